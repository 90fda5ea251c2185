"""A folder beside ``composer.lock``: its graphs, and what came of them by each engine.

================  =================================================================================
a folder a graph  a :class:`~composer.graphs.case.Case` without data, with its model and position
``results.json``  what came of each graph by each engine when it was replayed first
================  =================================================================================
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from composer.chain.lock.observed import Served
from composer.errors import ReproError
from composer.graphs.case import FORM, Case
from composer.records import EAGER
from composer.tools.trial import CRASH, HANG, NON_FINITE, NUMBERS, STRUCTURE, Trial

RESULTS = "results.json"

_WRONG = (STRUCTURE, NON_FINITE, NUMBERS, HANG, CRASH)


@dataclass(frozen=True)
class Result(Trial):
    """What came of a graph by an engine, and with which versions.

    Attributes:
        versions: The versions of Python, torch, composer and the engine's packages.
    """

    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """The kind of the gravest fault; empty if the engine works."""
        return next(iter(self.faults), "")

    @property
    def works(self) -> bool:
        """True if the engine runs the graph, and its numbers are right."""
        return not self.unknown and not self.kind

    @property
    def is_wrong(self) -> bool:
        """True if the engine goes wrong; an exception is a refusal, after which others serve."""
        return self.kind in _WRONG

    @property
    def outcome(self) -> str:
        """``works``, ``refuses``, ``unknown``, or the fault."""
        if self.unknown:
            return "unknown"
        if self.kind.startswith("raises"):
            return "refuses"
        return self.kind or "works"

    @property
    def is_timed(self) -> bool:
        """True if its times can be compared with others."""
        return bool(self.ratio) and not self.beside_load

    @property
    def speed(self) -> str:
        """Eager's time over the engine's, with the quartiles; empty if not measured."""
        if not self.ratio:
            return ""
        low, middle, high = self.ratio
        load = ", under a load" if self.beside_load else ""
        return f"{middle:.2f} ({low:.2f}-{high:.2f}){load}"


@dataclass(frozen=True)
class KeptGraphs:
    """The folder.

    Attributes:
        folder: Its path.
        results: What came of each graph, by its name and the engine.
    """

    folder: Path
    results: dict[tuple[str, str], Result] = field(default_factory=dict)

    @staticmethod
    def read(folder: Path) -> KeptGraphs:
        """Read a folder.

        Raises:
            ReproError: it is no such folder.
        """
        try:
            table = json.loads((folder / RESULTS).read_text())
            if table["form"] != FORM:
                raise ReproError(f"{str(folder)!r} has the form {table['form']}, not {FORM}")
            results = {(each.pop("graph"), each.pop("engine")): each for each in table["results"]}
            found = {which: Result(**each) for which, each in results.items()}
        except (OSError, ValueError, KeyError, TypeError) as error:
            how = "make one by composer lock --graphs"
            raise ReproError(f"{str(folder)!r} has no graphs of a lock ({error}); {how}") from error
        return KeptGraphs(folder, found)

    @property
    def graphs(self) -> list[str]:
        """The names of the graphs."""
        return sorted(each.parent.name for each in self.folder.glob("*/about.json"))

    def case(self, graph: str) -> Case:
        """Read a graph."""
        return Case.read(self.folder / graph)

    def candidates(self, graph: str) -> Iterator[dict[str, Any]]:
        """Yield the engines of the chain that a graph had, with their options."""
        facts = self.case(graph).facts
        chain = facts["policy"].get("chain") or [{"backend": each} for each in facts["engines"]]
        for each in chain:
            yield {"options": {}, **each}

    def write_results(self) -> None:
        """Write the results, completely or not at all.

        What an engine said of a fault is left out, since it may name files of the user.

        Raises:
            OSError: the file cannot be written.
        """
        rows = []
        for (graph, engine), each in sorted(self.results.items()):
            told = dataclasses.replace(each, faults=dict.fromkeys(each.faults, ""))
            rows.append({"graph": graph, "engine": engine, **dataclasses.asdict(told)})
        unfinished = self.folder / f".{RESULTS}.{os.getpid()}"
        unfinished.write_text(json.dumps({"form": FORM, "results": rows}, indent=1))
        unfinished.replace(self.folder / RESULTS)


def is_foreign(folder: Path) -> bool:
    """Return True if something is at this place that composer did not write."""
    return folder.exists() and not (folder / RESULTS).is_file()


def write(folder: Path, served: Iterable[Served]) -> list[str]:
    """Write the graphs of a program that ran with ``COMPOSER_DUMP``, in place of earlier ones.

    Graphs that are as they were keep their results.

    Args:
        folder: The folder.
        served: The graphs.

    Returns:
        A sentence on each graph that could not be kept.

    Raises:
        OSError: the folder cannot be written.
        ReproError: the folder that is there cannot be read.
    """
    left_out = []
    made = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        made.chmod(0o755)
        for each in served:
            chosen, dumped = each.chosen, each.report.dumped
            try:
                case = Case.read(Path(dumped)) if dumped else None
            except OSError:
                case = None
            if case is None:
                why = dumped or "not written: it was compiled without COMPOSER_DUMP"
                left_out.append(f"{chosen.title} is not kept for composer replay: {why}")
                continue
            engines = [name for name in each.rest.versions if name != EAGER]
            name = re.sub(r"[^\w.-]", "_", f"{chosen.model}-{chosen.position}")
            about: dict[str, Any] = {
                "model": chosen.model,
                "position": chosen.position,
                "engines": engines,
            }
            case.write(made / name, {}, **about)
        before = KeptGraphs.read(folder) if folder.exists() else KeptGraphs(folder)
        same = {graph for graph in before.graphs if _text(made / graph) == _text(folder / graph)}
        results = {which: each for which, each in before.results.items() if which[0] in same}
        KeptGraphs(made, results).write_results()
        if folder.exists():
            _swap(folder, made)
        else:
            made.rename(folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return left_out


def _swap(folder: Path, made: Path) -> None:
    """Put a folder in the place of another; if that fails half-way, the other is put back."""
    before = made.with_name(f"{made.name}-before")
    folder.rename(before)
    try:
        made.rename(folder)
    except BaseException:
        before.rename(folder)
        raise
    shutil.rmtree(before, ignore_errors=True)


def _text(graph: Path) -> str:
    """Return the program of a graph; empty if there is none."""
    program = graph / "graph.py"
    return program.read_text() if program.is_file() else ""
