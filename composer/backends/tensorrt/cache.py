"""What is kept on disk: plans, which another process then only loads, and times of kernels."""

from __future__ import annotations

from composer.system.disk import DiskCache

_PLANS = 8 << 30
_TIMINGS = 256 << 20
"""Bytes that all plans, and all timing caches, may take on disk."""


def plans() -> DiskCache:
    """Plans, by the key of all that they were made of."""
    return DiskCache("plans", limit=_PLANS)


def timings() -> DiskCache:
    """What builds measured, by library and device."""
    return DiskCache("timings", limit=_TIMINGS)
