"""Decompositions of attention whose translation is missing, fails, or differs from eager.

On the CPU there is one operator for attention, on CUDA one for each kernel that torch may choose.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
import torch.fx
from torch.nn import functional

from composer import _torch
from composer.lowering.operators import reductions
from composer.lowering.operators.entry import Operator, Operators
from composer.lowering.operators.guards import is_on_cpu, is_wide, only_for

aten = torch.ops.aten

_ON_CPU = aten._scaled_dot_product_flash_attention_for_cpu


def entries() -> Operators:
    """The entries of this module.

    In onnxscript 0.7 the translation of CUDA's ``flash`` kernel is right, that of ``efficient``
    fails, and ``cudnn`` has none.
    """
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    return {
        _ON_CPU: Operator(unsupported=(logarithms_read,)),
        _ON_CPU.default: Operator(masked_attention, in_training=attention),
        backward: Operator(attention_backward),
        aten._scaled_dot_product_flash_attention: Operator(unsupported=(logarithms_read,)),
        aten._scaled_dot_product_efficient_attention: Operator(unsupported=(logarithms_read,)),
        aten._scaled_dot_product_efficient_attention.default: Operator(efficient_attention),
        aten._scaled_dot_product_cudnn_attention.default: Operator(cudnn_attention),
        aten._native_multi_head_attention.default: Operator(self_attention),
        aten._transformer_encoder_layer_fwd.default: Operator(encoder_layer),
    }


def logarithms_read(node: torch.fx.Node) -> str | None:
    """Why attention must not be translated: its second result is read, but translated as zeros.

    Only a backward reads that result.
    """
    for user in node.users:
        if user.target is operator.getitem and user.args[1] == 1 and user.users:
            return "the logarithms for its backward are left at zero"
    return None


def masked_attention(query: torch.Tensor, *rest: Any, **options: Any) -> Any:
    """:func:`widened_attention`; bfloat16 is declined if the processor multiplies it natively.

    Torch itself is faster there.
    """
    if query.dtype is torch.bfloat16 and _torch.processor.multiplies_bf16():
        return NotImplemented
    return widened_attention(query, *rest, **options)


def widened_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> Any:
    """Attention with a mask, or with fewer heads of key and value than of the query.

    A row that is masked everywhere gives zeros, as in eager; the exporter's translation gives NaN.
    Such rows are the left padding of a batch in text generation. The translation also does not
    support shared heads of key and value. Half precision is computed in float32 and rounded once.
    """
    if query.shape[1] == key.shape[1] and (attn_mask is None or is_causal):
        return NotImplemented
    if query.dtype not in (torch.float16, torch.bfloat16):
        return attention(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)
    q, k, v = query.float(), key.float(), value.float()
    mask = None if attn_mask is None else attn_mask.float()
    found = attention(q, k, v, dropout_p, is_causal, attn_mask=mask, scale=scale)
    return found if found is NotImplemented else (found[0].to(query.dtype), found[1])


@only_for(is_wide)
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
    """Attention, and the log-sum-exp of each row of scores.

    Shapes are (batch, heads, length, size), the dtype is float32 or float64. Several heads of the
    query may share one of key and value. The result has the memory layout of the query. A row that
    is masked everywhere gives zeros, and zero as its log-sum-exp.
    """
    if dropout_p:
        return NotImplemented
    key, value = (_for_heads_of(query, each) for each in (key, value))
    rows, scores, seen = _attend(query, key, value, is_causal, attn_mask, scale)
    logarithms = log_sum_exp(scores)
    if seen is not None:
        logarithms = logarithms * seen.squeeze(-1)
    return laid_out_as(rows, query), logarithms


@only_for(is_wide)
def attention_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> Any:
    """Gradients of query, key and value.

    The attention weights are recomputed from ``logsumexp``, as in FlashAttention-2
    (arXiv:2307.08691, algorithm 2), but without its blocks.
    """
    if dropout_p:
        return NotImplemented
    keys, values = key.shape[1], value.shape[1]
    key, value = (_for_heads_of(query, each) for each in (key, value))
    scores = _scores(query, key, is_causal, attn_mask, scale)
    weights = torch.exp(scores - logsumexp.unsqueeze(-1))
    grad_weights = torch.matmul(grad, value.transpose(-2, -1))
    grad_scores = weights * (grad_weights - (grad * out).sum(-1, keepdim=True))
    grad_scores = grad_scores * _scale_of(query, scale)
    grads = (
        torch.matmul(grad_scores, key),
        _over_sharing(torch.matmul(grad_scores.transpose(-2, -1), query), keys),
        _over_sharing(torch.matmul(weights.transpose(-2, -1), grad), values),
    )
    return tuple(map(_heads_inside, grads))


def log_sum_exp(scores: torch.Tensor) -> torch.Tensor:
    """The log-sum-exp over the last dimension.

    It is written out if a size is unbacked: torch then has to know whether there are any elements,
    and fails (up to 2.15, see ``tests/lowering/test_unbacked.py``).
    """
    if not any(map(_torch.symbols.is_unbacked, scores.shape)):
        return torch.logsumexp(scores, -1)
    return reductions.log_sum_exp(scores, [-1])


def _for_heads_of(query: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
    """The key or value, repeated so that it has as many heads as the query."""
    groups = query.shape[1] // shared.shape[1]
    return shared if groups == 1 else shared.repeat_interleave(groups, 1)


def _over_sharing(grad: torch.Tensor, heads: int) -> torch.Tensor:
    """The gradient summed over the neighbouring query heads that share a head of the key."""
    if grad.shape[1] == heads:
        return grad
    return grad.reshape(grad.shape[0], heads, -1, *grad.shape[2:]).sum(2)


def efficient_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: torch.Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    """CUDA's memory-efficient kernel in inference.

    In memory the heads of a position are next to each other, see :func:`_heads_inside`. The other
    results are placeholders: only a backward reads them.
    """
    if dropout_p or compute_log_sumexp or query.shape[1] != key.shape[1]:
        return NotImplemented
    rows, _, _ = _attend(query, key, value, is_causal, attn_bias, scale)
    seed = torch.zeros((), dtype=torch.int64, device=query.device)
    logarithms = torch.zeros((*query.shape[:2], 0), device=query.device)
    return _heads_inside(rows), logarithms, seed, seed


def cudnn_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: torch.Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    """CuDNN's kernel in inference; its result has the memory layout of the query.

    The other results are placeholders: only a backward reads them.
    """
    if dropout_p or compute_log_sumexp or return_debug_mask or query.shape[1] != key.shape[1]:
        return NotImplemented
    rows, _, _ = _attend(query, key, value, is_causal, attn_bias, scale)
    seed = torch.zeros((), dtype=torch.int64, device=query.device)
    nothing = torch.zeros((0,), device=query.device)
    lengths = query.shape[2], key.shape[2]
    result = laid_out_as(rows, query)
    return result, nothing, None, None, *lengths, seed, seed, nothing


@only_for(is_on_cpu)
def encoder_layer(
    x: torch.Tensor,
    embed_dim: int,
    heads: int,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: torch.Tensor,
    norm_bias_1: torch.Tensor,
    norm_weight_2: torch.Tensor,
    norm_bias_2: torch.Tensor,
    ffn_weight_1: torch.Tensor,
    ffn_bias_1: torch.Tensor,
    ffn_weight_2: torch.Tensor,
    ffn_bias_2: torch.Tensor,
    mask: torch.Tensor | None = None,
    mask_type: int | None = None,
) -> Any:
    """``nn.TransformerEncoderLayer`` in inference, which torch runs as one operator.

    Devices other than the CPU are declined: torch uses another GELU there.
    """

    def attend(x: torch.Tensor) -> torch.Tensor:
        weights = (qkv_weight, qkv_bias, proj_weight, proj_bias)
        options = (mask, False, True, mask_type)
        result: torch.Tensor
        result, _ = self_attention(x, x, x, embed_dim, heads, *weights, *options)
        return result

    def feed_forward(x: torch.Tensor) -> torch.Tensor:
        activate = functional.gelu if use_gelu else functional.relu
        inner = activate(functional.linear(x, ffn_weight_1, ffn_bias_1))
        return functional.linear(inner, ffn_weight_2, ffn_bias_2)

    def norm_1(x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, (embed_dim,), norm_weight_1, norm_bias_1, eps)

    def norm_2(x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, (embed_dim,), norm_weight_2, norm_bias_2, eps)

    if norm_first:
        x = x + attend(norm_1(x))
        return x + feed_forward(norm_2(x))
    x = norm_1(x + attend(x))
    return norm_2(x + feed_forward(x))


def self_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    embed_dim: int,
    heads: int,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor,
    mask: torch.Tensor | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> Any:
    """``nn.MultiheadAttention`` over one tensor in inference, and its weights if requested.

    A row that is masked everywhere gives NaN here, as in eager; other attention gives zeros.
    """
    if not (query is key and key is value):
        return NotImplemented
    shape = (*query.shape[:2], 3, heads, embed_dim // heads)
    qkv = functional.linear(query, qkv_weight, qkv_bias).reshape(shape)
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    if mask is None and not need_weights:
        rows = functional.scaled_dot_product_attention(q, k, v)
        return functional.linear(rows.transpose(1, 2).flatten(2), proj_weight, proj_bias), None
    scores = _scores(q, k, False, None, None)
    if mask is not None:
        scores = torch.where(_hidden(mask, mask_type), -math.inf, scores)
    weights = torch.softmax(scores, -1)
    rows = torch.matmul(weights, v)
    result = functional.linear(rows.transpose(1, 2).flatten(2), proj_weight, proj_bias)
    if not need_weights:
        return result, None
    return result, weights.mean(1) if average_attn_weights else weights


_OF_KEYS = 1
"""The kind of mask with shape (batch, keys); other masks can be broadcast to the scores."""


def _hidden(mask: torch.Tensor, kind: int | None) -> torch.Tensor:
    """True where a mask hides a score: where it is true, or a number other than zero."""
    hidden = mask if mask.dtype is torch.bool else mask != 0
    return hidden[:, None, None] if kind == _OF_KEYS else hidden


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool,
    attn_mask: torch.Tensor | None,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The result, the scores, and which rows see a key.

    The last is 1 for such a row, else 0, in the dtype of the query; ``None`` without a mask.
    """
    if attn_mask is None:
        scores = _scores(query, key, is_causal, None, scale)
        return torch.matmul(torch.softmax(scores, -1), value), scores, None
    # The masked rows are handled in the mask, which is often the same in every layer, and in the
    # weights, which are never negative. In the result, a Where would be slow, and a factor would
    # make negative zeros.
    sees = (attn_mask != -math.inf).any(-1, keepdim=True)
    scores = _scores(query, key, is_causal, torch.where(sees, attn_mask, 0.0), scale)
    seen = sees.to(query.dtype)
    return torch.matmul(torch.softmax(scores, -1) * seen, value), scores, seen


def laid_out_as(rows: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """The result of attention in the memory layout of the query, as torch's kernel gives it."""
    inside = _torch.symbols.value_for_strides(query.stride(1)) < _torch.symbols.value_for_strides(
        query.stride(2)
    )
    return _heads_inside(rows) if inside else rows.contiguous()


def _heads_inside(x: torch.Tensor) -> torch.Tensor:
    """A copy of shape (batch, heads, length, size), stored as (batch, length, heads, size)."""
    return x.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)


def _scores(
    query: torch.Tensor,
    key: torch.Tensor,
    is_causal: bool,
    attn_mask: torch.Tensor | None,
    scale: float | None,
) -> torch.Tensor:
    scores = torch.matmul(query * _scale_of(query, scale), key.transpose(-2, -1))
    if is_causal:
        shape = (query.shape[-2], key.shape[-2])
        future = torch.ones(shape, dtype=torch.bool, device=query.device).triu(1)
        scores = torch.where(future, -math.inf, scores)
    return scores if attn_mask is None else scores + attn_mask


def _scale_of(query: torch.Tensor, scale: float | None) -> float:
    return 1 / math.sqrt(query.shape[-1]) if scale is None else scale
