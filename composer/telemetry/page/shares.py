"""Which engine took which share of graphs, compute nodes, calls and run time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from composer.records import EAGER, Attempt, CompileReport
from composer.telemetry.page.words import percentages, sane


@dataclass(frozen=True, slots=True)
class EngineShare:
    """What one engine serves, and its part of the whole in per cent.

    ``nodes`` is an estimate: a graph's captured operations, times the share of its compute nodes
    that the engine says it took; an engine that says nothing is taken to run them all.
    """

    engine: str
    graphs: int
    nodes: float
    calls: int
    seconds: float
    nodes_percent: float
    calls_percent: float
    seconds_percent: float


def accepted(graph: CompileReport) -> Attempt | None:
    """The attempt that serves a graph; none where it is the eager fallback, or nobody."""
    return next((each for each in reversed(graph.attempts) if each.accepted), None)


def shares(graphs: Iterable[CompileReport]) -> tuple[EngineShare, ...]:
    """Every engine that serves a graph, the one with the most compute nodes first, eager last.

    What an engine leaves to torch counts as eager's, and so do the calls that the eager fallback
    answered. Time within calls is not known in parts: all of it is the engine's. Graphs that nobody
    serves do not count.
    """
    served = [graph for graph in graphs if graph.chosen]
    engines = dict.fromkeys(graph.chosen for graph in served)
    totals = {engine: [0.0] * 4 for engine in (*engines, EAGER)}
    for graph in served:
        _add(totals, graph)
    order = sorted(totals, key=lambda name: (name == EAGER, -totals[name][1], name))
    kept = [name for name in order if any(totals[name])]
    columns = [percentages([totals[name][i] for name in kept]) for i in (1, 2, 3)]
    return tuple(
        EngineShare(name, int(count), nodes, int(calls), seconds, *percents)
        for name, *percents in zip(kept, *columns, strict=True)
        for count, nodes, calls, seconds in [totals[name]]
    )


def _add(totals: dict[str, list[float]], graph: CompileReport) -> None:
    """Graphs, nodes, calls and seconds of one graph."""
    attempt, counters = accepted(graph), graph.runtime.read()
    coverage = 1.0 if attempt is None or attempt.coverage is None else attempt.coverage
    taken = graph.nodes * min(max(0.0, coverage), 1.0)  # in this order NaN is nothing
    fallen = min(counters.fallbacks, counters.calls)
    mine, fallback = totals[graph.chosen], totals[EAGER]
    mine[0] += 1
    mine[1] += taken
    fallback[1] += graph.nodes - taken
    mine[2] += counters.calls - fallen
    fallback[2] += fallen
    mine[3] += sane(counters.seconds)


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What an engine says of itself in all its attempts: its versions, say."""

    name: str
    facts: tuple[tuple[str, str], ...]


def engines(graphs: Iterable[CompileReport]) -> tuple[EngineFacts, ...]:
    """The engines that say something of themselves, with what all their attempts agree on."""
    agreed: dict[str, dict[str, Any]] = {}
    for attempt in (each for graph in graphs for each in graph.attempts if each.engine):
        facts = agreed.setdefault(attempt.backend, dict(attempt.engine))
        for name in [name for name in facts if attempt.engine.get(name) != facts[name]]:
            del facts[name]
    found = (
        EngineFacts(
            name, tuple((key, fact(value)) for key, value in facts.items() if _is_short(value))
        )
        for name, facts in sorted(agreed.items())
    )
    return tuple(engine for engine in found if engine.facts)


def fact(value: Any) -> str:
    """One thing that an engine says, in a line, or in a line each for a list of sentences."""
    if isinstance(value, list | tuple):
        texts = [fact(each) for each in value]
        return ("\n" if any(" " in text for text in texts) else ", ").join(texts)
    if isinstance(value, dict):
        return ", ".join(f"{key} {fact(each)}" for key, each in value.items())
    return str(value)


def _is_short(value: Any) -> bool:
    text = fact(value)
    return len(text) <= 80 and "\n" not in text
