"""Collects the graphs of the program that ``composer lock`` or ``composer lock --check`` runs."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from composer import session
from composer.chain.candidates import ChainEntry
from composer.chain.lock.difference import Served
from composer.knowledge.chosen import readable, versions_with
from composer.knowledge.lock_file import Lock, LockedGraph
from composer.records import CompileReport, plain


def server_of(entry: ChainEntry) -> tuple[str, dict[str, Any], str]:
    """Return a candidate as :attr:`LockedGraph.server` has it: its name, options and precision."""
    precision = "bf16" if entry.precision == "bf16" else ""
    return entry.candidate.name, readable(entry.candidate.options), precision


class _Place(NamedTuple):
    """An entry of a chain, described before an engine could change its options.

    Attributes:
        entry: The entry.
        server: The result of :func:`server_of`.
        recorded: The options as the record of an attempt has them.
    """

    entry: ChainEntry
    server: tuple[str, dict[str, Any], str]
    recorded: Any


class Witness:
    """A sink that is also told of every graph before a candidate is tried on it.

    Args:
        lock: The lock to compare the program with. A ``locked`` policy follows it.
    """

    def __init__(self, lock: Lock | None = None) -> None:
        self.lock = lock
        self._graphs: dict[str, LockedGraph] = {}
        self._same: dict[str, str] = {}
        self._chains: dict[str, list[_Place]] = {}
        self._records: dict[int, dict[str, Any]] = {}

    def meet(self, graph: LockedGraph, entries: Sequence[ChainEntry]) -> None:
        """Keep the entry and the chain of a graph that is about to be compiled.

        Two keys are the same graph if their parts are equal. The keys can still differ, by
        ``strict`` or by the number of a device.
        """
        alike = (key for key, each in self._graphs.items() if each.parts == graph.parts)
        key = self._same[graph.key] = next(alike, graph.key)
        self._graphs.setdefault(key, graph)
        self._chains[key] = [
            _Place(entry, server_of(entry), plain(dict(entry.candidate.options)))
            for entry in entries
        ]

    def entry(self, graph: LockedGraph) -> LockedGraph | None:
        """Return the entry of a graph in the lock that the program is compared with."""
        return self.lock.entry(graph) if self.lock else None

    def emit(self, record: dict[str, Any]) -> None:
        """Keep the last record of each compile."""
        self._records[record["number"]] = record

    def served(self) -> list[Served]:
        """Return each graph once, in the order of compiling, with the engine that serves it now.

        Graphs without a record are left out. The program does not run them, because Dynamo has
        captured them anew.
        """
        reports = [CompileReport.from_dict(each) for each in self._records.values()]
        positions = Counter[str]()
        found = []
        for key, graph in self._graphs.items():
            mine = [each for each in reports if self._same.get(each.graph_key) == key]
            if not mine:
                continue
            counted = graph.model_copy(update={"position": positions[graph.model]})
            positions[graph.model] += 1
            found.append(self._served(counted, mine))
        return found

    def _served(self, graph: LockedGraph, reports: Sequence[CompileReport]) -> Served:
        """Return the engine that serves most compiles of a graph; the others are in ``apart``."""
        by_server = defaultdict[str, list[Served]](list)
        for each in reports:
            served = self._as_served(graph, each)
            by_server[str(served.graph.server)].append(served)
        groups = by_server.values()
        most = max(groups, key=lambda group: (bool(group[0].graph.engine), len(group)))
        apart = [(group[0].graph, len(group)) for group in groups if group is not most]
        return dataclasses.replace(most[0], compiles=len(reports), apart=tuple(apart))

    def _as_served(self, graph: LockedGraph, report: CompileReport) -> Served:
        served: dict[str, Any] = {"engine": report.chosen}
        place = self._place_that_serves(graph.key, report)
        packages: tuple[str, ...] = ()
        if place is not None:
            _, served["options"], served["precision"] = place.server
            packages = place.entry.backend.packages
        versions = versions_with(packages)
        return Served(graph.model_copy(update=served), versions, report.attempts)

    def _place_that_serves(self, key: str, report: CompileReport) -> _Place | None:
        """Return the place in the chain that serves; a name may stand there more than once."""
        named = [each for each in self._chains[key] if each.server[0] == report.chosen]
        accepted = [each for each in report.attempts if each.accepted]
        if not accepted:
            return next(iter(named), None)
        serves = accepted[-1]

        def likeness(place: _Place) -> tuple[bool, bool]:
            return place.recorded == serves.options, place.entry.on_trial == serves.on_trial

        return max(named, key=likeness, default=None)

    def locks(self) -> Lock:
        """Return the lock of the program, to be written to the file."""
        served = self.served()
        versions: dict[str, str] = {}
        for each in served:
            versions |= each.versions
        graphs = sorted((each.graph for each in served), key=lambda g: (g.model, g.position))
        return Lock(version=1, versions=dict(sorted(versions.items())), graphs=tuple(graphs))


@contextmanager
def watching(lock: Lock | None = None) -> Iterator[Witness]:
    """Collect all graphs that are compiled through composer until the block ends.

    Args:
        lock: The lock to compare the program with.
    """
    witness = Witness(lock)
    session.add_sink(witness)
    session.current().witness = witness
    try:
        yield witness
    finally:
        session.current().witness = None
        session.remove_sink(witness)
