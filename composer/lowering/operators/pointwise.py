"""Helpers for elementwise decompositions: the dtype to compute in, signs, numbers as tensors."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from composer.lowering.operators.entry import Function
from composer.lowering.operators.guards import only_for


def on_promoted_floats(function: Function) -> Function:
    """A decorator that casts the operands to the dtype to which eager promotes them.

    Half precision is computed in float32 and rounded once. Calls with another result than floats
    are declined, and so are calls with numbers only, such as ``torch.div(16, 4)``.
    """
    return functools.partial(_call_on_floats, function)


def _call_on_floats(function: Function, *values: Any) -> Any:
    dtype = torch.result_type(_typed_zero(values[0]), _typed_zero(values[-1]))
    has_tensor = any(isinstance(value, torch.Tensor) for value in values)
    if not has_tensor or not dtype.is_floating_point:
        return NotImplemented
    wide = dtype if dtype.itemsize > 2 else torch.float32
    result: torch.Tensor = function(*(_cast(value, wide) for value in values))
    return result.to(dtype)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) else value


def _typed_zero(value: Any) -> torch.Tensor | int | float:
    """A tensor as it is, or zero of the type of a number, which may be a symbol."""
    if isinstance(value, torch.Tensor):
        return value
    return 0.0 if isinstance(value, float | torch.SymFloat) else 0


def in_double(function: Function) -> Function:
    """A decorator that computes in float64 and rounds once.

    Float64 itself is declined: the series here are not exact enough for it.
    """
    return functools.partial(_call_on_double, function)


def _call_on_double(function: Function, *values: Any) -> Any:
    x = values[-1]
    if not x.dtype.is_floating_point or x.dtype is torch.float64:
        return NotImplemented
    return function(*values[:-1], x.double()).to(x.dtype)


of_doubles = only_for(lambda x: x.dtype is torch.float64)
"""A decorator that declines all dtypes but float64.

The translation of the operator keeps its constants in float32, which is enough for the others.
"""


def in_dtype_of(number: Any, other: Any) -> Any:
    """The number as a tensor of the other's dtype, if the other is a tensor of floats.

    Anything else is returned as it is.
    """
    if isinstance(number, torch.Tensor) or not isinstance(other, torch.Tensor):
        return number
    if not other.dtype.is_floating_point:
        return number
    return torch.full((), number, dtype=other.dtype, device=other.device)


def is_symbol(number: Any) -> bool:
    """True if the number is a symbol."""
    return isinstance(number, torch.SymInt | torch.SymFloat)


def is_negative(x: torch.Tensor) -> torch.Tensor:
    """True where the sign is a minus, also for a negative zero; false for every NaN."""
    return (x < 0) | ((x == 0) & (1 / x < 0))


def sign(x: torch.Tensor) -> torch.Tensor:
    """Minus one where ``x`` is negative or a negative zero, else one.

    A product with it restores the sign of a zero, which ``Where`` of ONNX Runtime 1.32 drops
    (microsoft/onnxruntime#32191).
    """
    return torch.where(is_negative(x), -1.0, 1.0).to(x.dtype)


def series(coefficients: Sequence[float], x: torch.Tensor) -> torch.Tensor:
    """The polynomial with these coefficients, lowest power first, by Horner's rule."""
    total = x * coefficients[-1] + coefficients[-2]
    for coefficient in reversed(coefficients[:-2]):
        total = total * x + coefficient
    return total
