"""Parts of elementwise functions: the dtype to compute in, signs, numbers as tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx

aten = torch.ops.aten


def of_floats(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compute in the dtype that eager promotes all to, halves in float32; decline what is no float.

    Numbers alone, of which ``torch.div(16, 4)`` makes a tensor too, are declined as well.
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
    """What eager promotes one value, or two, to; ``None`` for numbers alone."""
    if not any(isinstance(each, torch.Tensor) for each in values):
        return None
    first, *rest = (each if isinstance(each, torch.Tensor) else _like(each) for each in values)
    return torch.result_type(first, rest[0] if rest else first)


def _like(number: Any) -> int | float:
    """Some number of its kind, which may be symbolic."""
    return 0.0 if isinstance(number, float | torch.SymFloat) else 0


def in_double(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compute in float64 and round once; decline float64, for which the series are too short."""

    @functools.wraps(function)
    def widened(*values: Any) -> Any:
        x = values[-1]
        if not x.dtype.is_floating_point or x.dtype is torch.float64:
            return NotImplemented
        return function(*values[:-1], x.double()).to(x.dtype)

    return widened


def of_doubles(function: Callable[..., Any]) -> Callable[..., Any]:
    """Leave the other dtypes to a translation that holds its numbers in float32."""

    @functools.wraps(function)
    def narrowed(x: torch.Tensor, *numbers: float) -> Any:
        return function(x, *numbers) if x.dtype is torch.float64 else NotImplemented

    return narrowed


def held(number: Any, other: Any) -> Any:
    """A number as a tensor, where the other is one of floats."""
    is_float = isinstance(other, torch.Tensor) and other.dtype.is_floating_point
    if not is_float or isinstance(number, torch.Tensor):
        return number
    return torch.full((), number, dtype=other.dtype, device=other.device)


def is_symbol(number: Any) -> bool:
    """Whether a number is not known."""
    return isinstance(number, torch.SymInt | torch.SymFloat)


def is_negative(x: torch.Tensor) -> torch.Tensor:
    """Whether the sign is a minus, that of a zero too; ``False`` for every NaN."""
    return (x < 0) | ((x == 0) & (1 / x < 0))


def sign(x: torch.Tensor) -> torch.Tensor:
    """A factor of plus or minus one.

    ONNX Runtime's ``Where`` (1.32) drops the sign of a zero (microsoft/onnxruntime#32191).
    """
    return torch.where(is_negative(x), -1.0, 1.0).to(x.dtype)


def series(coefficients: Sequence[float], x: torch.Tensor) -> torch.Tensor:
    """The polynomial with these coefficients, lowest power first, by Horner's rule."""
    total = x * coefficients[-1] + coefficients[-2]
    for coefficient in reversed(coefficients[:-2]):
        total = total * x + coefficient
    return total
