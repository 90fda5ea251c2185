"""``isolate = true``: a candidate is first built in a sandbox, a child process.

An engine that crashes or hangs does so there. :func:`build_in_child` sends a parcel
(:mod:`~composer.chain.sandbox.parcel`) to a sandbox, which makes the attempt, runs the result once
(:mod:`~composer.chain.sandbox.isolated`), and ends. Only then does the caller build the candidate
in its own process. :mod:`composer.system.subprocesses` starts, limits and ends sandboxes. Some
engines start child processes by the same package.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from composer.backends.base import BuildTerms
from composer.chain.sandbox import parcel
from composer.errors import Refusal, SandboxRefusal, refuse, text_of
from composer.graphs import collectives
from composer.passes.resolve import SharedPasses
from composer.policy import Candidate
from composer.records import GraphRequest, Reason, Status
from composer.system import subprocesses


def build_in_child(
    request: GraphRequest, candidate: Candidate, min_coverage: float, terms: BuildTerms
) -> None:
    """Build the candidate in a sandbox, and run it once there.

    Args:
        request: The graph; neither it nor its tensors are changed.
        candidate: The candidate to build.
        min_coverage: Share of the graph that the engine has to take.
        terms: The terms of the build in this process. Their limits hold for the build and the run
            in the sandbox; the start of the child process is not counted.

    Raises:
        Refusal: ``crashed``, ``timed_out``, ``failed`` with ``out_of_memory``, ``declined`` with
            ``not_isolatable``; or the refusal of the attempt in the sandbox.
    """
    started = time.perf_counter()
    _build_apart(request, candidate, min_coverage, terms)
    terms.facts.extra["isolated"] = {"seconds": round(time.perf_counter() - started, 3)}


def _build_apart(
    request: GraphRequest, candidate: Candidate, min_coverage: float, terms: BuildTerms
) -> None:
    """Do what :func:`build_in_child` does, without a note in the facts of the attempt."""
    if collectives.meets_other_ranks(request.gm):
        message = "the graph has collectives, and a child process is no rank"
        refuse(Status.DECLINED, Reason.NOT_ISOLATABLE, message)
    shared = terms.late.shared if terms.late else SharedPasses()
    contents = {
        f"the backend {candidate.name!r}": candidate.backend,
        "its options": candidate.options,
        "the shared passes": shared if shared.late else SharedPasses(),
        "the graph": (request.gm, parcel.inputs_to_send(request.example_inputs)),
        "its surroundings": {
            "torch": parcel.surroundings(),
            "mode": request.mode,
            "min_coverage": min_coverage,
            "precision": terms.precision,
            "freeze": terms.freeze,
        },
    }
    _judge(
        subprocesses.ask(
            "composer.chain.sandbox.isolated:attempt", parcel.pack(contents), terms.limits
        )
    )


def try_in_child(
    request: GraphRequest, candidate: Candidate, min_coverage: float, terms: BuildTerms
) -> float:
    """Build the candidate in a sandbox, to learn if it would end this process or hang in it.

    Nobody asked for isolation here. So no other outcome counts: the build in this process follows,
    as without a sandbox, and has its own outcome. ``memory_limit`` is not applied.

    Args:
        request: As for :func:`build_in_child`.
        candidate: As for :func:`build_in_child`.
        min_coverage: As for :func:`build_in_child`.
        terms: As for :func:`build_in_child`.

    Returns:
        The seconds that it took.

    Raises:
        Refusal: ``crashed`` or ``timed_out``.
    """
    started = time.perf_counter()
    limits = dataclasses.replace(terms.limits, memory=None)
    why_not = ""
    try:
        _build_apart(request, candidate, min_coverage, dataclasses.replace(terms, limits=limits))
    except (Refusal, OSError) as error:  # OSError: there is no process left for a sandbox
        if _is_engines_end(error):
            raise
        why_not = text_of(error)
    seconds = time.perf_counter() - started
    told: dict[str, Any] = {"seconds": round(seconds, 3)}
    terms.facts.extra["tried_apart"] = told | ({"why_not": why_not} if why_not else {})
    return seconds


def _is_engines_end(error: Exception) -> bool:
    """Return True if the engine itself ended the sandbox, or did not come to an end in it."""
    if not isinstance(error, SandboxRefusal) or error.by_others:
        return False
    return error.status in (Status.CRASHED, Status.TIMED_OUT)


def _judge(attempt: dict[str, Any]) -> None:
    """Raise the refusal with which the attempt in the sandbox ended, if it failed."""
    if attempt["status"] == Status.SUCCEEDED:
        return
    status, reason = Status(attempt["status"]), Reason(attempt["reason"])
    message = attempt["message"]
    if reason is Reason.NOT_REGISTERED:  # it is registered here: the caller's own probe found it
        status, reason = Status.DECLINED, Reason.NOT_ISOLATABLE
        message = f"in a child process {message}"
    raise SandboxRefusal(status, reason, message, attempt["error_type"], attempt["traceback"])
