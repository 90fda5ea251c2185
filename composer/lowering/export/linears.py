"""Turns matrix products over more than two dimensions into one ``MatMul`` without views around it.

Torch flattens the leading dimensions before the product, and restores them in the result. ONNX
Runtime 1.31 runs each view as a node of its own, which takes a tenth of a call of a small T5. It
also folds factors and transposes only into products that are next to them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.fx

from composer import _torch
from composer.graphs.nodes import drop_unread
from composer.lowering.export.reshapes import VIEWS

aten = torch.ops.aten


def keep_dimensions(gm: torch.fx.GraphModule) -> None:
    """Remove the views around linear layers without bias, and around batched matrix products.

    ``view(mm(view(x), w))`` becomes ``matmul(x, w)`` where only the last size differs, and
    ``view(bmm(view(a), view(b)))`` becomes ``matmul(a, b)`` where all have the same leading sizes.
    """
    for product in gm.graph.find_nodes(op="call_function", target=aten.mm.default):
        flat, weight = product.args
        _replace_views(product, _unflattened(flat), weight)
    for product in gm.graph.find_nodes(op="call_function", target=aten.bmm.default):
        left, right = product.args
        a, b = _unflattened(left), _unflattened(right)
        matrices = _sizes(a)[-2:] + _sizes(b)[-2:]
        keeps_matrices = are_same_sizes(matrices, _sizes(left)[-2:] + _sizes(right)[-2:])
        if keeps_matrices and are_same_sizes(_sizes(a)[:-2], _sizes(b)[:-2]):
            _replace_views(product, a, b)
    drop_unread(gm.graph)


def _unflattened(operand: torch.fx.Node) -> torch.fx.Node:
    """Return the base of an operand that is a view, without an ``expand`` that repeats nothing.

    Torch makes both calls before ``bmm`` where the user's code calls ``matmul``.
    """
    source = operand.all_input_nodes[0] if operand.target in VIEWS else operand
    if source.target is not aten.expand.default:
        return source
    whole = source.all_input_nodes[0]
    return whole if are_same_sizes(_sizes(source), _sizes(whole)) else source


def _replace_views(product: torch.fx.Node, a: torch.fx.Node, b: torch.fx.Node) -> None:
    """Replace each view that restores the leading sizes of ``a`` by ``matmul(a, b)``."""
    if a is product.args[0]:
        return
    wanted = _sizes(a)[:-1] + _sizes(product)[-1:]
    for view in [user for user in product.users if user.target in VIEWS]:
        if not are_same_sizes(_sizes(view), wanted):
            continue
        with view.graph.inserting_before(view):
            whole = view.graph.call_function(aten.matmul.default, (a, b))
        whole.meta = dict(view.meta)
        view.replace_all_uses_with(whole)
        view.graph.erase_node(view)


def _sizes(node: torch.fx.Node) -> tuple[int | torch.SymInt, ...]:
    return tuple(node.meta["val"].shape)


def are_same_sizes(a: Sequence[int | torch.SymInt], b: Sequence[int | torch.SymInt]) -> bool:
    """True if the sizes are known to be equal. Symbols are not compared, which would add guards."""
    return len(a) == len(b) and all(map(_torch.symbols.is_same_size, a, b))
