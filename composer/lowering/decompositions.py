"""Operators written out before translation, where theirs would give other numbers than eager.

Each entry of :func:`decompositions` is for AOTAutograd's table: a function with the operator's
signature that returns ``NotImplemented`` where the exporter's translation is right.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from composer import _torch
from composer.lowering.elementwise import elementwise
from composer.lowering.reductions import reductions

aten = torch.ops.aten

_TRAINING_NORMS = (
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit.no_stats,
    aten.native_batch_norm.default,
)
"""Torchlib drops their training flag: the exported numbers would be eval's."""

_KEPT = (aten.lift_fresh.default, aten.lift.default)
"""Their decomposition calls an operator on the literal itself, which fake mode refuses."""


def decompositions() -> dict[Any, Callable[..., Any]]:
    """The exporter's own table, with ours in front of it."""
    table = dict(_torch.onnx_translator().decompositions)
    for operator in _KEPT:
        table.pop(operator, None)
    unpool = table[aten.max_unpool2d.default]
    table |= {operator: _torch.decomposition_of(operator) for operator in _TRAINING_NORMS}
    return (
        table
        | elementwise()
        | reductions()
        | {
            aten.max_unpool2d.default: functools.partial(max_unpool2d, unpool),
            aten._scaled_dot_product_flash_attention_for_cpu.default: masked_attention,
            aten.maximum.default: maximum,
            aten.minimum.default: minimum,
            aten.clamp.default: clamp,
            aten.clamp_min.default: lambda x, low: clamp(x, min=low),
            aten.clamp_max.default: lambda x, high: clamp(x, max=high),
            aten.relu.default: relu,
        }
    )


def max_unpool2d(written_out: Callable[..., Any], x: torch.Tensor, *args: Any) -> Any:
    """Torch's own, which loses the memory format that eager takes from the input."""
    usual = x.is_contiguous() and not x.is_contiguous(memory_format=torch.channels_last)
    return written_out(x, *args) if usual or x.dim() < 4 else NotImplemented


def masked_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> Any:
    """Attention in which a row that is masked everywhere gives zeros, as in eager, not NaN.

    Such rows are the padding on the left of a batch that is generated together. Shapes are
    (batch, heads, length, size); the layout is that of torch's kernel, heads inside of length.
    """
    alike = query.shape[1] == key.shape[1] and query.dtype is torch.float32
    if attn_mask is None or is_causal or dropout_p or not alike:
        return NotImplemented
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = torch.matmul(query * factor, key.transpose(-2, -1)) + attn_mask
    rows = torch.matmul(torch.softmax(scores, -1), value)
    empty = attn_mask.amax(-1, keepdim=True) == -math.inf
    rows = torch.where(empty, torch.zeros_like(rows), rows)
    laid_out = rows.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)
    return laid_out, torch.logsumexp(scores, -1)


# ONNX Runtime's Max, Min, Clip, Relu compare only the low half of int64 (1.31, AVX-512); its
# comparisons and Where are right.


def maximum(a: torch.Tensor, b: torch.Tensor) -> Any:
    """The larger of two integers."""
    return torch.where(a > b, a, b) if _are_long(a, b) else NotImplemented


def minimum(a: torch.Tensor, b: torch.Tensor) -> Any:
    """The smaller of two integers."""
    return torch.where(a < b, a, b) if _are_long(a, b) else NotImplemented


def clamp(x: torch.Tensor, min: Any = None, max: Any = None) -> Any:
    """An integer between integer bounds."""
    if x.dtype is not torch.int64 or isinstance(min, float) or isinstance(max, float):
        return NotImplemented
    if min is not None:
        x = torch.where(x < min, min, x)
    return x if max is None else torch.where(x > max, max, x)


def relu(x: torch.Tensor) -> Any:
    """An integer, or zero for a negative one."""
    return torch.where(x > 0, x, 0) if x.dtype is torch.int64 else NotImplemented


def _are_long(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype is torch.int64 and b.dtype is torch.int64
