"""What each pass that ships does for the public models, engine by engine.

Every model runs without passes, with each pass that matches it by itself, and with all of them;
compiled side by side in one process and timed in interleaved rounds, under ``torch.no_grad()`` and
in eval mode. Run from anywhere, with composer installed::

    python bench/passes.py --models bert,vit --json bench/results/passes.json

The figures decide which passes are worth listing, and which ship at all. Compile times are those
of one first call each, with Inductor's caches empty; ``own seconds`` are the pass's alone, from
composer's report. The exit status is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import functools
import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import zoo
from compiles import cold_compiles, first_line, flat, forget, positive
from models import model_names
from rich.console import Console
from rich.table import Table
from subjects import deviation
from timing import Ratio, machine, measure, paired_ratio, write_json

import composer
from composer.passes.canonical import to_aten
from composer.passes.pipeline import Pipeline
from composer.passes.resolve import PASSES

log = logging.getLogger("bench.passes")

ENGINES = ("eager", "onnxrt", "inductor")
NONE, ALL = "", "all"


@dataclass(frozen=True, slots=True)
class Row:
    """One pass on one model under one engine.

    ``speedup`` is the time without the pass over that with it, round by round. ``own_seconds`` are
    spent in the pass, ``extra_compile_seconds`` are all that the first call took longer. All are
    ``None`` where the pass has no match, or where ``error`` says what went wrong.
    """

    model: str
    engine: str
    passes: str
    matches: int
    own_seconds: float | None = None
    extra_compile_seconds: float | None = None
    speedup: Ratio | None = None
    max_relative_error: float | None = None
    error: str = ""

    def to_dict(self) -> dict[str, object]:
        """The row as JSON takes it."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Compiled:
    """A model after its first call with some passes."""

    call: Callable[[], object]
    seconds: float
    own_seconds: float
    relative_error: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit status is 1 if anything failed."""
    options = parse(arguments)
    logging.basicConfig()
    log.setLevel(logging.INFO)
    settings = {name: getattr(options, name) for name in ("rounds", "warmup", "tiny", "passes")}
    record: dict[str, Any] = {"machine": machine(), "settings": settings, "results": []}
    rows: list[Row] = []
    with cold_compiles(), torch.no_grad():
        bench("vit", "onnxrt", options.passes, tiny=True, rounds=1, warmup=0)
        for engine in options.engines:
            for model in options.models:
                forget()
                row = bench(
                    model, engine, options.passes, options.tiny, options.rounds, options.warmup
                )
                rows += row
                record["results"] = [each.to_dict() for each in rows]
                if options.json:
                    write_json(options.json, record)
    show(rows)
    return int(any(row.error for row in rows))


def bench(
    model: str, engine: str, passes: Sequence[str], tiny: bool, rounds: int, warmup: int
) -> list[Row]:
    """One row for each pass, and one for all that match together."""
    start = time.perf_counter()
    found = dict(count_matches(model, tuple(passes), tiny))
    matching = [name for name in passes if found[name]]
    lists = {NONE: [], **{name: [name] for name in matching}}
    if len(matching) > 1:
        lists[ALL] = matching
        found[ALL] = sum(found.values())
    module, inputs = zoo.build(model, tiny)
    reference = flat(module(**inputs))
    ready: dict[str, Compiled] = {}
    errors: dict[str, str] = {}
    for name, listed in lists.items() if matching else ():
        try:
            ready[name] = prepare(module, inputs, reference, engine, listed)
        except Exception as error:  # noqa: BLE001  # its row says what it was
            errors[name] = first_line(error)
    rows = rows_of(model, engine, found, ready, errors, rounds, warmup)
    log.info("%s on %s: %.0f s", model, engine, time.perf_counter() - start)
    return rows


@functools.cache
def count_matches(model: str, passes: tuple[str, ...], tiny: bool) -> Mapping[str, int]:
    """In how many places each pass, by itself, rewrites the model, which is one graph."""
    module, inputs = zoo.build(model, tiny)
    found: dict[str, int] = {}

    def count(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        for name in passes:
            pipeline = Pipeline("raise")
            pipeline.run(to_aten(gm, example_inputs), [PASSES.get(name)()])
            found[name] = pipeline.records[0].matches or 0
        return gm.forward

    torch.compile(module, backend=count)(**inputs)
    forget()
    return found


def compile_with(module: torch.nn.Module, engine: str, passes: Sequence[str]) -> Callable[..., Any]:
    """The module behind composer, with one engine and no fallback."""
    options = {"chain": [engine], "passes": list(passes), "strict": True}
    return torch.compile(module, backend="composer", options={**options, "on_pass_error": "raise"})


def prepare(
    module: torch.nn.Module,
    inputs: zoo.Inputs,
    reference: tuple[torch.Tensor, ...],
    engine: str,
    passes: Sequence[str],
) -> Compiled:
    """Compile by the first call, and hold what it returns against eager."""
    compiled = compile_with(module, engine, passes)
    start = time.perf_counter()
    outputs = flat(compiled(**inputs))
    seconds = time.perf_counter() - start
    own = sum(each.seconds for each in composer.reports()[-1].passes)
    error = deviation(reference, outputs).relative
    return Compiled(lambda: compiled(**inputs), seconds, own, error)


def rows_of(
    model: str,
    engine: str,
    found: Mapping[str, int],
    ready: Mapping[str, Compiled],
    errors: Mapping[str, str],
    rounds: int,
    warmup: int,
) -> list[Row]:
    """Time what compiled, in the same rounds, and compare each with the model without passes."""
    plain = ready.get(NONE)
    calls = {name: each.call for name, each in ready.items()}
    with torch.compiler.set_stance("fail_on_recompile"):
        times = measure(calls, rounds, warmup) if plain else {}
    rows = []
    for name, matches in found.items():
        error = errors.get(name) or errors.get(NONE, "")
        this = ready.get(name)
        if plain is None or this is None:
            rows.append(Row(model, engine, name, matches, error=error))
            continue
        rows.append(
            Row(
                *(model, engine, name, matches, this.own_seconds),
                extra_compile_seconds=this.seconds - plain.seconds,
                speedup=paired_ratio(times[NONE], times[name]),
                max_relative_error=this.relative_error,
            )
        )
    return rows


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Time composer's own passes on public models.")
    every = ", ".join(zoo.MODELS)
    parser.add_argument("--models", type=model_names, default=list(zoo.MODELS), help=f"of {every}")
    names = PASSES.names()
    parser.add_argument("--passes", type=one_of(names), default=list(names), metavar="A,B")
    parser.add_argument("--engines", type=one_of(ENGINES), default=list(ENGINES), metavar="A,B")
    parser.add_argument("--rounds", type=positive, default=15, help="rounds that count (15)")
    parser.add_argument("--warmup", type=int, default=3, help="rounds before them (3)")
    parser.add_argument("--tiny", action="store_true", help="very small models: a quick check")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")
    return parser.parse_args(arguments)


def one_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    """Reads a list with commas between, whose names are all known."""

    def names(text: str) -> list[str]:
        given = [name.strip() for name in text.split(",")]
        if unknown := [name for name in given if name not in known]:
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}")
        return given

    return names


def show(rows: Sequence[Row]) -> None:
    """Print the table; a pass without a match on a model has no line."""
    table = Table(title="speedup = without / with the pass in the same round, median (p25-p75)")
    for heading in ("model", "engine", "pass", "matches", "speedup", "own s", "extra s", "rel err"):
        table.add_column(heading, no_wrap=True)
    for row in rows:
        if not row.matches:
            continue
        names = (row.model, row.engine, row.passes, str(row.matches))
        if row.speedup is None or row.own_seconds is None:
            table.add_row(*names, f"FAILED {row.error}", style="red")
            continue
        speedup = f"{row.speedup.median:.3f} ({row.speedup.p25:.3f}-{row.speedup.p75:.3f})"
        seconds = (f"{row.own_seconds:.2f}", f"{row.extra_compile_seconds:.1f}")
        table.add_row(*names, speedup, *seconds, f"{row.max_relative_error:.0e}")
    width = None if sys.stdout.isatty() else 160
    Console(width=width, markup=False, highlight=False).print(table)


if __name__ == "__main__":
    sys.exit(main())
