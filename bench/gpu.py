"""How fast, how right and how large engines are on one NVIDIA GPU, through composer and without.

TensorRT, Inductor with Triton, ONNX Runtime with CUDA and eager, with CUDA graphs and without, in
bfloat16, float32 and float16, on the public models at serving sizes. One command, of less than ten
minutes, with composer installed::

    python bench/gpu.py --json gpu.json

All variants of a model and a dtype are compiled side by side in one process and timed by CUDA
events in interleaved rounds. An engine that is not here, or fails, is a line that says so in the
words of composer's report. What was not come to within ``--minutes`` is a line as well, and
``--models`` and ``--dtypes`` choose what comes first. Inductor's caches are empty when the bench
starts; a variant that found what another had compiled before is marked.

Exit status: 0 at the end, whatever engines did; 2 without a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import functools
import importlib.util
import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import native
import serving
import torch
from card import Card
from compiles import (
    Outputs,
    first_line,
    flat,
    forget,
    own_caches,
    positive,
    time_together,
    without_folders,
)
from rich.console import Console
from rich.table import Table
from timing import Ratio, Series, machine, measure, paired_ratio, write_json
from torch._dynamo.utils import counters
from torch._inductor import metrics

import composer
from composer.dispatch import compose
from composer.errors import FallbackWarning
from composer.records import CompileReport, Status

log = logging.getLogger("bench.gpu")

GRAPHS = "reduce-overhead"
OUT_OF_TIME = "not run: out of time"
SETTLE = 0.001
"""Seconds, so that two calls do not count: the card has no threads that spin after a call."""
GRACE = 90
"""Seconds after the last minute at which a process that hangs is ended."""

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to run a model.

    ``chain`` is the one candidate that composer may choose; without it ``native`` makes what to
    call, and without that it is eager. ``mode`` is ``torch.compile``'s.
    """

    name: str
    chain: str = ""
    native: Callable[[serving.Subject], Callable[..., Any]] | None = None
    mode: str | None = None
    replays: bool = False

    def apply(self, subject: serving.Subject) -> Callable[..., Any]:
        """What to call instead of the module; its first call compiles."""
        if self.chain:
            # A backend of its own each: Dynamo shares what it compiled between equal ones, and
            # torch.compile takes a mode or options.
            options = {"chain": [self.chain]}
            backend = functools.partial(compose, mode=self.mode, options=options)
            return torch.compile(subject.module, backend=backend)
        return self.native(subject) if self.native else subject.module


def inductor(mode: str | None) -> Callable[[serving.Subject], Callable[..., Any]]:
    """Inductor as ``torch.compile`` itself runs it."""
    return lambda subject: torch.compile(subject.module, mode=mode)


EAGER = "eager"
VARIANTS = (
    Variant(EAGER),
    Variant("inductor", native=inductor(None)),
    Variant("composer[inductor]", "inductor"),
    Variant("inductor, graphs", native=inductor(GRAPHS), replays=True),
    Variant("composer[inductor], graphs", "inductor", mode=GRAPHS, replays=True),
    Variant("composer[cudagraphs]", "cudagraphs", replays=True),
    Variant("torch_tensorrt", native=native.torch_tensorrt),
    Variant("composer[tensorrt]", "tensorrt"),
    Variant("composer[tensorrt], graphs", "tensorrt", mode=GRAPHS),
    Variant("onnxruntime", native=native.onnxruntime),
    Variant("composer[onnxrt]", "onnxrt"),
)


@dataclass(frozen=True, slots=True)
class Row:
    """What came of one variant of one model in one dtype; ``None`` for what is not known.

    ``compile_seconds`` is the first call, ``cached`` whether Inductor found its kernels in the
    cache, ``kernels`` how many it generated or found. Errors are against float64: the largest, and
    that over the largest number that should come out. ``peak_mib`` is the most memory at a time
    during a call and ``device_mib`` how much more of the card is in use after it, both above what
    was held before the compile. ``speedup`` is eager's time over this one's, round by round.
    ``left_out`` says why there are no figures, ``notes`` what else composer or torch said.
    """

    model: str
    dtype: str
    variant: str
    batch: int | None = None
    compile_seconds: float | None = None
    cached: bool = False
    kernels: int | None = None
    absolute_error: float | None = None
    relative_error: float | None = None
    peak_mib: float | None = None
    device_mib: float | None = None
    series: Series | None = None
    speedup: Ratio | None = None
    left_out: str = ""
    notes: str = ""

    def to_dict(self) -> dict[str, object]:
        """The row as JSON takes it."""
        plain = {name: getattr(self, name) for name in self.__slots__}
        return plain | {
            "series": self.series.to_dict() if self.series else None,
            "speedup": self.speedup.to_dict() if self.speedup else None,
        }


@dataclass(frozen=True, slots=True)
class Ready:
    """A variant after its first calls: ``call`` can be timed, ``None`` if it failed."""

    row: Row
    call: Call | None = None
    reports: tuple[CompileReport, ...] = ()


@dataclass(slots=True)
class Bench:
    """A run of the bench: on what, until when, and the engines that were found not to be here."""

    card: Card
    deadline: float
    variants: tuple[Variant, ...] = VARIANTS
    rounds: int = 15
    warmup: int = 3
    calls: int = 10
    tiny: bool = False
    missing: dict[str, str] = field(default_factory=dict)

    def over(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() >= self.deadline

    def rows(self, model: str, dtype: str) -> list[Row]:
        """One row for each variant of a model in a dtype; what raises ends a row, nothing more."""
        rows = [Row(model, dtype, variant.name) for variant in self.variants]
        if self.over():
            return [replace(row, left_out=OUT_OF_TIME) for row in rows]
        started = time.perf_counter()
        try:
            subject = serving.subject(model, dtype, self.card.device, self.tiny)
        except Exception as error:
            log.debug("%s in %s could not be built", model, dtype, exc_info=True)
            return [replace(row, left_out=first_line(error)) for row in rows]
        pairs = zip(rows, self.variants, strict=True)
        ready = [self.prepare(replace(row, batch=subject.batch), subject, v) for row, v in pairs]
        calls = {each.row.variant: each.call for each in ready if each.call}
        times, failures = time_together(calls, self.timed)
        log.info("%s in %s: %.0f s", model, dtype, time.perf_counter() - started)
        return [finish(each, times, failures) for each in ready]

    def timed(self, calls: Mapping[str, Call]) -> dict[str, Series]:
        """Rounds in which each variant has its turn, by the card's own clock."""
        clock = self.card.clock
        return measure(calls, self.rounds, self.warmup, self.calls, settle=SETTLE, clock=clock)

    def prepare(self, row: Row, subject: serving.Subject, variant: Variant) -> Ready:
        """Compile a variant by calling it; say what it takes, and how far off it is."""
        if self.over():
            return Ready(replace(row, left_out=OUT_OF_TIME))
        if known := self.missing.get(variant.name):
            return Ready(replace(row, left_out=known))
        try:
            return self.compiled(row, subject, variant)
        except native.NotHere as error:
            self.missing[variant.name] = str(error)
            return Ready(replace(row, left_out=str(error)))
        except Exception as error:
            log.debug("%s on %s failed", variant.name, subject.name, exc_info=True)
            return Ready(replace(row, left_out=first_line(error)))

    def compiled(self, row: Row, subject: serving.Subject, variant: Variant) -> Ready:
        """The same, without regard to what it raises."""
        composer.reset()
        self.card.clear()
        held, used = self.card.allocated(), self.card.used()
        before = inductor_counts()
        started = time.perf_counter()
        call = calling(variant.apply(subject), subject.inputs, marked=variant.replays)
        call()
        self.card.synchronize()
        seconds = time.perf_counter() - started
        reports = composer.reports()
        if refused := refusal(reports):
            if reports[-1].attempts[-1].status is Status.UNAVAILABLE:
                self.missing[variant.name] = refused
            return Ready(replace(row, left_out=refused))
        for _ in range(2):  # CUDA graphs: the second call records, the third is the first replay
            call()
        absolute, relative = errors(subject.exact, flat(call()))
        hits, kernels, skips = inductor_counts() - before
        row = replace(
            row,
            compile_seconds=None if variant.name == EAGER else seconds,
            cached=hits > 0,
            kernels=kernels if "inductor" in variant.name else None,
            absolute_error=absolute,
            relative_error=relative,
            peak_mib=self.card.peak(call) - held,
            device_mib=self.card.used() - used,
            notes=f"{skips} graphs without CUDA graphs" if skips else "",
        )
        return Ready(row, call, reports)


def main(arguments: Sequence[str] | None = None, card: Card | None = None) -> int:
    """Run the command. ``card`` stands in for the GPU where there is none."""
    options = parse(arguments)
    if card is None:
        if not torch.cuda.is_available():
            torch_is = f"torch {torch.__version__}, CUDA {torch.version.cuda}"
            print(f"there is no NVIDIA GPU here that {torch_is} can use", file=sys.stderr)
            return 2
        card = Card()
        faulthandler.dump_traceback_later(options.minutes * 60 + GRACE, exit=True)
    logging.basicConfig()
    logging.getLogger("bench").setLevel(logging.DEBUG if options.verbose else logging.INFO)
    show(run(options, card))
    faulthandler.cancel_dump_traceback_later()
    return 0


def run(options: argparse.Namespace, card: Card) -> list[Row]:
    """Measure what was asked for, dtype by dtype, and write the JSON anew after every model."""
    variants = tuple(each for each in VARIANTS if each.name in options.variants)
    asked = {n: getattr(options, n) for n in ("rounds", "warmup", "calls", "tiny")}
    deadline = time.monotonic() + options.minutes * 60
    bench = Bench(card, deadline, variants, **asked)
    settings = asked | {"minutes": options.minutes}
    record: dict[str, Any] = {"machine": machine(), "card": card.facts(), "settings": settings}
    rows: list[Row] = []
    with quiet(), own_caches(), torch.no_grad(), torch.compiler.config.patch(recompile_limit=64):
        if any("inductor" in variant.name for variant in variants):
            warm_up(card.device)
        for dtype in options.dtypes:
            for model in options.models:
                rows += bench.rows(model, dtype)
                forget()
                card.clear()
                record["results"] = [row.to_dict() for row in rows]
                if options.json:
                    write_json(options.json, record)
    return rows


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """The table says who does not serve; composer need not say it as well."""
    logger = logging.getLogger("composer")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)
            yield
    finally:
        logger.setLevel(level)


def warm_up(device: torch.device) -> None:
    """Have Inductor start its workers, and the card its libraries, before anything is timed."""
    x = torch.ones(64, 64, device=device)
    torch.compile(lambda x: torch.softmax(x @ x, -1))(x)
    forget()


def calling(
    function: Callable[..., Any], inputs: Mapping[str, torch.Tensor], *, marked: bool
) -> Call:
    """A call of the model. ``marked`` says that the outputs of the call before are not needed."""

    def call() -> object:
        if marked:
            torch.compiler.cudagraph_mark_step_begin()
        return function(**inputs)

    return call


class Counts(NamedTuple):
    """Graphs that Inductor found in its cache, kernels it generated, graphs it did not record."""

    hits: int
    kernels: int
    skips: int

    def __sub__(self, before: Counts) -> Counts:
        """What was added since ``before``."""
        return Counts(*(now - then for now, then in zip(self, before, strict=True)))


def inductor_counts() -> Counts:
    """Inductor's counters as they stand now, from the start of the process."""
    counted = counters["inductor"]
    hits, skips = counted["fxgraph_cache_hit"], counted["cudagraph_skips"]
    return Counts(hits, metrics.generated_kernel_count, skips)


def refusal(reports: Sequence[CompileReport]) -> str:
    """Why composer's one candidate does not serve a graph, in the report's words."""
    attempts = (attempt for report in reports for attempt in report.attempts)
    said = next((attempt.sentence() for attempt in attempts if not attempt.accepted), "")
    return without_folders(said)


def errors(exact: Outputs, outputs: Outputs) -> tuple[float, float]:
    """The largest error of all outputs, and the largest in terms of what should come out.

    Raises:
        ValueError: an output is missing, has another shape, or is not finite.
    """
    absolute = relative = 0.0
    for index, (expected, got) in enumerate(zip(exact, outputs, strict=True)):
        if expected.shape != got.shape:
            raise ValueError(f"output {index} is {[*got.shape]}, not {[*expected.shape]}")
        if not got.isfinite().all():
            raise ValueError(f"output {index} is not finite")
        largest = (got.double() - expected).abs().max().item()
        absolute = max(absolute, largest)
        relative = max(relative, largest / expected.abs().max().item())
    return absolute, relative


def finish(ready: Ready, times: Mapping[str, Series], failures: Mapping[str, str]) -> Row:
    """The final row: with its times, and with composer's counters as they stand after them."""
    row = ready.row
    series, eager = times.get(row.variant), times.get(EAGER)
    missed = sum(report.runtime.fallbacks for report in ready.reports)
    return replace(
        row,
        series=series,
        speedup=paired_ratio(eager, series) if eager and series else None,
        left_out=row.left_out or failures.get(row.variant, ""),
        notes=f"{missed} calls fell back" if missed else row.notes,
    )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    variants = [each.name for each in VARIANTS]
    parser.add_argument("--minutes", type=float, default=8, help="the rest is not run (8)")
    parser.add_argument("--models", nargs="+", choices=serving.MODELS, default=default_models())
    parser.add_argument("--dtypes", nargs="+", choices=[*serving.DTYPES], default=[*serving.DTYPES])
    parser.add_argument("--variants", nargs="+", choices=variants, default=variants)
    parser.add_argument("--rounds", type=positive, default=15, help="rounds that count (15)")
    parser.add_argument("--warmup", type=int, default=3, help="rounds before them (3)")
    parser.add_argument("--calls", type=positive, default=10, help="calls a reading (10)")
    parser.add_argument("--tiny", action="store_true", help="very small models: a quick check")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")
    parser.add_argument("--verbose", action="store_true", help="show the traceback of each failure")
    return parser.parse_args(arguments)


def default_models() -> list[str]:
    """The public models; where transformers is not here, those of torch alone come first."""
    here = importlib.util.find_spec("transformers") is not None
    return [*serving.SIZES] if here else [*serving.PLAIN, *serving.SIZES]


def show(rows: Sequence[Row]) -> None:
    """Print the table, wide enough to be read in a log file too."""
    table = Table(title="ms a call by CUDA events; speedup = eager / variant of the same round")
    for heading in ("model", "dtype", "variant"):
        table.add_column(heading, no_wrap=True)
    for heading in (
        "ms",
        "min",
        "speedup",
        "compile s",
        "kernels",
        "error",
        "peak MiB",
        "card MiB",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("why not, or notes")
    for index, row in enumerate(rows):
        end = index + 1 == len(rows) or (rows[index + 1].model, rows[index + 1].dtype) != (
            row.model,
            row.dtype,
        )
        table.add_row(*cells(row), style="dim" if row.left_out else None, end_section=end)
    width = None if sys.stdout.isatty() else 190
    Console(width=width, markup=False, highlight=False).print(table)


def cells(row: Row) -> tuple[str, ...]:
    """One line of the table; a dash for what is not known, ``*`` for a compile from the cache."""
    series, speedup, seconds = row.series, row.speedup, row.compile_seconds
    return (
        f"{row.model} x{row.batch}" if row.batch else row.model,
        row.dtype,
        row.variant,
        f"{series.median:.3f}" if series else "-",
        f"{series.minimum:.3f}" if series else "-",
        f"{speedup.median:.2f} ({speedup.p25:.2f}-{speedup.p75:.2f})" if speedup else "-",
        f"{seconds:.1f}{'*' if row.cached else ''}" if seconds is not None else "-",
        str(row.kernels) if row.kernels is not None else "-",
        f"{row.relative_error:.1e}" if row.relative_error is not None else "-",
        f"{row.peak_mib:.0f}" if row.peak_mib is not None else "-",
        f"{row.device_mib:.0f}" if row.device_mib is not None else "-",
        row.left_out or row.notes,
    )


if __name__ == "__main__":
    sys.exit(main())
