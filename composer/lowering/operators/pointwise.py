"""Helpers for elementwise decompositions: the dtype to compute in, signs, numbers as tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx

aten = torch.ops.aten


def of_floats(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that casts the operands to the dtype to which eager promotes them.

    Half precision is computed in float32 and rounded once. Calls with another result than floats
    are declined, and so are calls with numbers only, such as ``torch.div(16, 4)``.
    """

    @functools.wraps(function)
    def guarded(*values: Any) -> Any:
        dtype = _dtype_of(*values)
        if dtype is None or not dtype.is_floating_point:
            return NotImplemented
        wide = dtype if dtype.itemsize > 2 else torch.float32
        result = function(*(v.to(wide) if isinstance(v, torch.Tensor) else v for v in values))
        return result if wide is dtype else result.to(dtype)

    return guarded


def _dtype_of(*values: Any) -> torch.dtype | None:
    """The dtype to which eager promotes one or two values; ``None`` if all are numbers."""
    if not any(isinstance(each, torch.Tensor) for each in values):
        return None
    first, *rest = (each if isinstance(each, torch.Tensor) else _like(each) for each in values)
    return torch.result_type(first, rest[0] if rest else first)


def _like(number: Any) -> int | float:
    """A zero of the type of the number, which may be a symbol."""
    return 0.0 if isinstance(number, float | torch.SymFloat) else 0


def in_double(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that computes in float64 and rounds once.

    Float64 itself is declined: the series here are not exact enough for it.
    """

    @functools.wraps(function)
    def widened(*values: Any) -> Any:
        x = values[-1]
        if not x.dtype.is_floating_point or x.dtype is torch.float64:
            return NotImplemented
        return function(*values[:-1], x.double()).to(x.dtype)

    return widened


def of_doubles(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that declines all dtypes but float64.

    The translation of the operator keeps its constants in float32, which is enough for the others.
    """

    @functools.wraps(function)
    def narrowed(x: torch.Tensor, *numbers: float) -> Any:
        return function(x, *numbers) if x.dtype is torch.float64 else NotImplemented

    return narrowed


def held(number: Any, other: Any) -> Any:
    """The number as a tensor of the other's dtype, if the other is a tensor of floats.

    Anything else is returned as it is.
    """
    is_float = isinstance(other, torch.Tensor) and other.dtype.is_floating_point
    if not is_float or isinstance(number, torch.Tensor):
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
