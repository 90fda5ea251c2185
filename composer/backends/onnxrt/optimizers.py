"""Optimizers of ONNX Runtime that are not asked, always or about some models.

- Slower, always: ``SkipLayerNormFusion``. On the CPU (1.31) the fused kernel takes 0.26 ms for
  128 x 768 numbers, LayerNormalization and an Add about 0.1 ms. To try again with each release.
- Wrong, always: those for norms (:mod:`composer.backends.onnxrt.norms`).
- Inexact in float64: ``MatMulScaleFusion`` keeps the factor of a product in float32 (1.31).
- Breaking: models made of some graphs ONNX Runtime refuses itself (1.31). ``Pad_Fusion`` puts zeros
  that surround an average pool's input into the pool, also more of them than the kernel is wide,
  which no pool may have, or where ``ceil_mode`` counts otherwise. ``MatMulScaleFusion`` moves
  ``x * a * b`` into a product and takes ``x * a`` away, though another product reads it.

``test_onnxrt_optimizers.py`` and ``test_onnxrt_norms.py`` say when they can be asked.
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
    """The names of those that are not to be asked about this model."""
    yield from SLOWER
    yield from FUSIONS
    if _pads_averages(model):
        yield PADS
    if _has_doubles(model) or _scales_again(model):
        yield SCALES


def _pads_averages(model: onnx.ModelProto) -> bool:
    nodes = model.graph.node
    padded = {node.output[0] for node in nodes if node.op_type == "Pad"}
    return any(node.op_type == "AveragePool" and node.input[0] in padded for node in nodes)


def _has_doubles(model: onnx.ModelProto) -> bool:
    """Whether anything is in float64."""
    import onnx

    graph = model.graph
    values = (e.type.tensor_type for e in (*graph.input, *graph.value_info, *graph.output))
    dtypes = {*(e.elem_type for e in values), *(e.data_type for e in graph.initializer)}
    return onnx.TensorProto.DOUBLE in dtypes


def _scales_again(model: onnx.ModelProto) -> bool:
    """Whether something is multiplied or divided by a number, and by another one.

    Who else reads it the optimizer knows best: it makes one of equal operations first.
    """
    numbers, scaled = set(_numbers(model)), set[str]()
    for node in model.graph.node:
        if node.op_type in _SCALINGS and not numbers.isdisjoint(node.input):
            if not scaled.isdisjoint(node.input):
                return True
            scaled.update(node.output)
    return False


def _numbers(model: onnx.ModelProto) -> Iterator[str]:
    """The names of constants of one element."""
    yield from (each.name for each in model.graph.initializer if math.prod(each.dims) == 1)
    for node in model.graph.node:
        if node.op_type == "Constant":
            (value,) = node.attribute
            if not value.HasField("t") or math.prod(value.t.dims) == 1:
                yield node.output[0]
