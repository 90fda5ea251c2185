"""How fast and how close to eager the ten public models run on this machine.

Each model runs in eager mode, through Inductor, through composer's default chain, through composer
with nothing but ONNX Runtime, and on ONNX Runtime called by itself on what torch.onnx.export made;
all are compiled side by side in one process and timed in interleaved rounds. Run from anywhere,
with composer installed::

    python bench/models.py --models bert,vit --json bench/results/models.json

Compile times are those of a process that has compiled a small model before, with Inductor's caches
empty for every variant. The exit status is 1 if any variant of any model failed.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnxruntime
import torch
import zoo
from compiles import cold_compiles, first_line, flat, forget, positive, time_together
from rich.console import Console
from rich.table import Table
from timing import Ratio, Series, machine, measure, paired_ratio, write_json
from torch import Tensor, nn

log = logging.getLogger("bench.models")

Call = Callable[[], object]
Outputs = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to run a model: ``backend`` and ``options`` of ``torch.compile``, or plain eager.

    ``native`` is ONNX Runtime called by itself, without torch.compile.
    """

    name: str
    backend: str | None = None
    options: Mapping[str, Any] | None = None
    native: bool = False

    def apply(self, module: nn.Module) -> Callable[..., Any]:
        """What to call instead of ``module``; its first call compiles."""
        if self.native:
            return Native(module)
        if self.backend is None:
            return module
        options = dict(self.options) if self.options else None
        return torch.compile(module, backend=self.backend, options=options)


class Native:
    """The model as the public exporter gives it, in a session with ONNX Runtime's own defaults."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.session: onnxruntime.InferenceSession | None = None

    def __call__(self, **inputs: Tensor) -> Outputs:
        """Export at the first call; run on numpy's view of the inputs."""
        if self.session is None:
            self.session = self.make_session(inputs)
        feeds = {name: tensor.numpy() for name, tensor in inputs.items()}
        return tuple(map(torch.from_numpy, self.session.run(None, feeds)))

    def make_session(self, inputs: zoo.Inputs) -> onnxruntime.InferenceSession:
        """As many threads as torch has; everything else is left as it is."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                self.module, (), kwargs=inputs, dynamo=True, verbose=False, input_names=[*inputs]
            )
        assert program is not None
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        proto = program.model_proto.SerializeToString()
        return onnxruntime.InferenceSession(proto, options, providers=["CPUExecutionProvider"])


EAGER, NATIVE = "eager", "onnxruntime"
VARIANTS = (
    Variant(EAGER),
    Variant("inductor", "inductor"),
    Variant("composer", "composer"),
    Variant("composer[onnxrt]", "composer", {"chain": ["onnxrt"]}),
    Variant(NATIVE, native=True),
)


@dataclass(frozen=True, slots=True)
class Deviation:
    """The largest error against eager: ``absolute`` is max|d|, ``relative`` max|d| / max|eager|.

    The worst of all outputs, for each of the two numbers by itself.
    """

    absolute: float
    relative: float


@dataclass(frozen=True, slots=True)
class Subject:
    """A model to measure: how to call it, what eager returned, how many graphs Dynamo makes."""

    name: str
    module: nn.Module
    inputs: zoo.Inputs
    reference: Outputs
    graphs: int


@dataclass(frozen=True, slots=True)
class Row:
    """What came of one variant of one model.

    ``compile_seconds`` is the first call, which compiles and runs once. ``speedup`` is eager's time
    over this one's, round by round, ``over_native`` this one's over that of ONNX Runtime called by
    itself. ``composer`` holds a record of each graph that composer
    compiled for this variant. ``error`` is the first line of what went wrong, empty if nothing did.
    """

    model: str
    variant: str
    graphs: int | None = None
    compile_seconds: float | None = None
    deviation: Deviation | None = None
    series: Series | None = None
    speedup: Ratio | None = None
    over_native: Ratio | None = None
    composer: tuple[dict[str, Any], ...] = ()
    error: str = ""

    @property
    def engines(self) -> str:
        """The backends that composer chose, why not others, and calls left to its fallback."""
        chosen = Counter(str(graph["chosen"]) for graph in self.composer)
        attempts = [each for graph in self.composer for each in graph["attempts"] if each["reason"]]
        refused = Counter(f"{each['backend']} {each['reason']}" for each in attempts)
        missed = sum(graph["fallbacks"] for graph in self.composer)
        parts = [counted(chosen), counted(refused), f"{missed} calls fell back" if missed else ""]
        return "; ".join(filter(None, parts))

    def to_dict(self) -> dict[str, object]:
        """The row as JSON takes it; ``None`` for what is not known."""
        return {
            "model": self.model,
            "variant": self.variant,
            "error": self.error or None,
            "graphs": self.graphs,
            "compile_seconds": self.compile_seconds,
            "max_absolute_error": self.deviation.absolute if self.deviation else None,
            "max_relative_error": self.deviation.relative if self.deviation else None,
            "time": self.series.to_dict() if self.series else None,
            "speedup_over_eager": self.speedup.to_dict() if self.speedup else None,
            "time_over_native": self.over_native.to_dict() if self.over_native else None,
            "composer": list(self.composer),
        }


@dataclass(frozen=True, slots=True)
class Prepared:
    """A variant after its first call: ``call`` is ready to be timed, ``None`` if it failed.

    ``reports`` are composer's own, still counting.
    """

    row: Row
    call: Call | None = None
    reports: tuple[Any, ...] = ()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit status is 1 if anything failed, 2 if it was asked wrongly."""
    options = parse(arguments)
    logging.basicConfig()
    logging.getLogger("bench").setLevel(logging.DEBUG if options.verbose else logging.INFO)
    settings = {name: getattr(options, name) for name in ("rounds", "warmup", "tiny")}
    record: dict[str, Any] = {"machine": machine(), "settings": settings, "results": []}
    rows: list[Row] = []
    with cold_compiles(), torch.no_grad():
        bench_model("vit", tiny=True, rounds=1, warmup=0)
        for model in options.models:
            forget()
            rows += bench_model(model, options.tiny, options.rounds, options.warmup)
            record["results"] = [row.to_dict() for row in rows]
            if options.json:
                write_json(options.json, record)
    show(rows)
    return int(any(row.error for row in rows))


def bench_model(model: str, tiny: bool, rounds: int, warmup: int) -> list[Row]:
    """One row for each variant of ``model``; whatever raises fails a row and no more than that."""
    start = time.perf_counter()
    try:
        subject = make_subject(model, tiny)
    except Exception as error:
        log.debug("%s could not be built", model, exc_info=True)
        return [Row(model, variant.name, error=first_line(error)) for variant in VARIANTS]
    prepared = [prepare(subject, variant) for variant in VARIANTS]
    calls = {each.row.variant: each.call for each in prepared if each.call}
    times, failures = time_together(calls, lambda left: measure(left, rounds, warmup))
    log.info("%s: %.0f s", model, time.perf_counter() - start)
    return [finish(each, times, failures) for each in prepared]


def make_subject(model: str, tiny: bool) -> Subject:
    """Build ``model``, run it once in eager mode and count its graphs."""
    module, inputs = zoo.build(model, tiny)
    reference = flat(module(**inputs))
    return Subject(model, module, inputs, reference, graph_count(module, inputs))


def graph_count(module: nn.Module, inputs: zoo.Inputs) -> int:
    """How many graphs Dynamo captures in one call; leaves nothing compiled."""
    graphs = 0

    def count(gm: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        nonlocal graphs
        graphs += 1
        return gm.forward

    torch.compile(module, backend=count)(**inputs)
    torch.compiler.reset()
    return graphs


def prepare(subject: Subject, variant: Variant) -> Prepared:
    """Compile one variant by calling it, and compare what it returns with eager."""
    row = Row(subject.name, variant.name)
    before = composer_reports()
    try:
        compiled = variant.apply(subject.module)
        start = time.perf_counter()
        outputs = flat(compiled(**subject.inputs))
        seconds = time.perf_counter() - start
        row = replace(row, deviation=deviation(subject.reference, outputs))
    except Exception as error:
        log.debug("%s on %s failed", variant.name, subject.name, exc_info=True)
        return Prepared(replace(row, error=first_line(error)), reports=added_reports(before))
    if variant.name == EAGER:
        return Prepared(row, lambda: compiled(**subject.inputs))
    row = replace(row, compile_seconds=seconds, graphs=subject.graphs)
    return Prepared(row, lambda: compiled(**subject.inputs), added_reports(before))


def finish(prepared: Prepared, times: Mapping[str, Series], failures: Mapping[str, str]) -> Row:
    """The final row: with its times, and with composer's counters as they stand after them."""
    row = prepared.row
    series, eager, native = (times.get(name) for name in (row.variant, EAGER, NATIVE))
    composer = tuple(graph_record(report) for report in prepared.reports)
    return replace(
        row,
        series=series,
        speedup=paired_ratio(eager, series) if eager and series else None,
        over_native=paired_ratio(series, native) if native and series else None,
        composer=composer,
        graphs=len(composer) or row.graphs,
        error=row.error or failures.get(row.variant, ""),
    )


def deviation(reference: Outputs, outputs: Outputs) -> Deviation:
    """The largest errors of ``outputs``, computed in float64.

    Raises:
        ValueError: an output is missing, has another shape or dtype, or is not finite.
    """
    absolute = relative = 0.0
    for index, (expected, actual) in enumerate(zip(reference, outputs, strict=True)):
        if (expected.shape, expected.dtype) != (actual.shape, actual.dtype):
            raise ValueError(f"output {index} is {kind(actual)}, eager's is {kind(expected)}")
        if not actual.isfinite().all():
            raise ValueError(f"output {index} is not finite")
        largest = (actual.double() - expected.double()).abs().max().item()
        absolute = max(absolute, largest)
        relative = max(relative, largest / expected.double().abs().max().item())
    return Deviation(absolute, relative)


def kind(tensor: Tensor) -> str:
    """Dtype and shape of a tensor, in words."""
    return f"{tensor.dtype} {tuple(tensor.shape)}"


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
        "attempts": [{name: each[name] for name in kept} for each in record["attempts"]],
    }


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="Time eager, Inductor and composer on ten public models.",
        epilog="Exit status: 0, or 1 if any variant of any model failed.",
    )
    parser.add_argument(
        "--models",
        type=model_names,
        default=list(zoo.MODELS),
        metavar="A,B",
        help=f"which models, of {', '.join(zoo.MODELS)} (default: all)",
    )
    parser.add_argument("--rounds", type=positive, default=15, help="rounds that count (15)")
    parser.add_argument("--warmup", type=int, default=3, help="rounds before them (3)")
    parser.add_argument("--tiny", action="store_true", help="very small models: a quick check")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")
    parser.add_argument("--verbose", action="store_true", help="show the traceback of each failure")
    return parser.parse_args(arguments)


def model_names(text: str) -> list[str]:
    """The names in a list with commas between; every unknown one is complained of at once."""
    names = [name.strip() for name in text.split(",")]
    unknown = [zoo.unknown(name) for name in names if name not in zoo.MODELS]
    if unknown:
        raise argparse.ArgumentTypeError("; ".join(unknown))
    return names


def show(rows: Sequence[Row]) -> None:
    """Print the table, wide enough to be read in a log file too."""
    table = Table(title="ms a call; speedup = eager / variant of the same round, median (p25-p75)")
    for heading in ("model", "variant"):
        table.add_column(heading)
    for heading in (
        "median",
        "min",
        "speedup",
        "/ native",
        "compile s",
        "abs err",
        "rel err",
        "graphs",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("engines, or what failed")
    for index, row in enumerate(rows):
        last = index + 1 == len(rows) or rows[index + 1].model != row.model
        style = "red" if row.error else None
        table.add_row(*cells(row), style=style, end_section=last)
    width = None if sys.stdout.isatty() else 160
    Console(width=width, markup=False, highlight=False).print(table)


def cells(row: Row) -> tuple[str, ...]:
    """One line of the table; a dash for what is not known."""
    series, speedup, error, native = row.series, row.speedup, row.deviation, row.over_native
    return (
        row.model,
        row.variant,
        f"{series.median:.2f}" if series else "-",
        f"{series.minimum:.2f}" if series else "-",
        f"{speedup.median:.2f} ({speedup.p25:.2f}-{speedup.p75:.2f})" if speedup else "-",
        f"{native.median:.2f} ({native.p25:.2f}-{native.p75:.2f})" if native else "-",
        f"{row.compile_seconds:.1f}" if row.compile_seconds is not None else "-",
        f"{error.absolute:.1e}" if error else "-",
        f"{error.relative:.1e}" if error else "-",
        str(row.graphs) if row.graphs is not None else "-",
        f"FAILED {row.error}" if row.error else row.engines,
    )


if __name__ == "__main__":
    sys.exit(main())
