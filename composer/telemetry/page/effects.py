"""What the shared passes did, over all graphs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from composer.errors import first_line
from composer.records import CompileReport, PassRecord
from composer.telemetry.page.words import sane


@dataclass(frozen=True, slots=True)
class Effect:
    """One pass in one stage.

    ``runs`` is on how many graphs it ran, ``changed`` how many of these it changed. ``matches`` is
    ``None`` where it never counts them. Nodes are added up over the graphs that it changed.
    ``errors`` is how often it was rolled back, ``error`` what was wrong the first time.
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
    """Every pass that ran, in the order they ran first."""
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
