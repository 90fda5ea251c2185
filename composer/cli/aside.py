"""Keeping what the user's code prints out of what a program reads on stdout."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator

_STDOUT, _STDERR = 1, 2


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Send to stderr what is printed, by this process and by those that it starts."""
    _flush()
    kept = os.dup(_STDOUT)
    _point_away()
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        try:
            _flush()
        finally:
            os.dup2(kept, _STDOUT)
            os.close(kept)


def _point_away() -> None:
    """To stderr, or to nowhere where that is closed."""
    try:
        os.dup2(_STDERR, _STDOUT)
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, _STDOUT)
        os.close(nowhere)


def _flush() -> None:
    """Write out what Python and C hold back of what was printed."""
    for stream in (sys.stdout, sys.__stdout__):
        if stream is not None:
            stream.flush()
    if os.name == "posix":
        ctypes.CDLL(None).fflush(None)
