"""How composer's cost grows: with nodes, graphs, weights and batch.

The same engine through ``torch.compile`` alone and through composer, round by round in one process.
But for the batch it is one that compiles nothing and gives its first input back, so that what is
left is Dynamo's work and composer's. Run from anywhere, with composer installed::

    python bench/scaling.py --json bench/results/scaling.json

``compile`` is the first call, from Dynamo's capture on; ``call`` a later one; ``memory`` what
Python holds after the compile that it did not before (by ``tracemalloc``: an engine's own memory is
not in it).
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from compiles import own_code, positive
from rich.console import Console
from rich.table import Table
from timing import Series, machine, measure, paired_ratio, rotated, write_json
from torch import Tensor, nn

import composer

Function = Callable[[Tensor], Tensor]

SIDES = ("plain", "composer")
SWEEPS = {
    "nodes": (100, 1000, 10_000),
    "graphs": (1, 10, 50),
    "weights": (1, 10, 100, 1000),
    "batch": (1, 16, 256),
}
QUICK = {"nodes": (10, 40), "graphs": (1, 3), "weights": (1, 20), "batch": (1, 4)}
SLOW = 2000
"""Nodes, of all graphs together, from which rounds are few."""


@dataclass(frozen=True, slots=True)
class Case:
    """Something to compile: a function, the input of a call, and the engine."""

    function: Function
    x: Tensor
    engine: Any

    def compiled(self, side: str) -> Function:
        """Through composer or not, over a code object of its own; its first call compiles."""
        function = own_code(self.function, side)
        if side == "plain":
            return torch.compile(function, backend=self.engine)
        return torch.compile(function, backend="composer", options={"chain": [self.engine]})


def gives_its_first_input(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
    """The engine whose builds and calls are the cheapest, for graphs with one output."""
    (place,) = (i for i, each in enumerate(example_inputs) if not isinstance(each, nn.Parameter))
    return lambda *args: (args[place],)


def of_nodes(count: int) -> Case:
    """One graph of so many additions."""

    def chain(x: Tensor) -> Tensor:
        for _ in range(count):
            x = x + 1.0
        return x

    return Case(chain, torch.ones(8), gives_its_first_input)


def of_graphs(count: int) -> Case:
    """So many graphs of ten additions each, with breaks between."""
    part = "    x = x" + " + 1.0" * 10 + "\n    torch._dynamo.graph_break()\n"
    scope: dict[str, Any] = {"torch": torch}
    exec(f"def broken(x):\n{part * count}    return x", scope)  # a break in a loop gives all up
    return Case(scope["broken"], torch.ones(8), gives_its_first_input)


def of_weights(count: int) -> Case:
    """The sum of an input and so many weights."""
    weights = nn.ParameterList(nn.Parameter(torch.ones(8)) for _ in range(count))

    def total(x: Tensor) -> Tensor:
        for weight in weights:
            x = x + weight
        return x

    return Case(total, torch.ones(8), gives_its_first_input)


def of_batch(count: int) -> Case:
    """A perceptron on so many rows, by an engine that computes (``aot_eager``)."""
    model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
    return Case(lambda x: model(x), torch.randn(count, 256), "aot_eager")


CASES: Mapping[str, Callable[[int], Case]] = {
    "nodes": of_nodes,
    "graphs": of_graphs,
    "weights": of_weights,
    "batch": of_batch,
}


def figures(case: Case, rounds: int, calls: int) -> dict[str, Any]:
    """Compile, call and memory of one case, each without and with composer, and the ratio.

    Raises:
        RuntimeError: another engine than the one that is meant serves.
    """
    functions = {side: case.compiled(side) for side in SIDES}
    for function in functions.values():
        function(case.x)
    if (served := {report.chosen for report in composer.reports()}) & {"eager", ""} or not served:
        raise RuntimeError(f"meant to measure an engine, but {served or 'nobody'} serves")
    bound = {side: functools.partial(function, case.x) for side, function in functions.items()}
    with torch.compiler.set_stance("fail_on_recompile"):
        taken = measure(bound, max(rounds, 15), calls=calls)
    found = {"call": compared(taken), "compile": compared(first_calls(case, rounds))}
    return found | {"memory": {side: held(case, side) for side in SIDES}}


def first_calls(case: Case, rounds: int) -> dict[str, Series]:
    """Milliseconds of first calls, in turns; nothing compiled stays."""
    times: dict[str, list[float]] = {side: [] for side in SIDES}
    for turn in range(-1, rounds):
        for side in rotated(SIDES, turn):
            torch.compiler.reset()
            function = case.compiled(side)
            gc.collect()
            started = time.perf_counter()
            function(case.x)
            if turn >= 0:
                times[side].append((time.perf_counter() - started) * 1e3)
    return {side: Series(tuple(each)) for side, each in times.items()}


def held(case: Case, side: str) -> dict[str, float]:
    """KiB of Python's own objects after a compile, above those before, and at most during it."""
    torch.compiler.reset()
    function = case.compiled(side)
    gc.collect()
    tracemalloc.start()
    try:
        function(case.x)
        gc.collect()
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return {"kept_kib": kept / 1024, "peak_kib": peak / 1024}


def compared(taken: Mapping[str, Series]) -> dict[str, Any]:
    """The two series, their ratio, and the difference of the rounds in milliseconds."""
    plain, ours = (taken[side] for side in SIDES)
    pairs = zip(ours.milliseconds, plain.milliseconds, strict=True)
    return {
        "plain": plain.to_dict(),
        "composer": ours.to_dict(),
        "ratio": paired_ratio(ours, plain).to_dict(),
        "added_ms": Series(tuple(a - b for a, b in pairs)).to_dict(),
    }


def rounds_for(sweep: str, size: int, rounds: int) -> int:
    """Fewer where a compile takes seconds."""
    nodes = size * (10 if sweep == "graphs" else 1)
    return min(rounds, 3) if nodes >= SLOW else rounds


def show(sweeps: Mapping[str, Mapping[str, Any]]) -> None:
    """Print a line for each size of each sweep."""
    headings = ("compile, ms", "with", "ratio (p25-p75)", "call, us", "with", "ratio (p25-p75)")
    table = Table("what", *headings, "KiB kept", "with")
    for sweep, size, row in lines(sweeps):
        table.add_row(f"{size} {sweep}", *cells(row))
    Console(width=140).print(table)


def lines(sweeps: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Every size of every sweep."""
    for sweep, sizes in sweeps.items():
        for size, row in sizes.items():
            yield sweep, size, row


def cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """The figures of one line, without its name."""
    timed = []
    for part, scale in (("compile", 1.0), ("call", 1e3)):
        times = (row[part][side]["median_ms"] * scale for side in SIDES)
        ratio = row[part]["ratio"]
        timed += [f"{each:.1f}" for each in times]
        timed.append(f"{ratio['median']:.3f} ({ratio['p25']:.3f}-{ratio['p75']:.3f})")
    return (*timed, *(f"{row['memory'][side]['kept_kib']:.0f}" for side in SIDES))


def main() -> int:
    """Measure, print, and write the JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sweeps", default=",".join(SWEEPS), help=f"of {', '.join(SWEEPS)}")
    parser.add_argument("--rounds", type=positive, default=9, help="compiles that count (9)")
    parser.add_argument("--calls", type=positive, default=1000, help="calls that make one time")
    parser.add_argument("--quick", action="store_true", help="small sizes, two rounds")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    asked = parser.parse_args()
    names = asked.sweeps.split(",")
    if unknown := set(names) - set(SWEEPS):
        parser.error(f"unknown sweeps {', '.join(sorted(unknown))} (known: {', '.join(SWEEPS)})")
    rounds, calls = (2, 20) if asked.quick else (asked.rounds, asked.calls)
    record: dict[str, Any] = {"machine": machine(), "sweeps": {}}
    sys.setrecursionlimit(max(sys.getrecursionlimit(), 20_000))  # a graph is a chain of its nodes
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=1000):
        for sweep, size in itertools.chain.from_iterable(
            ((name, size) for size in (QUICK if asked.quick else SWEEPS)[name]) for name in names
        ):
            torch.compiler.reset()
            composer.reset()
            found = figures(CASES[sweep](size), rounds_for(sweep, size, rounds), calls)
            record["sweeps"].setdefault(sweep, {})[str(size)] = found
            if asked.json:
                write_json(asked.json, record)
    show(record["sweeps"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
