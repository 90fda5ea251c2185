"""What numbers that are drawn in place of a tensor's values have in common with these.

A program that is sent to others has no value of the user's. So nothing here is exact: a mean, a
deviation and the ends of a range are powers of two, and the ends lie within the range, so that a
position in a table stays one. Only values that say nothing of the user, such as the zeros and
infinities of a mask, are kept as they are.
"""

from __future__ import annotations

import math

import torch

_TELLING_NOTHING = {
    "0": 0.0,
    "1": 1.0,
    "-1": -1.0,
    "torch.inf": math.inf,
    "-torch.inf": -math.inf,
    "torch.finfo(torch.float32).min": torch.finfo(torch.float32).min,
    "torch.finfo(torch.float16).min": torch.finfo(torch.float16).min,
    "torch.finfo(torch.bfloat16).min": torch.finfo(torch.bfloat16).min,
}
"""Values that masks, biases and factors have before anything was learnt, as a program says them."""

_SAMPLE = 64
"""As many values are looked at before all of them are."""

_LARGEST = 127
"""The largest exponent of float32."""

_MOST_NUMBERS = 1 << 16
"""About so many numbers tell mean and deviation."""

_EIGHTHS = 8
"""A share is told in eighths."""

_MOST_POSITIONS = 1 << 24
"""The largest range from which distinct integers are drawn."""


def like(value: torch.Tensor) -> tuple[str, ...]:
    """Return the arguments of the function that draws numbers like those of a tensor.

    The function is ``tensor`` in :mod:`composer.graphs.python`.

    Args:
        value: A tensor with strides and values.
    """
    values = value.detach().flatten()
    if not values.numel():
        return ()
    if not values.is_complex():
        kept = _kept(values)
        if len(kept) == 2:
            return (_as_tuple(kept), f"share={_share(values, _TELLING_NOTHING[kept[1]])}")
        if kept:
            return (_as_tuple(kept),)
    if values.is_floating_point() or values.is_complex():
        return _like_floats(values)
    return _like_integers(values)


def like_number(value: float) -> float:
    """Return a number of the same size, which is a power of two."""
    if not value or not math.isfinite(value):
        return value
    exponent = min(round(math.log2(abs(value))), _LARGEST)
    return math.copysign(2.0**exponent, value)


def _as_tuple(texts: list[str]) -> str:
    return f"of=({', '.join(texts)},)"


def _share(values: torch.Tensor, number: float) -> float:
    """Return about how many of the values are a number, as a share that is neither 0 nor 1."""
    share = float((values.double() == number).double().mean())
    return min(max(round(share * _EIGHTHS), 1), _EIGHTHS - 1) / _EIGHTHS


def _kept(values: torch.Tensor) -> list[str]:
    """Return the distinct values of a tensor, if all of them say nothing of the user."""
    for some in (values[:_SAMPLE], values):
        counts = {text: _count(some, number) for text, number in _TELLING_NOTHING.items()}
        if sum(counts.values()) != some.numel():
            return []
    return [text for text, count in counts.items() if count]


def _count(values: torch.Tensor, number: float) -> int:
    """Return how many values are a number, which the dtype may not have."""
    exact = torch.tensor(number, dtype=torch.float64).to(values.dtype)
    return int((values == number).sum()) if float(exact) == number else 0


def _like_floats(values: torch.Tensor) -> tuple[str, ...]:
    """Return mean and deviation, as powers of two; NaN and infinities are left out of them."""
    values = torch.view_as_real(values).flatten() if values.is_complex() else values
    finite = values[:: max(1, values.numel() // _MOST_NUMBERS)].double()
    finite = finite[finite.isfinite()]
    if not finite.numel():
        return ("mean=0.0", "std=1.0")
    mean = float(finite.mean())
    std = float(finite.std(correction=0))
    if abs(mean) < std / 4:
        mean = 0.0
    arguments = (f"mean={like_number(mean)}", f"std={like_number(std)}")
    return (*arguments, "positive=True") if bool((finite > 0).all()) else arguments


def _like_integers(values: torch.Tensor) -> tuple[str, ...]:
    """Return the range, and the order where there is one."""
    values = values.long()
    count = values.numel()
    if torch.equal(values, torch.arange(count, device=values.device)):
        return ("order='range'",)  # which the shape says
    low, high = _inner_range(int(values.min()), int(values.max()))
    arguments: tuple[str, ...] = (f"low={low}", f"high={high}")
    if torch.unique(values).numel() == count and count <= high - low + 1 <= _MOST_POSITIONS:
        arguments = (*arguments, "order='distinct'")
    elif bool((values.diff() >= 0).all()):
        arguments = (*arguments, "order='ascending'")
    return arguments


def _inner_range(low: int, high: int) -> tuple[int, int]:
    """Return the ends of a range within these, which are zero or powers of two."""
    if low < 0 < high:
        return -_floor(-low), _floor(high)
    if high <= 0:
        bottom, top = _inner_range(-high, -low)
        return -top, -bottom
    top = _floor(high)
    bottom = 1 << (low - 1).bit_length() if low else 0
    return min(bottom, top), top


def _floor(number: int) -> int:
    """Return the largest power of two that is not above a number; 0 for 0."""
    return 1 << (number.bit_length() - 1) if number else 0
