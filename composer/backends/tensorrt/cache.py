"""What is kept on disk: plans, which another process then only loads, and times of kernels."""

from __future__ import annotations

from composer.system.disk import Shelf

_PLANS = 8 << 30
_TIMINGS = 256 << 20
"""Bytes that all plans, and all timing caches, may take on disk."""


def plans() -> Shelf:
    """Plans, by the key of all that they were made of."""
    return Shelf("plans", limit=_PLANS)


def timings() -> Shelf:
    """What builds measured, by library and device."""
    return Shelf("timings", limit=_TIMINGS)
