"""A file of lines that several processes append to at once, rotated by size.

What keeps the lines whole: a lock (the file beside it, ``.lock``) around each append, and one write
to a descriptor that only appends. A writer that was killed leaves at most one torn line, which the
next one closes. The lock is ``filelock``'s, which torch depends on: the kernel lets go of it when
its holder dies, and it minds forks.
"""

from __future__ import annotations

import io
import os
from pathlib import Path

KEPT = 3
"""How many older files there are: ``.1`` is the newest of them."""


class LineFile:
    """One such file.

    Args:
        path: Where it is; its folder is made if there is none.
    """

    def __init__(self, path: Path) -> None:
        from filelock import FileLock  # not before it is needed: 10 ms

        self.path = path
        self._lock = FileLock(f"{path}.lock")

    def append(self, line: bytes, limit: int, patience: float) -> None:
        """Add a line; the file is rotated first if it would become larger than ``limit``.

        Args:
            line: With its newline at the end.
            limit: Bytes. A longer line has a file to itself.
            patience: Seconds to wait for the lock.

        Raises:
            TimeoutError: another process has had the lock all the time.
            OSError: the file cannot be written.
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
    """The names that the file's lines can be under, newest first; not all need be there."""
    return path, *(Path(f"{path}.{number}") for number in range(1, KEPT + 1))


def _rotate(path: Path, added: int, limit: int) -> None:
    """Move each file to the next name, up to the first that is free: a rotation may have died."""
    size = path.stat().st_size if path.exists() else 0
    if not size or size + added <= limit:
        return
    names = rotated(path)
    free = next((n for n in range(1, KEPT) if not names[n].exists()), KEPT)
    for number in range(free, 0, -1):
        names[number - 1].replace(names[number])


def _write(path: Path, line: bytes) -> None:
    with path.open("ab+", buffering=0) as file:
        if file.seek(0, os.SEEK_END) and not _ends_a_line(file):
            line = b"\n" + line
        while line:  # a write may be short, when a signal comes or the disk fills up
            line = line[file.write(line) :]


def _ends_a_line(file: io.FileIO) -> bool:
    file.seek(-1, os.SEEK_END)
    return file.read(1) == b"\n"
