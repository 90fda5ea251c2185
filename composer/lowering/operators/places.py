"""Operators that read elements at indices, or write them there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeGuard

import torch
import torch.fx

from composer import _torch
from composer.lowering.operators.entry import Operator, Operators
from composer.lowering.operators.guards import are_known, only_for
from composer.lowering.operators.layouts import lying_as_in_eager
from composer.lowering.operators.reductions import over_vector

aten = torch.ops.aten


def entries() -> Operators:
    """The entries of this module."""
    return {
        **lying_as_in_eager(_put()),
        aten.index_put.default: _indexed(aten.index_put.default, "shapes:index_put"),
        aten._unsafe_index_put.default: _indexed(aten._unsafe_index_put.default),
        aten.masked_scatter_backward.default: Operator(masked_scatter_backward),
        aten.index.Tensor: _indexed(aten.index.Tensor),
        aten._unsafe_index.Tensor: _indexed(aten._unsafe_index.Tensor),
        aten.embedding.default: Operator(translate="comparisons:embedding"),
        aten.index_select.default: Operator(translate="comparisons:index_select"),
        aten.gather.default: Operator(translate="comparisons:gather"),
    }


def _put() -> Operators:
    src, add, value = aten.scatter.src, aten.scatter_add.default, aten.scatter.value
    return {
        src: over_vector(src, partial(scatter_part, src), translate="comparisons:scatter"),
        add: over_vector(add, partial(scatter_part, add), translate="comparisons:scatter_add"),
        value: over_vector(value, translate="comparisons:scatter_value"),
        aten.scatter_reduce.two: over_vector(
            aten.scatter_reduce.two,
            scatter_reduce,
            translate="comparisons:scatter_reduce",
            unsupported=(scatter_mean,),
        ),
        aten.scatter.reduce: Operator(scatter),
        aten.scatter.value_reduce: Operator(scatter),
        aten.index_reduce.default: over_vector(aten.index_reduce.default, index_reduce),
        aten.put.default: Operator(put),
    }


def _indexed(operator: Any, translate: str = "") -> Operator:
    """The entry of an operator whose translation passes indices on with their own dtype."""
    return Operator(partial(with_long_indices, operator), translate=translate)


def with_long_indices(
    operator: Any,
    x: torch.Tensor,
    indices: Sequence[torch.Tensor | None],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """The call with int32 indices cast to int64, which ONNX requires.

    The backward of ``unfold``, for example, has int32 indices.
    """
    if not any(map(_is_int32, indices)):
        return NotImplemented
    longer = [each.long() if _is_int32(each) else each for each in indices]
    return operator(x, longer, *args, **kwargs)


def _is_int32(index: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    return index is not None and index.dtype is torch.int32


def index_reduce(
    x: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    source: torch.Tensor,
    reduce: str,
    *,
    include_self: bool = True,
) -> Any:
    """``aten.index_reduce`` as ``scatter_reduce`` with the index repeated over each slice."""
    shape = [1] * x.dim()
    shape[dim] = index.numel()
    places = index.reshape(shape).expand(source.shape)
    return aten.scatter_reduce.two(x, dim, places, source, reduce, include_self=include_self)


def scatter_part(
    operator: Any, x: torch.Tensor, dim: int, index: torch.Tensor, src: torch.Tensor, **kwargs: Any
) -> Any:
    """The scatter with the source cut to the shape of the index; ONNX requires equal shapes."""
    if not are_known((*index.shape, *src.shape)) or index.shape == src.shape:
        return NotImplemented
    if not index.dim():
        return NotImplemented
    for along, size in enumerate(index.shape):
        src = src.narrow(along, 0, size)
    return operator(x, dim, index, src, **kwargs)


def scatter_reduce(
    x: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    src: torch.Tensor,
    reduce: str,
    *,
    include_self: bool = True,
) -> Any:
    """``aten.scatter_reduce``; a mean is computed as a sum divided by a count."""
    if reduce != "mean" or not x.dtype.is_floating_point:
        operator = partial(aten.scatter_reduce.two, reduce=reduce, include_self=include_self)
        return scatter_part(operator, x, dim, index, src)
    counts, sums = torch.zeros_like(x), torch.zeros_like(x)
    if include_self:
        counts, sums = torch.ones_like(x), x
    counts = torch.scatter_add(counts, dim, index, torch.ones_like(src))
    sums = torch.scatter_add(sums, dim, index, src)
    return torch.where(counts == 0, x, sums / counts)


def scatter(x: torch.Tensor, dim: int, index: torch.Tensor, src: Any, *, reduce: str) -> Any:
    """``aten.scatter`` with ``reduce``, as ``scatter_add`` or ``scatter_reduce`` with ``prod``."""
    if not isinstance(src, torch.Tensor):
        src = torch.full_like(index, src, dtype=x.dtype)
    if reduce == "add":
        return aten.scatter_add.default(x, dim, index, src)
    return aten.scatter_reduce.two(x, dim, index, src, "prod")


@only_for(torch.Tensor.dim)
@only_for(_torch.tensors.is_row_major)
def put(
    x: torch.Tensor, index: torch.Tensor, source: torch.Tensor, accumulate: bool = False
) -> Any:
    """``aten.put`` as ``index_put`` into the flattened tensor."""
    places = (index.reshape(-1),)
    flat = aten.index_put.default(x.reshape(-1), places, source.reshape(-1), accumulate)
    return flat.reshape(x.shape)


def masked_scatter_backward(grad: torch.Tensor, mask: torch.Tensor, sizes: Sequence[int]) -> Any:
    """The gradient of the source of ``masked_scatter``.

    The forward puts the first elements of the source, in order, where the mask is true. Here the
    gradients at these places are scattered back. The gradients at other places are scattered to one
    extra element at the end, which is cut off.
    """
    if any(map(_torch.symbols.depends_on_data, sizes)):
        return NotImplemented
    length = math.prod(sizes)
    taken = mask.expand(grad.shape).reshape(-1)
    place = torch.where(taken, taken.to(torch.int64).cumsum(0) - 1, length)
    source = grad.new_zeros(length + 1).scatter(0, place, grad.reshape(-1))
    return source.narrow(0, 0, length).reshape(sizes)


def scatter_mean(node: torch.fx.Node) -> str | None:
    """Why a mean must not be translated: the translation computes it differently."""
    is_mean = _torch.operators.argument(node, "reduce") == "mean"
    return "the mean is computed otherwise" if is_mean else None
