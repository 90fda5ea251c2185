"""Elements in their order, or chosen by their rank."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import torch.fx

from composer.lowering.operators.entry import Operator, Operators
from composer.lowering.operators.layouts import lying_as_in_eager
from composer.lowering.operators.limits import MOST_ADDED
from composer.lowering.operators.reductions import over_one_element

aten = torch.ops.aten


def entries() -> Operators:
    """The entries of this module."""
    sort, topk = aten.sort.default, aten.topk.default
    written_out = {
        sort: Operator(functools.partial(over_one_element, sort), translate="comparisons:sort"),
        topk: Operator(functools.partial(over_one_element, topk), translate="comparisons:topk"),
        aten.sort.stable: Operator(stable_sort),
        aten.median.default: Operator(median),
        aten.median.dim: Operator(median_along),
    }
    return lying_as_in_eager(written_out) | {
        aten.kthvalue.default: Operator(kthvalue),
        aten.nanmedian.default: Operator(nanmedian),
        aten.nanmedian.dim: Operator(nanmedian_along),
        aten.searchsorted.Tensor: Operator(searchsorted),
        aten.searchsorted.Scalar: Operator(searchsorted),
    }


def stable_sort(
    x: torch.Tensor, *, stable: bool | None, dim: int = -1, descending: bool = False
) -> Any:
    """ONNX's TopK takes the lower index first among equals: it is stable in both directions."""
    return aten.sort.default(x, dim, descending)


def median(x: torch.Tensor) -> Any:
    """The lower median of all elements; NaN if one of them is."""
    if not x.dtype.is_floating_point or not isinstance(x.numel(), int) or not x.numel():
        return NotImplemented
    flat = x.reshape(-1)
    ordered = torch.sort(flat).values
    return torch.where(torch.isnan(flat).any(), torch.nan, ordered[(x.numel() - 1) // 2])


def median_along(x: torch.Tensor, dim: int, keepdim: bool = False) -> Any:
    """The lower median, and where it is; of several equal elements eager names any, too."""
    if not x.dim():
        return over_one_element(aten.median.dim, x, dim)
    if not x.dtype.is_floating_point or not isinstance(x.shape[dim], int):
        return NotImplemented
    ordered, places = torch.sort(x, dim)
    middle = (x.shape[dim] - 1) // 2
    value, place = ordered.narrow(dim, middle, 1), places.narrow(dim, middle, 1)
    unordered = torch.isnan(x)
    spoilt = unordered.any(dim, keepdim=True)
    first = torch.argmax(unordered.to(torch.int32), dim, keepdim=True)
    value, place = torch.where(spoilt, torch.nan, value), torch.where(spoilt, first, place)
    return (value, place) if keepdim else (value.squeeze(dim), place.squeeze(dim))


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
