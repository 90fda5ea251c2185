"""Tables that are read by position: embeddings, and the position biases of windowed attention.

Eager raises for a position outside the table, and OpenVINO (2026.4) does not. So composer checks
positions that OpenVINO gets:

- Positions that are weights or constants are checked each time they are bound.
- Positions of an embedding that come from outside are checked at each call. Eager accepts no
  negative position there.

Torch runs all other lookups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set

import torch
import torch.fx

from composer.backends.onnx_engine import constant_at, positions_of

aten = torch.ops.aten


def positions_within(
    node: torch.fx.Node,
    weights: Mapping[str, torch.Tensor],
    comes_from_outside: Callable[[torch.fx.Node], bool],
) -> Set[torch.fx.Node]:
    """Return the nodes whose values a call uses as positions, if composer can check them.

    Args:
        node: The call.
        weights: Weights by the names of their inputs.
        comes_from_outside: Returns True if a value will be an input of the region of the call.
    """

    def fits(index: torch.fx.Node, size: int) -> bool:
        value = _value_of(index, weights)
        if value is not None:
            return are_within(value, size)
        return node.target is aten.embedding.default and comes_from_outside(index)

    pairs = tuple(positions_of(node))
    unfit = {index for index, size in pairs if not fits(index, size)}
    return {index for index, _ in pairs} - unfit


def _value_of(node: torch.fx.Node, weights: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """Return the constant or weight that a node stands for; ``None`` if it is neither."""
    gm = node.graph.owning_module
    if node.op == "get_attr" and gm is not None:
        return constant_at(gm, node)
    if node.op == "placeholder":
        return weights.get(str(node.target))
    return None


def are_within(positions: torch.Tensor, size: int) -> bool:
    """True if all positions are from 0 to ``size - 1``."""
    return bool(((positions >= 0) & (positions < size)).all())


def require_within(positions: torch.Tensor, size: int) -> None:
    """Raise for positions that OpenVINO would not check; eager then answers, or raises itself.

    Raises:
        IndexError: a position is negative, or not less than ``size``.
    """
    if not are_within(positions, size):
        raise IndexError(f"positions that are not from 0 up to {size}")
