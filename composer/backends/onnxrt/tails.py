"""Small sigmoids that are right to a part of themselves, where something may ask for that.

ONNX Runtime (1.32; microsoft/onnxruntime#22557) computes a sigmoid to 1e-7 of one: what should be
3e-7 is off by a third, and from -18 on it is zero. That is as good as any in a gate, whose factor
is added up with others. Of a probability the logarithm is taken, in the graph or by whoever gets
it.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import torch
import torch.fx

from composer.lowering.views import is_view

aten = torch.ops.aten

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
"""Of float64 a decomposition makes the same; integers are left to the engine."""

_PRODUCTS = (
    *(aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default),
    *(aten.matmul.default, aten.convolution.default),
)
_OF_BOTH_SIGNS = (
    *(aten.tanh.default, aten.silu.default, aten.gelu.default, aten.native_layer_norm.default),
    *(aten.native_group_norm.default, aten._native_batch_norm_legit_no_training.default),
    *_PRODUCTS,
)
_HANDING_ON = (
    *(aten.cat.default, aten.clone.default, aten._to_copy.default, aten.slice.Tensor),
    *(aten.mean.dim, aten.sum.dim_IntList),
)
_KEEPING_SIGNS = (
    *(aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor, aten.neg.default),
    *_HANDING_ON,
)
_KEEPING_SMALL = (
    *(aten.abs.default, aten.where.self, aten.clamp.default, aten.clamp_min.default),
    *(aten.maximum.default, aten.minimum.default, aten.div.Tensor, aten.index.Tensor),
    *(aten.gather.default, aten.amax.default, aten.amin.default, aten.prod.dim_int),
    *(*_PRODUCTS, *_KEEPING_SIGNS),
)
"""What gives something small where it is given it, or may."""

_ASKING = (
    *(aten.log.default, aten.log2.default, aten.log10.default, aten.log1p.default),
    *(aten.reciprocal.default, aten.xlogy.Tensor),
)


def keep_tails(gm: torch.fx.GraphModule) -> None:
    """Write out the sigmoids that are not gates.

    A gate is a factor of what has numbers of both signs, or is read by products of matrices and
    convolutions alone, and no logarithm or divisor is made of it by arithmetic.

    Args:
        gm: A region, which is changed.
    """
    sigmoids = gm.graph.find_nodes(op="call_function", target=aten.sigmoid.default)
    sigmoids = [each for each in sigmoids if each.args[0].meta["val"].dtype in _FLOATS]
    if not sigmoids:
        return
    signed = _signed(gm)
    asked, let_out = _asked(gm), _let_out(gm, signed)
    for node in sigmoids:
        own = signed | _multiples(node.all_input_nodes[0])
        if node in asked or any(_lets_out(user, node, own, let_out) for user in node.users):
            _write_out(node)


def _signed(gm: torch.fx.GraphModule) -> set[torch.fx.Node]:
    """The nodes that give numbers of both signs, as far as that can be told from operators."""
    found: set[torch.fx.Node] = set()
    for node in gm.graph.nodes:
        keeps = node.target in _KEEPING_SIGNS or is_view(node)
        if node.target in _OF_BOTH_SIGNS or (keeps and not found.isdisjoint(node.all_input_nodes)):
            found.add(node)
    return found


def _multiples(x: torch.fx.Node) -> set[torch.fx.Node]:
    """What a sigmoid of ``x`` makes a swish of: it is small where they are negative, or all are."""
    return {x, *x.all_input_nodes} if x.target is aten.mul.Tensor else {x}


def _asked(gm: torch.fx.GraphModule) -> set[torch.fx.Node]:
    """The nodes of whose small values a logarithm is taken, or that divide, by way of others."""
    found: set[torch.fx.Node] = set()
    for node in reversed(gm.graph.nodes):
        if any(_asks(user, node, found) for user in node.users):
            found.add(node)
    return found


def _asks(user: torch.fx.Node, node: torch.fx.Node, asked: Set[torch.fx.Node]) -> bool:
    if user.target in _ASKING or (user.target is aten.div.Tensor and user.args[1] is node):
        return True
    return user in asked and (user.target in _KEEPING_SMALL or is_view(user))


def _let_out(gm: torch.fx.GraphModule, signed: Set[torch.fx.Node]) -> set[torch.fx.Node]:
    """The nodes that are read by anything but gates, by way of views as well."""
    found: set[torch.fx.Node] = set()
    for node in reversed(gm.graph.nodes):
        if any(_lets_out(user, node, signed, found) for user in node.users):
            found.add(node)
    return found


def _lets_out(
    user: torch.fx.Node,
    gate: torch.fx.Node,
    signed: Set[torch.fx.Node],
    let_out: Set[torch.fx.Node],
) -> bool:
    if user.target is aten.mul.Tensor:
        return not any(each in signed and each is not gate for each in user.args)
    if user.target in _PRODUCTS:
        return False
    return user in let_out if user.target in _HANDING_ON or is_view(user) else True


def _write_out(node: torch.fx.Node) -> None:
    """As ``1 / (1 + exp(-x))``, of halves in float32."""
    (x,) = node.all_input_nodes
    negated = _put(node, aten.neg.default, _cast(node, x, torch.float32))
    divisor = _put(node, aten.add.Tensor, _put(node, aten.exp.default, negated), 1.0)
    made = _cast(node, _put(node, aten.reciprocal.default, divisor), x.meta["val"].dtype)
    node.replace_all_uses_with(made)
    node.graph.erase_node(node)


def _cast(node: torch.fx.Node, value: torch.fx.Node, dtype: torch.dtype) -> torch.fx.Node:
    if value.meta["val"].dtype is dtype:
        return value
    made = _put(node, aten._to_copy.default, value, dtype=dtype)
    made.meta["val"] = value.meta["val"].to(dtype)
    return made


def _put(node: torch.fx.Node, target: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
    with node.graph.inserting_before(node):
        made = node.graph.call_function(target, args, kwargs)
    made.meta = node.meta | {"val": node.meta["val"].to(torch.float32)}
    return made
