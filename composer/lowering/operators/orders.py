"""Sorting, medians and other ranks, and cumulative sums, products and extremes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from composer import _torch
from composer.lowering.operators.entry import Operator, Operators, always
from composer.lowering.operators.guards import has_elements, is_float, may_add, only_for
from composer.lowering.operators.layouts import lying_as_in_eager
from composer.lowering.operators.reductions import over_vector

aten = torch.ops.aten


def entries() -> Operators:
    """The entries of this module."""
    sort, topk = aten.sort.default, aten.topk.default
    cummax, cummin = aten.cummax.default, aten.cummin.default
    written_out = {
        sort: over_vector(sort, translate="comparisons:sort"),
        topk: over_vector(topk, translate="comparisons:topk"),
        aten.sort.stable: Operator(stable_sort),
        aten.median.default: Operator(median),
        aten.median.dim: over_vector(aten.median.dim, median_along),
        aten.cumsum.default: over_vector(aten.cumsum.default, cumsum),
        aten.cumprod.default: over_vector(aten.cumprod.default, cumprod, or_whole=True),
        aten.logcumsumexp.default: over_vector(aten.logcumsumexp.default, logcumsumexp),
        cummax: over_vector(cummax, functools.partial(running, torch.ge)),
        cummin: over_vector(cummin, functools.partial(running, torch.le)),
    }
    return lying_as_in_eager(written_out) | {
        aten.kthvalue.default: Operator(kthvalue),
        aten.nanmedian.default: Operator(nanmedian),
        aten.nanmedian.dim: Operator(nanmedian_along),
        aten.searchsorted.Tensor: Operator(searchsorted),
        aten.searchsorted.Scalar: Operator(searchsorted),
        aten.logcumsumexp: Operator(unsupported=(always("it overflows"),)),
    }


def stable_sort(
    x: torch.Tensor, *, stable: bool | None, dim: int = -1, descending: bool = False
) -> Any:
    """A stable sort as an ordinary one.

    ONNX's ``TopK`` puts the lower index first among equals, so it is stable in both directions.
    """
    return aten.sort.default(x, dim, descending)


@only_for(has_elements)
@only_for(is_float)
def median(x: torch.Tensor) -> Any:
    """The lower median of all elements; NaN if an element is NaN."""
    flat = x.reshape(-1)
    ordered = torch.sort(flat).values
    return torch.where(torch.isnan(flat).any(), torch.nan, ordered[(x.numel() - 1) // 2])


@only_for(is_float)
def median_along(x: torch.Tensor, dim: int, keepdim: bool = False) -> Any:
    """The lower median and its index.

    Among equal elements the index may differ from eager's, which is not defined there either.
    """
    if not isinstance(x.shape[dim], int):
        return NotImplemented
    ordered, places = torch.sort(x, dim)
    middle = (x.shape[dim] - 1) // 2
    value, place = ordered.narrow(dim, middle, 1), places.narrow(dim, middle, 1)
    unordered = torch.isnan(x)
    spoilt = unordered.any(dim, keepdim=True)
    first = torch.argmax(unordered.to(torch.int32), dim, keepdim=True)
    value, place = torch.where(spoilt, torch.nan, value), torch.where(spoilt, first, place)
    return _without(dim, keepdim, value, place)


def _without(dim: int, keepdim: bool, *results: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The results, without their dimension of size one unless ``keepdim`` is true."""
    return results if keepdim else tuple(each.squeeze(dim) for each in results)


@only_for(is_float)
@only_for(torch.Tensor.dim)
def kthvalue(x: torch.Tensor, k: int, dim: int = -1, keepdim: bool = False) -> Any:
    """``aten.kthvalue`` by sorting.

    Among equal elements the index may differ from eager's, which is not defined there either.
    """
    values, places = torch.sort(x, dim)
    value, place = values.narrow(dim, k - 1, 1), places.narrow(dim, k - 1, 1)
    return _without(dim, keepdim, value.contiguous(), place.contiguous())


@only_for(has_elements)
@only_for(is_float)
def nanmedian(x: torch.Tensor) -> Any:
    """The lower median of the elements that are not NaN."""
    return nanmedian_along(x.reshape(-1), 0)[0]


@only_for(is_float)
@only_for(torch.Tensor.dim)
def nanmedian_along(x: torch.Tensor, dim: int, keepdim: bool = False) -> Any:
    """The lower median of the elements that are not NaN, and its index.

    NaN is sorted to the end.
    """
    if x.shape[dim] == 0:
        return NotImplemented
    values, places = torch.sort(x, dim)
    count = (x == x).sum(dim, keepdim=True)
    middle = torch.div(count - 1, 2, rounding_mode="floor")
    middle = torch.where(middle < 0, 0, middle)
    value, place = torch.gather(values, dim, middle), torch.gather(places, dim, middle)
    return _without(dim, keepdim, value, place)


@only_for(torch.Tensor.dim)
def searchsorted(
    ordered: torch.Tensor,
    x: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: torch.Tensor | None = None,
) -> Any:
    """``aten.searchsorted`` by counting the elements before each value; NaN comes last."""
    if sorter is not None:
        return NotImplemented
    if not isinstance(x, torch.Tensor):
        x = torch.full((), x, dtype=torch.result_type(ordered, x), device=ordered.device)
    if x.dtype is not ordered.dtype or not may_add(x.numel() * ordered.shape[-1]):
        return NotImplemented
    rows = ordered.unsqueeze(-2) if ordered.dim() > 1 else ordered
    is_after = torch.gt if right or side == "right" else torch.ge
    before = torch.logical_not(is_after(rows, x.unsqueeze(-1)))
    return before.sum(-1, dtype=torch.int32 if out_int32 else torch.int64)


_LONGEST = 64
"""The most elements along a scanned dimension; each becomes a few nodes."""

_FEW = 256
"""The most numbers that are summed one after the other in float32."""


def cumsum(x: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Any:
    """``aten.cumsum`` of many floats, computed in float64 as eager's CPU kernel does."""
    dtype = dtype or x.dtype
    if isinstance(x.shape[dim], int) and x.shape[dim] <= _FEW:
        return NotImplemented
    if dtype not in (torch.float32, torch.float16, torch.bfloat16) or x.device.type != "cpu":
        return NotImplemented
    return torch.cumsum(x.to(dtype).double(), dim).to(dtype)


def cumprod(x: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Any:
    """``aten.cumprod`` as one product per element; floats are computed in float64, as in eager."""
    if dtype is None:
        dtype = x.dtype if x.dtype.is_floating_point else torch.int64
    wide = torch.float64 if dtype.is_floating_point else dtype
    return _scanned(torch.mul, x.to(dtype).to(wide), dim, dtype)


@only_for(is_float)
def logcumsumexp(x: torch.Tensor, dim: int) -> Any:
    """``aten.logcumsumexp`` as one ``logaddexp`` per element; the first is with minus infinity."""
    if _torch.symbols.may_be_empty(x):
        return NotImplemented
    first, rest = x.narrow(dim, 0, 1), x.narrow(dim, 1, x.shape[dim] - 1)
    first = torch.logaddexp(first, torch.full_like(first, -math.inf))
    return _scanned(torch.logaddexp, torch.cat([first, rest], dim), dim, x.dtype)


def _scanned(
    step: Callable[..., torch.Tensor], x: torch.Tensor, dim: int, dtype: torch.dtype
) -> Any:
    parts = _parts(x, dim)
    if not parts:
        return NotImplemented
    for i in range(1, len(parts)):
        parts[i] = step(parts[i - 1], parts[i])
    return torch.cat(parts, dim).to(dtype)


def running(is_better: Callable[..., torch.Tensor], x: torch.Tensor, dim: int) -> Any:
    """The cumulative maximum or minimum, and its index: of the last one among equals or NaN.

    ``is_better`` is ``torch.ge`` for the maximum, ``torch.le`` for the minimum.
    """
    parts = _parts(x, dim)
    if not parts or x.dtype is torch.bool:
        return NotImplemented
    places = [torch.zeros_like(parts[0], dtype=torch.int64)]
    for i in range(1, len(parts)):
        best, candidate = parts[i - 1], parts[i]
        better = is_better(candidate, best) & (best == best) | (candidate != candidate)
        parts[i] = torch.where(better, candidate, best)
        places.append(torch.where(better, i, places[-1]))
    return torch.cat(parts, dim), torch.cat(places, dim)


def _parts(x: torch.Tensor, dim: int) -> list[torch.Tensor]:
    """The slices of size one along ``dim``; empty if their number is too large or unknown."""
    size = x.shape[dim]
    if not isinstance(size, int) or not 0 < size <= _LONGEST:
        return []
    return [x.narrow(dim, i, 1) for i in range(size)]
