"""Compute small sigmoids with a small relative error, where a user of the value may need it.

The kernel of ONNX Runtime 1.32 has an absolute error of about 1e-7 (microsoft/onnxruntime#22557).
So a sigmoid of 3e-7 has a relative error of about a third, and the kernel gives zero for every
argument below -18.

That is good enough for a gate: the gate multiplies a value, and the product is added to others.
It is not good enough for a probability. The graph, or the caller who gets the probability, may
take its logarithm.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Set
from typing import Any

import torch
import torch.fx

from composer.backends.onnxrt.widening import cast
from composer.lowering.views import is_view

aten = torch.ops.aten

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes whose sigmoids are rewritten here.

For float64 a decomposition already does the same. Integers are left to the engine.
"""

_PRODUCTS = (
    *(aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default),
    *(aten.matmul.default, aten.convolution.default),
)
# Operators whose results may be positive or negative, whatever the signs of their operands.
_OF_BOTH_SIGNS = (
    *(aten.tanh.default, aten.silu.default, aten.gelu.default, aten.native_layer_norm.default),
    *(aten.native_group_norm.default, aten._native_batch_norm_legit_no_training.default),
    *_PRODUCTS,
)
# Operators that only move, cast, sum up or average the elements of their operands.
_LINEAR = (
    *(aten.cat.default, aten.clone.default, aten._to_copy.default, aten.slice.Tensor),
    *(aten.mean.dim, aten.sum.dim_IntList),
)
# Operators whose results have both signs if an operand has both.
_KEEPING_SIGNS = (
    *(aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor, aten.neg.default),
    *_LINEAR,
)
_KEEPING_SMALL = (
    *(aten.abs.default, aten.where.self, aten.clamp.default, aten.clamp_min.default),
    *(aten.maximum.default, aten.minimum.default, aten.div.Tensor, aten.index.Tensor),
    *(aten.gather.default, aten.amax.default, aten.amin.default, aten.prod.dim_int),
    *(*_PRODUCTS, *_KEEPING_SIGNS),
)
"""Operators whose results may be small where an operand is small."""

# Operators that need a small relative error of a small operand.
_SENSITIVE = (
    *(aten.log.default, aten.log2.default, aten.log10.default, aten.log1p.default),
    *(aten.reciprocal.default, aten.xlogy.Tensor),
)


_SIGMOID = (
    *((aten.neg.default,), (aten.exp.default,), (aten.add.Tensor, 1.0)),
    (aten.reciprocal.default,),
)
"""Operators that compute a sigmoid one after the other, each with its second operand."""

_Rule = Callable[[torch.fx.Node, torch.fx.Node, Set[torch.fx.Node]], bool]


def keep_tails(gm: torch.fx.GraphModule) -> None:
    """Write each sigmoid of a region that is not a gate as ``1 / (1 + exp(-x))``.

    A sigmoid is a gate if both of these hold:

    - All its users multiply it by a value of both signs, or are matrix products or convolutions.
      Between the sigmoid and these users there may be views, and operators that only move, sum up
      or average elements.
    - No logarithm is computed from it, and nothing is divided by it, directly or through other
      nodes.
    """
    sigmoids = gm.graph.find_nodes(op="call_function", target=aten.sigmoid.default)
    sigmoids = [each for each in sigmoids if each.args[0].meta["val"].dtype in _FLOATS]
    if not sigmoids:
        return
    signed = _signed(gm)
    precise = _with_user(gm, _needs_precision)
    exposed = _with_user(gm, lambda user, node, exposed: not _gates(user, node, signed, exposed))
    for node in sigmoids:
        (x,) = node.all_input_nodes
        # The product of the sigmoid with x or a factor of x is a swish. So these count as values of
        # both signs, also where their operators do not show it.
        swished = {x, *x.all_input_nodes} if x.target is aten.mul.Tensor else {x}
        factors = signed | swished
        is_gate = all(_gates(user, node, factors, exposed) for user in node.users)
        if node in precise or not is_gate:
            _write_out(node)


def _signed(gm: torch.fx.GraphModule) -> set[torch.fx.Node]:
    """The nodes whose values have both signs, judged by their operators alone."""
    found: set[torch.fx.Node] = set()
    for node in gm.graph.nodes:
        keeps = _calls(node, _KEEPING_SIGNS) and not found.isdisjoint(node.all_input_nodes)
        if keeps or node.target in _OF_BOTH_SIGNS:
            found.add(node)
    return found


def _calls(node: torch.fx.Node, operators: Collection[Any]) -> bool:
    """True if a node calls one of these operators, or makes a view."""
    return node.target in operators or is_view(node)


def _with_user(gm: torch.fx.GraphModule, holds: _Rule) -> set[torch.fx.Node]:
    """The nodes with a user for which a rule holds.

    The rule gets the user, the node, and the later nodes for which a rule was found to hold.
    """
    found: set[torch.fx.Node] = set()
    for node in reversed(gm.graph.nodes):
        if any(holds(user, node, found) for user in node.users):
            found.add(node)
    return found


def _needs_precision(user: torch.fx.Node, node: torch.fx.Node, precise: Set[torch.fx.Node]) -> bool:
    """True if ``user``, or a user of its result, needs a small relative error of ``node``."""
    if user.target in _SENSITIVE:
        return True
    if user.target is aten.div.Tensor and user.args[1] is node:
        return True
    return user in precise and _calls(user, _KEEPING_SMALL)


def _gates(
    user: torch.fx.Node,
    gate: torch.fx.Node,
    signed: Set[torch.fx.Node],
    exposed: Set[torch.fx.Node],
) -> bool:
    """True if ``user`` treats ``gate`` as a gate.

    Values of the nodes ``signed`` have both signs. The nodes ``exposed`` have a user that does not
    treat them as a gate.
    """
    if user.target is aten.mul.Tensor:
        factors = {factor for factor in user.args if factor is not gate}
        return not factors.isdisjoint(signed)
    if _calls(user, _LINEAR):
        return user not in exposed
    return user.target in _PRODUCTS


def _write_out(sigmoid: torch.fx.Node) -> None:
    """Replace a sigmoid by ``1 / (1 + exp(-x))``, computed in float32 also for half precision."""
    (x,) = sigmoid.all_input_nodes
    graph, dtype = sigmoid.graph, x.meta["val"].dtype
    with graph.inserting_before(sigmoid):
        value = cast(x, torch.float32)
        meta = sigmoid.meta | {"val": value.meta["val"]}
        for target, *operands in _SIGMOID:
            value = graph.call_function(target, (value, *operands))
            value.meta = dict(meta)
        result = cast(value, dtype)
    sigmoid.replace_all_uses_with(result)
    graph.erase_node(sigmoid)
