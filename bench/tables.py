"""Writes the tables of ``bench/README.md`` from the figures in ``bench/results``.

``python bench/tables.py`` replaces what stands between the markers; nothing there is typed by
hand.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
Record = Mapping[str, Any]


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; all columns but the first two are numbers."""
    marks = ["---"] * 2 + ["---:"] * (len(headings) - 2)
    lines = (headings, marks, *rows)
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def ratio(figure: Record) -> str:
    """``1.02 (1.01-1.03)``: the median and the quartiles of the ratios of paired rounds."""
    return f"{figure['median']:.3f} ({figure['p25']:.3f}-{figure['p75']:.3f})"


def described(record: Record) -> str:
    """One line about the machine and the day."""
    machine = record["machine"]
    packages = ", ".join(f"{name} {v}" for name, v in machine["packages"].items() if v)
    return (
        f"Measured {machine['date'][:10]} on {machine['cpu']}, {machine['cores']} cores, "
        f"{machine['cpu_capability']}, {machine['torch_threads']} threads; {packages}. "
        f"Load average at the start: {machine['load_average_1min']:.1f}."
    )


def overhead(record: Record) -> str:
    """Microseconds a call, milliseconds a compile."""
    headings = ("what", "unit", "without", "with", "ratio (quartiles)", "added")
    rows = []
    for part, unit, scale in (("calls", "us a call", 1e3), ("compiles", "ms a compile", 1.0)):
        for name, row in record[part].items():
            label = f"through `{name}`" if part == "calls" else f"first candidate {name}"
            times = [row[side]["median_ms"] * scale for side in ("plain", "composer", "added_ms")]
            plain, ours, added = (f"{time:.2f}" for time in times)
            rows.append((label, unit, plain, ours, ratio(row["ratio"]), added))
    return f"{described(record)}\n\n{table(headings, rows)}"


def models(record: Record) -> str:
    """Milliseconds a call of the public models, and what compiling them took."""
    headings = ("model", "variant", "median ms", "min ms", "eager / variant (quartiles)")
    headings += ("compile s", "largest relative error", "ran on")
    rows = [model_row(result) for result in record["results"]]
    return f"{described(record)}\n\n{table(headings, rows)}"


def model_row(result: Record) -> tuple[str, ...]:
    """One variant of one model; a failed one says why."""
    if result["error"]:
        return (result["model"], result["variant"], "", "", "", "", "", str(result["error"]))
    seconds = result["compile_seconds"]
    chosen = sorted({graph["chosen"] for graph in result["composer"]})
    return (
        result["model"],
        result["variant"],
        f"{result['time']['median_ms']:.2f}",
        f"{result['time']['minimum_ms']:.2f}",
        ratio(result["speedup_over_eager"]),
        "" if seconds is None else f"{seconds:.1f}",
        f"{result['max_relative_error']:.0e}",
        ", ".join(chosen),
    )


def main() -> int:
    """Rewrite the README's tables in place."""
    readme = HERE / "README.md"
    text = readme.read_text(encoding="utf-8")
    parts: dict[str, Callable[[Record], str]] = {"overhead": overhead, "models": models}
    for name, render in parts.items():
        record = json.loads((HERE / "results" / f"{name}.json").read_text(encoding="utf-8"))
        block = f"<!-- {name} -->\n{render(record)}\n<!-- /{name} -->"
        text = re.sub(rf"<!-- {name} -->.*<!-- /{name} -->", lambda _, b=block: b, text, flags=re.S)
    readme.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
