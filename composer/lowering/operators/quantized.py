"""Decompositions of the operators by which PT2E quantizes, ``torch.ops.quantized_decomposed``.

They exist in a process once ``torch.ao.quantization`` or another library has loaded them.
"""

from __future__ import annotations

from typing import Any

import torch

from composer import _torch
from composer.lowering.operators.entry import Operator, Operators


def entries() -> Operators:
    """The entries of this module; none as long as the operators are not loaded."""
    if not _torch.operators.can_quantize():
        return {}
    return {torch.ops.quantized_decomposed.quantize_per_tensor.default: Operator(quantize)}


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
