"""Values that two runs of a graph gave, and whether they are equal within bounds."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from composer import _torch

Values = dict[str, Any]
"""Name of a value, such as ``"output 0"``, to the value."""


_GRADIENT = "gradient of "


def gradients(outputs: Values, sources: Values) -> Values:
    """Gradients of the outputs with respect to the leaves among ``sources`` that require one.

    Hooks that the user put on those leaves are not called.
    """
    roots = [each for each in outputs.values() if requires_grad(each)]
    wanted = {n: each for n, each in sources.items() if requires_grad(each) and each.is_leaf}
    if not roots or not wanted:
        return {}
    weights = [pattern(root) for root in roots]
    with _torch.modes.own_backward(wanted.values()):
        found = torch.autograd.grad(roots, list(wanted.values()), weights, allow_unused=True)
    return {name_of_gradient(name): each for name, each in zip(wanted, found, strict=True)}


def name_of_gradient(source: str) -> str:
    """What :func:`gradients` calls the gradient of a source."""
    return f"{_GRADIENT}{source}"


def pattern(root: torch.Tensor) -> torch.Tensor:
    """A gradient for an output: no two neighbouring elements are equal, so errors do not cancel."""
    numbers = torch.arange(root.numel(), device=root.device).remainder(7) + 1
    return numbers.view(root.shape).to(root)


def requires_grad(value: Any) -> bool:
    """Whether it is a tensor that requires a gradient."""
    return isinstance(value, torch.Tensor) and value.requires_grad


def detached_copy(value: Any) -> Any:
    """A detached copy, which later writes to the value do not change."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def devices(values: Iterable[Any]) -> list[torch.device]:
    """The CUDA devices on which any tensor among ``values`` lies."""
    tensors = (each for each in values if isinstance(each, torch.Tensor))
    return sorted({each.device for each in tensors if each.device.type == "cuda"}, key=str)


class Mismatch(Enum):
    """In which way a value is not what it should be, the gravest first."""

    STRUCTURE = "structure"
    NON_FINITE = "non-finite"
    NUMBERS = "numbers"


TOLERANCES = {
    torch.float64: (1e-7, 1e-15),
    torch.float32: (1e-3, 1e-7),
    torch.float16: (4e-3, 1e-5),
    torch.bfloat16: (2e-2, 1e-5),
}
"""``rtol`` and ``atol`` of each dtype, for :class:`Bounds` that do not say.

Correct engines stay below 3e-5 in float32 on ten public models (bench/models.py); an engine that
silently computes in TF32 or bfloat16 is off by 1e-3 and 1e-2.
"""

_FILL, _FAR = 1e8, 1e6
"""From which size on a number may be what a mask was filled with, and how many times the median of
the smaller ones it is then."""

_TIMES_EAGERS = 3.0
"""How many times eager's own error against float64 an engine may add; torch's benchmarks have 2
or 3."""

_CANCELS = 0.1
"""From which share of a gradient on eager's own error says that nothing but rounding is left of it:
of a bias before a batch norm, or of the keys of an attention, which have no effect."""

_ROUNDINGS = 64
"""How many roundings of the largest gradient may be left of one that cancels."""


def _split(size: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Where there is what a mask was filled with, rather than something computed; and the others.

    Args:
        size: How large the numbers are.
        dtype: In which they were computed.
    """
    large = size >= _FILL
    filled = size == torch.finfo(dtype).max if dtype.is_floating_point else torch.zeros_like(large)
    if large.any():
        rest = size[~large & (size > 0)]
        filled |= large & (size > _FAR * rest.median()) if rest.numel() else False
    return filled, size[~filled] if filled.any() else size


@dataclass(frozen=True, slots=True)
class Bounds:
    """How far a value may be off: ``atol + rtol * max(|expected|, rms(expected))``, elementwise.

    Elements below the root mean square of a value are allowed the same error as that: they come
    from sums of larger numbers, whose rounding they carry. What masks are filled with, -1e9 or the
    lowest number there is, does not count for it. Integers and booleans have to be equal.
    ``rtol`` and ``atol`` default to those of the dtype in :data:`TOLERANCES`.
    """

    rtol: float | None = None
    atol: float | None = None

    def allowed(self, expected: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The allowed error of every element.

        Args:
            expected: In float64 or complex128.
            dtype: Of the values that are compared.
        """
        narrow = torch.empty(0, dtype=dtype).real.dtype if dtype.is_complex else dtype
        usual = TOLERANCES.get(narrow, (1e-1, 1e-5))
        rtol = usual[0] if self.rtol is None else self.rtol
        atol = usual[1] if self.atol is None else self.atol
        size = expected.abs().nan_to_num(posinf=0.0)
        _, plain = _split(size, narrow)
        scale = plain.square().mean().sqrt() if plain.numel() else 0.0
        return atol + rtol * size.clamp(min=scale)

    def rounding(self, dtype: torch.dtype) -> float:
        """What rounding may leave of a gradient that cancels, as a share of the largest one.

        Args:
            dtype: Of the gradient.
        """
        usual, _ = TOLERANCES.get(dtype, (1e-1, 1e-5))
        return min(_ROUNDINGS * torch.finfo(dtype).eps, usual)


@dataclass(frozen=True, slots=True)
class LowPrecisionBounds(Bounds):
    """How far low precision may be off: the largest error over the largest number in a value.

    Rounding to bfloat16 changes each operand by up to 0.4 %, and sums that cancel by far more than
    that: a bound on each element, or on their root mean square, would refuse every such engine.
    """

    share: float = 1e-2

    def allowed(self, expected: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The allowed error, the same for every element but for what a mask was filled with.

        Args:
            expected: In float64 or complex128.
            dtype: Of the values that are compared.
        """
        size = expected.abs().nan_to_num(posinf=0.0)
        filled, plain = _split(size, dtype)
        largest = float(plain.max()) if plain.numel() else 0.0
        return self.share * torch.where(filled, size, largest)

    def rounding(self, dtype: torch.dtype) -> float:
        """What low precision may leave of a gradient that cancels, whatever its dtype."""
        return self.share


@dataclass(frozen=True, slots=True)
class Errors:
    """How far a value is off.

    The largest absolute error, that error over the root mean square of what is expected, and the
    cosine of the two as vectors.
    """

    absolute: float = 0.0
    relative: float = 0.0
    cosine: float = 1.0


def is_gradient(name: str) -> bool:
    """Whether :func:`gradients` gave a value that name."""
    return name.startswith(_GRADIENT)


def largest_gradient(values: Values) -> float:
    """The size of the largest finite number in the gradients among the values; 0 without any."""
    found = [each for name, each in values.items() if is_gradient(name)]
    dense = (_wide(each).abs() for each in found if isinstance(each, torch.Tensor))
    finite = (each[each.isfinite()] for each in dense)
    return max((float(each.max()) for each in finite if each.numel()), default=0.0)


def mismatch_of(
    got: Any,
    expected: Any,
    exact: torch.Tensor | None,
    bounds: Bounds,
    largest: float = 0.0,
) -> tuple[Mismatch, str] | None:
    """In which way ``got`` differs from ``expected``, and a sentence about it; ``None`` if equal.

    Args:
        got: What was computed.
        expected: What eager computed.
        exact: What eager computed in float64; numbers are judged by it where there is one.
        bounds: How far numbers may be off.
        largest: For a gradient, the size of the largest number in any: the rounding of one that
            cancels depends on the others' size, not on its own. 0 for any other value.
    """
    if not isinstance(expected, torch.Tensor) or not isinstance(got, torch.Tensor):
        same = is_same_number(got, expected)
        return None if same else (Mismatch.STRUCTURE, f"is {got!r}, eager's is {expected!r}")
    mine, eagers = _structure(got), _structure(expected)
    if mine != eagers:
        return Mismatch.STRUCTURE, f"is {mine}, eager's is {eagers}"
    if not expected.is_floating_point() and not expected.is_complex():
        count = int((got != expected).sum())
        what = f"has {count} of {expected.numel()} elements that are not eager's"
        return (Mismatch.NUMBERS, what) if count else None
    return _mismatch_of_numbers(_wide(got), _wide(expected), exact, bounds, got.dtype, largest)


def is_same_number(got: Any, expected: Any) -> bool:
    """Whether two values that are no tensors are of one type and equal, NaN included."""
    if type(got) is not type(expected):
        return False
    return bool(got == expected) or (_is_nan(got) and _is_nan(expected))


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _structure(value: torch.Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)} on {value.device}"


def _wide(value: torch.Tensor) -> torch.Tensor:
    dense = value.to_dense() if value.layout is not torch.strided else value
    return dense.to(torch.complex128 if value.is_complex() else torch.float64)


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
    slack = torch.zeros((), dtype=torch.float64, device=got.device)
    if exact is not None and exact.shape == got.shape and exact.isfinite().all():
        if finite.any():
            eagers = (expected - exact).abs()[finite].max()
            slack = _TIMES_EAGERS * eagers
            if largest and eagers >= _CANCELS * exact.abs().max():
                slack = slack.clamp(min=bounds.rounding(dtype) * largest)
        expected, finite = exact, finite & exact.isfinite()
    elif not _equal_strange(got, expected):
        return Mismatch.NUMBERS, "has numbers where eager's has NaN or infinity"
    off = torch.where(finite, (got - expected).abs(), 0.0)
    over = off > bounds.allowed(expected, dtype) + slack
    if not over.any():
        return None
    errors = errors_of(got, expected)
    return Mismatch.NUMBERS, (
        f"is off by {errors.absolute:.3g} ({errors.relative:.3g} of its root mean square, cosine "
        f"{errors.cosine:.4g}) in {int(over.sum())} of {over.numel()} elements"
    )


def _equal_strange(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether both are NaN, or the same infinity, at the same places."""
    at = ~expected.isfinite()
    return bool(torch.isclose(got[at], expected[at], equal_nan=True).all())


def errors_of(got: Any, expected: Any) -> Errors:
    """How far two values of one shape are apart, as far as both are finite."""
    if not isinstance(expected, torch.Tensor) or not isinstance(got, torch.Tensor):
        return Errors()
    a, b = _wide(got).flatten(), _wide(expected).flatten()
    both = a.isfinite() & b.isfinite()
    a, b = a[both], b[both]
    if not a.numel():
        return Errors()
    absolute = float((a - b).abs().max())
    scale = float(b.abs().square().mean().sqrt())
    norms = float(a.abs().square().sum().sqrt() * b.abs().square().sum().sqrt())
    cosine = float((a * b.conj()).sum().abs()) / norms if norms else 1.0
    return Errors(absolute, absolute / scale if scale else (math.inf if absolute else 0.0), cosine)
