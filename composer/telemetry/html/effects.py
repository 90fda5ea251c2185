"""The effects of the shared passes, over all graphs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from composer.errors import first_line
from composer.records import CompileReport, PassRecord
from composer.telemetry.html.words import sane


@dataclass(slots=True)
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
    runs: int = 0
    changed: int = 0
    matches: int | None = None
    nodes_before: int = 0
    nodes_after: int = 0
    seconds: float = 0.0
    errors: int = 0
    error: str = ""

    def add(self, run: PassRecord) -> None:
        """Add one run of the pass."""
        self.runs += 1
        self.seconds += sane(run.seconds)
        if run.changed:
            self.changed += 1
            self.nodes_before += run.nodes_before
            self.nodes_after += run.nodes_after
        if run.matches is not None:
            self.matches = run.matches + (self.matches or 0)
        if run.error:
            self.errors += 1
            self.error = self.error or first_line(run.error)


def effects(graphs: Iterable[CompileReport]) -> tuple[Effect, ...]:
    """Return the effects of every pass, in the order of their first runs."""
    rows: dict[tuple[str, str], Effect] = {}
    for graph in graphs:
        for run in graph.passes:
            effect = rows.setdefault((run.name, run.stage), Effect(run.name, run.stage))
            effect.add(run)
    return tuple(rows.values())
