"""Eight bits beside float32: how fast and how exact composer and the engines' own tools are.

Each model runs in float32 by an engine of composer's, with ``precision = "int8"``, and as the
engine's own tool makes it: ``quantize_dynamic`` of ONNX Runtime, with its sums as they are and with
exact ones, and ``compress_weights`` of NNCF for OpenVINO. Two more variants let composer choose
among the engines, with and without eight bits. All variants of a model are compiled in one process,
and timed in interleaved rounds::

    python bench/int8.py --models bert,llama_step --json bench/results/int8.json

``llama_step`` is Llama on one token, as in a step of text generation, without a cache.

The errors are the largest differences from eager in float32, as a share of eager's largest number.
They are those on inputs that no variant was compiled, calibrated or chosen with.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import logging
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
import zoo
from compiles import Outputs, first_line, flat, forget, own_code, positive, time_together
from models import known_names
from native_cpu import OnnxRuntime, OpenVino, exported
from rich.console import Console
from rich.table import Table
from subjects import deviation
from timing import Series, machine, measure, paired_ratio, write_json
from torch import nn

import composer

log = logging.getLogger("bench.int8")

PACKAGES = ("openvino", "nncf")
MOST_ERROR = 0.05
"""The ``max_error`` of the variants that choose."""
UNSEEN = (1, 2, 3)
"""The seeds of the inputs on which errors are measured."""

STEP = "_step"
MODELS = (*zoo.MODELS, f"gpt2{STEP}", f"llama{STEP}")

Run = Callable[..., Any]


class QuantizedOnnxRuntime(OnnxRuntime):
    """What ONNX Runtime's tool makes of the exported model, with the tool's defaults."""

    def model(self, inputs: zoo.Inputs) -> bytes:
        """Return the model with the operators of the tool's list in eight bits."""
        from onnxruntime.quantization import quantize_dynamic

        with tempfile.TemporaryDirectory() as folder:
            source, target = Path(folder, "float.onnx"), Path(folder, "int8.onnx")
            source.write_bytes(exported(self.module, inputs))
            quantize_dynamic(source, target)
            return target.read_bytes()


class ExactlySummed(QuantizedOnnxRuntime):
    """The same with sums that do not saturate on processors without VNNI, as composer has them."""

    entries: ClassVar[dict[str, str]] = {"session.x64quantprecision": "1"}


class CompressedOpenVino(OpenVino):
    """A model of OpenVINO's whose weights NNCF has compressed, with NNCF's defaults."""

    def prepared(self, model: Any) -> Any:
        """Return the model with weights in eight bits."""
        import nncf

        return nncf.compress_weights(model)


def by_composer(*engines: str, **options: Any) -> Callable[[nn.Module], Run]:
    """Return what compiles a module by engines of composer's chain."""
    given = {"chain": list(engines)} | options

    def make(module: nn.Module) -> Run:
        def run(**inputs: torch.Tensor) -> Any:
            return module(**inputs)

        called = own_code(run, "run")
        return torch.compile(called, backend="composer", dynamic=False, options=given)

    return make


INT8 = {"precision": {"mode": "int8"}}
CHOSEN = functools.partial(by_composer, "onnxrt", "openvino", select="fastest")
AUTO = {"mode": "auto", "allow": ["bf16", "int8"], "max_error": MOST_ERROR}

VARIANTS: dict[str, Callable[[nn.Module], Run]] = {
    "onnxrt": by_composer("onnxrt"),
    "onnxrt int8": by_composer("onnxrt", **INT8),
    "quantize_dynamic": QuantizedOnnxRuntime,
    "quantize_dynamic, exact sums": ExactlySummed,
    "openvino": by_composer("openvino"),
    "openvino int8": by_composer("openvino", **INT8),
    "nncf": lambda module: CompressedOpenVino(module, "fp32"),
    "fastest": CHOSEN(),
    "fastest, int8 allowed": CHOSEN(precision=AUTO),
}

RATIOS = {
    "onnxrt int8": ("onnxrt", "quantize_dynamic", "quantize_dynamic, exact sums"),
    "openvino int8": ("openvino", "nncf"),
    "fastest, int8 allowed": ("fastest",),
}
"""By variant: those whose times are divided by its own. More than 1 means that it is faster."""

NEEDS = {
    "openvino": "openvino",
    "openvino int8": "openvino",
    "nncf": "nncf",
    "fastest": "openvino",
    "fastest, int8 allowed": "openvino",
}
"""The package that a variant needs, beside ONNX Runtime."""


def bench(name: str, variants: Sequence[str], rounds: int, *, tiny: bool) -> dict[str, Any]:
    """Return the times, the errors and composer's facts of each variant of a model."""
    module, inputs = built(name, 0, tiny=tiny)
    unseen = [built(name, seed, tiny=tiny).inputs for seed in UNSEEN]
    references = [flat(module(**each)) for each in unseen]
    rows: dict[str, dict[str, Any]] = {}
    calls: dict[str, Callable[[], object]] = {}
    for variant in variants:
        package = NEEDS.get(variant, "onnxruntime")
        if importlib.util.find_spec(package) is None:
            rows[variant] = {"failed": f"{package} is not installed"}
            continue
        try:
            run, rows[variant] = prepared(variant, module, inputs)
            rows[variant]["error"] = largest_error(run, unseen, references)
            calls[variant] = functools.partial(run, **inputs)
        except Exception as error:
            log.debug("%s on %s failed", variant, name, exc_info=True)
            rows[variant] = {"failed": first_line(error)}
    times, failures = time_together(calls, lambda left: measure(left, rounds))
    for variant, text in failures.items():
        rows[variant]["failed"] = text
    for variant, series in times.items():
        rows[variant]["time"] = series.to_dict()
        rows[variant]["faster_than"] = ratios(variant, times)
    forget()
    composer.reset()
    return rows


def built(name: str, seed: int, *, tiny: bool) -> zoo.Example:
    """Return a model of the zoo and its inputs, or the first token of them."""
    module, inputs = zoo.build(name.removesuffix(STEP), tiny, seed)
    if name.endswith(STEP):
        inputs = {each: tensor[:, :1] for each, tensor in inputs.items()}
    return zoo.Example(module, inputs)


def prepared(variant: str, module: nn.Module, inputs: zoo.Inputs) -> tuple[Run, dict[str, Any]]:
    """Return a variant after its first call, and what composer's record says of it."""
    before = len(composer.reports())
    run = VARIANTS[variant](module)
    run(**inputs)
    return run, {"graphs": [facts(report) for report in composer.reports()[before:]]}


def facts(report: Any) -> dict[str, Any]:
    """Return who serves a graph, in which precision, and how many products are in eight bits."""
    (served,) = [each for each in report.attempts if each.accepted] or [None]
    engine = {} if served is None else served.engine
    return {
        "chosen": report.chosen,
        "precision": served and served.precision,
        "products_in_fp32": served and served.products_in_fp32,
        "products_in_int8": engine.get("products_in_int8"),
        "weights_in_int8": engine.get("weights_in_int8"),
        "not_in_int8": engine.get("not_in_int8"),
    }


def largest_error(run: Run, unseen: Sequence[zoo.Inputs], references: Sequence[Outputs]) -> float:
    """Return the largest error over all inputs, relative to the largest number of an output."""
    pairs = zip(unseen, references, strict=True)
    return max(deviation(expected, flat(run(**each))).relative for each, expected in pairs)


def ratios(variant: str, times: dict[str, Series]) -> dict[str, dict[str, float]]:
    """Return how many times as fast a variant is as those that it is compared with."""
    others = [each for each in RATIOS.get(variant, ()) if each in times]
    return {each: paired_ratio(times[each], times[variant]).to_dict() for each in others}


def show(name: str, rows: dict[str, dict[str, Any]]) -> None:
    """Print a table of a model."""
    table = Table(title=name)
    for heading in ("variant", "ms", "quartiles", "times as fast as", "largest error", "graphs"):
        table.add_column(heading)
    for variant, row in rows.items():
        if "time" not in row:
            table.add_row(variant, row["failed"])
            continue
        time = row["time"]
        table.add_row(
            variant,
            f"{time['median_ms']:.2f}",
            f"{time['p25_ms']:.2f} to {time['p75_ms']:.2f}",
            "\n".join(f"{other} {spread(each)}" for other, each in row["faster_than"].items()),
            f"{row['error']:.1e}",
            "\n".join(map(in_words, row["graphs"])),
        )
    Console(width=160).print(table)


def spread(ratio: dict[str, float]) -> str:
    """Return a ratio with its quartiles."""
    return f"{ratio['median']:.2f} ({ratio['p25']:.2f} to {ratio['p75']:.2f})"


def in_words(graph: dict[str, Any]) -> str:
    """Return who serves a graph, and what is in eight bits."""
    counts = [
        f", {graph[f'{each}_in_int8']} {each} in int8"
        for each in ("products", "weights")
        if graph[f"{each}_in_int8"] is not None
    ]
    return f"{graph['chosen']} {graph['precision'] or ''}{''.join(counts)}"


def variant_names(text: str) -> list[str]:
    """Return the names in a list with semicolons between."""
    return known_names([name.strip() for name in text.split(";")], list(VARIANTS))


def model_names(text: str) -> list[str]:
    """Return the names in a list with commas between."""
    return known_names([name.strip() for name in text.split(",")], list(MODELS))


def main() -> None:
    """Print a table for each model; ``--json PATH`` writes the figures as well."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=model_names, default=list(MODELS), metavar="A,B")
    parser.add_argument("--variants", type=variant_names, default=list(VARIANTS), metavar="A;B")
    parser.add_argument("--rounds", type=positive, default=15)
    parser.add_argument("--tiny", action="store_true", help="very small models: a quick check")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--verbose", action="store_true", help="show the traceback of each failure")
    given = parser.parse_args()
    logging.basicConfig()
    log.setLevel(logging.DEBUG if given.verbose else logging.INFO)
    record: dict[str, Any] = {"machine": machine(PACKAGES), "max_error": MOST_ERROR, "models": {}}
    with torch.no_grad(), composer.using({"cache": {"verdicts": 0}}):
        for name in given.models:
            record["models"][name] = bench(name, given.variants, given.rounds, tiny=given.tiny)
            show(name, record["models"][name])
            if given.json:
                write_json(given.json, record)


if __name__ == "__main__":
    main()
