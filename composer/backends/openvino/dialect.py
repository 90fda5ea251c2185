"""OpenVINO's entries of operators, which go before composer's own."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch

from composer.lowering.operators import fused
from composer.lowering.operators.attention import widened_attention
from composer.lowering.operators.entry import Operator, Operators, stays

aten = torch.ops.aten


@functools.cache
def dialect() -> Operators:
    """ONNX Runtime's fused operators, which OpenVINO's reader knows, and attention in float32."""
    fused_attention = aten._scaled_dot_product_flash_attention_for_cpu.default
    return {
        **fused.fusions(),
        fused_attention: Operator(attention, in_training=stays),
        aten.mean.dim: Operator(mean_along),
    }


def attention(
    query: torch.Tensor, *given: Any, attn_mask: torch.Tensor | None = None, **how: Any
) -> Any:
    """One fused operator, or else attention in float32.

    In bfloat16 the lowering leaves attention under a mask as it is where torch has arithmetic for
    it. OpenVINO would take it all the same, by a translation that gives NaN for rows of padding.
    """
    one = fused.fuse_attention(query, *given, attn_mask=attn_mask, **how)
    if one is not NotImplemented:
        return one
    if attn_mask is not None and attn_mask.dtype is torch.bfloat16:
        attn_mask = _with_infinities(attn_mask.float())
    return widened_attention(query, *given, attn_mask=attn_mask, **how)


def _with_infinities(mask: torch.Tensor) -> torch.Tensor:
    """A mask that was of bfloat16.

    Of an infinity of bfloat16 OpenVINO (2026.4) makes the lowest float32 on processors without
    AVX-512. No other number of bfloat16 comes to that.
    """
    return torch.where(mask > torch.finfo(torch.float32).min, mask, -math.inf)


def mean_along(
    x: torch.Tensor, dim: Sequence[int] | None, keepdim: bool = False, **kwargs: Any
) -> Any:
    """By its numbers along every dimension: OpenVINO (2026.4) reads no mean without axes."""
    if dim or not x.dim():
        return NotImplemented
    return aten.mean.dim(x, [*range(x.dim())], keepdim, **kwargs)
