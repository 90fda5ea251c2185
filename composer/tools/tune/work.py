"""Does one job in a child process: compiles a model, calls it once, and returns the result.

The verdict is kept as for any user who asks for the fastest engine. If there is a verdict already,
nothing is measured again, so a plan that was interrupted can continue.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from typing import Any

import torch

from composer import config, session
from composer.errors import Refusal, SandboxRefusal, error_line, first_line, text_of
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
    except SandboxRefusal as ended:
        last = next((line for line in reversed(ended.traceback.splitlines()) if line.strip()), "")
        told = (first_line(text_of(ended)), *([first_line(last)] if last else []))
        done = {"graphs": [], "error": f"{ended.reason}: {'; '.join(told)}"}
    except Refusal as ended:
        done = {"graphs": [], "error": f"{ended.reason}: {first_line(text_of(ended))}"}
    return {"job": str(job.workload), **done, "seconds": round(time.perf_counter() - began, 3)}


def measure(payload: bytes, ready: Callable[[], None]) -> dict[str, Any]:
    """Build a model, compile it with ``select = "fastest"``, and call it; runs in the child."""
    job: Job = pickle.loads(payload)
    ready()
    session.current().fills_store = True
    error = ""
    try:
        _compile_and_call(job)
    except Exception as raised:  # noqa: BLE001  # the user's model may raise anything: recorded
        error = error_line(raised)
    rows = [_row(each) for each in session.current().reports()]
    if not rows and not error:
        error = "nothing was compiled"
    unkept = (f"graph {row['graph']}: {row['unkept']}" for row in rows if row["unkept"])
    return {"graphs": rows, "error": error or next(unkept, "")}


def _compile_and_call(job: Job) -> None:
    subject = job.workload.build()
    asked = {**job.options, "locked": False}
    select = {"by": "fastest", "background": False}
    with config.using(**asked), config.using(select=select), torch.set_grad_enabled(job.training):
        compiled = torch.compile(subject.model, backend="composer", dynamic=job.dynamic)
        subject.call(compiled)


def _row(report: CompileReport) -> dict[str, Any]:
    """Return which engine serves a graph and its times; ``why`` says why there are none.

    ``unkept`` says why the verdict could not be put where other processes look for it.
    """
    timing = _timing(report)
    measured = timing if isinstance(timing, dict) else {}
    trouble = session.current().unkept.get(report.graph_key, _KEEPS_NONE) if measured else ""
    return {
        "model": report.model,
        "graph": report.label,
        "key": report.graph_key,
        "device": report.device,
        "dtype": report.dtype,
        "training": report.training,
        "chosen": report.chosen,
        "timing": measured,
        "remembered": "remembered_in" in measured,
        "unkept": trouble and f"the verdict was not kept: {trouble}",
        "why": timing if isinstance(timing, str) else "",
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
    timings = (each.timing for each in report.attempts)
    beside = next((each for each in timings if isinstance(each, dict)), {})
    own = {name: beside[name] for name in _OF_ALL if name in beside}
    return {**own, "ms": own["eager_ms"]} if "eager_ms" in own else None


_KEEPS_NONE = "the policy has none remembered (strict, or [cache] verdicts = 0)"

_OF_ALL = ("eager_ms", "seconds", "under_load", "measured", "remembered_in")
"""The entries of a candidate's times that are the same for all candidates."""
