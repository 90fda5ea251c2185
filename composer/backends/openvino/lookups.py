"""Tables that are looked up: embeddings, the position biases of windowed attention.

Eager raises for a position that is not there, and OpenVINO (2026.4) does not. Positions that are
weights or constants are held against the table whenever they are bound. An embedding's that come
from outside are held against it at each call: eager takes none that counts from the end there. All
others stay torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set

import torch
import torch.fx

from composer.lowering.partition.regions import constant_at

aten = torch.ops.aten


def positions_within(
    node: torch.fx.Node,
    weights: Mapping[str, torch.Tensor],
    comes_from_outside: Callable[[torch.fx.Node], bool],
) -> Set[torch.fx.Node]:
    """What a call looks a tensor up by, if all of it is there or will be held against it.

    Args:
        node: The call.
        weights: By the names of their inputs.
        comes_from_outside: Whether a value will be an input of the region that the call is in.
    """

    def fits(index: torch.fx.Node, size: int) -> bool:
        value = _value_of(index, weights)
        if value is None:
            return node.target is aten.embedding.default and comes_from_outside(index)
        return are_within(value, size)

    pairs = tuple(_positions_of(node))
    unfit = {index for index, size in pairs if not fits(index, size)}
    return {index for index, _ in pairs} - unfit


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
    for node in gm.graph.nodes:
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
    if node.target not in (aten.index.Tensor, aten.embedding.default):
        return
    table, indices, *_ = node.args
    if isinstance(indices, torch.fx.Node):
        indices = [indices]
    assert isinstance(table, torch.fx.Node)
    assert isinstance(indices, list | tuple)
    for index, size in zip(indices, table.meta["val"].shape, strict=False):
        known = isinstance(index, torch.fx.Node) and isinstance(size, int)
        if known and index.meta["val"].dtype is torch.int64:
            yield index, size
