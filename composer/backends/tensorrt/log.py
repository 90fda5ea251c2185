"""What TensorRT says of its failures: its methods return ``None`` or ``False``, its log says why.

TensorRT keeps one logger for the whole process, the first that it is given. So there is one for
each library, and whoever wants to know what was said meanwhile records it.
"""

from __future__ import annotations

from collections.abc import Iterator
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
    """Severity and text of what was logged while this was recording."""

    said: list[tuple[str, str]] = field(default_factory=list)

    @property
    def first_error(self) -> str:
        """The first error, empty if there was none.

        Without a driver every error is followed by a line on "cudaError 35", and in builds for
        another device that is no error at all; it counts only where there is no other.
        """
        errors = [text for severity, text in self.said if severity in _ERRORS]
        telling = [text for text in errors if not any(each in text for each in _NO_DRIVER)]
        return _one_line((telling or errors or [""])[0])

    def refusal(self, what: str, reason: Reason = Reason.BUILD_FAILED) -> Refusal:
        """What failed as an error of ours, with the first error's words and the reason they give.

        Args:
            what: What was being done.
            reason: The reason where the words give no better one.
        """
        error = self.first_error
        message = f"{what}: {error}" if error else f"{what}; its log does not say why"
        if any(each in error for each in _NO_DRIVER):
            remedy = "; the NVIDIA driver is missing or too old for this release of TensorRT"
            return Refusal(Status.UNAVAILABLE, Reason.DRIVER_MISSING, message + remedy)
        if any(each in error for each in _NO_DEVICE):
            return Refusal(Status.UNAVAILABLE, Reason.NO_DEVICE, message)
        if any(each in error for each in _NO_MEMORY):
            return Refusal(Status.FAILED, Reason.OUT_OF_MEMORY, message)
        return Refusal(Status.FAILED, reason, message)


def make_log(trt: Any) -> Any:
    """A logger for this library; it must live as long as everything that is made with it."""

    class Log(trt.ILogger):  # type: ignore[misc]  # the base is only known at run time
        """Passes what is said on to whoever records; prints nothing."""

        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self._recorders: tuple[Lines, ...] = ()
            self._lock = forks.lock()

        def log(self, severity: Any, msg: str) -> None:
            """Called by TensorRT, from any of its threads."""
            for each in self._recorders:
                each.said.append((severity.name, msg))

        @contextmanager
        def recording(self) -> Iterator[Lines]:
            """Record what is said, by whichever thread."""
            lines = Lines()
            with self._lock:
                self._recorders = (*self._recorders, lines)
            try:
                yield lines
            finally:
                with self._lock:
                    self._recorders = tuple(e for e in self._recorders if e is not lines)

    return Log()


def _one_line(text: str) -> str:
    return " ".join(text.split())
