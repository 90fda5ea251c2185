"""Translations of products of quantized numbers, and of scales that are known only at a call."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import onnxscript

from composer.lowering.operators.translations.annotations import TTensor

op: Any = onnxscript.opset18


def integer_product(self: TTensor, mat2: TTensor) -> TTensor:
    """``aten._int_mm``: int8 or uint8 times int8, with sums in int32."""
    return op.MatMulInteger(self, mat2)


def choose(
    input: TTensor,  # the operator's own name
    quant_min: int,
    quant_max: int,
    eps: float,
    dtype: int,
) -> tuple[TTensor, TTensor]:
    """``choose_qparams.tensor``, for uint8 and without a lower limit of the scale."""
    _, scale, zero_point = op.DynamicQuantizeLinear(input)
    one = op.Constant(value_ints=[1])
    scale = op.Reshape(op.Cast(scale, to=ir.DataType.DOUBLE), one)
    return scale, op.Reshape(op.Cast(zero_point, to=ir.DataType.INT64), one)


def quantize(
    input: TTensor,  # the operator's own name
    scale: TTensor,
    zero_point: TTensor,
    quant_min: Any,
    quant_max: Any,
    dtype: int,
) -> TTensor:
    """``quantize_per_tensor.tensor``, for the whole range of the dtype."""
    return op.QuantizeLinear(input, *_as_numbers(scale, zero_point, dtype))


def dequantize(
    input: TTensor,  # the operator's own name
    scale: TTensor,
    zero_point: TTensor,
    quant_min: Any,
    quant_max: Any,
    dtype: int,
    out_dtype: int = -1,
) -> TTensor:
    """``dequantize_per_tensor.tensor``: engines may multiply the integers themselves."""
    dequantized = op.DequantizeLinear(input, *_as_numbers(scale, zero_point, dtype))
    return dequantized if out_dtype in (-1, None) else op.Cast(dequantized, to=out_dtype)


def _as_numbers(scale: TTensor, zero_point: TTensor, dtype: int) -> tuple[TTensor, TTensor]:
    """Return a scale and a zero point of one element as ONNX's operators take them."""
    number = op.Constant(value_ints=[])
    scale = op.Reshape(op.Cast(scale, to=ir.DataType.FLOAT), number)
    return scale, op.Reshape(op.Cast(zero_point, to=dtype), number)
