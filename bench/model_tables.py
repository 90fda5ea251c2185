"""The Markdown tables of ``bench/models.py``: what was chosen, times, compiles, memory, errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from markdown_table import Record, described, ratio, table

CHOICE = "composer, fastest"

_CHAINS = ("over_fastest", "without_openvino")
"""Where a summary has the means of choices among all engines, and among those without OpenVINO."""


def models(record: Record) -> str:
    """All that was measured, precision by precision."""
    parts = [described(record)]
    for precision in dict.fromkeys(row.get("precision", "fp32") for row in record["results"]):
        rows = [row for row in record["results"] if row.get("precision", "fp32") == precision]
        parts += [f"**{precision}**", *summed_up(record, precision)]
        parts += filter(None, (choices(record, rows, precision), *matrices(rows), failures(rows)))
    return "\n\n".join(parts)


def headline(record: Record) -> str:
    """For the front page: who serves each model, how much faster that is, and the means.

    In the lowest precision that was measured; of the others the means.
    """
    if not record.get("comparisons"):
        return "Not measured yet: `python bench/models.py --json bench/results/models.json`."
    *others, lowest = dict.fromkeys(row["precision"] for row in record["results"])
    rows = [row for row in record["results"] if row["precision"] == lowest]
    parts = [described(record), choices(record, rows, lowest), *summed_up(record, lowest)]
    for precision in others:
        parts += summed_up(record, precision)
    return "\n\n".join(filter(None, parts))


def summed_up(record: Record, precision: str) -> Iterator[str]:
    """The geometric means over the models, in a table."""
    for summary in record.get("summaries", ()):
        if summary["precision"] != precision:
            continue
        means = {
            f"{name} / choice": [mean(summary[part][name]) for part in _CHAINS]
            for name in summary["over_fastest"]
        }
        means["choice / best single engine"] = [mean(summary["regret"]), ""]
        lines = [(name, *found) for name, found in means.items() if any(found)]
        if lines:
            title = f"{precision}, geometric mean of {found_models(summary)} models"
            without = any(found for *_, found in lines)
            headings = (title, "all engines", *(("without OpenVINO",) if without else ()))
            yield table(headings, [line[: len(headings)] for line in lines], text=1)


def found_models(summary: Record) -> int:
    """How many models the means are over."""
    parts = (summary["over_fastest"], summary["without_openvino"])
    figures = (summary["regret"], *(each for part in parts for each in part.values()))
    return max(each["models"] for each in figures if each)


def mean(found: Record | None) -> str:
    """``**2.10** (2.02-2.20; models 1.10-3.02)``; nothing of nothing."""
    if not found:
        return ""
    ends = f"models {found['least']:.2f}-{found['most']:.2f}"
    return f"**{found['median']:.2f}** ({found['p25']:.2f}-{found['p75']:.2f}; {ends})"


def choices(record: Record, rows: Sequence[Record], precision: str) -> str:
    """What composer chose for each model, and how that compares."""
    headings = ("model", "best single engine", "composer's choice", "ms", "/ best single")
    over_names = ("eager", "inductor", *(("inductor fp32",) if precision != "fp32" else ()))
    headings += (*(f"{name} / choice" for name in over_names), "of the best product")
    lines = []
    for row in rows:
        found = record.get("comparisons", {}).get(row["model"], {}).get(precision, {})
        if row["variant"] != CHOICE or not row["time"] or not found:
            continue
        over, regret = found["over_fastest"], found["regret"]
        lines.append(
            (
                row["model"],
                regret["best"] if regret else "none is accurate",
                ", ".join(sorted({graph["chosen"] for graph in row["composer"]})),
                f"{row['time']['median_ms']:.2f}",
                ratio(regret) if regret else "",
                *(ratio(over[name]) if name in over else "" for name in over_names),
                f"{row['share_of_best_product']:.0%}" if row["share_of_best_product"] else "",
            )
        )
    return table(headings, lines, text=3) if lines else ""


def matrices(rows: Sequence[Record]) -> Iterator[str]:
    """A line for each model, a column for each variant."""
    yield matrix("median ms a call", rows, milliseconds)
    yield matrix("eager / variant (quartiles)", rows, speed)
    yield matrix("by composer / the engine by itself (quartiles)", rows, over_itself)
    yield matrix("seconds of the first call, cold", rows, seconds)
    yield matrix("MiB added, at most / kept", rows, mebibytes)
    yield matrix("largest relative error", rows, error)


def matrix(title: str, rows: Sequence[Record], cell: Callable[[Record], str]) -> str:
    """Of one figure; nothing where no row has it."""
    variants = dict.fromkeys(row["variant"] for row in rows)
    lines: dict[str, dict[str, str]] = {}
    for row in rows:
        lines.setdefault(row["model"], {})[row["variant"]] = cell(row)
    shown = [v for v in variants if any(line.get(v) for line in lines.values())]
    cells = [(m, *(line.get(v, "") for v in shown)) for m, line in lines.items()]
    return table((title, *shown), cells, text=1) if shown else ""


def milliseconds(row: Record) -> str:
    """The median of the calls."""
    return f"{row['time']['median_ms']:.2f}" if row["time"] else ""


def speed(row: Record) -> str:
    """How many times as fast as eager in float32."""
    found = row["speedup_over_eager"]
    if not found or is_eager(row):
        return ""
    return f"{found['median']:.2f} ({found['p25']:.2f}-{found['p75']:.2f})"


def over_itself(row: Record) -> str:
    """An engine in composer's chain against the same engine alone; what it did not take is said."""
    found = row.get("time_over_itself")
    if not found:
        return ""
    tried = (attempt for graph in row["composer"] for attempt in graph["attempts"])
    least = min(each["coverage"] if each["status"] == "succeeded" else 0.0 for each in tried)
    left = "" if least == 1.0 else f", {least:.1%} of the graph"
    return f"{found['median']:.2f} ({found['p25']:.2f}-{found['p75']:.2f}){left}"


def is_eager(row: Record) -> bool:
    """Whether it is what the others are compared with."""
    return bool(row["variant"] == "eager" and row.get("precision", "fp32") == "fp32")


def seconds(row: Record) -> str:
    """The first call."""
    return "" if row["compile_seconds"] is None else f"{row['compile_seconds']:.1f}"


def mebibytes(row: Record) -> str:
    """What the variant added to the process."""
    peak, kept = row.get("peak_growth_mib"), row.get("kept_growth_mib")
    return "" if peak is None or kept is None else f"{peak:.0f} / {kept:.0f}"


def error(row: Record) -> str:
    """Against eager in float32; eager's own is none."""
    found: Any = row["max_relative_error"]
    return "" if found is None or is_eager(row) else f"{found:.0e}"


def failures(rows: Sequence[Record]) -> str:
    """What has no figures, and why."""
    lines = [(row["model"], row["variant"], str(row["error"])) for row in rows if row["error"]]
    return table(("model", "variant", "why it has no figures"), lines, text=3) if lines else ""


def scaling(record: Record) -> str:
    """What composer adds, by nodes, graphs, weights and batch."""
    headings = ("size", "of", "compile, ms", "with composer", "ratio (quartiles)")
    headings += ("call, us", "with composer", "ratio (quartiles)", "KiB kept", "with composer")
    lines = []
    for sweep, sizes in record["sweeps"].items():
        for size, row in sizes.items():
            figures: list[str] = []
            for part, scale in (("compile", 1.0), ("call", 1e3)):
                sides = (row[part][side]["median_ms"] * scale for side in ("plain", "composer"))
                figures += [*(f"{each:.1f}" for each in sides), ratio(row[part]["ratio"])]
            kept = (f"{row['memory'][side]['kept_kib']:.0f}" for side in ("plain", "composer"))
            lines.append((f"{int(size):,}", sweep, *figures, *kept))
    return f"{described(record)}\n\n{table(headings, lines)}"
