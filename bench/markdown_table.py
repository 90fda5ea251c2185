"""What all generated tables are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], text: int = 2) -> str:
    """A Markdown table; all columns but the first ``text`` are numbers."""
    marks = ["---"] * text + ["---:"] * (len(headings) - text)
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
