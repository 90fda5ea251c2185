"""Keeps the output of the user's code out of the JSON that another program reads on stdout."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator

_STDOUT, _STDERR = 1, 2


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Redirect stdout to stderr, for this process and the processes that it starts."""
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
    """Redirect stdout to stderr, or to the null device if stderr is closed."""
    try:
        os.dup2(_STDERR, _STDOUT)
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, _STDOUT)
        os.close(nowhere)


def _flush() -> None:
    """Flush the output buffers of Python and of C."""
    for stream in (sys.stdout, sys.__stdout__):
        if stream is not None:
            stream.flush()
    if os.name == "posix":
        ctypes.CDLL(None).fflush(None)
