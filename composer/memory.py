"""Memory: how much is left, what an error says of it, and making room."""

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
"""Limit, use, and what of it is cached of files: version 2 of control groups, and version 1."""

_SAID = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "Failed to allocate memory for requested buffer",
    "std::bad_alloc",
)
"""How torch's allocator of the CPU and ONNX Runtime say it, in errors of no class of their own."""


def lacks_memory(error: BaseException) -> bool:
    """Whether this is a lack of memory, which may be over at the next call."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = text_of(error)
    return any(each in text for each in _SAID)


def free_memory() -> None:
    """Collect garbage, and give back what torch's allocator keeps for later."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def available_memory() -> int | None:
    """How many bytes this process may still take; ``None`` where the system does not say.

    Of the machine, or of a control group that it is in, if that has less: what is cached of files
    counts as free. psutil, the usual source, does not know of groups.
    """
    try:
        machine = _numbers(Path("/proc/meminfo"))["MemAvailable"] * 1024
    except (OSError, KeyError):
        return None
    return min([machine, *_left_in_groups()])


def _left_in_groups() -> Iterator[int]:
    """What is left in each control group with a limit, from the process's own to the root.

    Within a container the path may be the host's, and the root the container's own group.
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
    """``None`` for a group that is not there, or has no limit (``max``)."""
    try:
        most, taken = (int((group / each).read_text()) for each in (limit, used))
        return most - taken + _numbers(group / "memory.stat")[cached]
    except (OSError, KeyError, ValueError):
        return None


def _numbers(path: Path) -> dict[str, int]:
    """A file of the kernel's with a name and a number a line."""
    lines = (line.replace(":", " ").split() for line in path.read_text().splitlines())
    return {name: int(number) for name, number, *_ in lines}
