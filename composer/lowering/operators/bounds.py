"""The larger and the smaller of two, and numbers kept within bounds."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.fx

from composer import _torch
from composer.lowering.operators.entry import (
    Operator,
    Operators,
    large_integers,
    of_integers,
)

aten = torch.ops.aten


def entries() -> Operators:
    """The entries of this module."""
    is_large = (large_integers,)
    return {
        aten.maximum.default: Operator(maximum, unsupported=is_large),
        aten.minimum.default: Operator(minimum, unsupported=is_large),
        aten.clamp: Operator(unsupported=is_large),
        aten.clamp.default: Operator(clamp),
        aten.clamp.Tensor: Operator(clamp_by_tensors),
        aten.clamp_min: Operator(unsupported=is_large),
        aten.clamp_min.default: Operator(lambda x, low: clamp(x, min=low)),
        aten.clamp_min.Tensor: Operator(clamp_by_tensors),
        aten.clamp_max: Operator(unsupported=is_large),
        aten.clamp_max.default: Operator(lambda x, high: clamp(x, max=high)),
        aten.clamp_max.Tensor: Operator(lambda x, high: clamp_by_tensors(x, max=high)),
        aten.relu.default: Operator(relu, unsupported=is_large),
        aten.relu6: Operator(unsupported=is_large),
        aten.hardtanh: Operator(
            unsupported=(of_integers("bounds of integers are rounded to float32"),)
        ),
        aten.hardtanh_backward.default: Operator(
            _torch.operators.decomposition_of(aten.hardtanh_backward.default)
        ),
    }


# ONNX Runtime's Max, Min, Clip, Relu compare only the low half of int64 (1.31, AVX-512); its
# comparisons and Where are right.


def maximum(a: torch.Tensor, b: torch.Tensor) -> Any:
    """The larger of two integers."""
    return torch.where(a > b, a, b) if _are_long(a, b) else NotImplemented


def minimum(a: torch.Tensor, b: torch.Tensor) -> Any:
    """The smaller of two integers."""
    return torch.where(a < b, a, b) if _are_long(a, b) else NotImplemented


def clamp(x: torch.Tensor, min: Any = None, max: Any = None) -> Any:
    """An integer between integer bounds, any other number between two floats."""
    if x.dtype.is_floating_point:
        if any(isinstance(each, float) and math.isnan(each) for each in (min, max)):
            return torch.full_like(x, math.nan)
        both = isinstance(min, float) and isinstance(max, float)
        return NotImplemented if both else _between_floats(x, min, max)
    if isinstance(min, float) or isinstance(max, float):
        return aten.clamp.default(x.to(torch.result_type(x, 0.0)), min, max)
    if x.dtype is not torch.int64:
        return NotImplemented
    if min is not None:
        x = torch.where(x < min, min, x)
    return x if max is None else torch.where(x > max, max, x)


def clamp_by_tensors(x: torch.Tensor, min: Any = None, max: Any = None) -> Any:
    """NaN where either is NaN; of one bound without dimensions torchlib makes two."""
    if min is not None and max is not None:
        return NotImplemented
    for bound, nearer in ((min, torch.maximum), (max, torch.minimum)):
        if bound is not None:
            dtype = torch.result_type(x, bound)
            x = nearer(x.to(dtype), bound.to(dtype))
    return x


def _between_floats(x: torch.Tensor, min: Any, max: Any) -> Any:
    """The exporter breaks on an integer beside a float; a bound that is missing is infinite.

    ONNX Runtime's is the largest finite number.
    """
    bounds = (-math.inf if min is None else min), (math.inf if max is None else max)
    if not all(isinstance(each, int | float) for each in bounds):
        return NotImplemented
    return aten.clamp.default(x, *map(float, bounds))


def relu(x: torch.Tensor) -> Any:
    """An integer, or zero for a negative one."""
    return torch.where(x > 0, x, 0) if x.dtype is torch.int64 else NotImplemented


def _are_long(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype is torch.int64 and b.dtype is torch.int64
