"""Decompositions of elementwise functions whose translation is missing or wrong at the edges.

They give the same results as eager for zeros of both signs, infinities and NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from composer import _torch
from composer.lowering.operators.entry import Operator, Operators, always
from composer.lowering.operators.guards import is_float, is_on_cpu, only_for
from composer.lowering.operators.layouts import with_strides_of_operands
from composer.lowering.operators.pointwise import (
    in_double,
    in_dtype_of,
    is_negative,
    is_symbol,
    of_doubles,
    on_promoted_floats,
    sign,
)

aten = torch.ops.aten


def entries() -> Operators:
    """The entries of this module."""
    return with_strides_of_operands(_written_out()) | {
        aten.floor.default: Operator(whole),
        aten.ceil.default: Operator(whole),
        aten.round.default: Operator(whole),
        # The exporter's translation is one ONNX function, which hides its sigmoid.
        aten.glu.default: Operator(_torch.operators.decomposition_of(aten.glu.default)),
        aten.atan2: Operator(unsupported=(always("zeros lose their sign"),)),
        aten.logaddexp: Operator(unsupported=(always("it overflows"),)),
        aten.logaddexp2: Operator(unsupported=(always("it overflows"),)),
    }


def _written_out() -> Operators:
    fused = _torch.operators.multiply_add()
    return {
        aten.log1p.default: Operator(log1p),
        aten.expm1.default: Operator(expm1),
        aten.logaddexp.default: Operator(logaddexp),
        aten.logaddexp2.default: Operator(logaddexp2),
        aten.atan2.default: Operator(atan2),
        aten.copysign.Tensor: Operator(copysign, or_whole=True),
        aten.copysign.Scalar: Operator(copysign_of_number, or_whole=True),
        aten.fmax.default: Operator(on_promoted_floats(partial(extreme, torch.ge)), or_whole=True),
        aten.fmin.default: Operator(on_promoted_floats(partial(extreme, torch.le)), or_whole=True),
        aten.hypot.default: Operator(hypot, or_whole=True),
        aten.leaky_relu.default: Operator(of_doubles(leaky_relu)),
        aten.celu.default: Operator(of_doubles(celu)),
        aten.elu.default: Operator(elu),
        aten.deg2rad.default: Operator(of_doubles(lambda x: x * (math.pi / 180))),
        aten.rad2deg.default: Operator(of_doubles(lambda x: x * (180 / math.pi))),
        aten.sigmoid.default: Operator(of_doubles(lambda x: 1 / (1 + torch.exp(-x)))),
        aten.silu.default: Operator(of_doubles(lambda x: x / (1 + torch.exp(-x)))),
        aten.sign.default: Operator(signum),
        aten.signbit.default: Operator(only_for(is_float)(is_negative)),
        aten.trunc.default: Operator(trunc),
        aten.isinf.default: Operator(lambda x: is_infinite(x.abs(), math.inf)),
        aten.isposinf.default: Operator(lambda x: is_infinite(x, math.inf)),
        aten.isneginf.default: Operator(lambda x: is_infinite(x, -math.inf)),
        aten.heaviside.default: Operator(heaviside),
        aten.rsub.Scalar: Operator(less_than_number),
        aten.mul.Scalar: Operator(times_size),
        aten.xlogy.Tensor: Operator(xlogy),
        aten.xlogy.Scalar_Self: Operator(lambda x, y: xlogy(in_dtype_of(x, y), y)),
        aten.xlogy.Scalar_Other: Operator(lambda x, y: xlogy(x, in_dtype_of(y, x))),
        aten.log2.default: Operator(only_for(is_on_cpu)(partial(logarithm, 2))),
        aten.log10.default: Operator(only_for(is_on_cpu)(partial(logarithm, 10))),
        aten.logit.default: Operator(logit),
        aten.angle.default: Operator(angle),
        aten.pow.Tensor_Scalar: Operator(power),
        **({fused: Operator(multiply_add)} if fused else {}),
    }


@only_for(is_float)
def is_infinite(x: torch.Tensor, infinity: float) -> Any:
    """True where ``x`` equals the infinity.

    Torchlib first casts float64 to float32, in which large numbers become infinite.
    """
    return x == infinity


def leaky_relu(x: torch.Tensor, negative_slope: float = 0.01) -> torch.Tensor:
    """``aten.leaky_relu`` as a product with one or the slope, so that a zero keeps its sign."""
    return x * torch.where(x > 0, x.new_ones(()), negative_slope)


def celu(x: torch.Tensor, alpha: float = 1.0) -> Any:
    """``aten.celu``, written out because its translation also scales positive numbers."""
    return torch.where(x > 0, x, alpha * torch.expm1(x / alpha))


def elu(x: torch.Tensor, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Any:
    """``aten.elu`` with an input scale, by which its translation also scales positive numbers."""
    if input_scale == 1:
        return NotImplemented
    return torch.where(x > 0, x * scale, torch.expm1(x * input_scale) * (alpha * scale))


def signum(x: torch.Tensor) -> Any:
    """``aten.sign``: one, minus one or zero; zero for NaN."""
    if not x.dtype.is_signed:
        return NotImplemented
    return (x > 0).to(x.dtype) - (x < 0).to(x.dtype)


def trunc(x: torch.Tensor) -> Any:
    """``aten.trunc``; a result of zero keeps the sign of the number."""
    return _trunc(x) if x.dtype.is_floating_point else x.clone()


@on_promoted_floats
def _trunc(x: torch.Tensor) -> Any:
    return torch.floor(torch.abs(x)) * sign(x)


def whole(x: torch.Tensor) -> Any:
    """A copy of a tensor of integers, which rounding does not change."""
    return NotImplemented if x.dtype.is_floating_point else x.clone()


def times_size(x: torch.Tensor, number: Any) -> Any:
    """``aten.mul.Scalar`` with a symbol, as ``aten.mul.Tensor``.

    The translation of the overload for scalars needs the value of the number.
    """
    return aten.mul.Tensor(x, number) if is_symbol(number) else NotImplemented


def less_than_number(x: torch.Tensor, number: Any, alpha: Any = 1) -> Any:
    """``aten.rsub.Scalar`` of an integer tensor and a float, with the tensor cast first.

    The exporter does not promote an operand that follows a number.
    """
    dtype = torch.result_type(x, number)
    return NotImplemented if x.dtype is dtype else aten.rsub.Scalar(x.to(dtype), number, alpha)


def multiply_add(a: torch.Tensor, b: Any, c: torch.Tensor) -> Any:
    """A product and a sum, with the product rounded, as in eager."""
    return a * b + c


@on_promoted_floats
def heaviside(x: torch.Tensor, at_zero: torch.Tensor) -> Any:
    """``aten.heaviside``: zero, ``at_zero`` or one; zero for NaN."""
    return _select(x == 0, at_zero, (x > 0).to(x.dtype))


@on_promoted_floats
def xlogy(x: torch.Tensor, y: torch.Tensor) -> Any:
    """``x * log(y)``; zero where ``x`` is zero and ``y`` is not NaN."""
    return torch.where((x == 0) & (y == y), 0.0, x * torch.log(y))


@only_for(is_float)
def power(x: torch.Tensor, exponent: Any) -> Any:
    """``aten.pow`` with the exponents 0.5 and -0.5 as roots, as in eager, or with a symbol.

    The root of minus infinity is NaN, where the power is not. In float16 on the CPU eager computes
    a power, so that is declined.
    """
    if x.dtype is torch.float16 and is_on_cpu(x):
        return NotImplemented
    if isinstance(exponent, torch.SymInt):  # the exporter supports only known numbers
        return torch.pow(x, in_dtype_of(exponent, x))
    if abs(exponent) != 0.5:
        return NotImplemented
    return torch.sqrt(x) if exponent > 0 else torch.rsqrt(x)


@in_double
def logarithm(base: int, x: torch.Tensor) -> Any:
    """A logarithm that is exact for powers of the base, as it is computed in float64.

    It is not used on other devices than the CPU: engines for GPUs have no float64.
    """
    return torch.log(x) * (1 / math.log(base))


@only_for(is_float)
def logit(x: torch.Tensor, eps: float | None = None) -> Any:
    """``aten.logit`` with ``eps``; NaN stays NaN."""
    if eps is None:
        return NotImplemented
    inner = torch.clamp(x, eps, 1 - eps)
    return torch.log(inner / (1 - inner))


@on_promoted_floats
def angle(x: torch.Tensor) -> Any:
    """``aten.angle`` of real numbers: zero, or pi if negative; NaN for NaN."""
    half_turn = torch.full((), math.pi, dtype=x.dtype, device=x.device)
    return torch.where(x != x, x, torch.where(x < 0, half_turn, 0.0))


@on_promoted_floats
def log1p(x: torch.Tensor) -> Any:
    """``log(1 + x)`` by Kahan's method.

    Torchlib's ``log(x + 1)`` loses the digits of a small ``x``.
    """
    y = x + 1
    exact = (y == 1) | (y == math.inf)
    return x * torch.where(exact, 1, torch.log(y) / (y - 1))


@on_promoted_floats
def expm1(x: torch.Tensor) -> Any:
    """``exp(x) - 1`` by Kahan's method.

    Torchlib's ``exp(x) - 1`` loses the digits of a small ``x``.
    """
    y = torch.exp(x)
    x = torch.clamp(x, -800, 800)  # so that infinities do not give NaN in the division
    slope = (y - 1) / torch.where(torch.abs(x) < 1, torch.log(y), x)
    return x * torch.where(y == 1, 1, slope)


@on_promoted_floats
def logaddexp(a: torch.Tensor, b: torch.Tensor) -> Any:
    """``log(exp(a) + exp(b))`` from the larger of the two, so that nothing overflows."""
    return torch.maximum(a, b) + torch.log1p(torch.exp(-_distance(a, b)))


@on_promoted_floats
def logaddexp2(a: torch.Tensor, b: torch.Tensor) -> Any:
    """``log2(2**a + 2**b)`` from the larger of the two, so that nothing overflows."""
    return torch.maximum(a, b) + torch.log1p(torch.exp2(-_distance(a, b))) * (1 / math.log(2))


def _distance(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The absolute difference; zero, not NaN, for two equal infinities."""
    return torch.where(a == b, 0, torch.abs(a - b))


@on_promoted_floats
def atan2(y: torch.Tensor, x: torch.Tensor) -> Any:
    """The angle of the vector (x, y), computed from an angle in the first octant."""
    wide, high = torch.abs(x), torch.abs(y)
    steep = high > wide
    ratio = torch.where(steep, wide / high, high / wide)
    ratio = torch.where(wide == high, torch.where(wide == 0, 0, 1), ratio)
    angle = torch.atan(ratio)
    angle = torch.where(steep, math.pi / 2 - angle, angle)
    angle = torch.where(is_negative(x), math.pi - angle, angle)
    return angle * sign(y)


@on_promoted_floats
def copysign(a: torch.Tensor, b: torch.Tensor) -> Any:
    """The magnitude of ``a`` with the sign of ``b``."""
    return torch.abs(a) * sign(b)


@only_for(is_float)
def copysign_of_number(a: torch.Tensor, b: float) -> Any:
    """The magnitude of ``a`` with the sign of ``b``."""
    return torch.abs(a) * math.copysign(1.0, b)


def extreme(is_better: Callable[..., torch.Tensor], a: torch.Tensor, b: torch.Tensor) -> Any:
    """The larger or smaller one, by ``torch.ge`` or ``torch.le``; if one is NaN, the other."""
    return _select(is_better(a, b) | torch.isnan(b), a, b)


def _select(first: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``where`` that keeps the sign of a zero."""
    return torch.abs(torch.where(first, a, b)) * torch.where(first, sign(a), sign(b))


@on_promoted_floats
def hypot(a: torch.Tensor, b: torch.Tensor) -> Any:
    """The length of the vector (a, b); infinite if one is infinite, even if the other is NaN."""
    a, b = torch.abs(a), torch.abs(b)
    longer, shorter = torch.where(a > b, a, b), torch.where(a > b, b, a)
    ratio = shorter / longer
    length = torch.where(longer == 0, shorter, longer * torch.sqrt(1 + ratio * ratio))
    return torch.where((a == math.inf) | (b == math.inf), math.inf, length)
