"""Warns once for each reason that something the user asked for does not run.

composer gives a ``FallbackWarning`` and a ``WARNING`` log line for a candidate that was not
accepted, and for a pass that was rolled back. It does so the first time for each backend and
reason. It also warns of each graph that ``composer.lock`` does not know, of misspelt environment
variables, since they have no effect, and of each compile that came late
(:mod:`composer.telemetry.late_compiles`).

There is no warning for:

- an engine of the default chain that is not installed, or that is known to have failed for the
  graph, if another engine serves the graph: the user did not ask for it by name;
- a candidate that was skipped for another reason;
- an engine that was slower in a measurement;
- a candidate that ``precision = "auto"`` tried in low precision and did not choose.
"""

from __future__ import annotations

import logging
import os

from composer.errors import FallbackWarning, LateCompileWarning
from composer.records import EAGER, Attempt, CompileReport, Reason, Status
from composer.registry import nearest
from composer.system import distribution
from composer.system.warned import warn_once

logging.getLogger("composer").addHandler(logging.NullHandler())

_PREFIX = "COMPOSER_"

VARIABLES = (
    *("COMPOSER_CACHE_DIR", "COMPOSER_CHAIN", "COMPOSER_CONFIG", "COMPOSER_DISABLE"),
    *("COMPOSER_DUMP", "COMPOSER_DUMP_DATA", "COMPOSER_DUMP_FORMAT"),
    *("COMPOSER_SELECT", "COMPOSER_SINKS"),
    *("COMPOSER_STRICT", "COMPOSER_TELEMETRY", "COMPOSER_TELEMETRY_MAX_BYTES"),
    "COMPOSER_VERDICT_STORE",
)
"""All environment variables that composer reads."""

_ALIKE = 0.8
"""How similar another name must be to one of them, without the prefix, to count as misspelt.

PHP's package manager Composer uses the same prefix; its most similar variable reaches 0.64."""


def warn_of_fallbacks(report: CompileReport, *, asked_by_name: bool) -> None:
    """Warn of the candidates that were not accepted.

    Args:
        report: The report of the compile.
        asked_by_name: True if the user wrote the chain, false for the default chain.
    """
    missed = asked_by_name or report.chosen == EAGER
    for attempt in report.attempts:
        if _deserves_warning(attempt, missed=missed):
            text = f"{attempt.sentence()}; graph {report.label} runs on {report.chosen}"
            _warn(text, about=f"{attempt.backend} {attempt.reason}")


def _deserves_warning(attempt: Attempt, *, missed: bool) -> bool:
    """Return true by the rules at the head of this module.

    ``missed`` is true if the user asked for the engine, or if no other engine serves the graph.
    """
    if attempt.tentative and attempt.reason is not Reason.RAISED_AT_RUNTIME:
        return False
    if attempt.status is Status.UNAVAILABLE:
        return missed
    if attempt.status is Status.SKIPPED:
        return missed and attempt.reason is Reason.KNOWN_FAILURE
    return attempt.status not in (Status.SUCCEEDED, Status.NOT_CHOSEN)


def warn_of_passes(report: CompileReport) -> None:
    """Warn of the passes that were rolled back, or had no graph to run on."""
    for each in report.passes:
        if each.error:
            text = f"{each.error}; graph {report.label} runs without it"
            _warn(text, about=f"{each.name} {each.error}")


def warn_of_lock(report: CompileReport) -> None:
    """Warn of a graph that ``composer.lock`` does not know, under ``locked = "warn"``."""
    if report.lock is None or not report.lock.unlocked:
        return
    without = f"graph {report.label} runs on {report.chosen}, as it would without a lock"
    _warn(f"{report.lock.unlocked}; {without}", about=f"composer.lock {report.graph_key}")


def warn_of_late_compile(report: CompileReport) -> None:
    """Warn of a compile that came when its function had settled."""
    if report.late is None:
        return
    waited = "" if report.waited is None else f"; a call waited {report.waited:.2f} s for it"
    reason = f"; Dynamo's reason: {report.recompiled}" if report.recompiled else ""
    text = f"graph {report.label} of {report.model} was compiled {report.late}{waited}{reason}"
    warn_once(LateCompileWarning(text), may_raise=True)


def warn_of_environment() -> None:
    """Warn of another package in composer's folder, and of misspelt environment variables."""
    clash = distribution.conflict()
    if clash:
        _warn(clash)
    known = [each.removeprefix(_PREFIX) for each in VARIABLES]
    for name in sorted(os.environ.keys() - set(VARIABLES)):
        if not name.startswith(_PREFIX):
            continue
        meant = nearest(name.removeprefix(_PREFIX), known, _ALIKE)
        if meant:
            text = f"{name} is set, which nobody reads; did you mean {_PREFIX}{meant}?"
            _warn(text)


def warn_of_mistake(mistake: str) -> None:
    """Warn of a user's mistake that is ignored because ``COMPOSER_DISABLE`` is set.

    Args:
        mistake: The mistake; empty if there is none.
    """
    if mistake:
        text = f"{_SWITCH} is on, and a mistake is disregarded: {mistake}"
        _warn(text, about=_SWITCH)


_SWITCH = "COMPOSER_DISABLE"


def _warn(text: str, about: str = "") -> None:
    warn_once(FallbackWarning(text), about=about, may_raise=True)
