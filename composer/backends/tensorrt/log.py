"""TensorRT's log, which says why a method of TensorRT returned ``None`` or ``False``.

TensorRT uses one logger for the whole process: the first that it is given. So each library has one
logger, and code that needs the messages of an operation records them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from composer.errors import Refusal
from composer.records import Reason, Status
from composer.system import forks

_ERRORS = ("INTERNAL_ERROR", "ERROR")
_NO_DRIVER = ("cudaError 35", "failure with error: 35", "driver version is insufficient")
_NO_DEVICE = ("cudaError 100", "failure with error: 100", "no CUDA-capable device")
_NO_MEMORY = ("OutOfMemory", "out of memory", "Out of memory", "bad_alloc", "cudaError 2 ")


@dataclass(slots=True)
class Lines:
    """Severity and text of the messages that were logged during a recording."""

    said: list[tuple[str, str]] = field(default_factory=list)

    @property
    def first_error(self) -> str:
        """The first error message; empty if there was none.

        Without a driver, each error is followed by a message with "cudaError 35". In a build for
        another device that message is not an error. So it counts only if there is no other error.
        """
        errors = [text for severity, text in self.said if severity in _ERRORS]
        others = [text for text in errors if not _mentions(text, _NO_DRIVER)]
        first, *_ = others or errors or [""]
        return " ".join(first.split())

    def refusal(self, failure: str, reason: Reason = Reason.BUILD_FAILED) -> Refusal:
        """Return a refusal with the first error's message, and the reason that the message implies.

        The text says that ``failure`` happened. If the message implies no reason, it is ``reason``.
        """
        error = self.first_error
        message = f"{failure}: {error}" if error else f"{failure}; its log does not say why"
        if _mentions(error, _NO_DRIVER):
            remedy = "; the NVIDIA driver is missing or too old for this release of TensorRT"
            return Refusal(Status.UNAVAILABLE, Reason.DRIVER_MISSING, message + remedy)
        if _mentions(error, _NO_DEVICE):
            return Refusal(Status.UNAVAILABLE, Reason.NO_DEVICE, message)
        if _mentions(error, _NO_MEMORY):
            return Refusal(Status.FAILED, Reason.OUT_OF_MEMORY, message)
        return Refusal(Status.FAILED, reason, message)


def make_log(trt: Any) -> Any:
    """Return a logger for this library; it must live as long as all objects made with it."""

    class Log(trt.ILogger):  # type: ignore[misc]  # the base is only known at run time
        """Passes messages to all current recordings; prints nothing."""

        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self._recorders: tuple[Lines, ...] = ()
            self._lock = forks.lock()

        def log(self, severity: Any, msg: str) -> None:
            """Record a message. TensorRT calls this from any of its threads."""
            for each in self._recorders:
                each.said.append((severity.name, msg))

        @contextmanager
        def recording(self) -> Iterator[Lines]:
            """Record all messages while the context is open, from every thread."""
            lines = Lines()
            with self._lock:
                self._recorders = (*self._recorders, lines)
            try:
                yield lines
            finally:
                with self._lock:
                    self._recorders = tuple(e for e in self._recorders if e is not lines)

    return Log()


def _mentions(text: str, phrases: Iterable[str]) -> bool:
    return any(phrase in text for phrase in phrases)
