"""What the ONNX Runtime engine costs around ONNX Runtime itself.

``python bench/onnxrt.py`` measures seven things, each in one process of its own kind:

- ``calls``: our part of a call, above the session's own run with everything bound beforehand, by
  the number of inputs, outputs and bound weights;
- ``spinning``: what the waiting of the session's threads costs it, and torch's next operation;
- ``translation``: seconds for 1,000 nodes, by the public exporter and by composer's lowering;
- ``memory``: how much a process grows from before the compile to the third call, over the weights;
- ``rewrites``: what each rewrite of the graph gains, as the time without it over the time with all;
- ``sessions``: a session made anew, with weights read as they lie and with copies transposed;
- ``halves``: a call of models in half precision, in eager and by Inductor, over ONNX Runtime's.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import onnxscript
import torch
import zoo
from compiles import own_code
from rich.console import Console
from rich.table import Table
from timing import Series, machine, measure, paired_ratio, write_json
from torch.utils._pytree import tree_leaves

import composer
from composer import _torch
from composer.backends import onnxrt
from composer.build import Artefacts, BuildTerms, building
from composer.lowering.export import onnx as lowering
from composer.lowering.loaded import BoundRegion

SHAPES = {"1 in, 1 out": (1, 1, 0), "8 in, 1 out": (8, 1, 0), "1 in, 8 out": (1, 8, 0)}
SHAPES |= {"1 in, 1 out, 200 weights": (1, 1, 200)}
WAITING = {
    "spinning until the next call": {"session.force_spinning_stop": "0"},
    "spinning within a call": {"session.force_spinning_stop": "1"},
    "never spinning": {"session.intra_op.allow_spinning": "0"},
}
REWRITTEN = ("bert", "whisper_enc", "vit", "convnext", "swin", "resnet", "gpt2", "llama", "t5")
UNBIASED = ("gpt2", "llama", "t5")
HALF = ("bert", "llama")
PARTS = ("calls", "spinning", "translation", "memory", "rewrites", "sessions", "halves")
DEFAULT = PARTS[:-1]
"""Half precision is a thing of the processor, and has figures of its own."""
MODELS = ("bert", "gpt2", "swin", "resnet", "mobilenet")


class Sums(torch.nn.Module):
    """As many inputs, outputs and weights as asked for, and next to nothing to compute."""

    def __init__(self, outputs: int, weights: int) -> None:
        super().__init__()
        self.outputs = outputs
        self.many = torch.nn.ParameterList(torch.rand(64) for _ in range(weights))

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The outputs differ by a number."""
        total = sum(self.many, sum(inputs))
        return tuple(torch.relu(total + k) for k in range(self.outputs))


def call_costs(rounds: int, calls: int) -> dict[str, dict[str, Any]]:
    """Microseconds of a call: the session bound beforehand, and our engine around it."""
    rows: dict[str, dict[str, Any]] = {}
    for name, (inputs, outputs, weights) in SHAPES.items():
        args = [torch.rand(64) for _ in range(inputs)]
        module = Sums(outputs, weights)
        engine, given = captured_engine(module, args)
        ours = functools.partial(engine, *given.values())
        variants = {"alone": bound_beforehand(engine, given), "ours": ours}
        taken = measure(variants, rounds, calls=calls)
        pairs = zip(taken["ours"].milliseconds, taken["alone"].milliseconds, strict=True)
        rows[name] = {
            "alone": taken["alone"].to_dict(),
            "ours": taken["ours"].to_dict(),
            "added_us": 1e3 * Series(tuple(a - b for a, b in pairs)).median,
            "allowed_us": 3 + inputs + outputs + 0.08 * weights,
        }
    return rows


def captured_engine(
    module: torch.nn.Module, args: list[torch.Tensor]
) -> tuple[BoundRegion, dict[str, Any]]:
    """The region of a compiled module, and the arguments of its last call by the model's names."""
    seen: list[tuple[BoundRegion, dict[str, Any]]] = []
    names: list[tuple[str, ...]] = []
    load = onnxrt.load
    original = BoundRegion.__call__

    def spy(engine: Any, *given: Any) -> list[Any]:
        seen.append((engine, dict(zip(names[-1], given, strict=False))))
        return original(engine, *given)

    def named(region: Any, *more: Any) -> Any:
        names.append(region.graph.inputs)
        return load(region, *more)

    torch.compiler.reset()
    with mock.patch.object(BoundRegion, "__call__", spy), mock.patch.object(onnxrt, "load", named):
        torch.compile(module, backend="onnxrt")(*args)
    return seen[-1]


def bound_beforehand(engine: BoundRegion, given: dict[str, Any]) -> Callable[[], None]:
    """The session's own run: nothing to allocate, bind or check."""
    session, *_ = engine.bounds[0].keeps
    binding = session.io_binding()
    results = engine(*given.values())
    for value in session.get_inputs():
        tensor = given[value.name]
        binding.bind_input(value.name, "cpu", 0, 1, tuple(tensor.shape), tensor.data_ptr())
    for value, tensor in zip(session.get_outputs(), results, strict=True):
        binding.bind_output(value.name, "cpu", 0, 1, tuple(tensor.shape), tensor.data_ptr())
    run, inner = session._sess.run_with_iobinding, binding._iobinding
    kept = (results, binding)
    return lambda kept=kept: run(inner, None)


def spinning_costs(rounds: int) -> dict[str, dict[str, Any]]:
    """Milliseconds of a call of BERT, and of torch's own work right after it, by way of waiting."""
    module, inputs = zoo.build("bert")
    matrix = torch.randn(512, 512)
    runs: dict[str, Callable[[], object]] = {}
    for name, entries in WAITING.items():
        compiled = onnx_compiled(module, entries)
        compiled(**inputs)
        runs[name] = functools.partial(compiled, **inputs)
    rows: dict[str, dict[str, Any]] = {}
    calls: dict[str, list[float]] = {name: [] for name in runs}
    after: dict[str, list[float]] = {name: [] for name in (*runs, "torch alone")}
    for turn in range(-3, rounds):
        for name in (*runs, "torch alone"):
            time.sleep(0.05)
            began = time.perf_counter()
            if name in runs:
                runs[name]()
            else:
                torch.mm(matrix, matrix)
            middle = time.perf_counter()
            torch.mm(matrix, matrix).relu_().sum()
            ended = time.perf_counter()
            if turn >= 0:
                after[name].append(1e3 * (ended - middle))
                if name in runs:
                    calls[name].append(1e3 * (middle - began))
    for name, series in after.items():
        rows[name] = {"torch_after": Series(tuple(series)).to_dict()}
        if name in calls:
            rows[name]["call"] = Series(tuple(calls[name])).to_dict()
    return rows


def onnx_compiled(module: torch.nn.Module, entries: Mapping[str, str]) -> Callable[..., Any]:
    """The module over a frame of its own, since Dynamo keeps one list of entries a frame."""
    options = {"session_config": dict(entries)}
    return torch.compile(framed(module), backend="onnxrt", options=options)


def framed(module: torch.nn.Module) -> Callable[..., Any]:
    """A function that calls the module, over a code object of its own."""

    def run(**inputs: torch.Tensor) -> Any:
        return module(**inputs)

    return own_code(run, "run")


def translation_costs(rounds: int) -> dict[str, dict[str, Any]]:
    """Seconds for 1,000 ATen nodes: the public exporter's, and composer's translation."""
    rows: dict[str, dict[str, Any]] = {}
    for model in MODELS:
        module, inputs = zoo.build(model)
        ours: list[float] = []
        theirs: list[float] = []
        nodes = 0
        for turn in range(-1, rounds):
            torch.compiler.reset()
            with counting_translation() as counted:
                torch.compile(module, backend="onnxrt")(**inputs)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                program = torch.export.export(module, (), kwargs=inputs, strict=False)
                exported = time.perf_counter()
                torch.onnx.export(program, dynamo=True, verbose=False)
            ended = time.perf_counter()
            if turn >= 0:
                nodes = counted["nodes"]
                ours.append(1e3 * counted["seconds"])
                theirs.append(1e3 * (ended - exported))
        mine, public = Series(tuple(ours)), Series(tuple(theirs))
        rows[model] = {
            "nodes": nodes,
            "exporter_s_per_1000": public.median / nodes,
            "composer_s_per_1000": mine.median / nodes,
            "ratio": paired_ratio(public, mine).to_dict(),
        }
    return rows


@contextmanager
def counting_translation() -> Iterator[dict[str, Any]]:
    """Seconds spent in, and nodes given to, composer's translation within the block."""
    counted: dict[str, Any] = {"seconds": 0.0, "nodes": 0}
    original = lowering.to_onnx

    def timed(region: Any, artefacts: Any = None) -> Any:
        counted["nodes"] += sum(node.op == "call_function" for node in region.gm.graph.nodes)
        began = time.perf_counter()
        made = original(region, artefacts)
        counted["seconds"] += time.perf_counter() - began
        return made

    partition = importlib.import_module("composer.lowering.partition.by_trial")
    with mock.patch.object(partition, "to_onnx", timed):
        yield counted


def without(rewrite: str) -> AbstractContextManager[object]:
    """Compile without one of the rewrites, or with all of them for an empty name."""
    operators = {
        "Gelu": torch.ops.aten.gelu.default,
        "MultiHeadAttention": torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    }
    if rewrite == "unread nodes dropped":
        name = "onnx_ir.passes.common.RemoveUnusedNodesPass"
        return mock.patch(name, return_value=lambda model: model)
    if rewrite == "no SkipLayerNormalization":
        return mock.patch("composer.backends.onnxrt.optimizers.SLOWER", ())
    if rewrite == "norms as one operator":
        return mock.patch("composer.backends.onnxrt.session.fuse_norms")
    if rewrite == "splits without sequences":
        return mock.patch("composer.lowering.operators.translations.shapes.pieces", in_a_sequence)
    table = dict(onnxrt.entries())
    table.pop(operators.get(rewrite), None)
    return mock.patch.object(onnxrt, "entries", return_value=table)


def in_a_sequence(x: Any, sizes: list[int], dim: int) -> Any:
    """A split as torch's exporter says it."""
    op: Any = onnxscript.opset18
    return op.SplitToSequence(x, op.Constant(value_ints=sizes), axis=dim)


REWRITES = (
    *("unread nodes dropped", "no SkipLayerNormalization", "Gelu", "MultiHeadAttention"),
    *("norms as one operator", "splits without sequences"),
)


class Gated(torch.nn.Module):
    """A linear layer whose result is split in two, as in the blocks of many diffusion models."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(768, 6144)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One half times the GELU of the other."""
        value, gate = self.linear(x).chunk(2, -1)
        return value * torch.nn.functional.gelu(gate)


def rewrite_gains(rounds: int) -> dict[str, dict[str, Any]]:
    """Time without each rewrite over the time with all, for models that have something of it."""
    rows: dict[str, dict[str, Any]] = {}
    for model in (*REWRITTEN, "gated unit"):
        gated = Gated(), {"x": torch.rand(8, 256, 768)}
        module, inputs = zoo.build(model) if model in REWRITTEN else gated
        runs: dict[str, Callable[[], object]] = {}
        torch.compiler.reset()
        for rewrite in ("", *REWRITES):
            compiled = onnx_compiled(module, {})
            with without(rewrite):
                compiled(**inputs)
            runs[rewrite] = functools.partial(compiled, **inputs)
        taken = measure(runs, rounds)
        rows[model] = {
            rewrite: paired_ratio(taken[rewrite], taken[""]).to_dict() for rewrite in REWRITES
        }
    return rows


def session_costs(rounds: int) -> dict[str, dict[str, Any]]:
    """Milliseconds of a new session and its first call, and what ONNX Runtime's own way is over it.

    For models with products without a bias, whose weights it transposes first.
    """
    edit = mock.patch.object(onnxrt.session, "read_weights_as_they_lie", return_value=None)
    rows: dict[str, dict[str, Any]] = {}
    for model in UNBIASED:
        module, inputs = zoo.build(model)
        torch.compiler.reset()
        compiled = onnx_compiled(module, {})
        compiled(**inputs)

        def again(run: Callable[..., Any] = compiled, given: Any = inputs) -> None:
            composer.refresh()  # whose next call makes a session, and translates nothing
            run(**given)

        def transposing(run: Callable[[], None] = again) -> None:
            with edit:
                run()

        taken = measure({"as they lie": again, "transposed": transposing}, rounds)
        ratio = paired_ratio(taken["transposed"], taken["as they lie"])
        rows[model] = {"session": taken["as they lie"].to_dict(), "transposed": ratio.to_dict()}
    return rows


def half_costs(rounds: int) -> dict[str, dict[str, Any]]:
    """Milliseconds of a call in half precision, what others take over it, and the errors.

    bfloat16 is left out where the processor has arithmetic for it: the engine leaves it to torch.
    """
    dtypes = (
        [torch.float16] if _torch.processor.multiplies_bf16() else [torch.bfloat16, torch.float16]
    )
    rows: dict[str, dict[str, Any]] = {}
    for model in HALF:
        for dtype in dtypes:
            module, inputs = zoo.build(model)
            module.to(dtype)
            given = {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}
            runs = {name: one_engine(module, name) for name in ("inductor", "onnxrt")}
            calls: dict[str, Callable[[], Any]] = {"eager": functools.partial(module, **given)}
            calls |= {name: functools.partial(run, **given) for name, run in runs.items()}
            expected = calls["eager"]()
            row: dict[str, Any] = {f"{k}_error": error(calls[k](), expected) for k in runs}
            taken = measure(calls, rounds)
            row["onnxrt"] = taken["onnxrt"].to_dict()
            for name in ("eager", "inductor"):
                row[f"{name}_over_onnxrt"] = paired_ratio(taken[name], taken["onnxrt"]).to_dict()
            rows[f"{model}, {str(dtype).removeprefix('torch.')}"] = row
            torch.compiler.reset()
    return rows


def one_engine(module: torch.nn.Module, engine: str) -> Callable[..., Any]:
    """The module on one engine, or an error."""
    options = {"chain": [engine], "strict": True}
    return torch.compile(framed(module), backend="composer", options=options)


def error(actual: Any, expected: Any) -> float:
    """The largest difference over the largest number of eager's, for the worst of the outputs."""
    pairs = zip(tree_leaves(actual), tree_leaves(expected), strict=True)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def memory_costs(megabytes: tuple[int, ...]) -> dict[str, dict[str, Any]]:
    """Growth of a fresh process that compiles a stack of linear layers, for each size."""
    rows: dict[str, dict[str, Any]] = {}
    for size in megabytes:
        command = [sys.executable, __file__, "--grow", str(size)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        rows[f"{size} MB"] = json.loads(done.stdout.splitlines()[-1])
    return rows


def grow(megabytes: int) -> dict[str, float]:
    """Resident megabytes before the compile and at the third call, in this process."""
    layers = max(2, megabytes // 64)
    width = int((megabytes * 1e6 / 4 / layers) ** 0.5)
    pairs = ((torch.nn.Linear(width, width), torch.nn.ReLU()) for _ in range(layers))
    model, x = (
        torch.nn.Sequential(*(each for pair in pairs for each in pair)),
        torch.randn(4, width),
    )
    tiny = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    with torch.no_grad():
        torch.compile(tiny, backend="onnxrt")(torch.randn(2, 4))  # what is imported once
        expected = model(x)
        before = resident()
        compiled = torch.compile(model, backend="onnxrt")
        for _ in range(3):
            result = compiled(x)
        after = resident()
    error = ((result - expected).abs().max() / expected.abs().max()).item()
    weights = sum(each.numel() * each.element_size() for each in model.parameters()) / 1e6
    return {
        "weights_mb": weights,
        "before_mb": before,
        "grown_mb": after - before,
        "grown_over_weights": (after - before) / weights,
        "relative_error": error,
    }


def resident() -> float:
    """Megabytes of this process that lie in memory (Linux)."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    (line,) = (line for line in status.splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024 / 1e6


def show(record: Mapping[str, Any]) -> None:
    """Print a table for every part that was measured."""
    console = Console(width=120)
    for part in PARTS:
        rows = {name: dict(figures(row)) for name, row in record.get(part, {}).items()}
        headings = dict.fromkeys(key for row in rows.values() for key in row)
        table = Table(part, *headings)
        for name, row in rows.items():
            table.add_row(name, *(f"{row[key]:.3g}" if key in row else "" for key in headings))
        if rows:
            console.print(table)


def figures(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """One number for each entry: a series and a ratio stand with their median."""
    for key, value in row.items():
        if isinstance(value, dict):
            yield key, value.get("median_ms", value.get("median"))
        else:
            yield key, value


def main() -> int:
    """Measure what was asked for, print it, and write the JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--parts", default=",".join(DEFAULT), help="of " + ", ".join(PARTS))
    parser.add_argument("--rounds", type=int, default=15, help="paired rounds (default 15)")
    parser.add_argument("--calls", type=int, default=2000, help="calls that make one time")
    parser.add_argument("--megabytes", default="600,2500", help="weights for `memory`")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--grow", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.grow:
        print(json.dumps(grow(asked.grow)))
        return 0
    record: dict[str, Any] = {"machine": machine()}
    chosen = asked.parts.split(",")
    with torch.no_grad(), building(BuildTerms(artefacts=Artefacts(keep_gib=0))):
        if "calls" in chosen:
            record["calls"] = call_costs(asked.rounds, asked.calls)
        if "spinning" in chosen:
            record["spinning"] = spinning_costs(asked.rounds)
        if "translation" in chosen:
            record["translation"] = translation_costs(max(3, asked.rounds // 3))
        if "rewrites" in chosen:
            record["rewrites"] = rewrite_gains(asked.rounds)
        if "sessions" in chosen:
            record["sessions"] = session_costs(asked.rounds)
        if "halves" in chosen:
            record["halves"] = half_costs(max(5, asked.rounds // 3))
    if "memory" in chosen:
        record["memory"] = memory_costs(tuple(map(int, asked.megabytes.split(","))))
    show(record)
    if asked.json:
        write_json(asked.json, record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
