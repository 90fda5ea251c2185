"""The pass that computes products with a weight in eight bits, and everything else in float32."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.fx

from composer import _torch
from composer.passes import ahead, metadata
from composer.passes.aliasing import Aliasing
from composer.passes.base import SHARED_MODULES, GraphPass
from composer.passes.lower_precision import products_of, without
from composer.records import Int8

aten = torch.ops.aten

_WEIGHTS = {
    "aten::linear": (1, 0),
    "aten::matmul": (1, 1),
    "aten::mm": (1, 1),
    "aten::addmm": (2, 1),
}
"""By operator: the place of the weight among the operands, and the axis of its output channels. The
operand in front of it is the activation."""

_ADDED = {"aten::linear": "bias", "aten::addmm": "self"}
"""By operator: what is added to the product."""

_FEW_ROWS = 4
"""Up to so many rows, a product takes as long as it takes to read a weight from memory."""

_UINT8 = 0, 255
_INT8 = -127, 127, torch.int8
"""The ranges of the integers; that of the weights is symmetric."""

_LEAST = torch.finfo(torch.float32).tiny
"""The smallest scale. ONNX's ``DynamicQuantizeLinear`` has no lower limit but this one."""


@dataclass(frozen=True)
class QuantizeProducts(GraphPass):
    """Multiply activations by weights in eight bits.

    A weight gets a scale for each output channel, and no zero point. An activation is quantized to
    uint8 with one scale and one zero point, which are chosen at each call. Products that share an
    activation share its integers. Products of two activations, convolutions and everything between
    stay in float32.

    The graph is written with the operators of PT2E. Engines that have kernels for integers find
    those between the operators that dequantize and the product.

    Similar: ``quantize_dynamic`` of ``torch.ao.quantization`` and ``onnxruntime.quantization``.

    Attributes:
        wide: Which of the products stay in float32, counted from the start of the graph.
        kind: What is quantized. For ``"weights"`` it is the weights alone, of products with few
            rows: their time is that of reading the weight.
    """

    wide: tuple[int, ...] = ()
    kind: Int8 = "products"

    depends_on: ClassVar[tuple[str, ...]] = (
        *SHARED_MODULES,
        "composer.passes.ahead",
        "composer.passes.lower_precision",
    )

    def run(self, gm: torch.fx.GraphModule) -> int:
        """Quantize the operands of each product, or its weight alone."""
        _torch.operators.load_quantizing()
        quantizing = _Quantizing(gm.graph, Aliasing(gm), self.kind)
        chosen = list(self.chosen(without(products_with_weights(gm, self.kind), self.wide)))
        for product in chosen:
            quantizing.quantize(product)
        return len(chosen)


def products_with_weights(gm: torch.fx.GraphModule, kind: Int8) -> list[torch.fx.Node]:
    """Return the products of a graph at stage ``aten`` that may be quantized, in graph order."""
    found = [node for node in products_of(gm) if _multiplies_weight(node)]
    return found if kind == "products" else [node for node in found if _has_few_rows(node)]


def _multiplies_weight(node: torch.fx.Node) -> bool:
    """Return True if the second factor of a product is a weight: a matrix among the inputs.

    A product without elements is left alone, since none of them can be the largest. So are those
    for which engines have no kernel: a vector times a matrix, and what adds more than a bias.
    """
    place, _ = _WEIGHTS.get(_torch.operators.operator_name(node.target), (len(node.args), 0))
    if len(node.args) <= place:
        return False
    x: Any = node.args[place - 1]
    weight: Any = node.args[place]
    is_weight = weight.op == "placeholder" and _torch.dynamo.is_static_input(weight)
    if not is_weight or weight.meta["val"].dim() != 2 or x.meta["val"].dim() < 2:
        return False
    if _adds_more_than_a_bias(node):
        return False
    sizes = *x.meta["val"].shape, *weight.meta["val"].shape
    return 0 not in [each for each in sizes if isinstance(each, int)]


def _adds_more_than_a_bias(product: torch.fx.Node) -> bool:
    """Return True for ``addmm`` with factors, or if a number is not added to a whole column."""
    name = _torch.operators.operator_name(product.target)
    if name not in _ADDED:
        return False
    factors = {_torch.operators.argument(product, each) for each in ("alpha", "beta")}
    bias = _torch.operators.argument(product, _ADDED[name])
    is_bias = bias is None or bias.meta["val"].shape == product.meta["val"].shape[-1:]
    return bool(factors - {1, None}) or not is_bias


def _has_few_rows(product: torch.fx.Node) -> bool:
    """Return True for a product of at most four rows; not if their number is dynamic."""
    rows = product.meta["val"].shape[:-1]
    return all(isinstance(each, int) for each in rows) and math.prod(rows) <= _FEW_ROWS


@dataclass(frozen=True)
class Scales:
    """Computes the scales of a weight.

    Attributes:
        axis: The axis of the output channels.
    """

    axis: int

    def __call__(self, weight: torch.Tensor) -> torch.Tensor:
        """Return a scale for each channel, of which the largest magnitude is 127 steps."""
        scales: torch.Tensor = _scales(_call, weight, self.axis)
        return scales


@dataclass(frozen=True)
class Integers:
    """Computes the integers of a weight, which are multiples of its :class:`Scales`.

    Attributes:
        axis: The axis of the output channels.
    """

    axis: int

    def __call__(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the integers, in int8."""
        integers: torch.Tensor = _integers(_call, weight, Scales(self.axis)(weight), self.axis)
        return integers


def _scales(call: Callable[..., Any], weight: Any, axis: int) -> Any:
    """Compute the scales of a weight; ``call`` runs an operator, or adds it to a graph."""
    size = call(aten.abs.default, weight)
    largest = call(aten.amax.default, size, [1 - axis])
    return call(aten.clamp_min.default, call(aten.div.Scalar, largest, 127), _LEAST)


def _integers(call: Callable[..., Any], weight: Any, scales: Any, axis: int) -> Any:
    zeros = call(aten.zeros_like.default, scales, dtype=torch.int64)
    quantize = torch.ops.quantized_decomposed.quantize_per_channel.default
    return call(quantize, weight, scales, zeros, axis, *_INT8)


def _call(target: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return target(*args, **kwargs)


class _Quantizing:
    """Quantizes operands in one graph, and remembers what it has made.

    An activation that the graph writes to is quantized again for each product.
    """

    def __init__(self, graph: torch.fx.Graph, aliasing: Aliasing, kind: Int8) -> None:
        self._graph = graph
        self._aliasing = aliasing
        self._kind = kind
        self._activations: dict[torch.fx.Node, Any] = {}
        self._ops = torch.ops.quantized_decomposed

    def quantize(self, product: torch.fx.Node) -> None:
        """Quantize the operands of one product."""
        place, axis = _WEIGHTS[_torch.operators.operator_name(product.target)]
        args: list[Any] = list(product.args)
        with self._graph.inserting_before(product):
            if self._kind == "products":
                args[place - 1] = self._activation(args[place - 1], product)
            args[place] = self._weight(args[place], axis, product)
        product.args = tuple(args)

    def _activation(self, x: torch.fx.Node, product: torch.fx.Node) -> Any:
        if x not in self._activations or self._aliasing.is_written(x):
            emit = functools.partial(self._emit, product)
            chosen = emit(self._ops.choose_qparams.tensor, x, *_UINT8, _LEAST, torch.uint8)
            scale, zero_point = (emit(operator.getitem, chosen, place) for place in (0, 1))
            how = scale, zero_point, *_UINT8, torch.uint8
            integers = emit(self._ops.quantize_per_tensor.tensor, x, *how)
            self._activations[x] = emit(self._ops.dequantize_per_tensor.tensor, integers, *how)
        return self._activations[x]

    def _weight(self, weight: torch.fx.Node, axis: int, product: torch.fx.Node) -> Any:
        emit = functools.partial(self._emit, product)
        scales = _scales(emit, weight, axis)
        integers = _integers(emit, weight, scales, axis)
        ahead.mark(scales, weight, Scales(axis))
        ahead.mark(integers, weight, Integers(axis))
        back = self._ops.dequantize_per_channel.default
        return emit(back, integers, scales, None, axis, *_INT8)

    def _emit(
        self, product: torch.fx.Node, target: Any, *args: Any, **kwargs: Any
    ) -> torch.fx.Node:
        made = self._graph.call_function(target, args, kwargs)
        made.meta.update(metadata.provenance(product))
        return made
