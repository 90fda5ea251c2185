"""The pass that folds batch norm in eval mode into the convolution or linear layer before it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.fx

from composer import _torch
from composer.passes import order
from composer.passes.aliasing import Aliasing, operands
from composer.passes.base import SHARED_MODULES, GraphPass
from composer.passes.node_modes import NodeModes

aten = torch.ops.aten

_PRODUCTS = {"aten::conv1d": 3, "aten::conv2d": 4, "aten::conv3d": 5, "aten::linear": 2}
"""Operators, and the rank of their result for which the pass applies. Channels are then dimension 1
of the result, and dimension 0 of the weight."""

_STATISTICS = ("running_mean", "running_var")
_OPERANDS = ("input", "weight", "bias")

Emit = Callable[..., torch.fx.Node]


@dataclass(frozen=True)
class FoldBatchNorm(GraphPass):
    """Scale the weights and shift the bias of a convolution or linear layer by its batch norm.

    The pass applies to batch norm with running statistics (``training`` false) that is the only
    user of a convolution or linear layer. The scaling is part of the graph, so gradients flow to
    all parameters. Engines that treat weights as constants compute it once. Half-precision weights
    are scaled in float32 and rounded once, since eager computes the norm in float32.

    A pair is not folded if its dtypes differ (autocast), if its grad mode or autocast state
    differs, or if the graph writes to a parameter or a statistic.

    Similar: ``torch.nn.utils.fusion.fuse_conv_bn_weights``, on modules.
    """

    keeps_numbers: ClassVar[bool] = True

    depends_on: ClassVar[tuple[str, ...]] = SHARED_MODULES

    def run(self, gm: torch.fx.GraphModule) -> int:
        """Replace each pair by one convolution with computed weights."""
        aliasing, modes = Aliasing(gm), NodeModes.in_graph(gm.graph)
        norms = gm.graph.find_nodes(op="call_function", target=aten.batch_norm.default)
        foldable = [norm for norm in norms if _folds(norm, aliasing, modes)]
        chosen = list(self.chosen(foldable))
        for norm in chosen:
            _fold(gm.graph, norm)
        return len(chosen)


def _folds(norm: torch.fx.Node, aliasing: Aliasing, modes: NodeModes) -> bool:
    product: Any = norm.args[0]
    rank = _PRODUCTS.get(_torch.operators.operator_name(product.target))
    if product.meta["val"].dim() != rank or len(product.users) != 1:
        return False
    statistics = operands(norm, *_STATISTICS)
    if len(statistics) != 2 or _torch.operators.argument(norm, "training"):
        return False
    if modes.of[product] != modes.of[norm]:
        return False
    parameters = [*operands(product, "weight", "bias"), *operands(norm, "weight", "bias")]
    parameters += statistics
    dtypes = {node.meta["val"].dtype for node in (product, norm, *parameters)}
    if len(dtypes) > 1 or aliasing.is_written(product, *parameters):
        return False
    return order.can_read(product, parameters)


def _fold(graph: torch.fx.Graph, norm: torch.fx.Node) -> None:
    product: Any = norm.args[0]
    with graph.inserting_before(product):
        weight, bias = _folded(graph.call_function, product, norm)
    product.args = (_torch.operators.argument(product, "input"), weight, bias, *product.args[3:])
    product.kwargs = {k: v for k, v in product.kwargs.items() if k not in _OPERANDS}
    norm.replace_all_uses_with(product)
    graph.erase_node(norm)


def _folded(
    call: Emit, product: torch.fx.Node, norm: torch.fx.Node
) -> tuple[torch.fx.Node, torch.fx.Node]:
    """Return the weight and the bias with which the product computes both product and norm."""
    dtype = norm.meta["val"].dtype
    is_short = dtype in (torch.float16, torch.bfloat16)

    def read(node: torch.fx.Node, name: str) -> Any:
        value = _torch.operators.argument(node, name)
        reads_short = is_short and isinstance(value, torch.fx.Node)
        return call(aten.to.dtype, (value, torch.float32)) if reads_short else value

    def rounded(node: torch.fx.Node) -> torch.fx.Node:
        return call(aten.to.dtype, (node, dtype)) if is_short else node

    weight, bias = (read(product, name) for name in ("weight", "bias"))
    gain, shift = (read(norm, name) for name in ("weight", "bias"))
    mean, variance = (read(norm, name) for name in _STATISTICS)
    stable = call(aten.add.Tensor, (variance, _torch.operators.argument(norm, "eps")))
    scale = call(aten.rsqrt.default, (stable,))
    if gain is not None:
        scale = call(aten.mul.Tensor, (scale, gain))
    centred = mean if bias is None else call(aten.sub.Tensor, (mean, bias))
    offset = call(aten.mul.Tensor, (centred, scale))
    if shift is None:
        moved = call(aten.neg.default, (offset,))
    else:
        moved = call(aten.sub.Tensor, (shift, offset))
    rank = _torch.operators.argument(product, "weight").meta["val"].dim()
    spread = call(aten.view.default, (scale, [-1] + [1] * (rank - 1)))
    return rounded(call(aten.mul.Tensor, (weight, spread))), rounded(moved)
