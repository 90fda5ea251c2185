"""composer: one ``torch.compile`` backend that tries several engines and says what happened.

``torch.compile(model, backend="composer")`` tries TensorRT, Inductor and ONNX Runtime in turn,
checks that the engine it accepts did the work, and runs the captured graph itself when none can.
:func:`report` shows who ran and why the others did not.
"""

from __future__ import annotations

from composer import errors, passes, testing
from composer.book import PolicyBook, using
from composer.explain import explain
from composer.lowering.weights import refresh
from composer.policy import Candidate, Policy
from composer.records import Attempt, CompileReport, Reason, Status
from composer.session import configure, reset
from composer.session import current as _current
from composer.telemetry.report import Report as _Report

__all__ = [
    "Attempt",
    "Candidate",
    "CompileReport",
    "Policy",
    "PolicyBook",
    "Reason",
    "Status",
    "configure",
    "errors",
    "explain",
    "passes",
    "refresh",
    "report",
    "reports",
    "reset",
    "testing",
    "using",
]


def reports() -> tuple[CompileReport, ...]:
    """The records of the last 1,000 compiled graphs, oldest first."""
    return _current().reports()


def report(last: int | None = None) -> _Report:
    """The report of this process; ``str()`` is the table that a person reads.

    Args:
        last: How many of the newest graphs to show; all that are kept by default.

    Raises:
        ValueError: ``last`` is negative.
    """
    if last is not None and last < 0:
        raise ValueError(f"last is a number of graphs, not {last}")
    kept = reports()
    return _Report(kept if last is None else kept[len(kept) - min(last, len(kept)) :])
