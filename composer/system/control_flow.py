"""Exceptions that interrupt the program, and are not failures of the code that they pass through.

Some end a program, a thread or a generator. Others are raised by a signal handler: job queues end a
task in this way when its time is up. Celery raises ``SoftTimeLimitExceeded``, an ordinary
``Exception``. Such an exception may be raised at any line, also within an engine.

Every other exception is a failure, even if it is no ``Exception``: engines written in Rust raise
``pyo3_runtime.PanicException``, a ``BaseException``.
"""

from __future__ import annotations

import functools
import signal
import sys
import traceback
from asyncio import CancelledError
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

from composer.errors import chained

_EXITS = (KeyboardInterrupt, SystemExit, GeneratorExit, CancelledError)


def pass_on(error: BaseException) -> None:
    """Re-raise an exception that is not a failure; return if it is one.

    Args:
        error: The exception that was caught.

    Raises:
        BaseException: ``error`` ends the program, a thread or a task, or was caused by an exception
            that a signal handler raised. In the second case that exception is raised.
    """
    found = error if _is_exit(error) else interruption(error)
    if found is None:
        return
    try:
        raise found
    finally:
        del error, found  # their traceback holds this frame


def _is_exit(error: BaseException) -> bool:
    """True if an exception, or one of a group, ends a program, a thread or a task."""
    if isinstance(error, BaseExceptionGroup):
        return error.subgroup(_EXITS) is not None
    return isinstance(error, _EXITS)


def interruption(error: BaseException) -> BaseException | None:
    """The exception of a signal handler that caused ``error``; ``None`` if there is none.

    Such an exception has a registered handler in its traceback. Python also chains an error to the
    exception that a caller was handling at that time. That exception did not cause the error, and
    is left out.

    Args:
        error: The exception that was caught.
    """
    handlers = set(_handlers())
    if not handlers:
        return None
    callers = set(_callers(sys._getframe(1)))
    for each in chained(error):
        frames = [frame for frame, _ in traceback.walk_tb(each.__traceback__)]
        within = each is error or not callers.intersection(frames[:1])
        if within and any(frame.f_code in handlers for frame in frames):
            return each
    return None


def _handlers() -> Iterator[CodeType]:
    """The code of all signal handlers that are written in Python."""
    for number in signal.valid_signals():
        handler: Any = signal.getsignal(number)
        while isinstance(handler, functools.partial):
            handler = handler.func
        if callable(handler) and not hasattr(handler, "__code__"):  # a bound method has it, too
            handler = getattr(type(handler), "__call__", None)  # noqa: B004  # of an object
        code = getattr(handler, "__code__", None)
        if isinstance(code, CodeType):
            yield code


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
