"""The sinks of a process. Their errors become warnings and never reach the user's program."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from composer.errors import OptionError, TelemetryWarning, class_and_text
from composer.policy.switches import is_disabled
from composer.records import CompileReport
from composer.registry import Registry, names_in, unknown_among
from composer.system import control_flow, forks
from composer.system.warned import warn_once

OWN = {
    "jsonl": "composer.telemetry.jsonl:JsonLinesSink",
    "logging": "composer.telemetry.log:LoggingSink",
    "opentelemetry": "composer.telemetry.otel:OpenTelemetrySink",
    "prometheus": "composer.telemetry.prometheus:PrometheusSink",
    "torch_trace": "composer.telemetry.torch_trace:TorchTraceSink",
}
"""composer's own sinks. The method ``wanted`` of each says if it is on. Sinks of other packages
without that method are on if they are installed."""

SINKS: Registry[Any] = Registry("sink", OWN, group="composer.sinks")


class Sinks:
    """The sinks that are on: those that the environment asks for, and those that a call added."""

    def __init__(self) -> None:
        self._lock = forks.lock()
        self._environment: tuple[str, str] | None = None
        self._found: dict[str, Any] = {}
        self._added: list[Any] = []

    def add(self, sink: Any) -> None:
        """Give every record from now on to ``sink`` as well. Adding it twice has no effect."""
        with self._lock:
            if not any(sink is each for each in self._added):
                self._added.append(sink)

    def remove(self, sink: Any) -> None:
        """Give ``sink`` no more records. It is not closed; that is left to its owner."""
        with self._lock:
            self._added = [each for each in self._added if each is not sink]

    def emit(self, report: CompileReport, *, first: bool = True) -> None:
        """Give a report to every sink.

        Args:
            report: The report of the compile.
            first: True for the first report of its graph, false for a later one.

        Raises:
            OptionError: ``COMPOSER_SINKS`` names an unknown sink, or a sink refuses a value in the
                environment. It is raised only for a first report. Later reports come from calls of
                a compiled graph, which must not fail because of a sink.
        """
        with self._lock:
            if first:
                with self._guarded(""):
                    self._look_around()
            sinks = self._on()
        for name, sink in sinks:
            if first and hasattr(sink, "follow"):
                with self._guarded(name):
                    sink.follow(report)
            with self._guarded(name, raises=first):
                sink.emit(report.to_dict())

    def close(self) -> None:
        """Close every sink that is on, so that it writes its remaining data."""
        with self._lock:
            for name, sink in self._on():
                self._close(name, sink)
            self._found, self._environment = {}, None

    def _on(self) -> list[tuple[str, Any]]:
        added = ((type(sink).__qualname__, sink) for sink in self._added)
        return [*self._found.items(), *added]

    def _look_around(self) -> None:
        """Make the sinks that the environment asks for, if the environment has changed."""
        sinks = os.environ.get("COMPOSER_SINKS", "")
        environment = sinks, os.environ.get("COMPOSER_TELEMETRY", "")
        if environment == self._environment:
            return
        named = _named(sinks)
        for name in SINKS.names():
            with self._guarded(name):
                self._look_for(name, named)
        self._environment = environment  # set last, so that a mistake is an error at every compile

    def _look_for(self, name: str, named: frozenset[str]) -> None:
        """Make a sink if it is wanted and not on yet; close it if it is not wanted any more."""
        kind = SINKS.get(name)
        is_wanted = not hasattr(kind, "wanted") or kind.wanted(name, named)
        is_on = name in self._found
        if is_wanted and not is_on:
            self._found[name] = kind()
        elif is_on and not is_wanted:
            self._close(name, self._found.pop(name))

    def _close(self, name: str, sink: Any) -> None:
        if hasattr(sink, "close"):
            with self._guarded(name):
                sink.close()

    @contextmanager
    def _guarded(self, name: str, *, raises: bool = True) -> Iterator[None]:
        """Warn once if a step of a sink raises; ``raises`` lets a mistake of the user through.

        ``COMPOSER_DISABLE`` has the program work whatever else is wrong.
        """
        try:
            yield
        except BaseException as error:  # whatever a sink raises becomes a warning
            control_flow.pass_on(error)
            if raises and isinstance(error, OptionError) and not is_disabled():
                raise
            what = f"the sink {name!r}" if name else "what the environment says of sinks"
            text = f"{what} failed: {class_and_text(error)}"
            warn_once(TelemetryWarning(text), about=name, cause=error)


def _named(text: str) -> frozenset[str]:
    """Return the names in ``COMPOSER_SINKS``; raise ``OptionError`` if one is unknown."""
    names = names_in(text)
    known = SINKS.names()
    mistakes = unknown_among(names, known, "unknown sink")
    if mistakes:
        raise OptionError(f"COMPOSER_SINKS: {mistakes} (known: {', '.join(known)})")
    return frozenset(names)
