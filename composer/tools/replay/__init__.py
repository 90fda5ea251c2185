"""Compiles the graphs of a lock with what is installed now, and says what changed.

``composer lock --graphs`` keeps the graphs (:mod:`~composer.tools.replay.kept`). Each engine runs
each graph in a child process (:mod:`composer.tools.trial`), beside eager mode. The first replay of
a graph keeps its results; a later one is compared with them.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer.backends import find_backend
from composer.chain import repro
from composer.errors import ReproError
from composer.graphs.case import Case, versions
from composer.system import distribution
from composer.tools.replay.kept import KeptGraphs, Result
from composer.tools.trial import tried

_SPEED = 1.2
"""An engine is slower or faster if its time changed by more than this, and by more than spread."""

_EXACTNESS = 10.0
"""An engine is less exact if its error grew by this factor, and is this many times eager's."""

_COVERAGE = 0.005


@dataclass(frozen=True)
class Change:
    """One thing that is not as it was.

    Attributes:
        text: What it is.
        is_worse: True if a program is worse off.
    """

    text: str
    is_worse: bool


@dataclass(frozen=True)
class Replayed:
    """One graph by one engine.

    Attributes:
        graph: The graph's name in the folder.
        engine: The engine, with its options.
        now: What came of it now.
        then: The result that was kept; ``None`` if there is none.
        changes: How they differ.
    """

    graph: str
    engine: str
    now: Result
    then: Result | None = None
    changes: tuple[Change, ...] = ()

    @property
    def is_worse(self) -> bool:
        """True if something is worse than it was; without an earlier result, if it goes wrong."""
        return any(each.is_worse for each in self.changes)


def replay(
    folder: Path,
    *,
    engines: Collection[str] = (),
    seconds: float = 300.0,
    keep: bool = False,
    said: Callable[[str], object] = lambda line: None,
) -> list[Replayed]:
    """Compile the graphs of a folder with what is installed now, and compare with earlier results.

    Args:
        folder: The folder that ``composer lock --graphs`` wrote.
        engines: Names of engines; by default, all engines of the chain that each graph had.
        seconds: The time limit of an engine on a graph.
        keep: True to keep these results in place of the earlier ones.
        said: Called with a line before each run.

    Returns:
        What came of each graph by each engine.

    Raises:
        ReproError: it is no such folder, or no graph has such an engine.
        Refusal: no child process can be started here.
        OSError: the results cannot be kept.
    """
    kept = KeptGraphs.read(folder)
    wanted = [
        (graph, candidate)
        for graph in kept.graphs
        for candidate in kept.candidates(graph)
        if not engines or candidate["backend"] in engines
    ]
    missing = set(engines) - {candidate["backend"] for _, candidate in wanted}
    if missing:
        raise ReproError(f"no graph in {str(folder)!r} has the engine {', '.join(sorted(missing))}")
    replayed = []
    for number, (graph, candidate) in enumerate(wanted, 1):
        engine = label(candidate)
        said(f"{number} of {len(wanted)}: {graph} by {engine}")
        then = kept.results.get((graph, engine))
        now = _result(kept.case(graph), candidate, seconds)
        if any(each.is_worse for each in _speed(then, now)):
            # Times of one process are more alike than those of two, so another has to agree.
            again = _result(kept.case(graph), candidate, seconds)
            now = max(now, again, key=lambda each: [*each.ratio[1:2]])
        replayed.append(Replayed(graph, engine, now, then, tuple(changes_of(then, now))))
        if keep or then is None or then.unknown:
            kept.results[graph, engine] = now
            kept.write_results()
    return replayed


def label(candidate: Mapping[str, Any]) -> str:
    """Return the name of an engine, and its options."""
    options = [f"{name}={value!r}" for name, value in sorted(candidate["options"].items())]
    return " ".join([str(candidate["backend"]), *options])


def _result(case: Case, candidate: Mapping[str, Any], seconds: float) -> Result:
    """Run a graph by an engine in a child process."""
    name = candidate["backend"]
    packages: tuple[str, ...] = ("torch", distribution.NAME)
    if not repro.is_importable(candidate):
        return Result(unknown=f"no child process can import {name}", versions=versions(packages))
    packages = (*packages, *find_backend(name).packages)
    with tempfile.TemporaryDirectory() as room:
        folder = Path(room, "try")
        repro.write(case, folder, candidate)
        trial = tried(folder, seconds, timed=True)
    return Result(**dataclasses.asdict(trial), versions=versions(packages))


def changes_of(then: Result | None, now: Result) -> Iterator[Change]:
    """Yield how two results of an engine on a graph differ, or what is wrong in the first one."""
    if now.unknown:
        yield Change(f"unknown: {now.unknown}", is_worse=then is not None and then.works)
    elif then is None or then.unknown:
        yield from _fault(now, is_worse=now.is_wrong)
    elif then.kind != now.kind:
        yield from _fault(now, is_worse=now.is_wrong or not then.kind)
        if not now.kind:
            yield Change(f"works now; it was: {then.kind}", is_worse=False)
    else:
        yield from _numbers(then, now)
        yield from _speed(then, now)


def _fault(now: Result, *, is_worse: bool) -> Iterator[Change]:
    for kind, what in [*now.faults.items()][:1]:
        yield Change(f"{kind}: {what}", is_worse)


def _numbers(then: Result, now: Result) -> Iterator[Change]:
    """Yield that an engine takes another share of the work, or is less exact."""
    grown = now.coverage - then.coverage
    if abs(grown) > _COVERAGE:
        text = f"takes {now.coverage:.0%} of the work; it was {then.coverage:.0%}"
        yield Change(text, is_worse=grown < 0)
    if not (then.errors and now.errors):
        return
    mine, eagers = now.errors
    if mine > _EXACTNESS * max(then.errors[0], eagers):
        text = f"its error is {mine:.1e}; it was {then.errors[0]:.1e}, eager's is {eagers:.1e}"
        yield Change(text, is_worse=True)


def _speed(then: Result | None, now: Result) -> Iterator[Change]:
    """Yield that an engine is slower or faster, if the quartiles of both do not overlap."""
    if then is None or not (then.is_timed and now.is_timed):
        return
    factor = now.ratio[1] / then.ratio[1]
    both = f"{then.speed} times eager's speed before, {now.speed} now"
    if factor < 1 / _SPEED and now.ratio[2] < then.ratio[0]:
        yield Change(f"slower: {both}", is_worse=True)
    elif factor > _SPEED and now.ratio[0] > then.ratio[2]:
        yield Change(f"faster: {both}", is_worse=False)
