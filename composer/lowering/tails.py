"""Small sigmoids that are right to a part of themselves, where something may ask for that.

ONNX Runtime (1.31) computes a sigmoid to 1e-7 of one: what should be 3e-7 is off by a third, and
from -18 on it is zero. That is as good as any in a gate, whose factor is added up with others. Of a
probability the logarithm is taken, in the graph or by whoever gets it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from composer.lowering.views import is_view

aten = torch.ops.aten

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


def keep_tails(gm: torch.fx.GraphModule) -> None:
    """Write out the sigmoids of float32 that are not gates.

    A gate is a factor of what has numbers of both signs, of which nobody takes a logarithm, or is
    read by products of matrices and convolutions alone.

    Args:
        gm: A region, which is changed.
    """
    signed: set[torch.fx.Node] | None = None
    for node in gm.graph.find_nodes(op="call_function", target=aten.sigmoid.default):
        if node.meta["val"].dtype is not torch.float32:
            continue
        signed = _signed(gm) if signed is None else signed
        if not _is_gate(node, signed | {node.args[0]}):
            _write_out(node)


def _signed(gm: torch.fx.GraphModule) -> set[torch.fx.Node]:
    """The nodes that give numbers of both signs, as far as that can be told from operators."""
    found: set[torch.fx.Node] = set()
    for node in gm.graph.nodes:
        keeps = node.target in _KEEPING_SIGNS or is_view(node)
        if node.target in _OF_BOTH_SIGNS or (keeps and not found.isdisjoint(node.all_input_nodes)):
            found.add(node)
    return found


def _is_gate(node: torch.fx.Node, signed: set[torch.fx.Node]) -> bool:
    return all(_takes_as_gate(user, node, signed) for user in node.users)


def _takes_as_gate(user: torch.fx.Node, gate: torch.fx.Node, signed: set[torch.fx.Node]) -> bool:
    if user.target is aten.mul.Tensor:
        return any(each in signed and each is not gate for each in user.args)
    if user.target in _PRODUCTS:
        return True
    return (user.target in _HANDING_ON or is_view(user)) and _is_gate(user, signed)


def _write_out(node: torch.fx.Node) -> None:
    """As ``1 / (1 + exp(-x))``."""
    negated = _put(node, aten.neg.default, *node.args)
    divisor = _put(node, aten.add.Tensor, _put(node, aten.exp.default, negated), 1.0)
    node.replace_all_uses_with(_put(node, aten.reciprocal.default, divisor))
    node.graph.erase_node(node)


def _put(node: torch.fx.Node, target: Any, *args: Any) -> torch.fx.Node:
    with node.graph.inserting_before(node):
        made = node.graph.call_function(target, args)
    made.meta = dict(node.meta)
    return made
