"""What came of one variant of one model: the rows of ``bench/models.py``, and their JSON."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from resident import Growth
from subjects import Deviation
from timing import Ratio, Series


@dataclass(frozen=True, slots=True)
class Row:
    """What came of one variant of one model in one precision.

    Attributes:
        model: Its name.
        variant: Its name.
        precision: What it was asked to compute in.
        training: Whether a call is a step of training.
        graphs: How many graphs Dynamo made, of a variant that compiles.
        compile_seconds: The first call, which compiles and runs once.
        deviation: How far the first call's results are off eager's in float32.
        growth: What the variant added to the process until its first call was over.
        series: The times of its calls.
        speedup: Eager's time in float32 over this one's, round by round.
        over_itself: Of an engine by composer: its time over that of the same engine by itself.
        share: Operations a second over those of the machine's best matrix product.
        via: What a native engine was given.
        composer: A record of each graph that composer compiled for this variant.
        error: The first line of what went wrong, empty if nothing did.
    """

    model: str
    variant: str
    precision: str
    training: bool
    graphs: int | None = None
    compile_seconds: float | None = None
    deviation: Deviation | None = None
    growth: Growth | None = None
    series: Series | None = None
    speedup: Ratio | None = None
    over_itself: Ratio | None = None
    share: float | None = None
    via: str = ""
    composer: tuple[dict[str, Any], ...] = ()
    error: str = ""

    @property
    def name(self) -> str:
        """Of the variant and its precision, as calls are kept by."""
        return f"{self.variant} {self.precision}"

    @property
    def engines(self) -> str:
        """The backends that composer chose, why not others, and calls left to its fallback."""
        chosen = Counter(str(graph["chosen"]) for graph in self.composer)
        attempts = [each for graph in self.composer for each in graph["attempts"] if each["reason"]]
        refused = Counter(f"{each['backend']} {each['reason']}" for each in attempts)
        missed = sum(graph["fallbacks"] for graph in self.composer)
        parts = [counted(chosen), counted(refused), f"{missed} calls fell back" if missed else ""]
        return "; ".join(filter(None, (self.via, *parts)))

    def to_dict(self) -> dict[str, Any]:
        """The row as JSON takes it; ``None`` for what is not known."""
        return {
            "model": self.model,
            "variant": self.variant,
            "precision": self.precision,
            "training": self.training,
            "error": self.error or None,
            "graphs": self.graphs,
            "compile_seconds": self.compile_seconds,
            "max_absolute_error": self.deviation.absolute if self.deviation else None,
            "max_relative_error": self.deviation.relative if self.deviation else None,
            "peak_growth_mib": self.growth.peak if self.growth else None,
            "kept_growth_mib": self.growth.kept if self.growth else None,
            "time": self.series.to_dict() if self.series else None,
            "speedup_over_eager": self.speedup.to_dict() if self.speedup else None,
            "time_over_itself": self.over_itself.to_dict() if self.over_itself else None,
            "share_of_best_product": self.share,
            "via": self.via or None,
            "composer": list(self.composer),
        }


def counted(names: Counter[str]) -> str:
    """The names with commas between, and how often each that is there more than once."""
    return ", ".join(f"{name} x{n}" if n > 1 else name for name, n in names.items())


def composer_reports() -> list[Any]:
    """All of composer's reports; none before Dynamo has loaded it, or if it is not installed."""
    composer = sys.modules.get("composer")
    return list(composer.reports()) if composer else []


def added_reports(before: Sequence[Any]) -> tuple[Any, ...]:
    """The reports that are there now and were not before."""
    known = {id(report) for report in before}
    return tuple(report for report in composer_reports() if id(report) not in known)


def graph_record(report: Any) -> dict[str, Any]:
    """What the result keeps of a report: who served the graph, who was tried, how calls went."""
    record = report.to_dict()
    kept = ("backend", "status", "reason", "seconds", "coverage")
    return {
        "chosen": record["chosen"],
        "nodes": record["nodes"],
        "seconds": record["seconds"],
        "calls": record["runtime"]["calls"],
        "fallbacks": record["runtime"]["fallbacks"],
        "attempts": [
            {name: each[name] for name in kept} | {"timing": each["engine"].get("timing")}
            for each in record["attempts"]
        ],
    }
