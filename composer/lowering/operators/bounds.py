"""The larger and the smaller of two, and numbers kept within bounds."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.fx

from composer import _torch
from composer.lowering.operators.entry import Operator, Operators, of_integers

aten = torch.ops.aten


def entries() -> Operators:
    """The entries of this module."""
    return {
        aten.clamp.default: Operator(clamp),
        aten.clamp.Tensor: Operator(clamp_by_tensors),
        aten.clamp_min.default: Operator(lambda x, low: clamp(x, min=low)),
        aten.clamp_min.Tensor: Operator(clamp_by_tensors),
        aten.clamp_max.default: Operator(lambda x, high: clamp(x, max=high)),
        aten.clamp_max.Tensor: Operator(lambda x, high: clamp_by_tensors(x, max=high)),
        aten.hardtanh: Operator(
            unsupported=(of_integers("bounds of integers are rounded to float32"),)
        ),
        aten.hardtanh_backward.default: Operator(
            _torch.operators.decomposition_of(aten.hardtanh_backward.default)
        ),
    }


def clamp(x: torch.Tensor, min: Any = None, max: Any = None) -> Any:
    """An integer between integer bounds, any other number between two floats."""
    if x.dtype.is_floating_point:
        if any(isinstance(each, float) and math.isnan(each) for each in (min, max)):
            return torch.full_like(x, math.nan)
        both = isinstance(min, float) and isinstance(max, float)
        return NotImplemented if both else _between_floats(x, min, max)
    if isinstance(min, float) or isinstance(max, float):
        return aten.clamp.default(x.to(torch.result_type(x, 0.0)), min, max)
    return NotImplemented


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
