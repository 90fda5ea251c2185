"""Candidates in a sandbox, a child process: an engine that crashes or hangs does so there.

A parcel (:mod:`~composer.chain.sandbox.parcel`) takes the graph, its inputs and its candidates to
the sandbox, which tries them (:mod:`~composer.chain.sandbox.isolated`).
:mod:`composer.system.subprocesses` starts, limits and ends sandboxes.

- :func:`build_in_child` is ``isolate = true``: one candidate is built and run once before the
  caller builds it in its own process.
- :func:`~composer.chain.sandbox.decide.decide` tries all candidates of a chain and measures them,
  where composer chooses. The caller then builds the one that has won, from the artefacts that the
  sandbox has left on disk.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from composer.build import Precision
from composer.chain.candidates import ChainEntry
from composer.chain.sandbox import parcel
from composer.chain.sandbox.decide import Undecided, decide
from composer.chain.sandbox.parcel import surroundings
from composer.passes.resolve import SharedPasses
from composer.records import GraphRequest
from composer.system import subprocesses

__all__ = ["Undecided", "build_in_child", "decide", "surroundings"]


def build_in_child(
    request: GraphRequest,
    entry: ChainEntry,
    precision: Precision,
    shared: SharedPasses,
) -> dict[str, Any]:
    """Build a candidate in a sandbox, and run it once there.

    Args:
        request: The graph, rewritten to the candidate's precision; neither it nor its tensors are
            changed.
        entry: The candidate. The limits of its build hold for the build and the run in the sandbox;
            the start of the child process is not counted.
        precision: The precision that its engine is asked for.
        shared: The passes of the later stages.

    Returns:
        What the record says of it.

    Raises:
        Refusal: ``crashed``, ``timed_out``, ``failed`` with ``out_of_memory``, ``declined`` with
            ``not_isolatable``; or the refusal of the attempt in the sandbox.
    """
    started = time.perf_counter()
    alone = dataclasses.replace(entry, bounds=None, told=precision, tentative=False)
    with parcel.Memory() as memory:
        payload = parcel.pack(parcel.case(request, [alone], shared), memory)
        answer = subprocesses.ask(parcel.WORK, payload, entry.limits)
    # If Dynamo is to capture the graph anew, or a pass fails, the build in this process says so.
    for attempt in [] if "unfinished" in answer else parcel.attempts_of(answer):
        if not attempt.accepted:
            raise parcel.refusal_of(attempt)
    return {"seconds": round(time.perf_counter() - started, 3)}
