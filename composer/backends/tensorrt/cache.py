"""What is kept on disk: plans, which other processes can load, and measured times of kernels."""

from __future__ import annotations

from composer.system.disk import DiskCache

_PLANS = 8 << 30
_TIMINGS = 256 << 20
"""Bytes on disk that all plans, and all timing caches, may use."""


def plans() -> DiskCache:
    """Return the cache of plans; a key covers everything that a plan depends on."""
    return DiskCache("plans", limit=_PLANS)


def timings() -> DiskCache:
    """Return the cache of kernel times that builds measured, by library and device."""
    return DiskCache("timings", limit=_TIMINGS)
