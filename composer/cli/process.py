"""Prepares this process for a measurement: its engine switches, its cache folder, its stdout."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import tempfile
from collections.abc import Iterator

from composer.cli.usage import USAGE, fail, fail_on
from composer.errors import OptionError
from composer.policy import switches
from composer.system.disk import CACHE_DIR

_STDOUT, _STDERR = 1, 2


def refuse_switches(why: str) -> None:
    """End the command if the environment overrides the policy's engines."""
    with fail_on(OptionError):
        switch = switches.switch_on_call()
    if switch:
        fail(f"{switch} is set, and {why}; unset it", USAGE)


@contextlib.contextmanager
def cache(*, remember: bool) -> Iterator[None]:
    """Use the cache on disk, or a folder of its own that is removed at the end."""
    if remember:
        yield
        return
    before = os.environ.get(CACHE_DIR)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.environ[CACHE_DIR] = folder
        try:
            yield
        finally:
            del os.environ[CACHE_DIR]
            if before is not None:
                os.environ[CACHE_DIR] = before


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Redirect stdout to stderr, also for child processes, so that stdout gets nothing but JSON."""
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
