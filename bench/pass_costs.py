"""What shared passes cost a compile: the pipeline, and making the graph of the ``aten`` stage.

``python bench/pass_costs.py`` takes a graph of 1,000 operations and measures, with Inductor's cold
compile of the same graph beside it,

- five passes that match nothing, that rewrite a tenth of the operations each, and that rewrite
  half of them each;
- canonical ATen made from it, and from each of the public models, in milliseconds a node.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

import torch
import zoo
from compiles import cold_compiles, forget
from rich.console import Console
from rich.table import Table
from timing import machine, write_json

from composer import _torch
from composer.graphs import clones
from composer.passes import GraphPass
from composer.passes.canonical import to_aten
from composer.passes.pipeline import Pipeline

aten = torch.ops.aten
OPERATIONS, PASSES = 1000, 5


@dataclass(frozen=True)
class Swap(GraphPass):
    """Make sines of some cosines, and cosines of some sines."""

    eliminates_dead_code: ClassVar[bool] = True

    most: int = 0

    def run(self, gm: torch.fx.GraphModule) -> int:
        """Rewrite no more than ``most`` of them."""
        other = {aten.cos.default: aten.sin.default, aten.sin.default: aten.cos.default}
        found = [node for node in gm.graph.nodes if node.target in other][: self.most]
        for node in found:
            node.target = other[node.target]
        return len(found)


def thousand(x: torch.Tensor) -> torch.Tensor:
    """Operations in a row, half of them cosines."""
    for _ in range(OPERATIONS // 2):
        x = torch.cos(x) + 1.0
    return x


def captured(function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[dict[str, float]]:
    """What the graph of a function costs to make canonical, and its passes to run."""
    rows: list[dict[str, float]] = []

    def look(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        rows.append(costs(gm, example_inputs))
        return gm.forward

    with torch.no_grad():
        torch.compile(function, backend=look)(*args, **kwargs)
    forget()
    return rows


def costs(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> dict[str, float]:
    """Seconds, each the median of five."""
    made = to_aten(gm, example_inputs)
    canonical = timed(lambda: to_aten(gm, example_inputs))
    nodes = len(gm.graph.nodes)
    row = {"nodes": nodes, "aten_s": canonical, "aten_ms_a_node": 1e3 * canonical / nodes}
    for name, most in (("none", 0), ("tenth", OPERATIONS // 10), ("half", OPERATIONS // 2)):
        make = _torch.sources.lazy_graph_module  # as composer does for this stage
        twins = iter([clones.clone_graph(made, make) for _ in range(5)])
        row[f"passes_{name}_s"] = timed(
            lambda t=twins, m=most: Pipeline("raise").run(next(t), [Swap(m)] * PASSES)
        )
    return row


def timed(run: Callable[[], object]) -> float:
    """Seconds of the middle one of five runs."""
    taken = []
    for _ in range(5):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return median(taken)


def inductor_seconds() -> float:
    """A cold compile of the thousand operations; the least of three."""
    x, taken = torch.randn(64, 64), []
    for _ in range(3):
        forget()
        start = time.perf_counter()
        with torch.no_grad():
            torch.compile(thousand)(x)
        taken.append(time.perf_counter() - start)
    forget()
    return min(taken)


def main() -> int:
    """Measure, print, and write the JSON if asked to."""
    parser = argparse.ArgumentParser(description="What shared passes cost a compile.")
    parser.add_argument("--models", nargs="*", default=list(zoo.MODELS))
    parser.add_argument("--json", type=Path, help="where to write the figures")
    asked = parser.parse_args()
    record: dict[str, Any] = {"machine": machine(), "operations": OPERATIONS, "passes": PASSES}
    with cold_compiles():
        record["inductor_s"] = inductor_seconds()
    (record["thousand"],) = captured(thousand, torch.randn(64, 64))
    record["models"] = {}
    for name in asked.models:
        module, inputs = zoo.build(name, tiny=True)  # as many nodes as the full size
        (record["models"][name],) = captured(module, **inputs)
    show(record)
    if asked.json:
        write_json(asked.json, record)
    return 0


def show(record: dict[str, Any]) -> None:
    """Print both tables."""
    console, passes = Console(width=110), Table("five passes that rewrite", "s", "of Inductor's")
    for name in ("none", "tenth", "half"):
        seconds = record["thousand"][f"passes_{name}_s"]
        passes.add_row(name, f"{seconds:.3f}", f"{seconds / record['inductor_s']:.1%}")
    console.print(passes)
    nodes = Table("graph", "nodes", "canonical ATen, s", "ms a node")
    for name, row in {"1,000 operations": record["thousand"], **record["models"]}.items():
        cells = (f"{row['nodes']}", f"{row['aten_s']:.2f}", f"{row['aten_ms_a_node']:.2f}")
        nodes.add_row(name, *cells)
    console.print(nodes)


if __name__ == "__main__":
    sys.exit(main())
