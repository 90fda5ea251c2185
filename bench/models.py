"""How fast, how right and how large the public models run, by engine and by composer.

Each model runs in eager mode, through Inductor (its defaults, max-autotune, freezing), on ONNX
Runtime and OpenVINO called by themselves and as the one engine of composer's chain, through the
default chain, and through composer with ``select = "fastest"``; in float32, and where asked in
bfloat16; as a call without gradients, or with ``--train`` as a step of training of a small
configuration. Each model has a process of its own, since torch 2.13 never frees what Inductor froze
by its global setting. All variants of a precision are compiled there and timed in interleaved
rounds, then let go::

    python bench/models.py --models bert,vit --json bench/results/models.json
    python bench/models.py --train --json bench/results/training.json

Compile seconds are cold: of a process that has compiled a small model before, with empty caches
for every variant (``bench/warm.py`` has those of warm starts). Memory is the growth of the process
from before a variant was made until after its first call. Whatever fails is a row that says so,
and the exit status is 1.
"""

from __future__ import annotations

import argparse
import difflib
import logging
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import zoo
from compiles import cold_compiles, first_line, forget, positive, time_together
from native_cpu import Native
from products import SIDE, best, products
from resident import give_back, growth
from rows import Row, added_reports, composer_reports, graph_record
from show import show
from subjects import Subject, deviation, subject
from summary import compared, summary
from timing import Series, machine, measure, paired_ratio, write_json
from torch import nn
from variants import EAGER, INDUCTOR, ONE_OF_EACH, PRECISIONS, VARIANTS, Variant

from composer.policy import Policy

log = logging.getLogger("bench.models")

Call = Callable[[], object]
Found = tuple[list[Row], dict[str, Any], dict[str, dict[str, float]]]
"""Of one model: the rows, the comparisons by precision, and GFLOP/s of matrix products."""

PACKAGES = ("openvino",)
TINY_SIDE = 128
LONGEST = 5.0
"""Seconds a call beyond which a variant is not timed; without bfloat16's instructions some are."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A variant after its first call: ``call`` is ready to be timed, ``None`` if it failed.

    ``reports`` are composer's own, still counting.
    """

    row: Row
    call: Call | None = None
    reports: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Wish:
    """What is measured of each model."""

    variants: tuple[Variant, ...]
    precisions: tuple[str, ...]
    training: bool
    tiny: bool
    rounds: int
    warmup: int
    side: int = SIDE


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit status is 1 if anything failed, 2 if it was asked wrongly."""
    options = parse(arguments)
    wish = wished(options)
    record: dict[str, Any] = {"machine": machine(PACKAGES), "settings": settings(wish)}
    record |= {"results": [], "comparisons": {}, "products": {}, "summaries": []}
    rows: list[Row] = []
    for model in options.models:
        found, comparison, record["products"][model] = in_its_own_process(model, arguments)
        rows += found
        record["results"] = [row.to_dict() for row in rows]
        record["comparisons"][model] = comparison
        record["summaries"] = list(summaries(record["comparisons"], wish))
        if options.json:
            write_json(options.json, record)
    show(rows, record["summaries"])
    return int(any(row.error for row in rows))


def in_its_own_process(model: str, arguments: Sequence[str] | None) -> Found:
    """What :func:`bench_model` finds in a new process, by the same command line.

    Where that process dies, every row of the model says so.
    """
    given = sys.argv[1:] if arguments is None else arguments
    try:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            return pool.submit(bench_alone, model, given).result()
    except BrokenProcessPool as error:
        wish = wished(parse(arguments))
        return [failed(model, each, p, wish, error) for each, p in pairs(wish)], {}, {}


def bench_alone(model: str, arguments: Sequence[str]) -> Found:
    """Measure one model in a process that has measured nothing before."""
    options = parse(arguments)
    logging.basicConfig()
    logging.getLogger("bench").setLevel(logging.DEBUG if options.verbose else logging.INFO)
    wish = wished(options)
    with cold_compiles(), torch.no_grad():
        if not options.no_first:  # what is imported and compiled once in a process
            bench_model("vit", first_ones(wish))
            forget()
            give_back()
        return bench_model(model, wish)


def first_ones(wish: Wish) -> Wish:
    """A quick round of variants that between them import, and compile for good, what all do."""
    some = tuple(each for each in wish.variants if each.name in ONE_OF_EACH) or wish.variants
    quick = replace(wish, variants=some, precisions=wish.precisions[:1])
    return replace(quick, tiny=True, rounds=1, warmup=0, side=TINY_SIDE)


def settings(wish: Wish) -> dict[str, Any]:
    """As they stand in the JSON."""
    names = ("training", "tiny", "rounds", "warmup")
    return {
        **{name: getattr(wish, name) for name in names},
        "variants": [each.name for each in wish.variants],
        "precisions": list(wish.precisions),
    }


def summaries(comparisons: Mapping[str, Any], wish: Wish) -> Iterator[dict[str, Any]]:
    """One for each precision, over the models so far."""
    for precision in wish.precisions:
        found = {model: each[precision] for model, each in comparisons.items() if precision in each}
        yield {"precision": precision, "training": wish.training, **summary(found)}


def bench_model(model: str, wish: Wish) -> Found:
    """One row for each variant and precision; whatever raises fails a row and no more than that.

    Precisions take turns, so that variants of one precision only are held at a time; eager and
    Inductor in float32 run with each, for the ratios over them.
    """
    start = time.perf_counter()
    try:
        made = subject(model, tiny=wish.tiny, training=wish.training)
    except Exception as error:
        log.debug("%s could not be built", model, exc_info=True)
        return [failed(model, each, p, wish, error) for each, p in pairs(wish)], {}, {}
    rows: list[Row] = []
    comparisons = {}
    gflops = products(wish.side)
    for precision in wish.precisions:
        found, times = bench_precision(made, precision, wish)
        rows += [with_share(row, made, best(gflops, row.precision)) for row in found]
        comparisons[precision] = compared(times, {r.variant for r in found if is_accurate(r)})
        forget()
        give_back()
    log.info("%s: %.0f s", model, time.perf_counter() - start)
    return rows, comparisons, gflops


def is_accurate(row: Row) -> bool:
    """Whether a variant in bfloat16 is as close to eager as composer's default asks for."""
    if row.precision == "fp32":
        return True
    return row.deviation is not None and row.deviation.relative <= Policy().precision.max_error


def pairs(wish: Wish) -> Iterator[tuple[Variant, str]]:
    """What is measured in which precision."""
    for precision in wish.precisions:
        yield from ((each, precision) for each in wish.variants if precision in each.precisions)


def failed(model: str, variant: Variant, precision: str, wish: Wish, error: Exception) -> Row:
    """A row of a model that could not be built."""
    return Row(model, variant.name, precision, wish.training, error=first_line(error))


def bench_precision(
    made: Subject, precision: str, wish: Wish
) -> tuple[list[Row], dict[str, Series]]:
    """The rows of one precision, and the times by variant."""
    prepared = [prepare(made, v, precision) for v in wish.variants if precision in v.precisions]
    if precision != "fp32":
        asked = {each.name for each in wish.variants} | {EAGER}
        prepared[:0] = [prepare(made, VARIANTS[n], "fp32") for n in (EAGER, INDUCTOR) if n in asked]
    calls = {each.row.name: each.call for each in prepared if each.call}
    times, failures = time_together(calls, lambda left: measure(left, wish.rounds, wish.warmup))
    rows = [finish(each, times, failures) for each in prepared]
    own = [row for row in rows if row.precision == precision]
    others = [row for row in rows if row.precision != precision]
    named = {row.variant: times[row.name] for row in own if row.name in times}
    named |= {row.name: times[row.name] for row in others if row.name in times}
    return own, named


def prepare(made: Subject, variant: Variant, precision: str) -> Prepared:
    """Compile one variant by calling it, and compare what it returns with eager."""
    row = Row(made.name, variant.name, precision, made.training)
    before = composer_reports()
    natives: list[Native] = []

    def compile_it(module: nn.Module) -> Callable[..., Any]:
        called = variant.make(module, precision, made.training)
        natives.extend([called] if isinstance(called, Native) else [])
        return called

    asked = "fp32" if variant.lowers_itself else precision
    seconds = 0.0
    try:
        with nothing_remembered(), growth() as grown:
            ready = made.ready(compile_it, asked)
            start = time.perf_counter()
            outputs = ready.first()
            seconds = time.perf_counter() - start
        row = replace(row, deviation=deviation(made.reference, outputs), growth=grown)
    except Exception as error:
        log.debug("%s on %s failed", variant.name, made.name, exc_info=True)
        return Prepared(replace(row, error=first_line(error)), reports=added_reports(before))
    if variant.name != EAGER:
        row = replace(row, compile_seconds=seconds, via=natives[0].via if natives else "")
        row = replace(row, graphs=None if natives else made.graphs)
    return within_reason(Prepared(row, ready.call, added_reports(before)))


def within_reason(prepared: Prepared) -> Prepared:
    """Leave out of the rounds what takes too long for them.

    What this call raises the first round raises again, and ``time_together`` records it.
    """
    start = time.perf_counter()
    with suppress(Exception), torch.compiler.set_stance("fail_on_recompile"):
        assert prepared.call is not None
        prepared.call()
    seconds = time.perf_counter() - start
    if seconds <= LONGEST:
        return prepared
    row = replace(prepared.row, error=f"not timed: a call took {seconds:.0f} s")
    return replace(prepared, row=row, call=None)


@contextmanager
def nothing_remembered() -> Iterator[None]:
    """Let composer find nothing on disk of what another variant or run left there."""
    folder = os.environ.get("COMPOSER_CACHE_DIR")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as empty:
        os.environ["COMPOSER_CACHE_DIR"] = empty
        try:
            yield
        finally:
            os.environ.pop("COMPOSER_CACHE_DIR")
            os.environ |= {"COMPOSER_CACHE_DIR": folder} if folder is not None else {}


def finish(prepared: Prepared, times: Mapping[str, Series], failures: Mapping[str, str]) -> Row:
    """The final row: with its times, and with composer's counters as they stand after them."""
    row = prepared.row
    series = times.get(row.name)
    eager = times.get(f"{EAGER} fp32")
    native = times.get(f"{VARIANTS[row.variant].native} {row.precision}")
    composer = tuple(graph_record(report) for report in prepared.reports)
    return replace(
        row,
        series=series,
        speedup=paired_ratio(eager, series) if eager and series else None,
        over_itself=paired_ratio(series, native) if native and series else None,
        composer=composer,
        graphs=len(composer) or row.graphs,
        error=row.error or failures.get(row.name, ""),
    )


def with_share(row: Row, made: Subject, gflops: float | None) -> Row:
    """With the operations of eager's call a second, over the best matrix product's."""
    if row.series is None or gflops is None or not made.flops:
        return row
    return replace(row, share=made.flops / row.series.median / 1e6 / gflops)


def wished(options: argparse.Namespace) -> Wish:
    """What the command line asks for; variants that cannot train are left out of training."""
    names = options.variants or [n for n, each in VARIANTS.items() if each.by_default]
    variants = (VARIANTS[name] for name in names)
    return Wish(
        variants=tuple(each for each in variants if each.trains or not options.train),
        precisions=tuple(options.precisions),
        training=options.train,
        tiny=options.tiny or (options.train and not options.full),
        rounds=options.rounds,
        warmup=options.warmup,
        side=TINY_SIDE if options.tiny else SIDE,
    )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="Time eager, Inductor, native engines and composer on public models.",
        epilog="Exit status: 0, or 1 if any variant of any model failed.",
    )
    add = parser.add_argument
    known = ", ".join(zoo.MODELS)
    every = "; ".join(VARIANTS)
    add("--models", type=model_names, default=list(zoo.MODELS), metavar="A,B", help=f"of {known}")
    add("--variants", type=variant_names, metavar="A;B", help=f"with ; between, of {every}")
    add("--precisions", type=precision_names, default=["fp32"], metavar="A,B", help="fp32, bf16")
    add("--train", action="store_true", help="a step of training, of the very small models")
    add("--full", action="store_true", help="with --train: of the models in full size")
    add("--rounds", type=positive, default=15, help="rounds that count (15)")
    add("--warmup", type=int, default=2, help="rounds before them (2)")
    add("--tiny", action="store_true", help="very small models: a quick check")
    add("--no-first", action="store_true", help="compile no small model first: for quick checks")
    add("--json", type=Path, metavar="FILE", help="also write the results there")
    add("--verbose", action="store_true", help="show the traceback of each failure")
    return parser.parse_args(arguments)


def model_names(text: str) -> list[str]:
    """The names in a list with commas between; every unknown one is complained of at once."""
    names = [name.strip() for name in text.split(",")]
    unknown = [zoo.unknown(name) for name in names if name not in zoo.MODELS]
    if unknown:
        raise argparse.ArgumentTypeError("; ".join(unknown))
    return names


def variant_names(text: str) -> list[str]:
    """The names in a list with semicolons between; they hold commas themselves."""
    return known_names([name.strip() for name in text.split(";")], list(VARIANTS))


def precision_names(text: str) -> list[str]:
    """The names in a list with commas between."""
    return known_names([name.strip() for name in text.split(",")], list(PRECISIONS))


def known_names(names: list[str], known: list[str]) -> list[str]:
    """The names, if all are known."""
    unknown = [name for name in names if name not in known]
    if unknown:
        close = difflib.get_close_matches(unknown[0], known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known: {'; '.join(known)}"
        raise argparse.ArgumentTypeError(f"unknown: {'; '.join(unknown)}; {hint}")
    return names


if __name__ == "__main__":
    sys.exit(main())
