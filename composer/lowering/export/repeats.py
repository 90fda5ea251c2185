"""Multiplies with keys and values that several heads share, without a copy for each head.

A program with grouped-query attention (arXiv:2305.13245) repeats shared keys and values for every
head of the query. In a step of generation, whose query is one token, the copies are most of the
work. For a cache with 4,096 places, an engine moved four times the cache to multiply it by one row.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from composer import _torch
from composer.graphs.nodes import drop_unread
from composer.lowering.export.reshapes import VIEWS

aten = torch.ops.aten

_ROWS = 16
"""Most rows of a query. With more, the product takes longer, and engines fuse the usual form."""

_DIMS = 4
_HANDING_ON = (aten.transpose.int, aten._to_copy.default)


def share_heads(gm: torch.fx.GraphModule) -> None:
    """Make the heads of a query that share a key rows of one product.

    ``matmul(a, repeated(b))`` with ``a`` of shape (batch, heads, rows, size) becomes
    ``matmul(a, b)`` with ``a`` of shape (batch, groups, heads / groups * rows, size). A group is
    the heads that share a key, and ``b`` has one head for each group.
    """
    for product in gm.graph.find_nodes(op="call_function", target=aten.matmul.default):
        if len(product.all_input_nodes) > 1:
            _share(product, *product.all_input_nodes)
    drop_unread(gm.graph)


def _share(product: torch.fx.Node, left: torch.fx.Node, right: torch.fx.Node) -> None:
    done: list[torch.fx.Node] = []
    while right.target in _HANDING_ON:
        done.append(right)
        right = right.all_input_nodes[0]
    shared = _repeated(right)
    if shared is None or any(_moves_heads(each) for each in done):
        return
    batch, heads, rows, size = left.meta["val"].shape
    known = batch, heads, rows
    if not all(isinstance(each, int) for each in known) or rows > _ROWS:
        return
    groups = shared.meta["val"].shape[1]
    with product.graph.inserting_before(product):
        together = _reshaped(left, [batch, groups, heads // groups * rows, size])
        for each in reversed(done):
            shared = _called(each.target, shared, *each.args[1:], **each.kwargs)
        found = _called(aten.matmul.default, together, shared)
        whole = _reshaped(found, [*known, product.meta["val"].shape[-1]])
    found.meta = {**product.meta, **found.meta}
    product.replace_all_uses_with(whole)


def _repeated(node: torch.fx.Node) -> torch.fx.Node | None:
    """Return the tensor whose heads ``node`` repeats, each several times in a row, or ``None``."""
    if node.target not in VIEWS or node.meta["val"].dim() != _DIMS:
        return None
    spread = node.all_input_nodes[0]
    spread = spread.all_input_nodes[0] if spread.target is aten.clone.default else spread
    if spread.target is not aten.expand.default:
        return None
    added = _sliced(spread.all_input_nodes[0])
    if added.target is not aten.unsqueeze.default or added.args[1] not in (2, -3):
        return None
    shared = added.all_input_nodes[0]
    given, wide, found = (tuple(each.meta["val"].shape) for each in (shared, spread, node))
    if len(given) != _DIMS or len(wide) != _DIMS + 1 or not isinstance(wide[2], int):
        return None
    joined = given[0], given[1] * wide[2], *given[2:]
    is_joined = all(map(_torch.symbols.is_same_size, found, joined))
    return shared if is_joined else None


def _sliced(node: torch.fx.Node) -> torch.fx.Node:
    """Return the base of slices that leave nothing out; ``x[:, None]`` makes such slices."""
    while node.target is aten.slice.Tensor:
        source = node.all_input_nodes[0]
        if not all(
            map(_torch.symbols.is_same_size, node.meta["val"].shape, source.meta["val"].shape)
        ):
            return node
        node = source
    return node


def _moves_heads(call: torch.fx.Node) -> bool:
    last = ((2, 3), (3, 2), (-1, -2), (-2, -1))
    return call.target is aten.transpose.int and call.args[1:] not in last


def _called(operator: Any, x: torch.fx.Node, *args: Any, **how: Any) -> torch.fx.Node:
    made = x.graph.call_function(operator, (x, *args), how)
    values = (each.meta["val"] if isinstance(each, torch.fx.Node) else each for each in args)
    made.meta["val"] = operator(x.meta["val"], *values, **how)
    return made


def _reshaped(x: torch.fx.Node, sizes: list[Any]) -> torch.fx.Node:
    """Return the same numbers in another shape. One size may be a symbol.

    It is a ``reshape`` and not a view, since the exporter runs the graph again with torch's
    strides, for which the view may be impossible.
    """
    said = [size if isinstance(size, int) else -1 for size in sizes]
    made = x.graph.call_function(aten.reshape.default, (x, said))
    made.meta["val"] = x.meta["val"].new_empty(sizes)
    return made
