"""Measures how much memory an engine takes: by how much its build makes the process grow.

On the CPU, it is resident memory without a file behind it (Linux's ``RssAnon``). This includes the
engine's own copies of weights in other layouts. Garbage is collected and free memory is returned to
the system before each reading. On CUDA devices, it is the memory that torch's allocator has given
out, plus the peak of a call.

The figures have limits. A library that several engines load, or a model exported for several,
counts for the first of them. Memory that is needed only while a call runs is counted on CUDA only.
Memory that other threads of the process take meanwhile counts for the engine that is built.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import re
from collections.abc import Sequence
from pathlib import Path

import torch

MIB = 1 << 20

_STATUS = Path("/proc/self/status")


class Gauge:
    """Reads how much memory the process holds.

    Args:
        devices: Where the graph computes: CUDA devices, or none for the CPU.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = devices

    @property
    def works(self) -> bool:
        """True if this system reports memory."""
        return bool(self._devices) or _anonymous() is not None

    def held(self) -> int:
        """Bytes that are held, after garbage was collected."""
        gc.collect()
        if self._devices:
            return sum(map(torch.cuda.memory_allocated, self._devices))
        trim = _malloc_trim()
        if trim is not None:
            trim(0)
        return _anonymous() or 0

    def begin_peak(self) -> None:
        """Let :meth:`peak` count from now on."""
        for each in self._devices:
            torch.cuda.reset_peak_memory_stats(each)

    def peak(self) -> int:
        """The most bytes that were held at a time; 0 on the CPU."""
        return sum(map(torch.cuda.max_memory_allocated, self._devices))


def _anonymous() -> int | None:
    """Return the bytes of resident memory without a file; ``None`` if the system does not tell."""
    try:
        status = _STATUS.read_text()
    except OSError:
        return None
    found = re.search(r"^RssAnon:\s*(\d+) kB", status, re.MULTILINE)
    return int(found[1]) << 10 if found else None


@functools.cache
def _malloc_trim() -> ctypes._NamedFuncPointer | None:
    """Return the C library's function that returns free memory to the system, if it has one."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
