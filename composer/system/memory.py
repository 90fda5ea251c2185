"""Memory: how much is available, whether an error means that it ran out, and how to free some."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import torch

from composer.errors import text_of

_GROUPS = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")
_FILES = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""The files of a control group, by controller: ``""`` in version 2 of control groups, ``"memory"``
in version 1. They are the file with the limit, the file with the use, and the name of the file
cache's size in ``memory.stat``."""

_SAID = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "Failed to allocate memory for requested buffer",
    "std::bad_alloc",
)
"""Texts by which torch's CPU allocator and ONNX Runtime report a lack of memory. The class of the
error is a general one."""


def lacks_memory(error: BaseException) -> bool:
    """True if an error means that memory ran out. The next call may succeed.

    Args:
        error: What an engine raised.
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = text_of(error)
    return any(each in text for each in _SAID)


def free_memory() -> None:
    """Collect garbage, and return the unused memory that torch's allocator holds."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def available_memory() -> int | None:
    """The bytes that this process may still take; ``None`` if the system does not report it.

    The number is that of the machine, or of one of the process's control groups that has less.
    Cached files count as free. psutil, the usual source, does not know control groups.
    """
    try:
        machine = _numbers(Path("/proc/meminfo"))["MemAvailable"] * 1024
    except (OSError, KeyError):
        return None
    return min([machine, *_left_in_groups()])


def _left_in_groups() -> Iterator[int]:
    """The bytes left in each control group with a limit, from the process's own group to the root.

    In a container the path may be the host's, while the root is the container's own group.
    """
    try:
        lines = _OWN_GROUPS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in _FILES:
            continue
        root = _GROUPS / controllers
        own = root / path.lstrip("/")
        for group in (own, *own.parents):
            left = _left_in(group, *_FILES[controllers])
            if left is not None:
                yield left
            if group == root:
                break


def _left_in(group: Path, limit: str, used: str, cached: str) -> int | None:
    """The bytes left in a group; ``None`` where it does not exist or has no limit (``max``)."""
    try:
        most, taken = (int((group / each).read_text()) for each in (limit, used))
        return most - taken + _numbers(group / "memory.stat")[cached]
    except (OSError, KeyError, ValueError):
        return None


def _numbers(path: Path) -> dict[str, int]:
    """The numbers in a file of the kernel that has a name and a number on each line."""
    lines = (line.replace(":", " ").split() for line in path.read_text().splitlines())
    return {name: int(number) for name, number, *_ in lines}
