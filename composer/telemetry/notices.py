"""Warnings that something the user asked for does not run, once for each reason.

A candidate that was not accepted, and a pass that was rolled back, give a ``FallbackWarning`` and a
``WARNING`` line in the log, the first time for each backend and reason. Not warned of are engines
of the default chain that are missing on this machine, or known to have failed for the graph, while
another serves, since nobody asked for them by name; what was skipped for another cause; engines
that were measured to be slower, which is what measuring is for; and what ``precision = "auto"``
tried in bf16 and did not take. What a misspelt variable of the environment asks for does not happen
either, so that is warned of, too.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings

from composer.errors import FallbackWarning
from composer.records import EAGER, CompileReport, Reason, Status
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
"""All that composer reads."""

_ALIKE = 0.8
"""How like one of them another name must be, without the prefix, to be taken for a slip: PHP's
package manager has variables of the same prefix, the nearest of which comes to 0.64."""


def warn_of_fallbacks(
    report: CompileReport, warned: set[tuple[str, str]], *, asked_by_name: bool
) -> None:
    """Warn of the candidates that were not accepted.

    Args:
        report: The compile just done.
        warned: Pairs of backend and reason to be silent about; those warned of now are added.
        asked_by_name: Whether the user wrote the chain, rather than taking the default.
    """
    for attempt in report.attempts:
        what = attempt.backend, str(attempt.reason)
        # One that is absent, or was not tried again, is missed only if it was asked for, or if
        # nothing else serves.
        missed = asked_by_name or report.chosen == EAGER
        absent = attempt.status is Status.UNAVAILABLE and not missed
        skipped = attempt.status is Status.SKIPPED
        known = attempt.reason is Reason.KNOWN_FAILURE and missed
        unwanted = (skipped and not known) or attempt.status is Status.NOT_CHOSEN
        unwanted |= attempt.on_trial and attempt.reason is not Reason.RAISED_AT_RUNTIME
        if attempt.accepted or absent or unwanted or what in warned:
            continue
        _warn(f"{attempt.sentence()}; graph {report.label} runs on {report.chosen}")
        warned.add(what)  # not before: a filter may turn the warning into an error


def warn_of_passes(report: CompileReport, warned: set[tuple[str, str]]) -> None:
    """Warn of the passes that were rolled back, or had no graph to run on.

    Args:
        report: The compile just done.
        warned: Pairs of pass and error to be silent about; those warned of now are added.
    """
    for each in report.passes:
        if each.error and (each.name, each.error) not in warned:
            _warn(f"{each.error}; graph {report.label} runs without it")
            warned.add((each.name, each.error))


def warn_of_environment(warned: set[tuple[str, str]]) -> None:
    """Warn of another package in composer's folder, and of misspelt variables of composer's.

    Args:
        warned: Pairs of a name and what it collides with, to be silent about; those warned of now
            are added.
    """
    clash = distribution.conflict()
    if clash and (distribution.NAME, clash) not in warned:
        _warn(clash)
        warned.add((distribution.NAME, clash))
    known = [each.removeprefix(_PREFIX) for each in VARIABLES]
    for name in sorted(os.environ.keys() - set(VARIABLES)):
        own = name.removeprefix(_PREFIX)
        meant = nearest(own, known, _ALIKE) if own != name else None
        if meant and (name, meant) not in warned:
            _warn(f"{name} is set, which nobody reads; did you mean {_PREFIX}{meant}?")
            warned.add((name, meant))


def warn_of_mistake(mistake: str, warned: set[tuple[str, str]]) -> None:
    """Warn, once, of a mistake of the user's that ``COMPOSER_DISABLE`` has disregarded.

    Args:
        mistake: What it is; empty where there is none.
        warned: Pairs to be silent about; that of the switch is added.
    """
    if mistake and (_SWITCH, "") not in warned:
        _warn(f"{_SWITCH} is on, and a mistake is disregarded: {mistake}")
        warned.add((_SWITCH, ""))


_SWITCH = "COMPOSER_DISABLE"


def _warn(text: str) -> None:
    log.warning("%s", text)
    warnings.warn(text, FallbackWarning, stacklevel=_users_stacklevel())


def _users_stacklevel() -> int:
    """How many frames up the user's code is: the first that is neither torch's nor composer's."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and _is_machinery(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    return level


def _is_machinery(module: str) -> bool:
    return module.partition(".")[0] in {"composer", "torch", "contextlib", "functools"}
