"""OpenVINO's translations of operators, which take precedence over composer's own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from composer.backends.onnx_engine import (
    Operator,
    Operators,
    fuse_attention,
    fusions,
    long_log_softmax,
    stays,
    widened_attention,
    written_out,
)

aten = torch.ops.aten


def entries() -> Operators:
    """Return the translations that OpenVINO needs.

    They are ONNX Runtime's fused operators, which OpenVINO's reader knows, attention in float32,
    the mean over all dimensions, log-softmax of long rows, whose kernel (2026.4) loses digits, and
    quantization, of which the kernel rounds otherwise.
    """
    fused_attention = aten._scaled_dot_product_flash_attention_for_cpu.default
    return {
        **fusions(),
        **written_out(),
        fused_attention: Operator(attention, in_training=stays),
        aten.mean.dim: Operator(mean_along),
        aten._log_softmax.default: Operator(long_log_softmax),
    }


def attention(
    query: torch.Tensor, *given: Any, attn_mask: torch.Tensor | None = None, **how: Any
) -> Any:
    """Translate attention to one fused operator, or else to attention in float32.

    Composer's own entry does not rewrite bfloat16 attention with a mask where the processor has
    bfloat16 arithmetic. OpenVINO would still accept that attention, by the exporter's translation,
    which returns NaN for rows of padding.
    """
    one = fuse_attention(query, *given, attn_mask=attn_mask, **how)
    if one is not NotImplemented:
        return one
    if attn_mask is not None and attn_mask.dtype is torch.bfloat16:
        attn_mask = _with_infinities(attn_mask.float())
    return widened_attention(query, *given, attn_mask=attn_mask, **how)


def _with_infinities(mask: torch.Tensor) -> torch.Tensor:
    """Return a converted bfloat16 mask with its infinities restored.

    On processors without AVX-512, OpenVINO (2026.4) converts an infinity of bfloat16 to the lowest
    float32. No other bfloat16 number is converted to that.
    """
    return torch.where(mask > torch.finfo(torch.float32).min, mask, -math.inf)


def mean_along(
    x: torch.Tensor, dim: Sequence[int] | None, keepdim: bool = False, **kwargs: Any
) -> Any:
    """Write a mean without axes with all axes: OpenVINO (2026.4) reads no mean without axes."""
    if dim or not x.dim():
        return NotImplemented
    return aten.mean.dim(x, [*range(x.dim())], keepdim, **kwargs)
