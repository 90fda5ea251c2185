"""Who serves each graph in the end, by the records of its compiles.

A fact on who serves is made when the program is over. Until then an engine may fail at a call, and
one graph may be compiled several times and be served by several engines. So the last record of each
compile counts. The records are those of the program that ``composer lock`` runs, which a sink
collects, or those in files
(:mod:`composer.chain.lock.recorded`).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from composer import session
from composer.chain.candidates import ChainEntry
from composer.knowledge.chosen import Chosen, readable, version_here
from composer.knowledge.lock_file import Lock
from composer.records import EAGER, CompileReport, ForLock, plain
from composer.system import distribution
from composer.telemetry.report import counted


def server_of(entry: ChainEntry) -> dict[str, Any]:
    """Return a candidate as :attr:`Chosen.server` has it: its name, options and precision."""
    options = plain(entry.candidate.options)
    return _server(entry.candidate.name, options, entry.precision)


def _server(engine: str, options: dict[str, Any], precision: str | None) -> dict[str, Any]:
    low = "" if precision in (None, "fp32") else precision
    return {"engine": engine, "options": readable(options), "precision": low}


def packages_of(entries: Iterable[ChainEntry]) -> tuple[str, ...]:
    """Return torch, composer, and the packages of the engines of these candidates."""
    packages = itertools.chain.from_iterable(each.backend.packages for each in entries)
    return ("torch", distribution.NAME, *packages)


def versions_of(entries: Iterable[ChainEntry]) -> dict[str, dict[str, str]]:
    """Return the versions here of :func:`packages_of` each candidate, by its name, and of eager."""
    packages = {EAGER: packages_of(())}
    packages |= {each.candidate.name: packages_of([each]) for each in entries}
    return {who: {name: version_here(name) for name in those} for who, those in packages.items()}


@dataclass(frozen=True, slots=True)
class Served:
    """A graph of the program, and the candidate that serves it.

    Attributes:
        chosen: The entry that the lock would have for it.
        report: The record of one of its compiles.
        rest: What that record has for the lock.
        apart: If others serve some of its compiles: the entry for each, and a sentence about it.
    """

    chosen: Chosen
    report: CompileReport
    rest: ForLock
    apart: tuple[tuple[Chosen, str], ...] = ()

    @property
    def versions(self) -> dict[str, str]:
        """The versions of torch, composer, and the packages of the engine that serves."""
        return self.rest.versions.get(self.chosen.engine, self.rest.versions[EAGER])


class Observed:
    """A sink that keeps the last record of each compile.

    Args:
        lock: The lock to compare the program with. A ``locked`` policy follows it.
    """

    def __init__(self, lock: Lock | None = None) -> None:
        self.lock = lock
        self._records: dict[int, dict[str, Any]] = {}

    def emit(self, record: dict[str, Any]) -> None:
        """Keep the last record of each compile."""
        self._records[record["number"]] = record

    def served(self) -> list[Served]:
        """Return each graph once, in the order of compiling, with the candidate that serves it now.

        Compiles without a record are left out. The program does not run them, because Dynamo has
        captured the graph anew.
        """
        return served_by(CompileReport.from_dict(each) for _, each in sorted(self._records.items()))


def served_by(reports: Iterable[CompileReport]) -> list[Served]:
    """Return each graph of these compiles once, with the candidate that serves it.

    Args:
        reports: The last record of each compile, in the order of compiling.
    """
    by_parts = defaultdict[str, list[Served]](list)
    for report in reports:
        if report.lock is not None:
            chosen = Chosen.of(report, report.lock).model_copy(update=_serving(report))
            by_parts[str(chosen.parts)].append(Served(chosen, report, report.lock))
    positions = Counter[str]()
    found = []
    for compiles in by_parts.values():
        most = _most(compiles)
        model = most.chosen.model
        numbered = most.chosen.model_copy(update={"position": positions[model]})
        positions[model] += 1
        found.append(dataclasses.replace(most, chosen=numbered))
    return found


def _serving(report: CompileReport) -> dict[str, Any]:
    """Return the candidate that serves one compile of a graph, as :attr:`Chosen.server` has it."""
    serving = _server(report.chosen, {}, None)  # eager, which need not be in the chain, or nobody
    for each in report.attempts:
        if each.accepted and each.backend == report.chosen:
            serving = _server(each.backend, each.options, each.precision)
    return serving


def _most(compiles: Sequence[Served]) -> Served:
    """Return the candidate that serves most compiles of a graph; the others are in ``apart``."""
    counts = Counter(str(each.chosen.server) for each in compiles)
    by_server = {str(each.chosen.server): each for each in reversed(compiles)}
    most = max(counts, key=lambda server: (bool(by_server[server].chosen.engine), counts[server]))
    apart = []
    for server in counts.keys() - {most}:
        other = by_server[server].chosen
        times = f"{counts[server]} of {counted(len(compiles), 'compile')}"
        apart.append((other, f"served by {other.sentence()} in {times}"))
    return dataclasses.replace(by_server[most], apart=tuple(sorted(apart, key=itemgetter(1))))


def lock_of(served: Iterable[Served]) -> Lock:
    """Return the lock of a program, to be written to the file."""
    served = list(served)
    versions = {name: version for each in served for name, version in each.versions.items()}
    graphs = sorted((each.chosen for each in served), key=lambda g: (g.model, g.position))
    return Lock(version=1, versions=dict(sorted(versions.items())), graphs=tuple(graphs))


@contextmanager
def observing(lock: Lock | None = None) -> Iterator[Observed]:
    """Collect all graphs that are compiled through composer until the block ends.

    Args:
        lock: The lock to compare the program with.
    """
    observed = Observed(lock)
    session.add_sink(observed)
    session.current().observed = observed
    try:
        yield observed
    finally:
        session.current().observed = None
        session.remove_sink(observed)
