"""The share of each engine in graphs, compute nodes, calls and run time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from composer.records import EAGER, Attempt, CompileReport
from composer.telemetry.html.words import percentages, sane


@dataclass(frozen=True, slots=True)
class EngineShare:
    """The numbers of one engine, and its shares in per cent.

    ``nodes`` is an estimate. It is the number of captured operations of a graph times the share of
    compute nodes that the engine reports as its own. An engine that reports nothing is assumed to
    run all nodes.
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
    """Return the attempt that serves a graph; ``None`` for the eager fallback or no engine."""
    return next((each for each in reversed(graph.attempts) if each.accepted), None)


def shares(graphs: Iterable[CompileReport]) -> tuple[EngineShare, ...]:
    """Return the share of every engine: the one with the most compute nodes first, eager last.

    Nodes that an engine leaves to torch count for eager, and so do calls that the eager fallback
    answered. The time within calls cannot be split, so all of it counts for the engine. Graphs
    without an engine are left out.
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
    """Add one graph to the totals of graphs, nodes, calls and seconds."""
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
    """Facts that an engine reports about itself in all its attempts, such as its version."""

    name: str
    facts: tuple[tuple[str, str], ...]


def engines(graphs: Iterable[CompileReport]) -> tuple[EngineFacts, ...]:
    """Return engines that report facts, with the facts that are equal in all their attempts."""
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
    """Return one fact as text in one line; a list of sentences gets one line for each."""
    if isinstance(value, list | tuple):
        texts = [fact(each) for each in value]
        return ("\n" if any(" " in text for text in texts) else ", ").join(texts)
    if isinstance(value, dict):
        return ", ".join(f"{key} {fact(each)}" for key, each in value.items())
    return str(value)


def _is_short(value: Any) -> bool:
    text = fact(value)
    return len(text) <= 80 and "\n" not in text
