"""Does one job in a child process: compiles a model, calls it once, and returns the result.

The verdict is kept as for any user who asks for the fastest engine. If there is a verdict already,
nothing is measured again, so a plan that was interrupted can continue.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from composer import session
from composer.errors import Refusal, SandboxRefusal, error_line, first_line, text_of
from composer.policy import sources
from composer.records import CompileReport
from composer.system import hardware, subprocesses
from composer.tools.tune.plan import Job


def this_machine() -> str:
    """Return a description of the machine; it is equal on machines that can share verdicts."""
    return ", ".join(hardware.describe("cuda" if torch.cuda.is_available() else "cpu"))


def perform(job: Job, limits: subprocesses.Limits) -> dict[str, Any]:
    """Do a job in a child process.

    Returns:
        A dict of ``job``, ``graphs`` (the result of :func:`_row` for each), ``seconds``, and
        ``error``, which is empty if there was none.
    """
    began = time.perf_counter()
    try:
        done = subprocesses.ask("composer.tools.tune.work:measure", pickle.dumps(job), limits)
    except Refusal as refusal:
        lines = [first_line(text_of(refusal))]
        if isinstance(refusal, SandboxRefusal):
            child = [line for line in refusal.traceback.splitlines() if line.strip()]
            lines += map(first_line, child[-1:])
        done = {"graphs": [], "error": f"{refusal.reason}: {'; '.join(lines)}"}
    return {"job": str(job.workload), **done, "seconds": round(time.perf_counter() - began, 3)}


def measure(payload: bytes, ready: Callable[[], None]) -> dict[str, Any]:
    """Build a model, compile it with ``select = "fastest"``, and call it; runs in the child."""
    job: Job = pickle.loads(payload)
    ready()
    session.current().knowledge.fills_store = True
    error = ""
    try:
        _compile_and_call(job)
    except Exception as raised:  # noqa: BLE001  # the user's model may raise anything: recorded
        error = error_line(raised)
    rows = [_row(each) for each in session.current().reports()]
    return {"graphs": rows, "error": error or _trouble(rows)}


def _trouble(rows: Sequence[dict[str, Any]]) -> str:
    """Return why the verdicts of a job are not complete; empty if they are."""
    if not rows:
        return "nothing was compiled"
    for row in rows:
        if row["unkept"]:
            return f"graph {row['graph']}: {row['unkept']}"
    return ""


def _compile_and_call(job: Job) -> None:
    subject = job.workload.build()
    asked = {**job.options, "locked": False}
    select = {"by": "fastest", "background": False}
    with sources.using(**asked), sources.using(select=select), torch.set_grad_enabled(job.training):
        compiled = torch.compile(subject.model, backend="composer", dynamic=job.dynamic)
        subject.call(compiled)


def _row(report: CompileReport) -> dict[str, Any]:
    """Return which engine serves a graph and its times; ``why`` says why there are none.

    ``unkept`` says why the verdict could not be put where other processes look for it.
    """
    found = _timing(report)
    timing = found if isinstance(found, dict) else {}
    unkept = ""
    if timing:
        trouble = session.current().knowledge.unkept.get(report.graph_key, _KEEPS_NONE)
        unkept = trouble and f"the verdict was not kept: {trouble}"
    return {
        "model": report.model,
        "graph": report.label,
        "key": report.graph_key,
        "device": report.device,
        "dtype": report.dtype,
        "training": report.training,
        "chosen": report.chosen,
        "timing": timing,
        "remembered": "remembered_in" in timing,
        "unkept": unkept,
        "why": found if isinstance(found, str) else "",
        "others": {a.backend: str(a.reason) for a in report.attempts if a.reason is not None},
    }


def _timing(report: CompileReport) -> Any:
    """Return the times of the engine that serves; its name may stand in the chain several times.

    If the captured graph serves and is not a candidate, its time is taken from the times of a
    candidate, which was measured against it.
    """
    for each in report.attempts:
        if each.accepted:
            return each.timing
    for each in report.attempts:
        if isinstance(each.timing, dict) and "eager_ms" in each.timing:
            common = {name: each.timing[name] for name in _OF_ALL if name in each.timing}
            return {**common, "ms": each.timing["eager_ms"]}
    return None


_KEEPS_NONE = "the policy has none remembered (strict, or [cache] verdicts = 0)"

_OF_ALL = ("eager_ms", "seconds", "under_load", "measured", "remembered_in")
"""The entries of a candidate's times that are the same for all candidates."""
