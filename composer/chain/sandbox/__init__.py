"""``isolate = true``: a candidate is first built in a sandbox, a child process.

An engine that crashes or hangs does so there. :func:`build_in_child` sends a parcel
(:mod:`~composer.chain.sandbox.parcel`) to a sandbox, which makes the attempt, runs the result once
(:mod:`~composer.chain.sandbox.isolated`), and ends. Only then does the caller build the candidate
in its own process. :mod:`composer.system.subprocesses` starts, limits and ends sandboxes. Some
engines start child processes by the same package.
"""

from __future__ import annotations

import time
from typing import Any

from composer.backends.base import BuildTerms
from composer.chain.sandbox import parcel
from composer.errors import SandboxRefusal, refuse
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
    if collectives.meets_other_ranks(request.gm):
        message = "the graph has collectives, and a child process is no rank"
        refuse(Status.DECLINED, Reason.NOT_ISOLATABLE, message)
    started = time.perf_counter()
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
    terms.facts.extra["isolated"] = {"seconds": round(time.perf_counter() - started, 3)}


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
