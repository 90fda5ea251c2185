"""Exceptions that are no failure of what they came through: the program's own interruptions.

That is what ends a program, a thread or a generator, and what the handler of a signal raises. Job
queues end a task so when its time is up: Celery raises ``SoftTimeLimitExceeded``, an ``Exception``
like any other. It may come at any line, one of an engine's as well.

All else is a failure, an ``Exception`` or not: engines written in Rust raise
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


class ProcessEnds(BaseException):
    """Ends composer's background thread, since the process is ending."""


_EXITS = (KeyboardInterrupt, SystemExit, GeneratorExit, CancelledError, ProcessEnds)


def pass_on(error: BaseException) -> None:
    """Raise what is no failure: an exit, or what a signal's handler raised and it came of."""
    found = error if _is_exit(error) else interruption(error)
    if found is None:
        return
    try:
        raise found
    finally:
        del error, found  # whose traceback holds this frame


def _is_exit(error: BaseException) -> bool:
    """Whether it ends a program, a thread or a task, by itself or among a group's."""
    if isinstance(error, BaseExceptionGroup):
        return error.subgroup(_EXITS) is not None
    return isinstance(error, _EXITS)


def interruption(error: BaseException) -> BaseException | None:
    """What a signal's handler raised and ``error`` came of; ``None`` where it came of no such.

    It has a handler that is registered now in its traceback. Python also chains an error to what
    the program, further out, was handling when it was raised; that has led to nothing.
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
    """What runs when a signal comes, where that is written in Python."""
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
