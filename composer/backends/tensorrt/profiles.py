"""Optimization profiles: the ranges of sizes in which a plan can run, from the graph's symbols."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from composer import _torch
from composer.backends.tensorrt.settings import EVERY, Sizes
from composer.errors import refuse
from composer.records import Reason, Status

Ranges = dict[str, Sizes]
"""Maps the name of a symbol to its least, usual and greatest value."""

Shape = tuple[int, ...]
Profile = dict[str, tuple[Shape, Shape, Shape]]
"""Maps the name of an input to its least, usual and greatest shape."""

_ROOM = 4
"""By default, the greatest size is this factor times the size of the first call."""


def ranges_of(
    shapes: Mapping[str, Sequence[Any]], profiles: Sequence[Mapping[str, Sizes]]
) -> tuple[Ranges, ...]:
    """Return one set of ranges for each of the profiles, or one set around the first call.

    Args:
        shapes: The shape of each input whose shape is not fixed, by name.
        profiles: The profiles of the policy. Symbols without an entry get the default range.

    Raises:
        Refusal: ``declined`` with ``dynamic_shape``, for an unbacked size.
    """
    defaults: Ranges = {}
    for size in itertools.chain.from_iterable(shapes.values()):
        if isinstance(size, torch.SymInt):
            defaults |= _ranges_around(size)
    if not defaults:
        return ()
    return tuple(_completed(profile, defaults) for profile in profiles or ({},))


def _ranges_around(size: torch.SymInt) -> Ranges:
    ranges: Ranges = {}
    for name, (first, low, top) in _torch.symbols.symbol_facts(size).items():
        if first is None:
            message = f"nothing is known of the size {name} of an input, so no range around it"
            refuse(Status.DECLINED, Reason.DYNAMIC_SHAPE, message)
        ranges[name] = around(first, low, top)
    return ranges


def around(size: int, low: int | None = 1, top: int | None = None) -> Sizes:
    """Return the default range around a size of a call, within the bounds of its symbol."""
    greatest = size * _ROOM if top is None else min(size * _ROOM, top)
    usual = max(1, size)
    least = 1 if low is None else max(1, min(low, usual))
    return least, usual, max(usual, greatest)


def _completed(profile: Mapping[str, Sizes], defaults: Ranges) -> Ranges:
    every = profile.get(EVERY)
    return {name: profile.get(name, every or sizes) for name, sizes in defaults.items()}


def profile_of(shapes: Mapping[str, Sequence[Any]], ranges: Ranges) -> Profile:
    """Return the shapes of every dynamic input for these ranges.

    TensorRT accepts a profile that lacks the range of an input, and then computes wrong numbers or
    nothing. So the profile has all inputs.

    Raises:
        Refusal: ``declined`` with ``dynamic_shape``, if a size decreases as a symbol grows.
    """
    profile: Profile = {}
    extents = [{name: sizes[i] for name, sizes in ranges.items()} for i in range(3)]
    for name, shape in shapes.items():
        least, usual, greatest = (_shape_with(shape, values) for values in extents)
        sizes = zip(least, usual, greatest, strict=True)
        if not all(0 <= low <= size <= high for low, size, high in sizes):
            message = f"the sizes of {name} run from {least} over {usual} to {greatest}"
            refuse(Status.DECLINED, Reason.DYNAMIC_SHAPE, message)
        profile[name] = (least, usual, greatest)
    return profile


def _shape_with(shape: Sequence[Any], values: Mapping[str, int]) -> Shape:
    return tuple(_torch.symbols.size_with(size, values) for size in shape)


def holds(profile: Profile, shapes: Mapping[str, Shape]) -> bool:
    """True if the shapes lie within a profile."""
    for name, (least, _, greatest) in profile.items():
        sizes = zip(least, shapes[name], greatest, strict=True)
        if not all(low <= size <= high for low, size, high in sizes):
            return False
    return True


def symbols_in(shapes: Mapping[str, Sequence[Any]], call: Mapping[str, Shape]) -> dict[str, int]:
    """Return the values of the symbols in a call, for symbols that are a size by themselves."""
    return {
        str(size): value
        for name, shape in shapes.items()
        for size, value in zip(shape, call[name], strict=True)
        if _torch.symbols.symbols(size) == {str(size)}
    }


def wider(ranges: Ranges, values: Mapping[str, int]) -> Ranges:
    """Return the ranges, extended to contain these values.

    If a value exceeds the greatest size, the new greatest size is ``_ROOM`` times the value.
    """
    wide: Ranges = {}
    for name, (least, usual, greatest) in ranges.items():
        value = values.get(name, usual)
        if value > greatest:
            greatest = value * _ROOM
        wide[name] = (min(least, value), value, greatest)
    return wide
