"""ONNX Runtime's fused operators (domain ``com.microsoft``), for engines that support them.

In standard ONNX, attention and GELU are many nodes each. ONNX Runtime's optimizer does not
recognise them in the form that the exporter gives them. So composer defines one operator for each.
Torch can run it, and it is translated to one ONNX node.

The entries of :func:`fusions` replace ATen's operators by these, or return ``NotImplemented`` where
the result would differ. No pattern has to be matched in the ONNX graph, and the graph gets smaller
before it is translated.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch.nn import functional

from composer import _torch
from composer.lowering.operators.attention import laid_out_as, log_sum_exp
from composer.lowering.operators.entry import Operator, Operators, stays
from composer.lowering.operators.guards import are_known, is_float32, is_on_cpu, only_for

aten = torch.ops.aten


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, heads: int, scale: float
) -> torch.Tensor:
    """``composer.attention`` for the CPU; shapes are (batch, length, heads * size)."""
    q, k, v = (_apart(each, heads) for each in (query, key, value))
    rows = functional.scaled_dot_product_attention(q, k, v, scale=scale)
    return rows.transpose(1, 2).flatten(2)


def _apart(x: torch.Tensor, heads: int) -> torch.Tensor:
    """``x`` as a view of shape (batch, heads, length, size).

    The size is given, because torch cannot infer it for a tensor without elements.
    """
    return x.view(*x.shape[:2], heads, x.shape[-1] // heads).transpose(1, 2)


def _like_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, heads: int, scale: float
) -> torch.Tensor:
    return query.new_empty(*query.shape[:2], value.shape[-1])


_library = cast(Any, torch.library.Library)("composer", "DEF")  # the operators live as long as this
_library.define("gelu(Tensor x) -> Tensor")
_library.define(
    "attention(Tensor query, Tensor key, Tensor value, int heads, float scale) -> Tensor"
)
_library.impl("gelu", functional.gelu, "CPU")
_library.impl("gelu", torch.empty_like, "Meta")
_library.impl("attention", _attention, "CPU")
_library.impl("attention", _like_attention, "Meta")

gelu = torch.ops.composer.gelu.default
"""GELU by the error function, for contiguous float32 tensors."""

attention = torch.ops.composer.attention.default
"""Attention without a mask; shapes are (batch, length, heads * size)."""


def entries() -> Operators:
    """The entries of this module."""
    return {
        gelu: Operator(translate="fused:gelu"),
        attention: Operator(translate="fused:attention"),
    }


def fusions() -> Operators:
    """Entries for an engine that supports these operators; they are used in inference only."""
    return {
        aten.gelu.default: Operator(fuse_gelu, in_training=stays),
        aten._scaled_dot_product_flash_attention_for_cpu.default: Operator(
            fuse_attention, in_training=stays
        ),
    }


@only_for(_torch.tensors.is_row_major)
def fuse_gelu(x: torch.Tensor, *, approximate: str = "none") -> Any:
    """GELU by the error function as one ``Gelu`` node, not as five.

    The tanh form is declined: ONNX Runtime itself fuses it into a ``FastGelu``.
    """
    return gelu(x) if approximate == "none" and _has_kernel(x) else NotImplemented


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
    """Attention without a mask as one ``MultiHeadAttention``, whose kernel stores no scores.

    Shapes here are (batch, heads, length, size); those of ``composer.attention`` are (batch,
    length, heads * size). The result has the memory layout of the query.
    """
    plain = attn_mask is None and not is_causal and not dropout_p and scale != 0  # the common case
    if not plain or not all(map(_has_kernel, (query, key, value))):
        return NotImplemented
    batch, heads, length, size = query.shape
    if key.shape[1] != heads or not are_known((heads, size)):
        return NotImplemented
    factor = 1 / math.sqrt(size) if scale is None else scale
    rows = attention(*map(_heads_joined, (query, key, value)), heads, factor)
    result = rows.view(batch, length, heads, value.shape[-1]).transpose(1, 2)
    # In inference the second result has no users, so its nodes are removed from the graph.
    scores = torch.matmul(query * factor, key.transpose(-2, -1))
    return laid_out_as(result, query), log_sum_exp(scores)


def _heads_joined(x: torch.Tensor) -> torch.Tensor:
    batch, heads, length, size = x.shape
    return x.transpose(1, 2).reshape(batch, length, heads * size)


def _has_kernel(x: torch.Tensor) -> bool:
    """True for a float32 tensor on the CPU that has elements, or whose sizes are dynamic.

    The kernels support float32 only, and their results for empty tensors are not known.
    """
    if not is_float32(x) or not is_on_cpu(x):
        return False
    return all(not isinstance(size, int) or size for size in x.shape)
