"""ONNX Runtime's own fused operators (domain ``com.microsoft``), for engines that have them.

In ONNX's standard operators attention and GELU are many nodes, and ONNX Runtime's optimizer does
not recognise them in the form that the exporter gives them. In a graph each is one operator of
composer's, which torch can run, too, and which is translated to one node. The entries of
:func:`fusions` make it, or return ``NotImplemented`` where it would not mean the same. So nothing
has to be matched afterwards, and the graph gets smaller before it is translated.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch.nn import functional

from composer import _torch
from composer.lowering.operators.attention import laid_out_as, log_sum_exp
from composer.lowering.operators.entry import Operator, Operators, stays

aten = torch.ops.aten


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


def fusions() -> Operators:
    """Entries for an engine that has these operators, in inference."""
    return {
        aten.gelu.default: Operator(fuse_gelu, in_training=stays),
        aten._scaled_dot_product_flash_attention_for_cpu.default: Operator(
            fuse_attention, in_training=stays
        ),
    }


def fuse_gelu(x: torch.Tensor, *, approximate: str = "none") -> Any:
    """GELU by the error function as one ``Gelu``, not as five operators over the tensor.

    The tanh form is left as it is: ONNX Runtime itself makes a ``FastGelu`` of it.
    """
    if approximate != "none" or not _plain(x) or not _torch.tensors.is_row_major(x):
        return NotImplemented
    return gelu(x)


def fuse_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> Any:
    """Attention without a mask as one ``MultiHeadAttention``, whose kernel keeps no scores.

    Shapes are (batch, heads, length, size), the operator's (batch, length, heads * size). The
    result is laid out as the query is.
    """
    plain = attn_mask is None and not is_causal and not dropout_p and scale != 0  # the usual one
    if not plain or not all(map(_plain, (query, key, value))):
        return NotImplemented
    batch, heads, length, size = query.shape
    if key.shape[1] != heads or not (isinstance(heads, int) and isinstance(size, int)):
        return NotImplemented
    factor = 1 / math.sqrt(size) if scale is None else scale
    rows = attention(*map(_heads_joined, (query, key, value)), heads, factor)
    result = rows.view(batch, length, heads, value.shape[-1]).transpose(1, 2)
    # Nobody reads the second result in inference: then it leaves no trace in the graph.
    scores = torch.matmul(query * factor, key.transpose(-2, -1))
    return laid_out_as(result, query), log_sum_exp(scores)


def _heads_joined(x: torch.Tensor) -> torch.Tensor:
    batch, heads, length, size = x.shape
    return x.transpose(1, 2).reshape(batch, length, heads * size)


def _plain(x: torch.Tensor) -> bool:
    """The kernels are for float32, and nothing is known of them for no elements."""
    empty = any(isinstance(n, int) and n == 0 for n in x.shape)
    return x.dtype is torch.float32 and x.device.type == "cpu" and not empty
