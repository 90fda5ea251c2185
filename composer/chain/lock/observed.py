"""The graphs of the program that ``composer lock`` runs, and who serves each of them in the end.

A fact on who serves is made when the program is over. Until then an engine may fail at a call, and
one graph may be compiled several times and be served by several engines. So the last record of each
compile is collected here, as a sink.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from composer import session
from composer.chain.candidates import ChainEntry
from composer.knowledge.chosen import Chosen, readable, version_here
from composer.knowledge.lock_file import Lock
from composer.records import EAGER, Attempt, CompileReport, plain
from composer.system import distribution
from composer.telemetry.report import counted


def server_of(entry: ChainEntry) -> dict[str, Any]:
    """Return a candidate as :attr:`Chosen.server` has it: its name, options and precision."""
    return {
        "engine": entry.candidate.name,
        "options": readable(entry.candidate.options),
        "precision": "bf16" if entry.precision == "bf16" else "",
    }


def packages_of(entries: Iterable[ChainEntry]) -> tuple[str, ...]:
    """Return torch, composer, and the packages of the engines of these candidates."""
    packages = itertools.chain.from_iterable(each.backend.packages for each in entries)
    return ("torch", distribution.NAME, *packages)


@dataclass(frozen=True, slots=True)
class Served:
    """A graph of the program, and the candidate that serves it.

    Attributes:
        chosen: The entry that the lock would have for it.
        packages: torch, composer, and the packages of the engine that serves.
        attempts: The candidates that were tried.
        apart: If others serve some of its compiles: the entry for each, and a sentence about it.
    """

    chosen: Chosen
    packages: tuple[str, ...]
    attempts: tuple[Attempt, ...] = ()
    apart: tuple[tuple[Chosen, str], ...] = ()


class Observed:
    """A sink that is also told of every graph before a candidate is tried on it.

    Args:
        lock: The lock to compare the program with. A ``locked`` policy follows it.
    """

    def __init__(self, lock: Lock | None = None) -> None:
        self.lock = lock
        self._met: dict[int, dict[str, Served]] = {}
        self._records: dict[int, dict[str, Any]] = {}

    def meet(self, number: int, graph: Chosen, entries: Sequence[ChainEntry]) -> None:
        """Keep what the lock would say of a graph, for each candidate that may come to serve it."""
        nobody = Served(graph, packages_of(()))
        eager = Served(graph.model_copy(update={"engine": EAGER}), packages_of(()))
        self._met[number] = {"": nobody, EAGER: eager} | {
            _label(each.candidate.name, plain(each.candidate.options), each.tentative): Served(
                graph.model_copy(update=server_of(each)), packages_of([each])
            )
            for each in entries
        }

    def emit(self, record: dict[str, Any]) -> None:
        """Keep the last record of each compile."""
        self._records[record["number"]] = record

    def served(self) -> list[Served]:
        """Return each graph once, in the order of compiling, with the candidate that serves it now.

        Compiles without a record are left out. The program does not run them, because Dynamo has
        captured the graph anew.
        """
        by_parts = defaultdict[str, list[Served]](list)
        for number, candidates in self._met.items():
            if number in self._records:
                served = _served(candidates, CompileReport.from_dict(self._records[number]))
                by_parts[str(served.chosen.parts)].append(served)
        positions = Counter[str]()
        found = []
        for compiles in by_parts.values():
            most = _most(compiles)
            model = most.chosen.model
            numbered = most.chosen.model_copy(update={"position": positions[model]})
            positions[model] += 1
            found.append(dataclasses.replace(most, chosen=numbered))
        return found

    def export(self) -> Lock:
        """Return the lock of the program, to be written to the file."""
        served = self.served()
        packages = sorted(itertools.chain.from_iterable(each.packages for each in served))
        graphs = sorted((each.chosen for each in served), key=lambda g: (g.model, g.position))
        versions = {name: version_here(name) for name in packages}
        return Lock(version=1, versions=versions, graphs=tuple(graphs))


def _served(candidates: Mapping[str, Served], report: CompileReport) -> Served:
    """Return the candidate that serves one compile of a graph."""
    serves = candidates[report.chosen if report.chosen == EAGER else ""]
    for each in report.attempts:
        if each.accepted and each.backend == report.chosen:
            # A lock that names eager adds it to a chain that lacks it.
            serves = candidates.get(_label(each.backend, each.options, each.tentative), serves)
    return dataclasses.replace(serves, attempts=report.attempts)


def _label(name: str, options: Mapping[str, Any], tentative: bool) -> str:
    """Return what tells a candidate from the others of its chain, in its entry and its record."""
    return f"{name} {options} {tentative}"


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
