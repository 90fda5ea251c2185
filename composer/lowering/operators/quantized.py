"""Operators that quantize, and products of quantized numbers.

Those of ``torch.ops.quantized_decomposed``, by which PT2E quantizes, exist in a process once
``torch.ao.quantization`` or another library has loaded them. torchao's own operators
(``quantize_affine`` and its kin) are composed of plain arithmetic, so torch decomposes them itself.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from composer import _torch
from composer.lowering.operators.entry import Operator, Operators
from composer.lowering.operators.layouts import lying_as_in_eager

aten = torch.ops.aten


def entries() -> Operators:
    """The entries of this module; those of PT2E only if its operators are loaded."""
    products = {
        aten._int_mm.default: Operator(translate="quantized:integer_product"),
        aten._weight_int8pack_mm.default: Operator(product_with_int8),
    }
    return products | _of_pt2e() if _torch.operators.can_quantize() else products


def _of_pt2e() -> dict[Any, Operator]:
    ops = torch.ops.quantized_decomposed
    return {
        ops.quantize_per_tensor.default: Operator(quantize),
        **lying_as_in_eager(
            {
                ops.quantize_per_tensor.tensor: Operator(
                    quantize_to_a_part, translate="quantized:quantize"
                ),
                ops.quantize_per_tensor.tensor2: Operator(quantize_by_tensors),
                ops.quantize_per_channel_group.default: Operator(quantize_groups),
            }
        ),
        **{each: Operator(_torch.operators.eager_parts_of(each)) for each in _composed()},
        ops.dequantize_per_tensor.tensor: Operator(translate="quantized:dequantize"),
        ops.dequantize_per_tensor.tensor2: Operator(translate="quantized:dequantize"),
        ops.choose_qparams.tensor: Operator(choose_with_limit, translate="quantized:choose"),
        ops.choose_qparams_symmetric.tensor: Operator(
            functools.partial(choose_for_tensor, symmetric=True)
        ),
    }


def _composed() -> tuple[Any, ...]:
    """The operators whose kernels are Python functions that call other operators."""
    ops = torch.ops.quantized_decomposed
    return (
        *(ops.quantize_per_token.default, ops.dequantize_per_token.default),
        *(ops.choose_qparams_per_token.default, ops.choose_qparams_per_token_asymmetric.default),
        *(ops.dequantize_per_channel_group.default, ops.convert_element_type.no_fuse),
    )


def written_out() -> Operators:
    """Entries for an engine whose ``QuantizeLinear`` rounds otherwise, and that has no float64."""
    if not _torch.operators.can_quantize():
        return {}
    ops = torch.ops.quantized_decomposed
    return {
        ops.quantize_per_tensor.default: Operator(quantize_by_numbers),
        ops.quantize_per_tensor.tensor: Operator(quantize_in_single_precision),
        ops.quantize_per_tensor.tensor2: Operator(quantize_in_single_precision),
        ops.dequantize_per_tensor.tensor: Operator(dequantize_by_tensors),
        ops.dequantize_per_tensor.tensor2: Operator(dequantize_by_tensors),
        ops.choose_qparams.tensor: Operator(choose_for_tensor),
    }


def product_with_int8(x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """``aten._weight_int8pack_mm``, which scales the sums and rounds the result once."""
    sums = torch.mm(x.float(), weight.t().float())
    return (sums * scales.float()).to(x.dtype)


def quantize(
    x: torch.Tensor,
    scale: float,
    zero_point: int,
    quant_min: int,
    quant_max: int,
    dtype: torch.dtype,
) -> Any:
    """Quantize to the whole range of the dtype, and clamp the result to a narrower one.

    The exporter's translation ignores ``quant_min`` and ``quant_max``.
    """
    limits = torch.iinfo(dtype)
    if (quant_min, quant_max) == (limits.min, limits.max):
        return NotImplemented
    whole = torch.ops.quantized_decomposed.quantize_per_tensor.default(
        x, scale, zero_point, limits.min, limits.max, dtype
    )
    return torch.clamp(whole, quant_min, quant_max)


def quantize_by_numbers(
    x: torch.Tensor,
    scale: float,
    zero_point: int,
    quant_min: int,
    quant_max: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Quantize by the arithmetic of eager, which multiplies by the inverse of the scale."""
    rounded = torch.round(x.float() * (1.0 / scale)) + zero_point
    return torch.clamp(rounded, quant_min, quant_max).to(dtype)


def quantize_by_tensors(
    x: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor,
    quant_min: Any,
    quant_max: Any,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Quantize with a scale and a zero point that are known only when the program runs.

    Eager reads them as Python numbers, and so it inverts the scale in float64. If the scale is a
    number in float32, its inverse is the same in float32.
    """
    inverse = (1.0 / scale).float().reshape(())
    rounded = torch.round(x.float() * inverse) + zero_point.float().reshape(())
    return torch.clamp(rounded, quant_min, quant_max).to(dtype)


def quantize_to_a_part(
    x: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor,
    quant_min: int,
    quant_max: int,
    dtype: torch.dtype,
) -> Any:
    """Quantize to a narrower range than that of the dtype; ``QuantizeLinear`` has the whole one."""
    limits = torch.iinfo(dtype)
    if x.dtype is torch.float32 and (quant_min, quant_max) == (limits.min, limits.max):
        return NotImplemented
    return quantize_by_tensors(x, scale, zero_point, quant_min, quant_max, dtype)


def quantize_in_single_precision(
    x: torch.Tensor, scale: torch.Tensor, *others: Any
) -> torch.Tensor:
    """Quantize with a scale that is converted to float32 before it is inverted."""
    return quantize_by_tensors(x, scale.float(), *others)


def dequantize_by_tensors(
    x: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor,
    quant_min: Any,
    quant_max: Any,
    dtype: torch.dtype,
    *,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Dequantize with a scale and a zero point that are known only when the program runs."""
    wanted = out_dtype or torch.float32
    shifted = x.to(wanted) - zero_point.to(wanted).reshape(())
    return shifted * scale.to(wanted).reshape(())


def quantize_groups(
    x: torch.Tensor,
    scales: torch.Tensor,
    zero_points: torch.Tensor,
    quant_min: int,
    quant_max: int,
    dtype: torch.dtype,
    group_size: int,
) -> torch.Tensor:
    """Quantize each group of numbers of a row with a scale and a zero point of its own."""
    shifted = x.reshape(scales.numel(), -1) * (1.0 / scales.reshape(-1, 1))
    rounded = torch.round(shifted + zero_points.reshape(-1, 1))
    return torch.clamp(rounded, quant_min, quant_max).to(dtype).reshape(x.shape)


def choose_with_limit(
    x: torch.Tensor, quant_min: int, quant_max: int, eps: float, dtype: torch.dtype
) -> Any:
    """A scale that is not smaller than ``eps``; ``DynamicQuantizeLinear`` has no such limit."""
    is_whole = x.dtype is torch.float32 and (quant_min, quant_max, dtype) == (0, 255, torch.uint8)
    if is_whole and eps <= torch.finfo(torch.float32).tiny:
        return NotImplemented
    return choose_for_tensor(x, quant_min, quant_max, eps, dtype)


def choose_for_tensor(
    x: torch.Tensor,
    quant_min: int,
    quant_max: int,
    eps: float,
    dtype: torch.dtype,
    *,
    symmetric: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A scale and a zero point for all numbers of a tensor: float64 and int64, one element each."""
    low = torch.clamp(torch.amin(x), max=0).float().reshape(1)
    high = torch.clamp(torch.amax(x), min=0).float().reshape(1)
    steps = float(quant_max - quant_min)
    if symmetric:
        scale = torch.clamp(torch.maximum(-low, high) / (steps / 2), min=eps)
        middle = 128 if dtype is torch.uint8 else 0
        return scale.double(), torch.full((1,), middle, dtype=torch.int64, device=x.device)
    scale = torch.clamp((high - low) / steps, min=eps)
    zero_point = torch.clamp(quant_min - torch.round(low / scale), quant_min, quant_max)
    return scale.double(), zero_point.to(torch.int64)
