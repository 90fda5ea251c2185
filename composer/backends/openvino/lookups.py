"""Tables that are looked up by weights, such as the position biases of windowed attention.

Eager raises for a position that is not there, and OpenVINO (2026.4) does not. Positions that are
weights or constants are held against the table, whenever they are bound, and at a call where they
cannot be; all others stay torch's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set

import torch
import torch.fx

from composer.lowering.regions import constant_at

aten = torch.ops.aten


def positions_within(
    node: torch.fx.Node, weights: Mapping[str, torch.Tensor]
) -> Set[torch.fx.Node]:
    """What a call looks a tensor up by, as far as that is known and all of it is there.

    Args:
        node: The call.
        weights: By the names of their inputs.
    """
    pairs = tuple(_positions_of(node))
    known = {each: _value_of(each, weights) for each, _ in pairs}
    unfit = {i for i, size in pairs if (at := known[i]) is None or not are_within(at, size)}
    return known.keys() - unfit


def _value_of(node: torch.fx.Node, weights: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    gm = node.graph.owning_module
    if node.op == "get_attr" and gm is not None:
        return constant_at(gm, node)
    return weights.get(str(node.target)) if node.op == "placeholder" else None


def table_sizes(gm: torch.fx.GraphModule) -> dict[int, int]:
    """How many places there are for what the calls of a region look up by.

    Returns:
        The least number, by the position among the placeholders.
    """
    number = {each: i for i, each in enumerate(gm.graph.find_nodes(op="placeholder"))}
    found: dict[int, int] = {}
    for node in gm.graph.find_nodes(op="call_function", target=aten.index.Tensor):
        for index, size in _positions_of(node):
            at = number[index]
            found[at] = min(size, found.get(at, size))
    return found


def are_within(positions: torch.Tensor, size: int) -> bool:
    """Whether all count from the beginning of a table of so many places, and are there."""
    return bool(((positions >= 0) & (positions < size)).all())


def require_within(positions: torch.Tensor, size: int) -> None:
    """Raise where OpenVINO would not: eager then answers, or raises itself.

    Raises:
        IndexError: a position is not from 0 up to ``size``.
    """
    if not are_within(positions, size):
        raise IndexError(f"positions that are not from 0 up to {size}")


def _positions_of(node: torch.fx.Node) -> Iterator[tuple[torch.fx.Node, int]]:
    """Each tensor of int64 that a call looks another up by, and the size it has to be within."""
    if node.target is not aten.index.Tensor:
        return
    table, indices = node.args
    assert isinstance(table, torch.fx.Node)
    assert isinstance(indices, list | tuple)
    for index, size in zip(indices, table.meta["val"].shape, strict=False):
        known = isinstance(index, torch.fx.Node) and isinstance(size, int)
        if known and index.meta["val"].dtype is torch.int64:
            yield index, size
