"""Operators of composer's own: what ONNX Runtime has one fused operator for.

In a graph each is one call, which torch can run as well, by kernels of its own.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.nn import functional

from composer.lowering.operators.entry import Operator, Operators


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, heads: int, scale: float
) -> torch.Tensor:
    """Shapes are (batch, length, heads * size)."""
    q, k, v = (_apart(each, heads) for each in (query, key, value))
    rows = functional.scaled_dot_product_attention(q, k, v, scale=scale)
    return rows.transpose(1, 2).flatten(2)


def _apart(x: torch.Tensor, heads: int) -> torch.Tensor:
    """(batch, heads, length, size); the size is said, since of no elements it cannot be told."""
    return x.view(*x.shape[:2], heads, x.shape[-1] // heads).transpose(1, 2)


def _like_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, heads: int, scale: float
) -> torch.Tensor:
    return query.new_empty(*query.shape[:2], value.shape[-1])


_library = cast(Any, torch.library.Library)("composer", "DEF")  # defined as long as this is there
_library.define("gelu(Tensor x) -> Tensor")
_library.define(
    "attention(Tensor query, Tensor key, Tensor value, int heads, float scale) -> Tensor"
)
_library.impl("gelu", functional.gelu, "CPU")
_library.impl("gelu", torch.empty_like, "Meta")
_library.impl("attention", _attention, "CPU")
_library.impl("attention", _like_attention, "Meta")

gelu = torch.ops.composer.gelu.default
"""Of contiguous float32, by the error function."""

attention = torch.ops.composer.attention.default
"""Without mask; shapes are (batch, length, heads * size)."""


def entries() -> Operators:
    """The entries of this module."""
    return {
        gelu: Operator(translate="fused:gelu"),
        attention: Operator(translate="fused:attention"),
    }
