"""Warns once for each reason that something the user asked for does not run.

composer gives a ``FallbackWarning`` and a ``WARNING`` log line for a candidate that was not
accepted, and for a pass that was rolled back. It does so the first time for each backend and
reason. It also warns of misspelt environment variables, since they have no effect.

There is no warning for:

- an engine of the default chain that is not installed, or that is known to have failed for the
  graph, if another engine serves the graph: the user did not ask for it by name;
- a candidate that was skipped for another reason;
- an engine that was slower in a measurement;
- a candidate that ``precision = "auto"`` tried in bf16 and did not choose.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings

from composer.errors import FallbackWarning
from composer.records import EAGER, Attempt, CompileReport, Reason, Status
from composer.registry import nearest
from composer.system import distribution

log = logging.getLogger("composer")
log.addHandler(logging.NullHandler())

_PREFIX = "COMPOSER_"

VARIABLES = (
    *("COMPOSER_CACHE_DIR", "COMPOSER_CHAIN", "COMPOSER_CONFIG", "COMPOSER_DISABLE"),
    *("COMPOSER_DUMP", "COMPOSER_DUMP_FORMAT", "COMPOSER_SELECT", "COMPOSER_SINKS"),
    *("COMPOSER_STRICT", "COMPOSER_TELEMETRY", "COMPOSER_TELEMETRY_MAX_BYTES"),
    "COMPOSER_VERDICT_STORE",
)
"""All environment variables that composer reads."""

_ALIKE = 0.8
"""How similar another name must be to one of them, without the prefix, to count as misspelt.

PHP's package manager Composer uses the same prefix; its most similar variable reaches 0.64."""


def warn_of_fallbacks(
    report: CompileReport, warned: set[tuple[str, str]], *, asked_by_name: bool
) -> None:
    """Warn of the candidates that were not accepted.

    Args:
        report: The report of the compile.
        warned: Pairs of backend and reason without a further warning; new pairs are added.
        asked_by_name: True if the user wrote the chain, false for the default chain.
    """
    missed = asked_by_name or report.chosen == EAGER
    for attempt in report.attempts:
        if _deserves_warning(attempt, missed=missed):
            text = f"{attempt.sentence()}; graph {report.label} runs on {report.chosen}"
            _warn_once((attempt.backend, str(attempt.reason)), text, warned)


def _deserves_warning(attempt: Attempt, *, missed: bool) -> bool:
    """Return true by the rules at the head of this module.

    ``missed`` is true if the user asked for the engine, or if no other engine serves the graph.
    """
    if attempt.on_trial and attempt.reason is not Reason.RAISED_AT_RUNTIME:
        return False
    if attempt.status is Status.UNAVAILABLE:
        return missed
    if attempt.status is Status.SKIPPED:
        return missed and attempt.reason is Reason.KNOWN_FAILURE
    return attempt.status not in (Status.SUCCEEDED, Status.NOT_CHOSEN)


def warn_of_passes(report: CompileReport, warned: set[tuple[str, str]]) -> None:
    """Warn of the passes that were rolled back, or had no graph to run on.

    Args:
        report: The report of the compile.
        warned: Pairs of pass and error without a further warning; new pairs are added.
    """
    for each in report.passes:
        if each.error:
            text = f"{each.error}; graph {report.label} runs without it"
            _warn_once((each.name, each.error), text, warned)


def warn_of_environment(warned: set[tuple[str, str]]) -> None:
    """Warn of another package in composer's folder, and of misspelt environment variables.

    Args:
        warned: Pairs without a further warning; new pairs are added. A pair is a name, and the
            conflict or the variable that was meant.
    """
    clash = distribution.conflict()
    if clash:
        _warn_once((distribution.NAME, clash), clash, warned)
    known = [each.removeprefix(_PREFIX) for each in VARIABLES]
    for name in sorted(os.environ.keys() - set(VARIABLES)):
        if not name.startswith(_PREFIX):
            continue
        meant = nearest(name.removeprefix(_PREFIX), known, _ALIKE)
        if meant:
            text = f"{name} is set, which nobody reads; did you mean {_PREFIX}{meant}?"
            _warn_once((name, meant), text, warned)


def warn_of_mistake(mistake: str, warned: set[tuple[str, str]]) -> None:
    """Warn once of a user's mistake that is ignored because ``COMPOSER_DISABLE`` is set.

    Args:
        mistake: The mistake; empty if there is none.
        warned: Pairs without a further warning; the pair of ``COMPOSER_DISABLE`` is added.
    """
    if mistake:
        text = f"{_SWITCH} is on, and a mistake is disregarded: {mistake}"
        _warn_once((_SWITCH, ""), text, warned)


_SWITCH = "COMPOSER_DISABLE"


def _warn_once(key: tuple[str, str], text: str, warned: set[tuple[str, str]]) -> None:
    if key not in warned:
        log.warning("%s", text)
        warnings.warn(text, FallbackWarning, stacklevel=_users_stacklevel())
        warned.add(key)  # last, since a filter may turn the warning into an error


def _users_stacklevel() -> int:
    """Return the stack level of the user's code: the first frame outside torch and composer."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and _is_machinery(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    return level


def _is_machinery(module: str) -> bool:
    return module.partition(".")[0] in {"composer", "torch", "contextlib", "functools"}
