"""A file of lines to which several processes can append, rotated by size.

Two things keep lines whole. Each append holds a lock (the file with suffix ``.lock`` in the same
folder). Each line is one write to a descriptor in append mode. A killed writer leaves at most one
incomplete line, and the next writer ends it with a newline.

The lock is from ``filelock``, which torch depends on. The kernel releases it when its holder dies,
and it handles forks.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path

KEPT = 3
"""The number of older files that are kept; ``.1`` is the newest of them."""


class LineFile:
    """A file of lines with a lock.

    Args:
        path: The path of the file; its folder is created if needed.
    """

    def __init__(self, path: Path) -> None:
        from filelock import FileLock  # imported here since the import takes 10 ms

        self.path = path
        self._lock = FileLock(f"{path}.lock")

    def append(self, line: bytes, limit: int, patience: float) -> None:
        """Append a line. If the file would become larger than ``limit``, it is rotated first.

        Args:
            line: The line, with a newline at its end.
            limit: The largest size of the file in bytes. A longer line gets a file of its own.
            patience: The time to wait for the lock, in seconds.

        Raises:
            TimeoutError: Another process held the lock all the time.
            OSError: The file cannot be written.
        """
        from filelock import Timeout

        if self.path.is_dir():
            raise IsADirectoryError(f"{self.path} is a folder, not a file")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with self._lock.acquire(timeout=patience, poll_interval=0.005):
                _rotate(self.path, len(line), limit)
                _write(self.path, line)
        except Timeout:
            raise TimeoutError(
                f"another process holds {self._lock.lock_file}, after {patience:g} s still"
            ) from None


def rotated(path: Path) -> tuple[Path, ...]:
    """Return the names of the file and its older files, newest first; some may not exist."""
    return path, *(Path(f"{path}.{number}") for number in range(1, KEPT + 1))


def _rotate(path: Path, added: int, limit: int) -> None:
    """Rename each file to the next name if the file would become too large.

    Names after the first free one stay, since an earlier rotation may have been interrupted there.
    """
    size = path.stat().st_size if path.exists() else 0
    if not size or size + added <= limit:
        return
    names = rotated(path)
    existing = list(itertools.takewhile(Path.exists, names[:-1]))
    for name, next_name in reversed(list(zip(existing, names[1:], strict=False))):
        name.replace(next_name)


def _write(path: Path, line: bytes) -> None:
    with path.open("ab+", buffering=0) as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":  # a process ended while it wrote
                line = b"\n" + line
        while line:  # a write may be short, when a signal comes or the disk fills up
            line = line[file.write(line) :]
