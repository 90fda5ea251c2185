"""The share of each engine in graphs, operations, calls and run time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from composer.records import EAGER, CompileReport
from composer.telemetry.html.words import percentages, sane
from composer.telemetry.report import attempts_of


@dataclass(slots=True)
class EngineShare:
    """The numbers of one engine, and its shares in per cent.

    ``nodes`` is an estimate. It is the number of captured operations of a graph times the share of
    the graph's work that the engine reports as its own. An engine that reports nothing is assumed
    to run all of them.
    """

    engine: str
    graphs: int = 0
    nodes: float = 0.0
    calls: int = 0
    seconds: float = 0.0
    nodes_percent: float = 0.0
    calls_percent: float = 0.0
    seconds_percent: float = 0.0


def shares(graphs: Iterable[CompileReport]) -> tuple[EngineShare, ...]:
    """Return the share of every engine: the one with the most operations first, eager last.

    What an engine leaves to torch counts for eager, and so do calls that the eager fallback
    answered. The time within calls cannot be split, so all of it counts for the engine. Graphs
    without an engine are left out.
    """
    eager = EngineShare(EAGER)
    engines = {EAGER: eager}
    for graph in graphs:
        if graph.chosen:
            _add(graph, engines.setdefault(graph.chosen, EngineShare(graph.chosen)), eager)
    if eager == EngineShare(EAGER):
        del engines[EAGER]
    rows = sorted(engines.values(), key=lambda row: (row is eager, -row.nodes, row.engine))
    for field in ("nodes", "calls", "seconds"):
        parts = percentages([getattr(row, field) for row in rows])
        for row, percent in zip(rows, parts, strict=True):
            setattr(row, f"{field}_percent", percent)
    return tuple(rows)


def _add(graph: CompileReport, engine: EngineShare, eager: EngineShare) -> None:
    """Add one graph to the totals of the engine that serves it, and to those of eager."""
    coverage = min(max(0.0, _coverage(graph)), 1.0)  # in this order NaN becomes 0
    counters = graph.runtime.read()
    fallbacks = min(counters.fallbacks, counters.calls)
    engine.graphs += 1
    engine.nodes += graph.nodes * coverage
    eager.nodes += graph.nodes - graph.nodes * coverage
    engine.calls += counters.calls - fallbacks
    eager.calls += fallbacks
    engine.seconds += sane(counters.seconds)


def _coverage(graph: CompileReport) -> float:
    """Return the share that the attempt that serves reports; 1 if there is no report."""
    for attempt in reversed(graph.attempts):
        if attempt.accepted:
            return 1.0 if attempt.coverage is None else attempt.coverage
    return 1.0


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Facts that an engine reports about itself in all its attempts, such as its version."""

    name: str
    facts: tuple[tuple[str, str], ...]


def engines(graphs: Iterable[CompileReport]) -> tuple[EngineFacts, ...]:
    """Return engines that report facts, with the facts that are equal in all their attempts."""
    agreed: dict[str, dict[str, Any]] = {}
    for attempt in attempts_of(graphs):
        if attempt.engine:
            facts = agreed.get(attempt.backend, attempt.engine).items()
            equal = {name: value for name, value in facts if attempt.engine.get(name) == value}
            agreed[attempt.backend] = equal
    rows = [EngineFacts(name, tuple(_short(agreed[name]))) for name in sorted(agreed)]
    return tuple(engine for engine in rows if engine.facts)


def _short(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the facts whose text is one line of at most 80 characters."""
    for name, value in facts.items():
        text = fact(value)
        if len(text) <= 80 and "\n" not in text:
            yield name, text


def fact(value: Any) -> str:
    """Return one fact as text in one line; a list of sentences gets one line for each."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {fact(each)}" for name, each in value.items())
    if not isinstance(value, list | tuple):
        return str(value)
    texts = [fact(each) for each in value]
    has_sentences = " " in "".join(texts)
    return ("\n" if has_sentences else ", ").join(texts)
