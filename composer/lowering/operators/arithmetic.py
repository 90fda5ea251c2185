"""Division, remainder and clamp, rounded as in eager.

A decomposition that returns ``NotImplemented`` leaves the call to torchlib's own translation.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
import torch.fx

from composer import _torch
from composer.graphs.nodes import tensors_of, value_of
from composer.lowering.operators.entry import (
    Operator,
    Operators,
    is_integral,
    numbers_of,
    refuse_integers,
)
from composer.lowering.operators.layouts import with_strides_of_operands
from composer.lowering.operators.pointwise import in_dtype_of, is_symbol, on_promoted_floats, sign

aten = torch.ops.aten


def entries() -> Operators:
    """The entries of this module."""
    written_out = {
        aten.remainder.Tensor: Operator(remainder),
        aten.remainder.Scalar: Operator(remainder),
        aten.remainder.Scalar_Tensor: Operator(remainder),
        aten.floor_divide.default: Operator(floor_divide),
        aten.div.Tensor_mode: Operator(divide),
    }
    rounded = refuse_integers("bounds of integers are rounded to float32")
    on_bounds = _torch.operators.decomposition_of(aten.hardtanh_backward.default)
    return with_strides_of_operands(written_out) | {
        aten.div: Operator(unsupported=(half_factor,)),
        aten.mul: Operator(unsupported=(half_factor,)),
        operator.floordiv: Operator(unsupported=(division_of_sizes,)),
        aten.clamp.default: Operator(clamp),
        aten.clamp.Tensor: Operator(clamp_by_tensors),
        aten.clamp_min.default: Operator(lambda x, low: clamp(x, min=low)),
        aten.clamp_min.Tensor: Operator(clamp_by_tensors),
        aten.clamp_max.default: Operator(lambda x, high: clamp(x, max=high)),
        aten.clamp_max.Tensor: Operator(lambda x, high: clamp_by_tensors(x, max=high)),
        aten.hardtanh: Operator(unsupported=(rounded,)),
        # Torchlib's gradient is not zero where the input equals a bound.
        aten.hardtanh_backward.default: Operator(on_bounds),
    }


def remainder(a: Any, b: Any) -> Any:
    """``aten.remainder``; a Python number is first rounded to the tensor's dtype, as in eager."""
    is_half = isinstance(a, torch.Tensor) and a.dtype.itemsize <= 2
    divisor = in_dtype_of(b, a) if is_half or is_symbol(b) else b
    return _remainder(in_dtype_of(a, b), divisor)


def is_integer_division(a: Any, b: Any) -> bool:
    """True if ``a`` is a tensor of integers and ``b`` a nonzero ``int`` that its dtype can hold."""
    if not isinstance(a, torch.Tensor) or not is_integral(a):
        return False
    limits = torch.iinfo(a.dtype)
    return type(b) is int and b != 0 and limits.min <= b <= limits.max


@on_promoted_floats
def _remainder(a: torch.Tensor, b: Any) -> Any:
    """The remainder computed from ``fmod``, which is exact.

    Torchlib computes ``a - floor(a / b) * b``, which rounds three times.
    """
    rest = torch.fmod(a, b)
    rest = torch.where(_other_side(rest, b), rest + b, rest)
    return torch.abs(rest) * torch.where(rest == 0, sign(a), sign(rest))


def floor_divide(a: Any, b: Any) -> Any:
    """``aten.floor_divide``; ``a`` or ``b`` may be a Python number."""
    divisor = in_dtype_of(b, a) if is_symbol(b) else b
    return _floor_divide(in_dtype_of(a, b), divisor)


@on_promoted_floats
def _floor_divide(a: torch.Tensor, b: Any) -> Any:
    """The quotient computed from the remainder, as in CPython and eager.

    The floor of the rounded quotient would be wrong by one in some cases.
    """
    rest = torch.fmod(a, b)
    quotient = (a - rest) / b  # an integer, but for the rounding of the division
    quotient = torch.where(_other_side(rest, b), quotient - 1, quotient)
    whole = torch.floor(quotient)
    whole = torch.where(quotient - whole > 0.5, whole + 1, whole)
    plain = a / b
    by_zero = b == 0
    if not isinstance(by_zero, torch.Tensor):
        by_zero = torch.full_like(a, by_zero, dtype=torch.bool)
    whole = torch.where(by_zero, plain, torch.where(quotient == 0, 0.0, whole))
    # A zero has the sign of the plain quotient.
    return torch.abs(whole) * torch.where(whole == 0, sign(plain), sign(whole))


def _other_side(rest: torch.Tensor, b: Any) -> torch.Tensor:
    """True where the remainder is not zero and its sign differs from the divisor's."""
    if not isinstance(b, torch.Tensor):
        return rest > 0 if b < 0 else rest < 0
    return ((rest > 0) & (b < 0)) | ((rest < 0) & (b >= 0))


def divide(a: Any, b: Any, *, rounding_mode: str | None = None) -> Any:
    """``aten.div`` with a rounding mode, ``"floor"`` or ``"trunc"``."""
    if rounding_mode == "floor":
        return torch.floor_divide(a, b) if is_integer_division(a, b) else floor_divide(a, b)
    if rounding_mode == "trunc":
        return towards_zero(a, b) if is_integer_division(a, b) else _truncate(a, b)
    return NotImplemented


def _truncate(a: Any, b: Any) -> Any:
    """The truncated quotient of floats; ``a`` or ``b`` may be a Python number.

    If the divisor is one number, eager computes half precision in float32 and rounds it after the
    truncation. Else it rounds the quotient to float16 before it truncates.
    """
    if _is_of_integers(a) or _is_of_integers(b):
        return NotImplemented
    if not isinstance(b, torch.Tensor) or (isinstance(b.numel(), int) and b.numel() == 1):
        return _truncate_in_float32(a, b)
    return NotImplemented if torch.result_type(a, b) is torch.float16 else torch.trunc(a / b)


def _is_of_integers(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.dtype.is_floating_point


def towards_zero(a: torch.Tensor, b: int) -> torch.Tensor:
    """The integer quotient, truncated; it is computed from the quotient that is rounded down."""
    negative = a < 0 if b > 0 else a > 0
    return torch.floor_divide(a, b) + (negative & (torch.remainder(a, b) != 0)).to(a.dtype)


@on_promoted_floats
def _truncate_in_float32(a: torch.Tensor, b: Any) -> Any:
    return torch.trunc(a / b)


def division_of_sizes(node: torch.fx.Node) -> str | None:
    """Why a division of sizes must not be translated: one of them may be negative.

    Torchlib translates it to ONNX's ``Div``, which rounds towards zero; Python rounds down.
    """
    sizes = torch.fx.node.map_arg(node.args, value_of)
    is_negative = any(map(_may_be_negative, sizes))
    return "a negative number is rounded towards zero" if is_negative else None


def _may_be_negative(size: Any) -> bool:
    least = _torch.symbols.least(size)
    return least is None or least < 0


_HALF = torch.finfo(torch.float16)


def half_factor(node: torch.fx.Node) -> str | None:
    """Why a factor of a float16 tensor must not be translated: it is outside float16's range.

    Eager multiplies by the number in float32. ONNX wants it in the dtype of the tensor. Float16 can
    represent numbers below its normal range, but with a relative error of up to one half.
    """
    is_half = all(value.dtype is torch.float16 for value in tensors_of(node))
    if not is_half or all(map(_fits_half, numbers_of(node))):
        return None
    return "float16 does not hold the factor"


def _fits_half(number: float) -> bool:
    is_special = not number or not math.isfinite(number)
    return is_special or _HALF.tiny <= abs(number) <= _HALF.max


def clamp(x: torch.Tensor, min: Any = None, max: Any = None) -> Any:
    """``aten.clamp``, written so that tensor and bounds are all floats or all integers."""
    floats = [each for each in (min, max) if isinstance(each, float)]
    if not x.dtype.is_floating_point:
        dtype = torch.result_type(x, 0.0)
        return aten.clamp.default(x.to(dtype), min, max) if floats else NotImplemented
    if any(map(math.isnan, floats)):
        return torch.full_like(x, math.nan)
    if len(floats) == 2:  # torchlib translates this correctly
        return NotImplemented
    return _between_floats(x, min, max)


def clamp_by_tensors(x: torch.Tensor, min: Any = None, max: Any = None) -> Any:
    """``aten.clamp.Tensor`` with one bound, as a minimum or maximum that keeps NaN.

    Torchlib translates a bound without dimensions to ``Clip``. ONNX Runtime then uses the largest
    finite number as the missing bound, which changes infinities.
    """
    if min is not None and max is not None:
        return NotImplemented
    bound, nearer = (max, torch.minimum) if min is None else (min, torch.maximum)
    dtype = torch.result_type(x, bound)
    return nearer(x.to(dtype), bound.to(dtype))


def _between_floats(x: torch.Tensor, min: Any, max: Any) -> Any:
    """Clamp with two float bounds; a missing bound becomes an infinity.

    The exporter fails if one bound is an integer and the other a float. ONNX Runtime takes the
    largest finite number for a missing bound, which changes infinities.
    """
    low = -math.inf if min is None else min
    high = math.inf if max is None else max
    if is_symbol(low) or is_symbol(high):
        return NotImplemented
    return aten.clamp.default(x, float(low), float(high))
