"""Memory: how much is left, what an error says of it, and making room."""

from __future__ import annotations

import gc
from pathlib import Path

import torch

_GROUP = Path("/sys/fs/cgroup")


def lacks_memory(error: BaseException) -> bool:
    """Whether this is a lack of memory, which may be over at the next call."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError)


def free_memory() -> None:
    """Collect garbage, and give back what torch's allocator keeps for later."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def available_memory() -> int | None:
    """How many bytes this process may still take; ``None`` where the system does not say.

    Of the machine, or of the container (control groups, version 2), if that has less: what is
    cached of files counts as free. psutil, the usual source, does not know of containers.
    """
    try:
        machine = _numbers(Path("/proc/meminfo"))["MemAvailable"] * 1024
    except (OSError, KeyError):
        return None
    try:
        limit, used = (int((_GROUP / f"memory.{each}").read_text()) for each in ("max", "current"))
        cached = _numbers(_GROUP / "memory.stat")["inactive_file"]
    except (OSError, KeyError, ValueError):  # no group, or one without a limit: "max"
        return machine
    return min(machine, limit - used + cached)


def _numbers(path: Path) -> dict[str, int]:
    """A file of the kernel's with a name and a number a line."""
    lines = (line.replace(":", " ").split() for line in path.read_text().splitlines())
    return {name: int(number) for name, number, *_ in lines}
