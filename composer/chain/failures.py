"""Keeps failures on disk, so that later processes do not repeat them.

Only expensive failures are kept: a crash, a build that exceeded its ``timeout``, and a build that
failed after a second or more. A faster failure costs little to try again, and may not occur again.

Failures with causes that may soon be gone are not kept: lack of memory, a full disk, a child
process that was ended by ``SIGTERM`` or was slow to start. Failures whose cause is not part of the
key are not kept either: the system's compiler, a module that is not installed, the recursion limit,
warnings that are errors.

A child that was killed by ``SIGKILL`` is kept. Often the system killed it for lack of memory. The
next process would run the same risk, and might be killed instead of its child.
"""

from __future__ import annotations

import dataclasses
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
from composer.telemetry.report import counted

WORTH_SECONDS = 1.0
"""A failed build is remembered if it took at least this many seconds."""
REMEDY = "; `composer cache clear failures` has it tried again"
DAY = 86_400.0
_LIMIT = 16 << 20
_TRACEBACK = 16_000
"""How many characters of a traceback are kept, from its end, where the error is."""
_BUILDS = (Reason.BUILD_FAILED, Reason.EXPORT_FAILED)


def cache() -> DiskCache:
    """The disk cache that failures are kept in."""
    return DiskCache("failures", limit=_LIMIT)


def key_of(
    request: GraphRequest,
    candidate: Candidate,
    backend: Backend,
    limits: object,
    precision: str | None,
) -> str | None:
    """Return the SHA-256 of everything that a failure depends on.

    Args:
        request: The graph; its key covers shapes, passes and the policy's settings.
        candidate: The entry of the chain.
        backend: The candidate's engine. Without an identity of it, the key is ``None``.
        limits: The limits of its build.
        precision: Its precision, if the policy asks for one.
    """
    identity = backend.identity()
    if identity is None:
        return None
    facts: dict[str, Any] = {
        "graph": request.graph_key,
        "backend": [candidate.name, identity],
        "options": repr(sorted(candidate.options.items())),
        "mode": request.mode,
        "limits": repr(limits),
        "versions": [version_of(distribution.NAME), torch.__version__, platform.python_version()],
        "device": _device(request.device),
    }
    if precision:
        facts["precision"] = precision
    return digest_of(facts)


def refuse_known(key: str | None, days: float, facts: BuildFacts) -> None:
    """Refuse a candidate that failed at most ``days`` days ago.

    Failures of this process itself count until :func:`composer.reset`. Failures dated more than a
    day in the future do not count: a clock was wrong, and their age is unknown.

    Args:
        key: The result of :func:`key_of`.
        days: How long a failure is remembered.
        facts: The facts of the attempt, which say if the failures cannot be read.

    Raises:
        Refusal: ``skipped`` with ``known_failure``, and the traceback of the kept failure.
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
    if not -DAY < age <= days * DAY:
        return
    known = entry.facts
    is_own = known.get("process") == this_process()
    if is_own and key not in session.current().failures:
        return
    line = first_line(known["message"])
    message = f"{known['status']} ({known['reason']}) {_ago(age)}: {line}{REMEDY}"
    error = known["error_type"], known["traceback"]
    raise Refusal(Status.SKIPPED, Reason.KNOWN_FAILURE, message, *error)


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


def remember(key: str | None, request: GraphRequest, attempt: Attempt) -> Attempt:
    """Keep a failure for this process and others.

    Args:
        key: The result of :func:`key_of`.
        request: The graph.
        attempt: The candidate's record.

    Returns:
        The record, which says why if the failure cannot be kept.
    """
    if key is None:
        return attempt
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
        return attempt
    engine = {**attempt.engine, "failures": kept.trouble}
    return dataclasses.replace(attempt, engine=engine)


def _ago(seconds: float) -> str:
    for unit, size in (("day", DAY), ("hour", 3600.0), ("minute", 60.0)):
        number = int(seconds / size)
        if number:
            return f"{counted(number, unit)} ago"
    return "less than a minute ago"


def _device(device: str) -> list[Any]:
    """Return the kind of machine, since several machines may share one cache."""
    if device.startswith("cuda") and torch.cuda.is_available():
        return [torch.cuda.get_device_name(device), *torch.cuda.get_device_capability(device)]
    return [device.partition(":")[0], platform.machine(), torch.backends.cpu.get_cpu_capability()]
