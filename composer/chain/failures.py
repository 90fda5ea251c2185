"""What failed in earlier processes, kept on disk, so that the next one does not pay for it again.

Only expensive failures are kept: a crash, a build that exceeded its ``timeout``, and one that
failed after a second or more. What fails sooner costs little to try again, and may work by then.
Causes that may be over a moment later do not count: memory that was short, a disk that was full, a
child process that somebody ended by ``SIGTERM`` or that was slow to start. Nor do those that are no
part of what a failure is known by: the system's compiler, the limit of recursion, warnings that are
errors. A child that was killed by
``SIGKILL`` counts, which is often the system's doing for want of memory: the next process would run
the same risk, and it may not be the child that is killed.
"""

from __future__ import annotations

import platform
import time
from typing import Any

import torch

from composer import _torch, session
from composer.backends.base import Backend, BuildFacts
from composer.errors import Refusal, SandboxRefusal, causes, chained, first_line
from composer.policy import Candidate
from composer.records import Attempt, GraphRequest, Reason, Status
from composer.system import distribution
from composer.system.disk import DiskCache, digest_of, this_process
from composer.system.distribution import version_of

WORTH_SECONDS = 1.0
"""A failed build is remembered if it took so long."""
REMEDY = "; `composer cache clear failures` has it tried again"
DAY = 86_400.0
_LIMIT = 16 << 20
_TRACEBACK = 16_000
"""Characters of a traceback that are kept: its end, where the error is."""
_BUILDS = (Reason.BUILD_FAILED, Reason.EXPORT_FAILED)


def cache() -> DiskCache:
    """The disk cache that failures are kept in."""
    return DiskCache("failures", limit=_LIMIT)


def key_of(
    request: GraphRequest,
    candidate: Candidate,
    backend: Backend,
    limits: object,
    precision: str | None = None,
) -> str | None:
    """SHA-256 of all that a failure depends on: equal where the same one is to be expected.

    Args:
        request: The graph; its key covers shapes, passes and the policy's settings.
        candidate: The entry of the chain.
        backend: Its engine.
        limits: What its build may take.
        precision: What it computes in, where the policy says so.

    Returns:
        ``None`` where the engine has no :meth:`~composer.backends.base.Backend.identity`.
    """
    identity = backend.identity()
    if identity is None:
        return None
    facts = {
        "graph": request.graph_key,
        "backend": [candidate.name, identity],
        "options": repr(sorted(candidate.options.items())),
        "mode": request.mode,
        "limits": repr(limits),
        "versions": [version_of(distribution.NAME), torch.__version__, platform.python_version()],
        "device": _device(request.device),
        **({"precision": precision} if precision else {}),
    }
    return digest_of(facts)


def refuse_known(key: str | None, days: float, facts: BuildFacts) -> None:
    """Refuse what failed no longer than ``days`` ago.

    Failures of this process itself count until :func:`composer.reset`. Those from more than a day
    ahead do not count: the clock was wrong, and nobody knows how old they are.

    Args:
        key: Of :func:`key_of`.
        days: How long a failure is remembered.
        facts: Of the attempt, where it is said if the failures cannot be read.

    Raises:
        Refusal: ``skipped`` with ``known_failure``, and the traceback of that time.
    """
    if key is None:
        return
    kept = cache()
    entry = kept.get(key)
    if kept.trouble:
        facts.extra["failures"] = kept.trouble
    if entry is None:
        return
    age = time.time() - entry.written
    own = entry.facts.get("process") == this_process()
    if not -DAY < age <= days * DAY or (own and key not in session.current().failures):
        return
    told = entry.facts
    said = first_line(told["message"])
    what = f"{told['status']} ({told['reason']}) {_ago(age)}: {said}{REMEDY}"
    raise Refusal(Status.SKIPPED, Reason.KNOWN_FAILURE, what, told["error_type"], told["traceback"])


def is_expensive(attempt: Attempt, error: BaseException) -> bool:
    """Whether a failure was expensive enough to be remembered.

    What is no ``Exception`` may have come from outside: a time limit that another thread set.

    Args:
        attempt: What became of the candidate.
        error: What ended it.
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
    """Whether another compiler, limit or filter of warnings may have the same build succeed."""
    return isinstance(error, RecursionError | Warning) or _torch.inductor.is_compilers(error)


def remember(key: str | None, request: GraphRequest, attempt: Attempt) -> None:
    """Keep a failure for this process and others.

    Args:
        key: Of :func:`key_of`.
        request: The graph.
        attempt: What became of the candidate; where it cannot be kept, its record says why.
    """
    if key is None:
        return
    facts = {
        "process": this_process(),
        "backend": attempt.backend,
        "graph_key": request.graph_key,
        "model": request.model,
        "device": request.device,
        "status": str(attempt.status),
        "reason": str(attempt.reason),
        "message": attempt.message,
        "error_type": attempt.error_type,
        "traceback": attempt.traceback[-_TRACEBACK:],
        "seconds": attempt.seconds,
        "torch": torch.__version__,
    }
    kept = cache()
    if kept.put(key, facts):
        session.current().failures.add(key)
    else:
        attempt.engine["failures"] = kept.trouble


def _ago(seconds: float) -> str:
    for unit, size in (("day", DAY), ("hour", 3600.0), ("minute", 60.0)):
        number = int(seconds / size)
        if number:
            return f"{number} {unit}{'s' if number > 1 else ''} ago"
    return "less than a minute ago"


def _device(device: str) -> list[Any]:
    """The kind of machine: several machines may share one cache."""
    if device.startswith("cuda") and torch.cuda.is_available():
        return [torch.cuda.get_device_name(device), *torch.cuda.get_device_capability(device)]
    return [device.partition(":")[0], platform.machine(), torch.backends.cpu.get_cpu_capability()]
