"""ONNX Runtime's own fused operators (domain ``com.microsoft``), where they are faster.

In ONNX's standard operators attention and GELU are many nodes, and ONNX Runtime's optimizer does
not recognise them in the form that the exporter gives them. Each entry of :func:`fusions` is for
AOTAutograd's table, as those of the other modules are: it makes the one fused operator, or returns
``NotImplemented`` for calls where that would not mean the same. So nothing has to be matched
afterwards, and the graph gets smaller before it is translated.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from composer import _torch
from composer.lowering.operators import fused
from composer.lowering.operators.attention import laid_out_as, log_sum_exp
from composer.lowering.operators.entry import Operator, Operators, stays

aten = torch.ops.aten


def fusions() -> Operators:
    """Entries for an engine that has these operators, in inference."""
    return {
        aten.gelu.default: Operator(gelu, in_training=stays),
        aten._scaled_dot_product_flash_attention_for_cpu.default: Operator(
            attention, in_training=stays
        ),
    }


def gelu(x: torch.Tensor, *, approximate: str = "none") -> Any:
    """GELU by the error function as one ``Gelu``, not as five operators over the tensor.

    The tanh form is left as it is: ONNX Runtime itself makes a ``FastGelu`` of it.
    """
    if approximate != "none" or not _plain(x) or not _torch.tensors.is_row_major(x):
        return NotImplemented
    return fused.gelu(x)


def attention(
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
    rows = fused.attention(*map(_heads_joined, (query, key, value)), heads, factor)
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
