"""How much memory this process has, and had at most, as the system counts it (Linux).

Resident memory is the whole process's. What a variant adds is the growth between two readings,
both after freed memory was given back: the C library keeps it otherwise, for whoever comes next.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

MIB = 2**20
_PEAK_FORGOTTEN = "5"
"""What ``/proc/self/clear_refs`` takes to have the peak start from here."""


@dataclass(slots=True)
class Growth:
    """MiB that a block added: at most while it ran, and for good; ``None`` where nobody knows."""

    peak: float | None = None
    kept: float | None = None


@contextmanager
def growth() -> Iterator[Growth]:
    """Have the growth of this process filled in when the block ends."""
    found = Growth()
    give_back()
    before = _status("VmRSS")
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text(_PEAK_FORGOTTEN, encoding="utf-8")
    try:
        yield found
    finally:
        peak = _status("VmHWM")
        give_back()
        after = _status("VmRSS")
        if before is not None and peak is not None and after is not None:
            found.peak, found.kept = peak - before, after - before


def give_back() -> None:
    """Collect garbage, and have the C library return what it keeps in reserve."""
    gc.collect()
    with suppress(OSError, AttributeError):  # no glibc
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def _status(field: str) -> float | None:
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((int(x.split()[1]) * 1024 / MIB for x in lines if x.startswith(field)), None)
