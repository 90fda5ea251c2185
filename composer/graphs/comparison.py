"""Comparison of the results of two runs of a graph, within bounds.

It needs torch alone. A folder of :mod:`composer.graphs.case` has a copy of this file.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

Values = dict[str, Any]
"""Values by name, such as ``"output 0"``."""


_GRADIENT = "gradient of "


def gradients(
    outputs: Values,
    sources: Values,
    within: Callable[[Iterable[torch.Tensor]], AbstractContextManager[Any]] = (
        contextlib.nullcontext
    ),
) -> Values:
    """Gradients of the outputs with respect to the leaves in ``sources`` that require one.

    Args:
        outputs: The values to begin from.
        sources: The values that may require a gradient.
        within: A context manager around the backward, which gets the leaves.
    """
    roots = list(filter(requires_grad, outputs.values()))
    leaves = {name: each for name, each in sources.items() if requires_grad(each) and each.is_leaf}
    if not roots or not leaves:
        return {}
    weights = list(map(pattern, roots))
    with within(leaves.values()):
        found = torch.autograd.grad(roots, list(leaves.values()), weights, allow_unused=True)
    return dict(zip(map(name_of_gradient, leaves), found, strict=True))


def name_of_gradient(source: str) -> str:
    """The name that :func:`gradients` gives to the gradient of a source."""
    return f"{_GRADIENT}{source}"


def pattern(root: torch.Tensor) -> torch.Tensor:
    """A gradient for an output, in which neighbours differ, so that errors do not cancel."""
    numbers = torch.arange(root.numel(), device=root.device).remainder(7) + 1
    return numbers.view(root.shape).to(root)


def requires_grad(value: Any) -> bool:
    """True for a tensor that requires a gradient."""
    return isinstance(value, torch.Tensor) and value.requires_grad


def is_inexact(tensor: torch.Tensor) -> bool:
    """True for floating-point and complex numbers, which rounding changes and gradients have."""
    return tensor.is_floating_point() or tensor.is_complex()


def detached_copy(value: Any) -> Any:
    """A detached copy, which later writes to the tensor do not change; other values as they are."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def devices(values: Iterable[Any]) -> list[torch.device]:
    """The CUDA devices of the tensors in ``values``, sorted by name."""
    known = {each.device for each in values if isinstance(each, torch.Tensor)}
    return sorted((each for each in known if each.type == "cuda"), key=str)


class Mismatch(Enum):
    """The kinds of differences from the expected value, the most serious first."""

    STRUCTURE = "structure"
    NON_FINITE = "non-finite"
    NUMBERS = "numbers"


TOLERANCES = {
    torch.float64: (1e-7, 1e-15),
    torch.float32: (1e-3, 1e-7),
    torch.float16: (4e-3, 1e-5),
    torch.bfloat16: (2e-2, 1e-5),
}
"""The default ``rtol`` and ``atol`` of :class:`Bounds` for each dtype.

On ten public models (bench/models.py) the errors of correct engines are below 3e-5 in float32. An
engine that silently computes in TF32 has an error of 1e-3, one in bfloat16 of 1e-2.
"""

_TOLERANCE_OF_OTHERS = 1e-1, 1e-5

_FILL, _FAR = 1e8, 1e6
"""A number may be the fill value of a mask if it is at least the first, and more than the second
times the median of the numbers below the first."""

_TIMES_EAGERS = 3.0
"""The extra error that an engine may have, as a multiple of eager's own error against float64.
Torch's benchmarks use 2 or 3."""

_CANCELS = 0.1
"""If eager's own error is at least this share of a gradient, the gradient is only rounding errors.
The exact gradient is zero for a bias before a batch norm, or a bias of the keys in attention."""

_BLOCK = 1 << 17
"""Elements of a value that are compared at once on a CPU, so that they fit into its cache. On other
devices they are 1,000 times as many."""

_ROUNDINGS = 64
"""The most rounding errors of the largest gradient that may be left in one that cancels."""


def _split(size: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A boolean tensor that is true at fill values of masks, and the other absolute values.

    ``size`` holds the absolute values of numbers that were computed in ``dtype``.
    """
    large = size >= _FILL
    filled = size == torch.finfo(dtype).max if dtype.is_floating_point else torch.zeros_like(large)
    if large.any():
        median = size[~large & (size > 0)].median()  # NaN if there are no such numbers
        filled |= large & (size > _FAR * median)
    return filled, size[~filled] if filled.any() else size


@dataclass(frozen=True, slots=True)
class Bounds:
    """The allowed error of each element: ``atol + rtol * max(|expected|, rms(expected))``.

    Elements below the root mean square (rms) are allowed the same error as the rms itself, because
    they come from sums of larger numbers and carry their rounding errors. Fill values of masks,
    such as -1e9 or the lowest number of the dtype, are left out of the rms. Integers and booleans
    have to be equal. The defaults of ``rtol`` and ``atol`` are those of :data:`TOLERANCES`.
    """

    rtol: float | None = None
    atol: float | None = None

    def allowed(self, expected: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The allowed absolute error of every element.

        Args:
            expected: The expected values, in float64 or complex128.
            dtype: The dtype of the values that are compared.
        """
        rtol, atol = self._tolerances(dtype)
        size = expected.abs().nan_to_num(posinf=0.0)
        _, plain = _split(size, dtype.to_real())
        scale = plain.square().mean().sqrt() if plain.numel() else 0.0
        return atol + rtol * size.clamp(min=scale)

    def least_allowed(self, measured: Measured, dtype: torch.dtype) -> float:
        """The smallest allowed error of an element, for a value without fill values of masks."""
        rtol, atol = self._tolerances(dtype)
        return atol + rtol * measured.scale

    def _tolerances(self, dtype: torch.dtype) -> tuple[float, float]:
        """``rtol`` and ``atol`` for a dtype."""
        rtol, atol = TOLERANCES.get(dtype.to_real(), _TOLERANCE_OF_OTHERS)
        return (
            rtol if self.rtol is None else self.rtol,
            atol if self.atol is None else self.atol,
        )

    def rounding(self, dtype: torch.dtype) -> float:
        """The allowed error of a gradient that cancels, as a share of the largest gradient."""
        usual, _ = TOLERANCES.get(dtype, _TOLERANCE_OF_OTHERS)
        return min(_ROUNDINGS * torch.finfo(dtype).eps, usual)


@dataclass(frozen=True, slots=True)
class LowPrecisionBounds(Bounds):
    """Bounds for low precision: the allowed error is a share of the largest number in a value.

    Rounding to bfloat16 changes each operand by up to 0.4 %, and the result of a sum that cancels
    by far more. A bound relative to each element, or to their root mean square, would refuse every
    such engine.
    """

    share: float = 1e-2

    def allowed(self, expected: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The allowed absolute error, which is the same for all elements except fill values."""
        size = expected.abs().nan_to_num(posinf=0.0)
        filled, plain = _split(size, dtype)
        largest = float(plain.max()) if plain.numel() else 0.0
        return self.share * torch.where(filled, size, largest)

    def least_allowed(self, measured: Measured, dtype: torch.dtype) -> float:
        """The allowed absolute error of every element."""
        return self.share * measured.largest

    def rounding(self, dtype: torch.dtype) -> float:
        """The allowed error of a gradient that cancels, as a share of the largest gradient."""
        return self.share


@dataclass(frozen=True, slots=True)
class Errors:
    """The error of a value.

    Attributes:
        absolute: The largest absolute error.
        relative: That error divided by the root mean square of the expected value.
        cosine: The cosine similarity of the value and the expected one.
    """

    absolute: float = 0.0
    relative: float = 0.0
    cosine: float = 1.0


def is_gradient(name: str) -> bool:
    """True if the name is that of a gradient, as given by :func:`gradients`."""
    return name.startswith(_GRADIENT)


def largest_gradient(values: Values) -> float:
    """The largest finite absolute value in the gradients among the values; 0 if there is none."""
    largest = 0.0
    for name, value in values.items():
        if not is_gradient(name) or not isinstance(value, torch.Tensor):
            continue
        size = wide(value).abs()
        finite = size[size.isfinite()]
        if finite.numel():
            largest = max(largest, float(finite.max()))
    return largest


def mismatch_of(
    got: Any,
    expected: Any,
    exact: torch.Tensor | None,
    bounds: Bounds,
    largest: float = 0.0,
) -> tuple[Mismatch, str] | None:
    """The kind of difference and a sentence about it; ``None`` if equal within the bounds.

    Args:
        got: The value to check.
        expected: The value that eager computed.
        exact: The value that eager computed in float64; if there is one, numbers are compared
            with it.
        bounds: The allowed errors.
        largest: For a gradient, the largest absolute value in all gradients; 0 for other values.
            The rounding error of a gradient that cancels depends on the others, not on itself.
    """
    if not isinstance(expected, torch.Tensor) or not isinstance(got, torch.Tensor):
        if is_same_number(got, expected):
            return None
        return Mismatch.STRUCTURE, f"is {got!r}, eager's is {expected!r}"
    mine, eagers = _structure(got), _structure(expected)
    if mine != eagers:
        return Mismatch.STRUCTURE, f"is {mine}, eager's is {eagers}"
    if not is_inexact(expected):
        count = int((got != expected).sum())
        if not count:
            return None
        what = f"has {count} of {expected.numel()} elements that are not eager's"
        return Mismatch.NUMBERS, what
    if exact is None and _is_surely_within(got, expected, bounds):
        return None
    return _mismatch_of_numbers(wide(got), wide(expected), exact, bounds, got.dtype, largest)


def _is_surely_within(got: torch.Tensor, expected: torch.Tensor, bounds: Bounds) -> bool:
    """True if all elements are finite, and none is off by more than the least that is allowed.

    Nearly all values of a right engine pass here. What follows takes five times as long.
    """
    measured = measured_of(got, expected)
    may_be_filled = measured.largest >= min(_FILL, torch.finfo(got.dtype).max)
    if measured.count < expected.numel() or may_be_filled:
        return False
    return measured.absolute <= bounds.least_allowed(measured, got.dtype)


def is_same_number(got: Any, expected: Any) -> bool:
    """True if two values other than tensors have the same type and are equal; NaN equals NaN."""
    if type(got) is not type(expected):
        return False
    return bool(got == expected) or (_is_nan(got) and _is_nan(expected))


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _structure(value: torch.Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)} on {value.device}"


def wide(value: torch.Tensor) -> torch.Tensor:
    """The values as a dense tensor of float64 or complex128."""
    return _dense(value).to(torch.complex128 if value.is_complex() else torch.float64)


def _dense(value: torch.Tensor) -> torch.Tensor:
    return value if value.layout is torch.strided else value.to_dense()


def _mismatch_of_numbers(
    got: torch.Tensor,
    expected: torch.Tensor,
    exact: torch.Tensor | None,
    bounds: Bounds,
    dtype: torch.dtype,
    largest: float,
) -> tuple[Mismatch, str] | None:
    finite = expected.isfinite()
    strange = int((finite & ~got.isfinite()).sum())
    if strange:
        what = f"has {strange} elements that are NaN or infinite where eager's are numbers"
        return Mismatch.NON_FINITE, what
    if exact is not None and exact.shape == got.shape and exact.isfinite().all():
        rounding = bounds.rounding(dtype) * largest
        slack = _slack((expected - exact).abs()[finite], exact, rounding)
        expected = exact
    elif not _equal_strange(got, expected):
        return Mismatch.NUMBERS, "has numbers where eager's has NaN or infinity"
    else:
        slack = 0.0
    off = torch.where(finite, (got - expected).abs(), 0.0)
    over = off > bounds.allowed(expected, dtype) + slack
    if not over.any():
        return None
    errors = errors_of(got, expected)
    return Mismatch.NUMBERS, (
        f"is off by {errors.absolute:.3g} ({errors.relative:.3g} of its root mean square, cosine "
        f"{errors.cosine:.4g}) in {int(over.sum())} of {over.numel()} elements"
    )


def _slack(eagers: torch.Tensor, exact: torch.Tensor, rounding: float) -> float:
    """The error that an engine may have because eager has errors of its own (``eagers``).

    ``rounding`` is the error that is allowed if a gradient cancels; it is 0 for other values.
    """
    if not eagers.numel():
        return 0.0
    largest = float(eagers.max())
    slack = _TIMES_EAGERS * largest
    cancels = largest >= _CANCELS * float(exact.abs().max())
    return max(slack, rounding) if cancels else slack


def _equal_strange(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """True if ``got`` has the same NaN and infinities wherever ``expected`` is not finite."""
    at = ~expected.isfinite()
    return bool(torch.isclose(got[at], expected[at], equal_nan=True).all())


def errors_of(got: Any, expected: Any) -> Errors:
    """The errors of a value of the expected shape, over the elements where both are finite."""
    if not isinstance(expected, torch.Tensor) or not isinstance(got, torch.Tensor):
        return Errors()
    measured = measured_of(got, expected)
    norms = math.sqrt(measured.mine) * math.sqrt(measured.theirs)
    cosine = abs(measured.product) / norms if norms else 1.0
    relative = math.inf if measured.absolute else 0.0
    if measured.scale:
        relative = measured.absolute / measured.scale
    return Errors(measured.absolute, relative, cosine)


@dataclass(frozen=True, slots=True)
class Measured:
    """What a value and the expected one are, over the elements where both are finite.

    Attributes:
        count: The number of these elements.
        absolute: The largest absolute difference.
        largest: The largest expected number.
        mine: The sum of the squares of the value.
        theirs: The sum of the squares of the expected value.
        product: The inner product of the two.
    """

    count: int = 0
    absolute: float = 0.0
    largest: float = 0.0
    mine: float = 0.0
    theirs: float = 0.0
    product: complex = 0.0

    @property
    def scale(self) -> float:
        """The root mean square of the expected value; 0 if there are no elements."""
        return math.sqrt(self.theirs / max(self.count, 1))


def measured_of(got: torch.Tensor, expected: torch.Tensor) -> Measured:
    """Measure a value of the expected shape, in float64.

    It is read block by block: copies of the whole in float64 took five times as long.
    """
    length = _BLOCK if expected.device.type == "cpu" else _BLOCK << 10
    blocks = (torch.split(_dense(each).flatten(), length) for each in (got, expected))
    found = Measured()
    for pair in zip(*blocks, strict=True):
        found = _with_block(found, *map(wide, pair))
    return found


def _with_block(found: Measured, a: torch.Tensor, b: torch.Tensor) -> Measured:
    mine, theirs = _squares(a), _squares(b)
    if not math.isfinite(mine + theirs):
        both = a.isfinite() & b.isfinite()
        a, b = a[both], b[both]
        mine, theirs = _squares(a), _squares(b)
    if not a.numel():
        return found
    return Measured(
        found.count + a.numel(),
        max(found.absolute, _largest(a - b)),
        max(found.largest, _largest(b)),
        found.mine + mine,
        found.theirs + theirs,
        found.product + torch.vdot(a, b).item(),
    )


def _squares(values: torch.Tensor) -> float:
    return float(torch.vdot(values, values).real)


def _largest(values: torch.Tensor) -> float:
    least, most = torch.aminmax(values.abs() if values.is_complex() else values)
    return max(-float(least), float(most))
