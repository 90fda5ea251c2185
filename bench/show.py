"""The tables that ``bench/models.py`` prints."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rows import Row

HEADINGS = ("median", "min", "eager / this", "compile s", "rel err", "peak, kept MiB", "share")


def show(rows: Sequence[Row], comparisons: Sequence[Mapping[str, Any]]) -> None:
    """Print every row, then what they come to; wide enough to be read in a log file too."""
    console = Console(width=None if sys.stdout.isatty() else 160, markup=False, highlight=False)
    table = Table(title="ms a call; ratios of the same round, median (p25-p75)")
    for heading in ("model", "variant", "in"):
        table.add_column(heading)
    for heading in HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("engines, or what failed")
    for index, row in enumerate(rows):
        last = index + 1 == len(rows) or rows[index + 1].model != row.model
        table.add_row(*cells(row), style="red" if row.error else None, end_section=last)
    console.print(table)
    for each in comparisons:
        console.print("\n".join(said(each)))


def said(summary: Mapping[str, Any]) -> list[str]:
    """A line for each figure over all models."""
    kind = "step of training" if summary["training"] else "call"
    of = f"a {kind} in {summary['precision']}, over composer's choice"
    lines = [
        f"{of}{without}: {name} {spread(found)}"
        for part, without in (("over_fastest", ""), ("without_openvino", " without OpenVINO"))
        for name, found in summary[part].items()
        if found
    ]
    if found := summary["regret"]:
        lines.append(f"composer's choice over the best single engine: {spread(found)}")
    return lines


def spread(found: Mapping[str, float]) -> str:
    """``2.10 (2.02-2.20), models from 1.10 to 3.02``."""
    mean = f"{found['median']:.3f} ({found['p25']:.3f}-{found['p75']:.3f})"
    return f"{mean}, models from {found['least']:.3f} to {found['most']:.3f}"


def cells(row: Row) -> tuple[str, ...]:
    """One line of the table; a dash for what is not known."""
    series, speedup, error, grown = row.series, row.speedup, row.deviation, row.growth
    known = grown is not None and grown.peak is not None and grown.kept is not None
    return (
        row.model,
        row.variant,
        row.precision,
        f"{series.median:.2f}" if series else "-",
        f"{series.minimum:.2f}" if series else "-",
        f"{speedup.median:.2f} ({speedup.p25:.2f}-{speedup.p75:.2f})" if speedup else "-",
        f"{row.compile_seconds:.1f}" if row.compile_seconds is not None else "-",
        f"{error.relative:.1e}" if error else "-",
        f"{grown.peak:.0f}, {grown.kept:.0f}" if grown is not None and known else "-",
        f"{row.share:.0%}" if row.share is not None else "-",
        f"FAILED {row.error}" if row.error else row.engines,
    )
