"""Does TensorRT take the public models whole, and how long does a plan take?

``python bench/tensorrt_plans.py`` brings each model of ``zoo.py`` through composer's lowering into
the parser and the builder of TensorRT for RTX, which run on a CPU, and builds a plan for one GPU
without having it. Nothing is executed. Figures: the share of the graph and the number of regions,
seconds to translate it (ONNX, folding, and asking the parser), to parse and to build, and MiB.

The file is not called ``tensorrt.py``: run from this folder, that would be ``import tensorrt``.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import zoo
from rich.console import Console
from rich.table import Table
from timing import machine, write_json

from composer.backends import tensorrt
from composer.backends.tensorrt.library import Library, load_library
from composer.backends.tensorrt.loading import in_host_memory
from composer.backends.tensorrt.network import parse
from composer.backends.tensorrt.plan import Recipe, Target, build_plan
from composer.backends.tensorrt.profiles import profile_of
from composer.backends.tensorrt.settings import Settings
from composer.lowering.aot import FunctionalGraph, compile_functional
from composer.lowering.engine import OnnxBuild
from composer.lowering.loaded import Loaded
from composer.lowering.partition.by_trial import Partition, partition_by_trial


class Reading(tensorrt.TensorRTEngine):
    """Reads models, and builds no plan."""

    def load(self, *_: Any) -> Loaded:
        """Return a region that cannot run."""
        return Loaded(run=lambda args: [])


COLUMNS = ("coverage", "regions", "nodes", "translate_s", "parse_s", "build_s", "plan_mib")


def measured(
    library: Library, name: str, target: Target, settings: Settings, *, tiny: bool
) -> dict[str, Any]:
    """The figures of one model."""
    module, inputs = zoo.build(name, tiny=tiny)
    row: dict[str, Any] = {}

    def build(graph: FunctionalGraph) -> Any:
        began = time.perf_counter()
        terms = OnnxBuild(settings=settings, device=torch.device("cpu"))
        place = SimpleNamespace(target=target)
        with mock.patch.object(tensorrt, "place_on", return_value=place):
            pieces = partition_by_trial(graph, Reading(), terms)
        row["translate_s"] = time.perf_counter() - began
        row["coverage"] = pieces.parts.taken / pieces.parts.total
        row["regions"] = len(pieces.parts.regions)
        row["left"] = list(pieces.parts.left)
        row.update(built(library, pieces, target, settings))
        return lambda *args: None

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        compile_functional(gm, example_inputs, build)
        return gm.forward

    torch.compiler.reset()
    with torch.no_grad():
        torch.compile(module, backend=backend)(**inputs)
    return row


def built(
    library: Library, pieces: Partition, target: Target, settings: Settings
) -> dict[str, Any]:
    """Parse and build every region; seconds, nodes and MiB are sums."""
    sums = {"nodes": 0, "parse_s": 0.0, "build_s": 0.0, "plan_mib": 0.0}
    for name, region in pieces.parts.regions.items():
        read = pieces.models[name].read
        weights = in_host_memory(read.graph.inputs, region.weights | region.constants)
        profiles = tuple(profile_of(read.shapes, each) for each in read.ranges)
        recipe = Recipe(read.graph, weights, read.dtypes, profiles, settings, False, target)
        began = time.perf_counter()
        with library.busy, library.log.recording() as lines:
            parse(library, read.graph, weights, lines)
        parsed = time.perf_counter()
        plan = build_plan(library, recipe)
        sums["nodes"] += len(read.graph.model.graph.node)
        sums["parse_s"] += parsed - began
        sums["build_s"] += time.perf_counter() - parsed - (parsed - began)
        sums["plan_mib"] += len(plan) / 2**20
    return sums


def table_of(rows: dict[str, dict[str, Any]]) -> Table:
    """The figures for a person."""
    table = Table("model", *COLUMNS)
    for name, row in rows.items():
        cells = (row[column] for column in COLUMNS)
        table.add_row(name, *(f"{c:.3g}" if isinstance(c, float) else str(c) for c in cells))
    return table


def main() -> None:
    """Build the plans that were asked for, print a table and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=[*zoo.MODELS])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--precision", choices=("fp32", "fp16", "bf16"), default="fp32")
    parser.add_argument("--capability", default="8.9", help="of the GPU to build for")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    major, minor = map(int, asked.capability.split("."))
    target, settings = Target("", (major, minor), ""), Settings(precision=asked.precision)
    library = load_library()
    rows = {}
    for name in asked.models:
        rows[name] = measured(library, name, target, settings, tiny=asked.tiny)
    Console().print(table_of(rows))
    if asked.json:
        facts = {"library": [library.name, library.version], "capability": asked.capability}
        facts |= {"precision": asked.precision, "tiny": asked.tiny, "models": rows}
        write_json(asked.json, {"machine": machine(), **facts})


if __name__ == "__main__":
    main()
