"""How much memory an engine takes: by what the process holds more of since it is there.

On the CPU that is resident memory that no file stands behind (``RssAnon`` of Linux): engines make
their own copies of weights, in layouts of their own, and nobody counts them. Garbage is collected
and free memory handed back before each reading. On CUDA devices it is what torch's allocator has
given out, and the peak of a call above that.

What the figures do not tell: a library that is loaded for an engine counts for the first engine
that needs it, and so does what several share, a model that was exported. What the process needs
only while a call runs is counted on CUDA only. Anything else that goes on in the process counts for
the engine that is built meanwhile.
"""

from __future__ import annotations

import ctypes
import functools
import gc
from collections.abc import Sequence
from pathlib import Path

import torch

MIB = 1 << 20

_STATUS = Path("/proc/self/status")


class Gauge:
    """What is held now, where it can be told.

    Args:
        devices: Where the graph computes; only accelerators of the kind ``cuda`` are looked at, and
            the CPU's memory is where there are none.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = devices

    @property
    def works(self) -> bool:
        """Whether it can be told here."""
        return bool(self._devices) or _anonymous() is not None

    def held(self) -> int:
        """Bytes, with all that is garbage let go of first."""
        gc.collect()
        if self._devices:
            return sum(torch.cuda.memory_allocated(each) for each in self._devices)
        _trim()
        return _anonymous() or 0

    def begin_peak(self) -> None:
        """Let :meth:`peak` tell of what comes from now on."""
        for each in self._devices:
            torch.cuda.reset_peak_memory_stats(each)

    def peak(self) -> int:
        """Bytes that were given out at most at a time; 0 on the CPU."""
        return sum(torch.cuda.max_memory_allocated(each) for each in self._devices)


def _anonymous() -> int | None:
    """``None`` where the system does not tell."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    found = (line.split()[1] for line in lines if line.startswith("RssAnon:"))
    return next((int(kib) << 10 for kib in found), None)


def _trim() -> None:
    """Have the C library give back what it keeps for later, where it knows how to."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> ctypes._NamedFuncPointer | None:
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
