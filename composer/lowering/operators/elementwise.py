"""Elementwise functions written out: what has no translation, or one that is wrong at the edges.

Written for what eager gives at zeros of both signs, infinities and NaN. Special functions are
computed in float64 for the shorter dtypes, with textbook series (Abramowitz and Stegun, chapter 6;
Lanczos's coefficients are those of Godfrey, g = 7).
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch

from composer import _torch

aten = torch.ops.aten

_LANCZOS = (
    *(0.99999999999980993, 676.5203681218851, -1259.1392167224028, 771.32342877765313),
    *(-176.61502916214059, 12.507343278686905, -0.13857109526572012, 9.9843695780195716e-6),
    1.5056327351493116e-7,
)
_DIGAMMA = (1 / 12, -1 / 120, 1 / 252, -1 / 240, 1 / 132, -691 / 32760, 1 / 12)
"""Bernoulli numbers over twice their index: the asymptotic series in 1/x^2."""

_ERFINV_NEAR = (
    *(1.50140941, 0.246640727, -0.00417768164, -0.00125372503, 0.00021858087, -4.39150654e-06),
    *(-3.5233877e-06, 3.43273939e-07, 2.81022636e-08),
)
_ERFINV_FAR = (
    *(2.83297682, 1.00167406, 0.00943887047, -0.0076224613, 0.00573950773, -0.00367342844),
    *(0.00134934322, 0.000100950558, -0.000200214257),
)
"""M. Giles, Approximating the erfinv function, single precision; lowest power first."""


_COMPARISONS = (
    *(aten.eq.Scalar, aten.ne.Scalar, aten.lt.Scalar),
    *(aten.le.Scalar, aten.gt.Scalar, aten.ge.Scalar),
)


def elementwise() -> dict[Any, Callable[..., Any]]:
    """The table of this module's decompositions."""
    return {
        aten.log1p.default: log1p,
        aten.expm1.default: expm1,
        aten.logaddexp.default: logaddexp,
        aten.logaddexp2.default: logaddexp2,
        aten.atan2.default: atan2,
        aten.copysign.Tensor: copysign,
        aten.copysign.Scalar: copysign_of_number,
        aten.fmax.default: fmax,
        aten.fmin.default: fmin,
        aten.hypot.default: hypot,
        aten.erfinv.default: erfinv,
        aten.lgamma.default: lgamma,
        aten.digamma.default: digamma,
        aten.polygamma.default: polygamma,
        aten.special_spherical_bessel_j0.default: spherical_bessel_j0,
        aten.leaky_relu.default: _of_doubles(leaky_relu),
        aten.celu.default: _of_doubles(celu),
        aten.deg2rad.default: _of_doubles(lambda x: x * (math.pi / 180)),
        aten.rad2deg.default: _of_doubles(lambda x: x * (180 / math.pi)),
        **({fused: multiply_add} if (fused := _torch.operators.multiply_add()) else {}),
    }


def edges() -> dict[Any, Callable[..., Any]]:
    """What differs at the edges only; ``NotImplemented`` leaves a call to the table behind."""
    return {
        aten.sign.default: signum,
        aten.sgn.default: signum,
        aten.signbit.default: signbit,
        aten.trunc.default: trunc,
        aten.isinf.default: lambda x: is_infinite(x.abs(), math.inf),
        aten.isposinf.default: lambda x: is_infinite(x, math.inf),
        aten.isneginf.default: lambda x: is_infinite(x, -math.inf),
        aten.remainder.Tensor: remainder,
        aten.remainder.Scalar: remainder,
        aten.remainder.Scalar_Tensor: remainder,
        aten.fmod.Scalar: fmod,
        aten.floor_divide.default: floor_divide,
        aten.div.Tensor_mode: divide,
        aten.div.Scalar_mode: divide,
        aten.heaviside.default: heaviside,
        aten.rsub.Scalar: less_than_number,
        aten.mul.Scalar: times_size,
        aten.xlogy.Tensor: xlogy,
        aten.xlogy.Scalar_Self: lambda x, y: xlogy(_held(x, y), y),
        aten.xlogy.Scalar_Other: lambda x, y: xlogy(x, _held(y, x)),
        aten.sigmoid.default: _of_doubles(lambda x: 1 / (1 + torch.exp(-x))),
        aten.silu.default: _of_doubles(lambda x: x / (1 + torch.exp(-x))),
        aten.log2.default: functools.partial(logarithm, 2),
        aten.log10.default: functools.partial(logarithm, 10),
        aten.logit.default: logit,
        aten.angle.default: angle,
        aten.pow.Tensor_Scalar: power,
    } | {each: functools.partial(compare, each) for each in _COMPARISONS}


def _of_floats(function: Callable[..., Any]) -> Callable[..., Any]:
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


def _in_double(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compute in float64 and round once; decline float64, for which the series are too short."""

    @functools.wraps(function)
    def widened(*values: Any) -> Any:
        x = values[-1]
        if not x.dtype.is_floating_point or x.dtype is torch.float64:
            return NotImplemented
        return function(*values[:-1], x.double()).to(x.dtype)

    return widened


def is_negative(x: torch.Tensor) -> torch.Tensor:
    """Whether the sign is a minus, that of a zero too; ``False`` for every NaN."""
    return (x < 0) | ((x == 0) & (1 / x < 0))


def is_infinite(x: torch.Tensor, infinity: float) -> Any:
    """By comparing: torchlib casts float64 to float32 first, where large numbers are infinite."""
    return x == infinity if x.dtype.is_floating_point else NotImplemented


def _of_doubles(function: Callable[..., Any]) -> Callable[..., Any]:
    """Leave the other dtypes to a translation that holds its numbers in float32."""

    @functools.wraps(function)
    def narrowed(x: torch.Tensor, *numbers: float) -> Any:
        return function(x, *numbers) if x.dtype is torch.float64 else NotImplemented

    return narrowed


def leaky_relu(x: torch.Tensor, negative_slope: float = 0.01) -> torch.Tensor:
    """A factor for each side: a zero keeps its sign."""
    return x * torch.where(x > 0, x.new_ones(()), negative_slope)


def celu(x: torch.Tensor, alpha: float = 1.0) -> Any:
    """As eager does it; the translation of ``elu`` scales what is positive as well."""
    return torch.where(x > 0, x, alpha * torch.expm1(x / alpha))


def sign(x: torch.Tensor) -> torch.Tensor:
    """A factor of plus or minus one. ONNX Runtime's Where (1.31) drops the sign of a zero."""
    return torch.where(is_negative(x), -1.0, 1.0).to(x.dtype)


def signum(x: torch.Tensor) -> Any:
    """Plus or minus one, or zero; of NaN zero, too."""
    if x.dtype is torch.bool or not x.dtype.is_signed:
        return NotImplemented
    return (x > 0).to(x.dtype) - (x < 0).to(x.dtype)


def signbit(x: torch.Tensor) -> Any:
    """Of a zero, too."""
    return is_negative(x) if x.dtype.is_floating_point else NotImplemented


@_of_floats
def trunc(x: torch.Tensor) -> Any:
    """The sign stays that of the number when it becomes zero."""
    return torch.floor(torch.abs(x)) * sign(x)


def remainder(a: Any, b: Any) -> Any:
    """Of a number what the dtype holds of it, as in eager."""
    is_half = isinstance(a, torch.Tensor) and a.dtype.itemsize <= 2
    return _remainder(_held(a, b), _held(b, a) if is_half or _is_symbol(b) else b)


def _held(number: Any, other: Any) -> Any:
    """A number as a tensor, where the other is one of floats."""
    is_float = isinstance(other, torch.Tensor) and other.dtype.is_floating_point
    if not is_float or isinstance(number, torch.Tensor):
        return number
    return torch.full((), number, dtype=other.dtype, device=other.device)


def _are_integers(a: Any, b: Any) -> bool:
    """Whether a tensor of integers is divided by a number that its dtype holds, and not by zero."""
    is_tensor = isinstance(a, torch.Tensor) and a.dtype is not torch.bool
    if not is_tensor or a.dtype.is_floating_point or type(b) is not int:
        return False
    held = torch.iinfo(a.dtype)
    return b != 0 and held.min <= b <= held.max


def _is_symbol(number: Any) -> bool:
    """Whether a number is not known."""
    return isinstance(number, torch.SymInt | torch.SymFloat)


@_of_floats
def _remainder(a: torch.Tensor, b: Any) -> Any:
    """From the exact remainder of C: torchlib's ``a - floor(a / b) * b`` rounds three times."""
    rest = torch.fmod(a, b)
    rest = torch.where(_other_side(rest, b), rest + b, rest)
    return torch.abs(rest) * torch.where(rest == 0, sign(a), sign(rest))


def floor_divide(a: Any, b: Any) -> Any:
    """Either may be a number."""
    return _floor_divide(_held(a, b), _held(b, a) if _is_symbol(b) else b)


@_of_floats
def _floor_divide(a: torch.Tensor, b: Any) -> Any:
    """As CPython and eager do it: from the remainder, not by rounding the quotient down."""
    rest = torch.fmod(a, b)
    quotient = (a - rest) / b
    quotient = torch.where(_other_side(rest, b), quotient - 1, quotient)
    whole = torch.floor(quotient)
    whole = torch.where(quotient - whole > 0.5, whole + 1, whole)
    plain = a / b
    by_zero = (
        b == 0 if isinstance(b, torch.Tensor) else torch.full_like(a, b == 0, dtype=torch.bool)
    )
    whole = torch.where(by_zero, plain, torch.where(quotient == 0, 0.0, whole))
    return torch.abs(whole) * torch.where(whole == 0, sign(plain), sign(whole))


def _other_side(rest: torch.Tensor, b: Any) -> torch.Tensor:
    """Whether there is a rest, and its sign is not the divisor's."""
    if not isinstance(b, torch.Tensor):
        return rest > 0 if b < 0 else rest < 0
    return ((rest > 0) & (b < 0)) | ((rest < 0) & (b >= 0))


def divide(a: Any, b: Any, *, rounding_mode: str | None = None) -> Any:
    """Rounded down, or towards zero."""
    if rounding_mode == "floor":
        return torch.floor_divide(a, b) if _are_integers(a, b) else floor_divide(a, b)
    if rounding_mode == "trunc" and _are_integers(a, b):
        return _towards_zero(a, b)
    tensors = [each for each in (a, b) if isinstance(each, torch.Tensor)]
    floats = tensors and all(each.dtype.is_floating_point for each in tensors)
    if rounding_mode != "trunc" or not floats:
        return NotImplemented
    if not isinstance(b, torch.Tensor) or _is_one(b):
        return _truncated(a, b)
    # Of halves eager rounds the quotient first, which ONNX Runtime (1.31) leaves out in float16.
    return NotImplemented if torch.result_type(a, b) is torch.float16 else torch.trunc(a / b)


def fmod(a: torch.Tensor, b: Any) -> Any:
    """Of integers from the quotient: ONNX Runtime (1.31) takes this rest of theirs in float64."""
    return a - _towards_zero(a, b) * b if _are_integers(a, b) else NotImplemented


def _towards_zero(a: torch.Tensor, b: int) -> torch.Tensor:
    """The quotient of integers without its fraction, from the one that is rounded down."""
    negative = a < 0 if b > 0 else a > 0
    return torch.floor_divide(a, b) + (negative & (torch.remainder(a, b) != 0)).to(a.dtype)


def _is_one(x: torch.Tensor) -> bool:
    return all(isinstance(size, int) and size == 1 for size in x.shape)


@_of_floats
def _truncated(a: torch.Tensor, b: Any) -> Any:
    """The quotient without its fraction; of halves by one number it is rounded only then."""
    return torch.trunc(a / b)


def times_size(x: torch.Tensor, number: Any) -> Any:
    """A number that is not known: the translation of this overload reads its value."""
    return aten.mul.Tensor(x, number) if _is_symbol(number) else NotImplemented


def less_than_number(x: torch.Tensor, number: Any, alpha: Any = 1) -> Any:
    """An integer taken from a float: the exporter promotes no operand behind a number."""
    dtype = torch.result_type(x, number)
    return NotImplemented if x.dtype is dtype else aten.rsub.Scalar(x.to(dtype), number, alpha)


def multiply_add(a: torch.Tensor, b: Any, c: torch.Tensor) -> Any:
    """Rounded in between, as by eager."""
    return a * b + c


@_of_floats
def heaviside(x: torch.Tensor, at_zero: torch.Tensor) -> Any:
    """A step; NaN lies before it."""
    return _select(x == 0, at_zero, (x > 0).to(x.dtype))


@_of_floats
def xlogy(x: torch.Tensor, y: torch.Tensor) -> Any:
    """``x * log(y)``; zero where ``x`` is, unless ``y`` is NaN."""
    return torch.where((x == 0) & (y == y), 0.0, x * torch.log(y))


def compare(operator: Any, x: torch.Tensor, number: Any) -> Any:
    """With the number as float16 holds it; ONNX Runtime (1.31) compares in float32."""
    if x.dtype is not torch.float16 or not isinstance(number, int | float):
        return NotImplemented
    try:
        (held,) = struct.unpack("e", struct.pack("e", float(number)))
    except OverflowError:
        held = math.copysign(math.inf, number)
    return NotImplemented if held == number or number != number else operator(x, held)


def power(x: torch.Tensor, exponent: Any) -> Any:
    """Roots, of which eager makes roots as well: that of minus infinity is NaN.

    In float16 it makes powers of them on the CPU.
    """
    has_powers = x.dtype is torch.float16 and x.device.type == "cpu"
    if has_powers or not x.dtype.is_floating_point:
        return NotImplemented
    if isinstance(exponent, torch.SymInt):  # the exporter takes numbers that are known
        return torch.pow(x, _held(exponent, x))
    if abs(exponent) != 0.5:
        return NotImplemented
    return torch.sqrt(x) if exponent > 0 else torch.rsqrt(x)


def logarithm(base: int, x: torch.Tensor) -> Any:
    """Exact for powers of the base, on the CPU: engines for GPUs have no float64."""
    return _logarithm(base, x) if x.device.type == "cpu" else NotImplemented


@_in_double
def _logarithm(base: int, x: torch.Tensor) -> Any:
    return torch.log(x) * (1 / math.log(base))


def logit(x: torch.Tensor, eps: float | None = None) -> Any:
    """NaN stays NaN between bounds, too."""
    if eps is None or not x.dtype.is_floating_point:
        return NotImplemented
    inner = torch.clamp(x, eps, 1 - eps)
    return torch.log(inner / (1 - inner))


@_of_floats
def angle(x: torch.Tensor) -> Any:
    """Of a real number: zero, or half a turn; NaN of NaN."""
    half_turn = torch.full((), math.pi, dtype=x.dtype, device=x.device)
    return torch.where(x != x, x, torch.where(x < 0, half_turn, 0.0))


@_of_floats
def log1p(x: torch.Tensor) -> Any:
    """Kahan's: torchlib's ``log(x + 1)`` loses every ``x`` that is small."""
    y = x + 1
    exact = (y == 1) | (y == math.inf)
    return x * torch.where(exact, 1, torch.log(y) / (y - 1))


@_of_floats
def expm1(x: torch.Tensor) -> Any:
    """Kahan's: torchlib's ``exp(x) - 1`` loses every ``x`` that is small."""
    y = torch.exp(x)
    x = torch.clamp(x, -800, 800)  # so that the infinities, too, can be divided by
    slope = (y - 1) / torch.where(torch.abs(x) < 1, torch.log(y), x)
    return x * torch.where(y == 1, 1, slope)


@_of_floats
def logaddexp(a: torch.Tensor, b: torch.Tensor) -> Any:
    """``log(exp(a) + exp(b))`` from the larger of the two, so that nothing overflows."""
    return torch.maximum(a, b) + torch.log1p(torch.exp(-_distance(a, b)))


@_of_floats
def logaddexp2(a: torch.Tensor, b: torch.Tensor) -> Any:
    """``log2(2**a + 2**b)`` from the larger of the two, so that nothing overflows."""
    return torch.maximum(a, b) + torch.log1p(torch.exp2(-_distance(a, b))) * (1 / math.log(2))


def _distance(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Zero, not NaN, between equal infinities."""
    return torch.where(a == b, 0, torch.abs(a - b))


@_of_floats
def atan2(y: torch.Tensor, x: torch.Tensor) -> Any:
    """The angle of (x, y), from that in the first octant."""
    wide, high = torch.abs(x), torch.abs(y)
    steep = high > wide
    ratio = torch.where(steep, wide / high, high / wide)
    ratio = torch.where(wide == high, torch.where(wide == 0, 0, 1), ratio)
    angle = torch.atan(ratio)
    angle = torch.where(steep, math.pi / 2 - angle, angle)
    angle = torch.where(is_negative(x), math.pi - angle, angle)
    return angle * sign(y)


@_of_floats
def copysign(a: torch.Tensor, b: torch.Tensor) -> Any:
    """The magnitude of ``a`` with the sign of ``b``."""
    return torch.abs(a) * sign(b)


def copysign_of_number(a: torch.Tensor, b: float) -> Any:
    """The magnitude of ``a`` with the sign of ``b``."""
    return torch.abs(a) * math.copysign(1.0, b) if a.dtype.is_floating_point else NotImplemented


@_of_floats
def fmax(a: torch.Tensor, b: torch.Tensor) -> Any:
    """The larger; of a number and NaN, the number."""
    return _select((a >= b) | torch.isnan(b), a, b)


@_of_floats
def fmin(a: torch.Tensor, b: torch.Tensor) -> Any:
    """The smaller; of a number and NaN, the number."""
    return _select((a <= b) | torch.isnan(b), a, b)


def _select(first: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``where`` that keeps the sign of a zero."""
    return torch.abs(torch.where(first, a, b)) * torch.where(first, sign(a), sign(b))


@_of_floats
def hypot(a: torch.Tensor, b: torch.Tensor) -> Any:
    """The length of (a, b), infinite if one of them is, even beside NaN."""
    a, b = torch.abs(a), torch.abs(b)
    longer, shorter = torch.where(a > b, a, b), torch.where(a > b, b, a)
    ratio = shorter / longer
    length = torch.where(longer == 0, shorter, longer * torch.sqrt(1 + ratio * ratio))
    return torch.where((a == math.inf) | (b == math.inf), math.inf, length)


@_in_double
def erfinv(x: torch.Tensor) -> Any:
    """Giles's approximation, exact to the last bit or two of float32."""
    w = -torch.log((1 - x) * (1 + x))
    near, far = _series(_ERFINV_NEAR, w - 2.5), _series(_ERFINV_FAR, torch.sqrt(w) - 3)
    slope = torch.where(w < 5, near, far)
    return x * torch.where(torch.abs(x) == 1, math.inf, slope)


@_in_double
def lgamma(x: torch.Tensor) -> Any:
    """``log|gamma(x)|``: Lanczos's series, and the reflection formula below one half."""
    reflected = x < 0.5
    z = torch.where(reflected, 1 - x, x) - 1
    t = z + 7.5
    series = torch.zeros_like(z) + _LANCZOS[0]
    for k, c in enumerate(_LANCZOS[1:], 1):
        series = series + c / (z + k)
    right = (z + 0.5) * torch.log(t) - t + torch.log(series) + 0.5 * math.log(2 * math.pi)
    sine = torch.sin(math.pi * (x - torch.round(x)))
    left = math.log(math.pi) - torch.log(torch.abs(sine)) - right
    value = torch.where(reflected, left, right)
    value = torch.where((x == 1) | (x == 2), 0, value)
    return torch.where(torch.abs(x) == math.inf, math.inf, value)


@_in_double
def digamma(x: torch.Tensor) -> Any:
    """The derivative of ``lgamma``; infinite at zero, NaN at the other poles."""
    inner = _digamma(x)
    pole = (x < 0) & (x == torch.floor(x))
    return torch.where(x == 0, -1 / x, torch.where(pole, math.nan, inner))


def _digamma(x: torch.Tensor) -> torch.Tensor:
    reflected = x < 0.5
    y = torch.where(reflected, 1 - x, x)
    total = torch.zeros_like(y)
    for _ in range(10):  # up to where the asymptotic series is exact enough
        small = y < 10
        total = torch.where(small, total - 1 / y, total)
        y = torch.where(small, y + 1, y)
    total = total + torch.log(y) - 0.5 / y - _series(_DIGAMMA, 1 / (y * y)) / (y * y)
    return torch.where(reflected, total - math.pi * _cotangent(x), total)


def polygamma(n: int, x: torch.Tensor) -> Any:
    """The ``n``-th derivative of ``digamma``, for the first few ``n``."""
    if n == 0:
        return torch.digamma(x)
    return _polygamma(n, x) if n <= 10 else NotImplemented


@_in_double
def _polygamma(n: int, x: torch.Tensor) -> Any:
    reflected = x < 0.5
    y = torch.where(reflected, 1 - x, x)
    total = torch.zeros_like(y)
    for _ in range(20):
        small = y < 20
        total = torch.where(small, total + _power(y, -n - 1), total)
        y = torch.where(small, y + 1, y)
    total = total + _power(y, -n) / n + _power(y, -n - 1) / 2
    factor = math.factorial(n)
    for k, c in enumerate(_DIGAMMA, 1):
        rising = math.factorial(2 * k + n - 1) / math.factorial(2 * k - 1) / factor
        total = total + _power(y, -n - 2 * k) * (c * rising)
    sign = 1 if n % 2 else -1
    value = total * (sign * factor)
    turned = _series(_cotangent_derivative(n), _cotangent(x)) * math.pi ** (n + 1)
    value = torch.where(reflected, -sign * value - turned, value)
    pole = (x <= 0) & (x == torch.floor(x))
    value = torch.where(pole, sign * math.inf, value)
    return value if n == 1 else torch.where(x == math.inf, math.nan, value)  # as eager has it


def _cotangent(x: torch.Tensor) -> torch.Tensor:
    """The cotangent of pi x; ONNX Runtime (1.31) has the sine alone in float64."""
    fraction = x - torch.round(x)
    return torch.sin(math.pi * (0.5 - fraction)) / torch.sin(math.pi * fraction)


def _cotangent_derivative(n: int) -> Sequence[float]:
    """The ``n``-th derivative of the cotangent as a polynomial of it, lowest power first."""
    polynomial = [0.0, 1.0]
    for _ in range(n):
        slope = [k * c for k, c in enumerate(polynomial)][1:]
        polynomial = [-a - b for a, b in zip([*slope, 0.0, 0.0], [0.0, 0.0, *slope], strict=True)]
    return polynomial


def _power(x: torch.Tensor, exponent: int) -> torch.Tensor:
    power = functools.reduce(torch.mul, [x] * abs(exponent))
    return power if exponent > 0 else 1 / power


def _series(coefficients: Sequence[float], x: torch.Tensor) -> torch.Tensor:
    """The polynomial with these coefficients, lowest power first, by Horner's rule."""
    total = x * coefficients[-1] + coefficients[-2]
    for coefficient in reversed(coefficients[:-2]):
        total = total * x + coefficient
    return total


@_of_floats
def spherical_bessel_j0(x: torch.Tensor) -> Any:
    """``sin(x) / x``, and its series near zero."""
    square = x * x
    near = _series([(-1) ** n / math.factorial(2 * n + 1) for n in range(7)], square)
    far = torch.where(torch.abs(x) == math.inf, 0, torch.sin(x) / x)
    return torch.where(torch.abs(x) < 0.5, near, far)
