"""The sinks of a process: which are on, and that none of them is ever the user's problem."""

from __future__ import annotations

import functools
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from composer.errors import OptionError, TelemetryWarning, class_and_text
from composer.records import CompileReport
from composer.registry import Registry, did_you_mean
from composer.system import control_flow, forks

log = logging.getLogger("composer")

OWN = {
    "jsonl": "composer.telemetry.jsonl:JsonLinesSink",
    "logging": "composer.telemetry.log:LoggingSink",
    "opentelemetry": "composer.telemetry.otel:OpenTelemetrySink",
    "prometheus": "composer.telemetry.prometheus:PrometheusSink",
    "torch_trace": "composer.telemetry.torch_trace:TorchTraceSink",
}
"""composer's own, each of which says by ``wanted`` when it is on. Those of other packages are on
when they are installed."""

SINKS: Registry[Any] = Registry("sink", OWN, group="composer.sinks")


class Sinks:
    """The sinks that are on: those the environment asks for, and those added by hand."""

    def __init__(self) -> None:
        self._lock = forks.lock()
        self._asked: tuple[str, ...] | None = None
        self._found: dict[str, Any] = {}
        self._added: list[Any] = []
        self._reported: set[str] = set()

    def add(self, sink: Any) -> None:
        """Give every record from now on to ``sink`` as well; one that is on already stays on."""
        with self._lock:
            if not any(sink is each for each in self._added):
                self._added.append(sink)

    def remove(self, sink: Any) -> None:
        """Give ``sink`` no more records. It is not closed: whoever made it has that to do."""
        with self._lock:
            self._added = [each for each in self._added if each is not sink]

    def emit(self, report: CompileReport, *, first: bool = True) -> None:
        """Give a report to every sink.

        Args:
            report: Of the compile just done.
            first: Whether it is the first of its graph, rather than one that changed.

        Raises:
            OptionError: ``COMPOSER_SINKS`` names a sink that there is not, or a sink cannot take
                what the environment says. Only for a first report: others come from calls, which
                have their answer.
        """
        with self._lock:
            if first:
                self._look_around()
            sinks = self._on()
        for name, sink in sinks:
            follow = getattr(sink, "follow", None)
            if first and follow is not None:
                self._guarded(name, functools.partial(follow, report))
            self._guarded(name, functools.partial(_emit, sink, report), raises=first)

    def close(self) -> None:
        """Have every sink write what it still has to."""
        with self._lock:
            for name, sink in self._on():
                self._close(name, sink)
            self._found, self._asked = {}, None

    def _on(self) -> list[tuple[str, Any]]:
        added = ((type(sink).__qualname__, sink) for sink in self._added)
        return [*self._found.items(), *added]

    def _look_around(self) -> None:
        """Make the sinks that the environment asks for, whenever what it says has changed."""
        asked = tuple(os.environ.get(name, "") for name in ("COMPOSER_SINKS", "COMPOSER_TELEMETRY"))
        if asked == self._asked:
            return
        named = _named(asked[0])
        for name in SINKS.names():
            self._guarded(name, functools.partial(self._look_for, name, named))
        self._asked = asked  # not before: a mistake is an error at every compile

    def _look_for(self, name: str, named: frozenset[str]) -> None:
        """Have the sink if it is wanted, and the same one as long as it is."""
        kind = SINKS.get(name)
        wanted = getattr(kind, "wanted", None)
        if wanted is None or wanted(name, named):
            if name not in self._found:
                self._found[name] = kind()
        elif name in self._found:
            self._close(name, self._found.pop(name))

    def _close(self, name: str, sink: Any) -> None:
        close = getattr(sink, "close", None)
        if close is not None:
            self._guarded(name, close)

    def _guarded(self, name: str, step: Callable[[], object], *, raises: bool = True) -> None:
        """Run a step of a sink; what it raises is warned of once.

        A mistake of the user's is raised, unless nobody asks for that (``raises``).
        """
        try:
            step()
        except BaseException as error:  # whatever a sink raises becomes a warning
            control_flow.pass_on(error)
            if raises and isinstance(error, OptionError):
                raise
            if name not in self._reported:
                self._reported.add(name)
                _warn(f"the sink {name!r} failed: {class_and_text(error)}", error)


def _emit(sink: Any, report: CompileReport) -> None:
    sink.emit(report.to_dict())


def _named(text: str) -> frozenset[str]:
    """The names in ``COMPOSER_SINKS``, all of which must be known."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    mistakes = list(_mistakes(names))
    if mistakes:
        raise OptionError(f"COMPOSER_SINKS: {'; '.join(mistakes)}")
    return frozenset(names)


def _mistakes(names: list[str]) -> Iterator[str]:
    for name in names:
        if name not in SINKS:
            close = did_you_mean(name, SINKS.names())
            yield f"unknown sink {name!r} (known: {', '.join(SINKS.names())}){close}"


def _warn(text: str, error: BaseException) -> None:
    """Even where warnings are errors, a sink is not the user's problem."""
    log.warning("%s", text, exc_info=error)
    with suppress(TelemetryWarning):
        warnings.warn(text, TelemetryWarning, stacklevel=2)
