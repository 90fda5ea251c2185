"""The session: the one object that holds what this process remembers of its compiles.

:func:`reset` replaces it as a whole.
"""

from __future__ import annotations

import atexit
import copy
import itertools
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from composer.errors import OptionError, UnknownNameError
from composer.knowledge.facts import Knowledge
from composer.lowering.weights.narrow import Copies
from composer.policy.mistakes import refuse_mistakes
from composer.policy.model import Source
from composer.policy.sources import read
from composer.policy.switches import is_disabled
from composer.records import CompileReport, WithoutGraph
from composer.system import forks, warned
from composer.system.background import Worker
from composer.telemetry.late_compiles import LateCompiles
from composer.telemetry.progress import Progress
from composer.telemetry.report import Report
from composer.telemetry.sinks import Sinks

KEPT_REPORTS = 1000

KEPT_POSITIONS = 10_000
"""How many graphs of a model have a number of their own."""


class Session:
    """The last 1,000 reports, what is known about candidates, and the other memory of a process.

    Attributes:
        configured: The argument of ``composer.configure``.
        sinks: The sinks, which are given every record.
        observed: Under ``composer lock``, the object that is shown every graph
            (:mod:`composer.chain.lock.observed`).
        progress: The compile under way.
        captured: Names of the modules and functions that have a graph.
        noted: The number of compiles that gave no graph.
        installed: Engines that could serve a graph for which nobody wrote a chain.
        late_compiles: The functions that may have settled.
        knowledge: What is known about candidates for graphs.
        background: The thread that builds and measures engines beside the program.
        copies: The weights that engines read in bfloat16.
        numbers: Gives each graph of this process its number.
        positions: For each model, the graphs that were compiled, each with the number of those
            before it. The lock file names graphs by it, so it outlives :func:`reset`.
        resets: How often the process has begun anew, by :func:`reset` or torch's own reset.
    """

    def __init__(self) -> None:
        self.configured: Source = None
        self.sinks = Sinks()
        self.observed: Any = None
        self.knowledge = Knowledge()
        self.background = Worker()
        self.copies = Copies()
        self.numbers = itertools.count(1)
        self.positions: dict[str, dict[str, int]] = {}
        self.resets = 0
        self._lock = forks.lock()
        self._begin()

    def _begin(self) -> None:
        """Remember nothing of any compile."""
        self.progress = Progress()
        self.late_compiles = LateCompiles()
        self._reports: deque[CompileReport] = deque(maxlen=KEPT_REPORTS)
        self._without_graph: deque[WithoutGraph] = deque(maxlen=KEPT_REPORTS)
        self.captured: set[str] = set()
        self.noted = 0
        self.installed: dict[str, None] = {}

    def successor(self) -> Session:
        """A session with the same policy, sinks and background thread, and without any compile.

        The lock is the same as well, so that no reset is lost that another thread counts.
        """
        following = copy.copy(self)
        following.knowledge = self.knowledge.successor()
        following._begin()
        following.resets += 1
        return following

    def keep(self, report: CompileReport) -> None:
        """Remember a report. Beyond 1,000 the oldest is dropped."""
        with self._lock:
            self._reports.append(report)
            of_model = self.positions.setdefault(report.model, {})
            if len(of_model) < KEPT_POSITIONS:
                of_model.setdefault(report.graph_key, len(of_model))

    def position(self, model: str, graph_key: str) -> int:
        """How many other graphs of a model were compiled before this one."""
        with self._lock:
            of_model = self.positions.get(model, {})
            return of_model.get(graph_key, len(of_model))

    def note_captured(self, name: str) -> None:
        """Remember the name of a module or function that has a graph."""
        with self._lock:
            self.captured.add(name)

    def note_installed(self, engines: Iterable[str]) -> None:
        """Remember engines that could serve a graph for which nobody wrote a chain."""
        with self._lock:
            self.installed |= dict.fromkeys(engines)

    def replace(self, old: CompileReport, new: CompileReport) -> None:
        """Replace a report, if it is still kept.

        Args:
            old: The graph's report so far.
            new: Its changed report.
        """
        with self._lock:
            kept = [new if each is old else each for each in self._reports]
            self._reports = deque(kept, maxlen=KEPT_REPORTS)

    def as_they_stand(self, reports: Iterable[CompileReport]) -> list[CompileReport]:
        """The present reports of some graphs.

        A report is replaced when another engine takes over its graph.

        Args:
            reports: Earlier reports of the graphs.
        """
        now = {id(report.runtime): report for report in self.reports()}
        return [now.get(id(report.runtime), report) for report in reports]

    def note(self, found: WithoutGraph) -> None:
        """Remember a compile that gave no graph. Beyond 1,000 the oldest is dropped."""
        with self._lock:
            self._without_graph.append(found)
            self.noted += 1

    def without_graph(self, since: int = 0) -> tuple[WithoutGraph, ...]:
        """The functions that were compiled and have no graph yet, each once, the oldest first.

        Args:
            since: The value of ``noted`` from which on compiles count.
        """
        with self._lock:
            new = max(0, self.noted - since)
            kept = list(self._without_graph)
            captured = set(self.captured)
        newest = kept[max(0, len(kept) - new) :]
        return tuple(
            each for each in dict.fromkeys(newest) if each.given_up or each.name not in captured
        )

    def untried(self) -> tuple[str, ...]:
        """Installed engines that were tried on no graph, where nobody wrote a chain."""
        tried = {attempt.backend for report in self.reports() for attempt in report.attempts}
        with self._lock:
            installed = tuple(self.installed)
        return tuple(name for name in installed if name not in tried)

    def reports(self) -> tuple[CompileReport, ...]:
        """The reports kept, oldest first."""
        with self._lock:
            return tuple(self._reports)


_current = Session()


def current() -> Session:
    """The session that compiles report to."""
    return _current


def reports() -> tuple[CompileReport, ...]:
    """The records of the last 1,000 compiled graphs, oldest first."""
    return _current.reports()


def report(last: int | None = None) -> Report:
    """The report of this process; ``str()`` is the table that a person reads.

    Args:
        last: How many of the newest graphs to show; all that are kept by default.

    Raises:
        ValueError: ``last`` is negative.
    """
    if last is not None and last < 0:
        raise ValueError(f"last is a number of graphs, not {last}")
    shown = reports()
    if last is not None:
        shown = shown[max(0, len(shown) - last) :]
    now = _current.progress.now()
    return Report(shown, _current.without_graph(), _current.untried(), now)


def reset() -> None:
    """Forget reports and warnings. Compiled functions, policy and sinks stay what they are.

    Engines that have proved themselves need not do so again: no version has changed.
    """
    global _current
    warned.forget_warnings()
    with _current._lock:
        _current = _current.successor()


def count_reset() -> None:
    """Note that torch has forgotten what it compiled (``torch.compiler.reset()``)."""
    with _current._lock:
        _current.resets += 1


def configure(source: Source) -> None:
    """Set the policy of this process, in place of any set before.

    ``COMPOSER_CONFIG`` takes precedence. Later changes to the object that was given do not change
    the policy; a file that changed is read again by the next compile. Under ``COMPOSER_DISABLE``
    the next compile warns of a mistake.

    Args:
        source: A :class:`composer.PolicyBook`, a :class:`composer.Policy` for every graph, a
            mapping shaped like the TOML, the path of a file, or ``None`` for the defaults.

    Raises:
        OptionError: it is no source, a file is missing or no TOML, or naming every key and value
            that is wrong.
        UnknownNameError: naming every engine and pass that is nearly a known one.
    """
    try:
        _current.configured = _checked(source)
    except (OptionError, UnknownNameError):
        if not is_disabled():
            raise
        _current.configured = source


def _checked(source: Source) -> Source:
    """A source without mistakes: a file's path, or a copy of what was given."""
    if source is None:
        return None
    book = read(source)
    if not isinstance(source, str | Path):
        refuse_mistakes(book)
        return book
    path = Path(source).absolute()  # the working directory may change before it is read again
    refuse_mistakes(book, f"{path}: ")
    return path


def add_sink(sink: Any) -> None:
    """Give the record of every graph compiled from now on to a sink as well.

    Args:
        sink: Anything with ``emit(record: dict)``; see :class:`composer.telemetry.base.Sink`.

    Raises:
        TypeError: it has no such method.
    """
    if not callable(getattr(sink, "emit", None)):
        raise TypeError(f"a sink has a method emit(record), and {sink!r} has none")
    _current.sinks.add(sink)


def remove_sink(sink: Any) -> None:
    """Give a sink added by :func:`add_sink` no more records."""
    _current.sinks.remove(sink)


@atexit.register
def _close_sinks() -> None:
    """At the end of the process, let the sinks write the final counters."""
    _current.sinks.close()
