"""The effects of the shared passes, over all graphs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from composer.errors import first_line
from composer.records import CompileReport, PassRecord
from composer.telemetry.html.words import sane


@dataclass(frozen=True, slots=True)
class Effect:
    """The effects of one pass in one stage.

    Attributes:
        name: The name of the pass.
        stage: The stage.
        runs: The number of graphs on which it ran.
        changed: The number of graphs that it changed.
        matches: The number of its matches; ``None`` if it never counts them.
        nodes_before: The nodes before it ran, summed over the graphs that it changed.
        nodes_after: The nodes after it ran, summed over the same graphs.
        seconds: Its time over all graphs.
        errors: The number of times it was rolled back.
        error: The first error.
    """

    name: str
    stage: str
    runs: int
    changed: int
    matches: int | None
    nodes_before: int
    nodes_after: int
    seconds: float
    errors: int
    error: str


def effects(graphs: Iterable[CompileReport]) -> tuple[Effect, ...]:
    """Return the effects of every pass, in the order of their first runs."""
    found: dict[tuple[str, str], list[PassRecord]] = {}
    for each in (each for graph in graphs for each in graph.passes):
        found.setdefault((each.name, each.stage), []).append(each)
    return tuple(_effect(name, stage, runs) for (name, stage), runs in found.items())


def _effect(name: str, stage: str, runs: list[PassRecord]) -> Effect:
    changes = [each for each in runs if each.changed]
    matches = [each.matches for each in runs if each.matches is not None]
    errors = [first_line(each.error) for each in runs if each.error]
    return Effect(
        name,
        stage,
        runs=len(runs),
        changed=len(changes),
        matches=sum(matches) if matches else None,
        nodes_before=sum(each.nodes_before for each in changes),
        nodes_after=sum(each.nodes_after for each in changes),
        seconds=sum(sane(each.seconds) for each in runs),
        errors=len(errors),
        error=errors[0] if errors else "",
    )
