"""A candidate failed on a graph, at a cost, so that later processes do not repeat it.

Only expensive failures are kept: a crash, a build that exceeded its ``timeout``, and a build that
failed after a second or more. A faster failure costs little to try again, and may not occur again.

Failures with causes that may soon be gone are not kept: lack of memory, a full disk, a child
process that was ended by ``SIGTERM`` or was slow to start. Failures whose cause is not part of the
fingerprint are not kept either: the system's compiler, a module that is not installed, the
recursion limit, warnings that are errors.

A child that was killed by ``SIGKILL`` is kept. Often the system killed it for lack of memory. The
next process would run the same risk, and might be killed instead of its child.
"""

from __future__ import annotations

from typing import ClassVar

from composer import _torch
from composer.errors import Refusal, SandboxRefusal, causes, chained, first_line
from composer.knowledge.facts import Fact
from composer.policy import Cache
from composer.records import Attempt, GraphRequest, Reason, Status
from composer.telemetry.report import counted

WORTH_SECONDS = 1.0
"""A failed build is remembered if it took at least this many seconds."""

REMEDY = "; `composer cache clear failures` has it tried again"
_TRACEBACK = 16_000
"""How many characters of a traceback are kept, from its end, where the error is."""
_BUILDS = (Reason.BUILD_FAILED, Reason.EXPORT_FAILED)


class Failure(Fact):
    """The record of a candidate that failed on a graph. Its fields are those of the attempt."""

    kind: ClassVar[str] = "failures"
    noun: ClassVar[str] = "failure"
    depends_on: ClassVar[tuple[str, ...]] = (
        *("graph", "engine", "options", "precision", "limits", "build"),
        *("machine", "versions"),
    )
    limit: ClassVar[int] = 16 << 20

    backend: str
    graph_key: str
    model: str
    device: str
    status: Status
    reason: Reason
    message: str
    error_type: str
    traceback: str
    seconds: float

    @staticmethod
    def of(request: GraphRequest, attempt: Attempt) -> Failure:
        """Return the failure that an attempt recorded."""
        assert attempt.reason is not None  # it failed
        return Failure(
            backend=attempt.backend,
            graph_key=request.graph_key,
            model=request.model,
            device=request.device,
            status=attempt.status,
            reason=attempt.reason,
            message=attempt.message,
            error_type=attempt.error_type,
            traceback=attempt.traceback[-_TRACEBACK:],
            seconds=attempt.seconds,
        )

    @classmethod
    def most_days(cls, settings: Cache) -> float:
        """Return the days of ``[cache] failures``."""
        return settings.failures

    def refusal(self) -> Refusal:
        """Return the refusal of a candidate that is known to fail."""
        line = first_line(self.message)
        message = f"{self.status} ({self.reason}) {_ago(self.age)}: {line}{REMEDY}"
        error = self.error_type, self.traceback
        return Refusal(Status.SKIPPED, Reason.KNOWN_FAILURE, message, *error)

    def sentence(self) -> str:
        """Return the candidate, the graph, and the result."""
        graph = f"{self.backend}  {self.model}  {self.device}"
        return f"{graph}  {self.status} ({self.reason})  {first_line(self.message)}"


def is_expensive(attempt: Attempt, error: BaseException) -> bool:
    """Return True if the failure of an attempt was expensive enough to be remembered.

    An error that is not an ``Exception`` is not remembered. It may have come from outside, such as
    a time limit that another thread set.
    """
    if isinstance(error, SandboxRefusal) and error.by_others:
        return False
    if attempt.status in (Status.CRASHED, Status.TIMED_OUT):
        return True
    if not isinstance(error, Exception):
        return False
    if any(isinstance(each, OSError) for each in causes(error)):
        return False
    if any(map(_is_the_environments, chained(error))):
        return False
    failed = attempt.status is Status.FAILED and attempt.reason in _BUILDS
    return failed and attempt.seconds >= WORTH_SECONDS


def _is_the_environments(error: BaseException) -> bool:
    """Return True if the build may succeed with another compiler, module, limit or filter."""
    theirs = RecursionError | Warning | ModuleNotFoundError
    return isinstance(error, theirs) or _torch.inductor.is_compilers(error)


def _ago(seconds: float) -> str:
    for unit, size in (("day", 86_400.0), ("hour", 3600.0), ("minute", 60.0)):
        number = int(seconds / size)
        if number:
            return f"{counted(number, unit)} ago"
    return "less than a minute ago"
