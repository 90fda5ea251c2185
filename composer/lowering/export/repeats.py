"""Multiplies with keys and values that several heads share, without a copy for each head.

A program with grouped-query attention (arXiv:2305.13245) repeats shared keys and values for every
head of the query. In a step of generation, whose query is one token, the copies are most of the
work. For a cache with 4,096 places, an engine moved four times the cache to multiply it by one row.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx
from torch.fx.node import map_arg

from composer.graphs.nodes import are_static, drop_unread, value_of
from composer.lowering.export.linears import are_same_sizes
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
    shared = _source_of_repeats(right)
    if shared is None or any(map(_moves_heads, done)):
        return
    batch, heads, rows, size = left.meta["val"].shape
    if not are_static((batch, heads, rows)) or rows > _ROWS:
        return
    groups = shared.meta["val"].shape[1]
    with product.graph.inserting_before(product):
        joined = _reshaped(left, [batch, groups, heads // groups * rows, size])
        for call in reversed(done):
            shared = _called(call.target, shared, *call.args[1:], **call.kwargs)
        smaller = _called(aten.matmul.default, joined, shared)
        whole = _reshaped(smaller, [batch, heads, rows, product.meta["val"].shape[-1]])
    smaller.meta = {**product.meta, **smaller.meta}
    product.replace_all_uses_with(whole)


def _source_of_repeats(node: torch.fx.Node) -> torch.fx.Node | None:
    """Return the tensor whose heads ``node`` repeats, each several times in a row, or ``None``."""
    if node.target not in VIEWS:
        return None
    spread = node.all_input_nodes[0]
    if spread.target is aten.clone.default:
        spread = spread.all_input_nodes[0]
    if spread.target is not aten.expand.default:
        return None
    added = _without_slices(spread.all_input_nodes[0])
    if added.target is not aten.unsqueeze.default or added.args[1] not in (2, -3):
        return None
    shared = added.all_input_nodes[0]
    sizes, wide = shared.meta["val"].shape, spread.meta["val"].shape
    if len(sizes) != _DIMS or len(wide) != _DIMS + 1 or not isinstance(wide[2], int):
        return None
    batch, groups, *others = sizes
    repeated = [batch, groups * wide[2], *others]
    return shared if are_same_sizes(node.meta["val"].shape, repeated) else None


def _without_slices(node: torch.fx.Node) -> torch.fx.Node:
    """Return the base of slices that leave nothing out; ``x[:, None]`` makes such slices."""
    while node.target is aten.slice.Tensor:
        source = node.all_input_nodes[0]
        if not are_same_sizes(node.meta["val"].shape, source.meta["val"].shape):
            break
        node = source
    return node


def _moves_heads(call: torch.fx.Node) -> bool:
    is_of_last = call.args[1:] in ((2, 3), (3, 2), (-1, -2), (-2, -1))
    return call.target is aten.transpose.int and not is_of_last


def _called(operator: Any, x: torch.fx.Node, *args: Any, **kwargs: Any) -> torch.fx.Node:
    call = x.graph.call_function(operator, (x, *args), kwargs)
    values = map_arg(call.args, value_of)
    call.meta["val"] = operator(*values, **kwargs)
    return call


def _reshaped(x: torch.fx.Node, sizes: list[Any]) -> torch.fx.Node:
    """Return the same numbers in another shape. One size may be a symbol.

    It is a ``reshape`` and not a view, since the exporter runs the graph again with torch's
    strides, for which the view may be impossible.
    """
    static = [size if isinstance(size, int) else -1 for size in sizes]
    call = x.graph.call_function(aten.reshape.default, (x, static))
    call.meta["val"] = x.meta["val"].new_empty(sizes)
    return call
