"""Work for child processes."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy

IMPORTED_BY = os.getpid()
NICE_AT_IMPORT = os.nice(0)
SESSION = Path("/proc/self/autogroup")

left_behind: list[bytes] = []
"""What a child leaves in its memory."""


def look_around(payload: bytes, ready: Callable[[], None]) -> dict[str, Any]:
    """Where this is, and what is here."""
    ready()
    before = len(left_behind)
    left_behind.append(payload)
    return {
        "pid": os.getpid(),
        "server": os.getppid(),
        "imported_by": IMPORTED_BY,
        "folder": str(Path("/proc/self/cwd").readlink()),
        "inode": Path("/proc/self/cwd").stat().st_ino,
        "umask": os.umask(0),
        "nice": os.nice(0),
        "nice_at_import": NICE_AT_IMPORT,
        "session": SESSION.read_text().split()[-1:] if SESSION.exists() else [],
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "drawn": numpy.random.random(),
        "path": sys.path,
        "environment": dict(os.environ),
        "size": len(payload),
        "left_behind": before,
    }


def ends_the_server(payload: bytes, ready: Callable[[], None]) -> dict[str, Any]:
    """As the system may, for want of memory."""
    ready()
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(300)
    return {}


def stops_the_server(payload: bytes, ready: Callable[[], None]) -> dict[str, Any]:
    """It is there, and does nothing."""
    os.kill(os.getppid(), signal.SIGSTOP)
    return waits(payload, ready)


def waits_for_a_file(payload: bytes, ready: Callable[[], None]) -> dict[str, Any]:
    """Until it is removed; it has the child's number meanwhile."""
    file = Path(payload.decode())
    beside = file.with_suffix(".new")
    beside.write_text(f"{os.getpid()} {os.getppid()}")
    beside.rename(file)
    ready()
    while file.exists():
        time.sleep(0.01)
    return look_around(payload, lambda: None)


def prints_and_exits(payload: bytes, ready: Callable[[], None]) -> dict[str, Any]:
    """As a library of C does: nothing of Python's is put in order."""
    os.write(1, b"the last word\n")
    os._exit(7)


def waits(payload: bytes, ready: Callable[[], None]) -> dict[str, Any]:
    """For longer than anybody does."""
    ready()
    time.sleep(300)
    return {}
