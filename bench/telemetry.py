"""What the sink ``jsonl`` takes of a compile.

``python bench/telemetry.py`` compiles with and without the sink, in turn and in one process,

- a graph of three operations by ``aot_eager``: about the shortest compile that there is;
- a small BERT by Inductor, with cold caches.

The sink's own time is read beside the compile's: what ``emit`` takes with it above what it takes
without. The ratio of the compiles alone would not show it, since they differ by more than that.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import zoo
from compiles import cold_compiles
from overhead import compared, compile_anew
from rich.console import Console
from rich.table import Table
from timing import Ratio, machine, measure, quartiles, write_json

from composer import session
from composer.records import CompileReport
from composer.telemetry.jsonl import JsonLinesSink
from composer.telemetry.sinks import Sinks

GOAL = 0.02


class TimedSinks(Sinks):
    """Knows how long the last record took to all sinks, in seconds."""

    seconds = 0.0

    def emit(self, report: CompileReport, *, first: bool = True) -> None:
        """As without the clock."""
        started = time.perf_counter()
        super().emit(report, first=first)
        self.seconds = time.perf_counter() - started


def cost(compile_once: Callable[[], None], rounds: int, warmup: int) -> dict[str, Any]:
    """The compiles with the sink and without, and the sink's share of one.

    Args:
        compile_once: Compiles one graph from nothing.
        rounds: Paired rounds.
        warmup: Those before them that do not count.
    """
    sinks, emits = TimedSinks(), {"plain": [0.0], "composer": [0.0]}
    session.current().sinks = sinks
    with tempfile.TemporaryDirectory() as folder:
        sink = made_for(Path(folder) / "run.jsonl")

        def run(name: str) -> None:
            if name == "composer":
                sinks.add(sink)
            compile_once()
            sinks.remove(sink)
            emits[name].append(sinks.seconds)

        variants = {name: functools.partial(run, name) for name in emits}
        taken = measure(variants, rounds, warmup, settle=0)
    row = compared(taken)
    own = [a - b for a, b in zip(*(emits[n][-rounds:] for n in ("composer", "plain")), strict=True)]
    shares = [1e3 * a / b for a, b in zip(own, taken["plain"].milliseconds, strict=True)]
    row["sink_ms"] = 1e3 * quartiles(own)[1]
    p25, median, p75 = quartiles(shares)
    row["share"] = Ratio(median, p25, p75).to_dict()
    return row


def made_for(path: Path) -> JsonLinesSink:
    """A sink that goes on with ``path`` when the environment no longer names it."""
    os.environ["COMPOSER_TELEMETRY"] = str(path)
    try:
        return JsonLinesSink()
    finally:
        del os.environ["COMPOSER_TELEMETRY"]


def compile_bert(module: torch.nn.Module, inputs: Mapping[str, Any]) -> None:
    """By Inductor, and call it once."""
    torch.compiler.reset()
    torch.compile(module, backend="composer", options={"chain": ["inductor"]})(**inputs)


def show(rows: Mapping[str, Mapping[str, Any]]) -> None:
    """Print the table."""
    headings = ("compile", "without, ms", "with, ms", "ratio (p25-p75)", "sink, ms")
    table = Table(*headings, "share of the compile (p25-p75)")
    for name, row in rows.items():
        ratio, share = Ratio(**row["ratio"]), Ratio(**row["share"])
        table.add_row(
            name,
            f"{row['plain']['median_ms']:.1f}",
            f"{row['composer']['median_ms']:.1f}",
            f"{ratio.median:.3f} ({ratio.p25:.3f}-{ratio.p75:.3f})",
            f"{row['sink_ms']:.2f}",
            f"{share.median:.2%} ({share.p25:.2%}-{share.p75:.2%}), goal {GOAL:.0%}",
        )
    Console(width=120).print(table)


def main() -> int:
    """Measure, print, and write the JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=250, help="paired compiles by aot_eager")
    parser.add_argument(
        "--cold-rounds", type=int, default=5, help="paired compiles by Inductor; 0: none"
    )
    parser.add_argument("--json", type=Path, help="where to write the figures")
    asked = parser.parse_args()
    described = machine()
    bert = zoo.build("bert", tiny=True)
    with torch.no_grad():
        small = cost(functools.partial(compile_anew, ["aot_eager"]), asked.rounds, 3)
        rows = {"three operations by `aot_eager`": small}
        if asked.cold_rounds:
            with cold_compiles():
                large = cost(functools.partial(compile_bert, *bert), asked.cold_rounds, 1)
            rows["a small BERT by `inductor`"] = large
    show(rows)
    if asked.json:
        write_json(asked.json, {"machine": described, "goal": GOAL, "compiles": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
