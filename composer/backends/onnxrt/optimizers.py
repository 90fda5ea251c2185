"""Optimizers of ONNX Runtime that composer disables, for all models or for some.

Numbers and faults are those of ONNX Runtime 1.31.

Disabled for all models:

- ``SkipLayerNormFusion`` makes models slower. On the CPU the fused kernel takes 0.26 ms for
  128 x 768 elements; LayerNormalization and an Add take about 0.1 ms. Measure it again with each
  release.
- The optimizers for norms give wrong results (:mod:`composer.backends.onnxrt.norms`).

Disabled for some models:

- ``MatMulScaleFusion`` is inexact in float64: it keeps the factor of a product in float32.
- ``MatMulScaleFusion`` makes some models invalid, and ONNX Runtime then refuses them. It moves
  ``x * a * b`` into a product and removes ``x * a``, although another product reads ``x * a``.
- ``Pad_Fusion`` makes some models invalid, too. It moves the zero padding of an average pool's
  input into the pool. The padding may be wider than the kernel, which a pool does not allow. Or
  ``ceil_mode`` then gives another output size.

``test_onnxrt_optimizers.py`` and ``test_onnxrt_norms.py`` fail when an optimizer can be enabled.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from composer.backends.onnxrt.norms import FUSIONS

if TYPE_CHECKING:
    import onnx

SLOWER = ("SkipLayerNormFusion",)
PADS = "Pad_Fusion"
SCALES = "MatMulScaleFusion"

_SCALINGS = {"Mul", "Div"}


def left_out(model: onnx.ModelProto) -> Iterator[str]:
    """The names of the optimizers to disable for this model."""
    yield from SLOWER
    yield from FUSIONS
    if _pads_averages(model):
        yield PADS
    if _has_doubles(model) or _scales_again(model):
        yield SCALES


def _pads_averages(model: onnx.ModelProto) -> bool:
    """True if an average pool reads the result of a ``Pad``."""
    nodes = model.graph.node
    padded = {node.output[0] for node in nodes if node.op_type == "Pad"}
    return any(node.op_type == "AveragePool" and node.input[0] in padded for node in nodes)


def _has_doubles(model: onnx.ModelProto) -> bool:
    """True if any value or initializer is float64."""
    import onnx

    graph = model.graph
    values = (e.type.tensor_type for e in (*graph.input, *graph.value_info, *graph.output))
    dtypes = {*(e.elem_type for e in values), *(e.data_type for e in graph.initializer)}
    return onnx.TensorProto.DOUBLE in dtypes


def _scales_again(model: onnx.ModelProto) -> bool:
    """True if a value is multiplied or divided by a number, and the result again by a number.

    Other users of the first result are not checked here. The optimizer merges equal operations
    before, so the users it sees may differ from those in this model.
    """
    numbers, scaled = set(_numbers(model)), set[str]()
    for node in model.graph.node:
        if node.op_type in _SCALINGS and not numbers.isdisjoint(node.input):
            if not scaled.isdisjoint(node.input):
                return True
            scaled.update(node.output)
    return False


def _numbers(model: onnx.ModelProto) -> Iterator[str]:
    """The names of the constants with one element."""
    yield from (each.name for each in model.graph.initializer if math.prod(each.dims) == 1)
    for node in model.graph.node:
        if node.op_type == "Constant":
            (value,) = node.attribute
            if not value.HasField("t") or math.prod(value.t.dims) == 1:
                yield node.output[0]
