"""Decompositions of special functions that have no translation.

For float32 and half precision most are computed in float64, with textbook series (Abramowitz and
Stegun, chapter 6; Lanczos's coefficients are those of Godfrey, g = 7).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch

from composer.lowering.operators.entry import Operator, Operators, always
from composer.lowering.operators.layouts import with_strides_of_operands
from composer.lowering.operators.pointwise import in_double, on_promoted_floats, series

aten = torch.ops.aten


def entries() -> Operators:
    """The entries of this module."""
    written_out = {
        aten.erfinv.default: Operator(erfinv, or_whole=True),
        aten.lgamma.default: Operator(lgamma, or_whole=True),
        aten.digamma.default: Operator(digamma, or_whole=True),
        aten.polygamma.default: Operator(polygamma),
        aten.special_spherical_bessel_j0.default: Operator(spherical_bessel_j0, or_whole=True),
    }
    return with_strides_of_operands(written_out) | {
        aten.erfc: Operator(unsupported=(always("it loses its tail"),)),
        aten.special_erfcx: Operator(unsupported=(always("it underflows"),)),
    }


_LANCZOS = (
    *(0.99999999999980993, 676.5203681218851, -1259.1392167224028, 771.32342877765313),
    *(-176.61502916214059, 12.507343278686905, -0.13857109526572012, 9.9843695780195716e-6),
    1.5056327351493116e-7,
)

_DIGAMMA = (1 / 12, -1 / 120, 1 / 252, -1 / 240, 1 / 132, -691 / 32760, 1 / 12)
"""Coefficients of the asymptotic series in 1/x^2: Bernoulli numbers over their index."""

_ERFINV_NEAR = (
    *(1.50140941, 0.246640727, -0.00417768164, -0.00125372503, 0.00021858087, -4.39150654e-06),
    *(-3.5233877e-06, 3.43273939e-07, 2.81022636e-08),
)

_ERFINV_FAR = (
    *(2.83297682, 1.00167406, 0.00943887047, -0.0076224613, 0.00573950773, -0.00367342844),
    *(0.00134934322, 0.000100950558, -0.000200214257),
)
"""M. Giles, Approximating the erfinv function, single precision; lowest power first."""


@in_double
def erfinv(x: torch.Tensor) -> Any:
    """Giles's approximation, whose error is one or two units in the last place of float32."""
    w = -torch.log((1 - x) * (1 + x))
    near, far = series(_ERFINV_NEAR, w - 2.5), series(_ERFINV_FAR, torch.sqrt(w) - 3)
    slope = torch.where(w < 5, near, far)
    return x * torch.where(torch.abs(x) == 1, math.inf, slope)


@in_double
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


@in_double
def digamma(x: torch.Tensor) -> Any:
    """The derivative of ``lgamma``; infinite at zero, NaN at the other poles."""
    inner = _digamma(x)
    pole = (x < 0) & (x == torch.floor(x))
    return torch.where(x == 0, -1 / x, torch.where(pole, math.nan, inner))


def _digamma(x: torch.Tensor) -> torch.Tensor:
    reflected = x < 0.5
    y = torch.where(reflected, 1 - x, x)
    total = torch.zeros_like(y)
    for _ in range(10):  # until the asymptotic series is exact enough
        small = y < 10
        total = torch.where(small, total - 1 / y, total)
        y = torch.where(small, y + 1, y)
    total = total + torch.log(y) - 0.5 / y - series(_DIGAMMA, 1 / (y * y)) / (y * y)
    return torch.where(reflected, total - math.pi * _cotangent(x), total)


def polygamma(n: int, x: torch.Tensor) -> Any:
    """The ``n``-th derivative of ``digamma``, for the first few ``n``."""
    if n == 0:
        return torch.digamma(x)
    return _polygamma(n, x) if n <= 10 else NotImplemented


@in_double
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
    turned = series(_cotangent_derivative(n), _cotangent(x)) * math.pi ** (n + 1)
    value = torch.where(reflected, -sign * value - turned, value)
    pole = (x <= 0) & (x == torch.floor(x))
    value = torch.where(pole, sign * math.inf, value)
    return value if n == 1 else torch.where(x == math.inf, math.nan, value)  # as in eager


def _cotangent(x: torch.Tensor) -> torch.Tensor:
    """The cotangent of pi x, by sines, as ONNX Runtime has no tangent in float64.

    It has a cosine from 1.32 on (microsoft/onnxruntime#28975).
    """
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


@on_promoted_floats
def spherical_bessel_j0(x: torch.Tensor) -> Any:
    """``sin(x) / x``, and its series near zero."""
    square = x * x
    near = series([(-1) ** n / math.factorial(2 * n + 1) for n in range(7)], square)
    far = torch.where(torch.abs(x) == math.inf, 0, torch.sin(x) / x)
    return torch.where(torch.abs(x) < 0.5, near, far)
