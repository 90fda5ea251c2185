"""Elements chosen by rank or by place, written out: what has no translation, or mutates."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from composer import _torch
from composer.lowering.operators.limits import MOST_ADDED

aten = torch.ops.aten

_INDEXED = (
    *(aten.index.Tensor, aten._unsafe_index.Tensor),
    *(aten.index_put.default, aten._unsafe_index_put.default),
)
"""Operators whose translation hands indices over as they are."""


def selections() -> dict[Any, Callable[..., Any]]:
    """The table of this module's decompositions."""
    return {each: functools.partial(with_long_indices, each) for each in _INDEXED} | {
        aten.kthvalue.default: kthvalue,
        aten.nanmedian.default: nanmedian,
        aten.nanmedian.dim: nanmedian_along,
        aten.searchsorted.Tensor: searchsorted,
        aten.searchsorted.Scalar: searchsorted,
        aten.diagonal_scatter.default: diagonal_scatter,
        aten.as_strided_scatter.default: as_strided_scatter,
        aten.repeat.default: repeat,
        aten.full_like.default: full_like,
        aten.new_full.default: new_full,
    }


def with_long_indices(
    operator: Any, x: torch.Tensor, indices: Sequence[torch.Tensor | None], *args: Any, **how: Any
) -> Any:
    """Indices of 32 bits widened; ONNX wants 64. The backward of ``unfold`` has such."""
    if not any(each is not None and each.dtype is torch.int32 for each in indices):
        return accumulated(x, indices, *args, **how)
    longer = [
        each.long() if each is not None and each.dtype is torch.int32 else each for each in indices
    ]
    return operator(x, longer, *args, **how)


def accumulated(
    x: torch.Tensor,
    indices: Sequence[torch.Tensor | None],
    values: torch.Tensor | None = None,
    accumulate: bool = False,
) -> Any:
    """What is added at places along one dimension, by ``scatter_add``: an embedding's backward.

    ONNX Runtime (1.31) adds up what is put by several threads at once: where a place is met twice
    it loses some.
    """
    along = [dim for dim, each in enumerate(indices) if each is not None]
    if not accumulate or values is None or len(along) != 1 or x.device.type != "cpu":
        return NotImplemented
    (dim,) = along
    index = indices[dim]
    if index is None or index.dtype is not torch.int64:  # others are masks
        return NotImplemented
    if any(map(_torch.symbols.depends_on_data, index.shape)):
        return NotImplemented
    before, after = x.shape[:dim], x.shape[dim + 1 :]
    added = values.expand(*before, *index.shape, *after).reshape(*before, index.numel(), *after)
    places = index.reshape(-1)
    places = torch.where(places < 0, places + x.shape[dim], places)
    places = places.reshape(-1, *([1] * len(after))).expand(added.shape)
    result = aten.scatter_add.default(x, dim, places, added)
    order = _torch.tensors.order_of_memory(x)
    if order == sorted(order):
        return result
    back = [order.index(dim) for dim in range(x.dim())]
    return result.permute(order).contiguous().permute(back)


def kthvalue(x: torch.Tensor, k: int, dim: int = -1, keepdim: bool = False) -> Any:
    """By sorting; of several equal elements eager names any, too."""
    if not x.dim() or not x.dtype.is_floating_point:
        return NotImplemented
    values, places = torch.sort(x, dim)
    value, place = (each.narrow(dim, k - 1, 1).contiguous() for each in (values, places))
    return (value, place) if keepdim else (value.squeeze(dim), place.squeeze(dim))


def nanmedian(x: torch.Tensor) -> Any:
    """The lower median of what is no NaN."""
    if not x.dtype.is_floating_point or not isinstance(x.numel(), int) or not x.numel():
        return NotImplemented
    return nanmedian_along(x.reshape(-1), 0)[0]


def nanmedian_along(x: torch.Tensor, dim: int, keepdim: bool = False) -> Any:
    """The lower median of what is no NaN, and where it is: NaN is sorted to the end."""
    if not x.dim() or not x.dtype.is_floating_point or x.shape[dim] == 0:
        return NotImplemented
    values, places = torch.sort(x, dim)
    count = (x == x).sum(dim, keepdim=True)
    middle = torch.div(count - 1, 2, rounding_mode="floor")
    middle = torch.where(middle < 0, 0, middle)
    value, place = torch.gather(values, dim, middle), torch.gather(places, dim, middle)
    return (value, place) if keepdim else (value.squeeze(dim), place.squeeze(dim))


def searchsorted(
    ordered: torch.Tensor,
    x: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: torch.Tensor | None = None,
) -> Any:
    """By counting what comes before; NaN comes last."""
    if not ordered.dim() or torch.result_type(ordered, x) is not ordered.dtype:
        return NotImplemented
    number = functools.partial(torch.full, (), dtype=ordered.dtype, device=ordered.device)
    value = x if isinstance(x, torch.Tensor) else number(x)
    sizes = (value.numel(), ordered.shape[-1])
    if not all(isinstance(size, int) for size in sizes) or math.prod(sizes) > MOST_ADDED:
        return NotImplemented
    if sorter is not None or value.dtype is not ordered.dtype or 0 in sizes:
        return NotImplemented
    rows = ordered.unsqueeze(-2) if ordered.dim() > 1 else ordered
    after = rows > value.unsqueeze(-1) if right or side == "right" else rows >= value.unsqueeze(-1)
    return torch.logical_not(after).sum(-1, dtype=torch.int32 if out_int32 else torch.int64)


def diagonal_scatter(
    x: torch.Tensor, src: torch.Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> Any:
    """By the places of its numbers."""
    if not _torch.tensors.is_row_major(x):
        return NotImplemented
    along = torch.arange(src.shape[-1], device=x.device)
    places = along + max(-offset, 0), along + max(offset, 0)
    put = torch.index_put(x.movedim((dim1, dim2), (0, 1)), places, src.movedim(-1, 0))
    return put.movedim((0, 1), (dim1, dim2)).contiguous()


def as_strided_scatter(
    x: torch.Tensor,
    src: torch.Tensor,
    size: Sequence[Any],
    stride: Sequence[Any],
    storage_offset: Any = None,
) -> Any:
    """What replaces all of ``x``: the backward of a mean over images that lie channels last."""
    sizes = (*x.shape, *size, *stride, storage_offset or 0)
    if not all(isinstance(each, int) for each in sizes) or not _torch.tensors.is_row_major(x):
        return NotImplemented
    whole = math.prod(size) == x.numel() and _is_row_major(size, stride)
    if not whole or x.storage_offset() or storage_offset:
        return NotImplemented
    return src.contiguous().view(x.shape).clone()


def _is_row_major(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    following = itertools.accumulate(reversed(sizes), operator.mul, initial=1)
    steps = zip(reversed(sizes), reversed(strides), following, strict=False)
    return all(stride == step for size, stride, step in steps if size != 1)


def repeat(x: torch.Tensor, repeats: Sequence[int]) -> Any:
    """No repeats of no dimensions: ONNX has no shape without type for them."""
    return NotImplemented if repeats else x.clone()


def full_like(x: torch.Tensor, value: Any, *, dtype: Any = None, **others: Any) -> Any:
    """A constant that torch makes, where float32 could not hold it."""
    dtype = dtype or x.dtype
    plain = _torch.tensors.is_row_major(x) and others.get("memory_format") in (
        None,
        torch.preserve_format,
    )
    if not plain or dtype is not torch.float64:
        return NotImplemented
    return torch.full(x.shape, value, dtype=dtype, device=others.get("device") or x.device)


def new_full(x: torch.Tensor, size: Sequence[int], value: Any, **others: Any) -> Any:
    """A constant that torch makes, where float32 could not hold it."""
    dtype = others.get("dtype") or x.dtype
    if dtype is not torch.float64:
        return NotImplemented
    return torch.full(size, value, dtype=dtype, device=others.get("device") or x.device)
