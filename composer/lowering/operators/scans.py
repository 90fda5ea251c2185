"""Sums, products and extremes so far, along a dimension."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.fx

from composer import _torch
from composer.lowering.operators.entry import Operator, Operators, always
from composer.lowering.operators.layouts import lying_as_in_eager

aten = torch.ops.aten


def entries() -> Operators:
    """The entries of this module."""
    written_out = {
        aten.cumsum.default: Operator(cumsum),
        aten.cumprod.default: Operator(cumprod, or_whole=True),
        aten.logcumsumexp.default: Operator(logcumsumexp),
        aten.cummax.default: Operator(functools.partial(running, torch.ge)),
        aten.cummin.default: Operator(functools.partial(running, torch.le)),
    }
    return lying_as_in_eager(written_out) | {
        aten.logcumsumexp: Operator(unsupported=(always("it overflows"),)),
    }


_LONGEST = 64
"""Elements along a scanned dimension, each of which becomes a few nodes."""

_FEW = 256
"""How many numbers may be added up one after the other in float32."""


def cumsum(x: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Any:
    """Of many floats in float64, as eager's kernel for the CPU does it."""
    dtype = dtype or x.dtype
    if not x.dim() or (isinstance(x.shape[dim], int) and x.shape[dim] <= _FEW):
        return NotImplemented
    if dtype not in (torch.float32, torch.float16, torch.bfloat16) or x.device.type != "cpu":
        return NotImplemented
    return torch.cumsum(x.to(dtype).double(), dim).to(dtype)


def cumprod(x: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Any:
    """One product after the other; eager, too, keeps the products of floats in float64."""
    if dtype is None:
        dtype = x.dtype if x.dtype.is_floating_point else torch.int64
    wide = torch.float64 if dtype.is_floating_point else dtype
    return _scanned(torch.mul, x.to(dtype).to(wide), dim, dtype)


def logcumsumexp(x: torch.Tensor, dim: int) -> Any:
    """One sum after the other, the first to nothing."""
    if not x.dtype.is_floating_point or _torch.symbols.may_be_empty(x):
        return NotImplemented
    if not x.dim():
        return x.clone()
    first, rest = x.narrow(dim, 0, 1), x.narrow(dim, 1, x.shape[dim] - 1)
    first = torch.logaddexp(first, torch.full_like(first, -math.inf))
    return _scanned(torch.logaddexp, torch.cat([first, rest], dim), dim, x.dtype)


def _scanned(
    step: Callable[..., torch.Tensor], x: torch.Tensor, dim: int, dtype: torch.dtype
) -> Any:
    if not x.dim():
        return x.to(dtype).clone()
    parts = _parts(x, dim)
    if not parts:
        return NotImplemented
    for i in range(1, len(parts)):
        parts[i] = step(parts[i - 1], parts[i])
    return torch.cat(parts, dim).to(dtype)


def running(is_better: Callable[..., torch.Tensor], x: torch.Tensor, dim: int) -> Any:
    """The largest, or smallest, so far, and where it is: the last of equals, or of NaN."""
    if not x.dim():
        return x.clone(), torch.zeros_like(x, dtype=torch.int64)
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
    """Slices of one element along ``dim``; none if there are too many, or an unknown number."""
    size = x.shape[dim]
    if not isinstance(size, int) or not 0 < size <= _LONGEST:
        return []
    return [x.narrow(dim, i, 1) for i in range(size)]
