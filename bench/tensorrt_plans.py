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
from typing import Any

import torch
import zoo
from rich.console import Console
from rich.table import Table
from timing import machine, write_json

from composer.backends.tensorrt.engine import dtypes_of, in_host_memory
from composer.backends.tensorrt.library import Library, load_library
from composer.backends.tensorrt.network import parse
from composer.backends.tensorrt.partition import Partition, partition
from composer.backends.tensorrt.plan import Recipe, Target, build_plan
from composer.backends.tensorrt.profiles import profile_of, ranges_of
from composer.backends.tensorrt.settings import Settings
from composer.build import BuildTerms
from composer.lowering.aot import FunctionalGraph, compile_functional
from composer.lowering.export.plain import shapes_with_symbols

COLUMNS = ("coverage", "regions", "nodes", "translate_s", "parse_s", "build_s", "plan_mib")


def measured(
    library: Library, name: str, target: Target, settings: Settings, *, tiny: bool
) -> dict[str, Any]:
    """The figures of one model."""
    module, inputs = zoo.build(name, tiny=tiny)
    row: dict[str, Any] = {}

    def build(graph: FunctionalGraph) -> Any:
        began = time.perf_counter()
        pieces = partition(graph, library, settings, BuildTerms())
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
        plain = pieces.models[name]
        weights = in_host_memory(plain.graph.inputs, region.weights | region.constants)
        shapes = shapes_with_symbols(plain.graph, region.gm)
        profiles = [profile_of(shapes, each) for each in ranges_of(shapes, settings.profiles)]
        dtypes = dtypes_of(plain, region)
        recipe = Recipe(plain.graph, weights, dtypes, tuple(profiles), settings, False, target)
        began = time.perf_counter()
        with library.busy, library.log.recording() as lines:
            parse(library, plain.graph, weights, lines)
        parsed = time.perf_counter()
        plan = build_plan(library, recipe)
        sums["nodes"] += len(plain.graph.model.graph.node)
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
