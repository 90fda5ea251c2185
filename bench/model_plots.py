"""Plots of ``bench/models.py``: how much faster than eager, compile seconds, regret, shares."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from drawing import Figure, dots, named
from markdown_table import Record, described

CHOICE = "composer, fastest"
Value = Callable[[Record], Mapping[str, float] | None]


def of_models(record: Record, kind: str) -> Iterator[Figure]:
    """One set of plots for each precision.

    Args:
        record: What ``bench/models.py`` wrote.
        kind: ``"call"`` or ``"step of training"``.
    """
    for precision in dict.fromkeys(row.get("precision", "fp32") for row in record["results"]):
        rows = [row for row in record["results"] if row.get("precision", "fp32") == precision]
        of = f"{kind}, {precision}"
        under = described(record)
        for name, title, value, axis in (
            ("speed", "Speed over eager", speed, "eager / variant"),
            ("compile", "First call, cold", seconds, "seconds"),
            ("share", "Operations a second over the best product's", share, "share"),
        ):
            if any(value(row) for row in rows):
                yield dotted(name, f"{title}: {of}", rows, value, under, axis)
        compared = {model: each.get(precision) for model, each in comparisons(record).items()}
        if regrets := {
            m: each["regret"] for m, each in compared.items() if each and each["regret"]
        }:
            yield regret(f"Choice over the best single engine: a {of}", regrets, under)


def comparisons(record: Record) -> Mapping[str, Any]:
    """By model; none in what an older bench wrote."""
    found: Mapping[str, Any] = record.get("comparisons", {})
    return found


def dotted(
    name: str, title: str, rows: Sequence[Record], value: Value, under: str, axis: str
) -> Figure:
    """A dot for each variant of each model, with quartiles where there are some."""
    series: dict[str, dict[str, Mapping[str, float]]] = {}
    for row in rows:
        if (found := value(row)) is not None:
            series.setdefault(row["variant"], {})[row["model"]] = found
    under = f"{under} Bars are quartiles of the rounds." if name == "speed" else under
    image = dots(series, title, axis, under, line=1.0 if name == "speed" else None)
    models = dict.fromkeys(row["model"] for row in rows)
    lines = [[f"{p[m]['median']:.3g}" if m in p else "" for p in series.values()] for m in models]
    figures = tuple((model, *line) for model, line in zip(models, lines, strict=True))
    return Figure(named(name, title), title, under, image, ("model", *series), figures)


def regret(title: str, regrets: Mapping[str, Mapping[str, Any]], under: str) -> Figure:
    """One dot a model; 1 is as fast as the best engine there is."""
    under = f"{under} Bars are quartiles of the rounds."
    image = dots({CHOICE: regrets}, title, "composer / best single engine", under, line=1.0)
    rows = tuple((m, each["best"], f"{each['median']:.3f}") for m, each in regrets.items())
    headings = ("model", "best single engine", "composer / that")
    return Figure(named("regret", title), title, under, image, headings, rows)


def speed(row: Record) -> Mapping[str, float] | None:
    """Eager's time over the variant's, with quartiles."""
    found: Mapping[str, float] | None = row["speedup_over_eager"]
    return found


def seconds(row: Record) -> Mapping[str, float] | None:
    """Of the first call."""
    return None if row["compile_seconds"] is None else {"median": row["compile_seconds"]}


def share(row: Record) -> Mapping[str, float] | None:
    """Of the machine's best matrix product."""
    found = row.get("share_of_best_product")
    return None if found is None else {"median": found}
