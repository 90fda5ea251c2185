"""What composer costs: at every call, and at compile time for candidates that do not serve.

``python bench/overhead.py`` compares, round by round in one process,

- a call of a graph of three operations through composer with the same engine through
  ``torch.compile`` alone. Each variant has a code object of its own, since Dynamo looks through
  the cache entries of one code object in turn;
- a compile of that graph whose first candidate is unavailable, or fails, with one without it.

``python bench/overhead.py --guard`` compares a call that composer answers for when the engine
raises (``on_runtime_error = "fallback"``) with the same call without (``"raise"``): what the guard
itself costs, for 1, 4 and 16 inputs. The engine does next to nothing, and rounds are short and
many, so that some are undisturbed.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from compiles import own_code
from rich.console import Console
from rich.table import Table
from timing import Ratio, Series, machine, measure, paired_ratio, write_json

import composer
from composer.backends.base import Backend, Build, BuildRequest

INPUTS = (1, 4, 16)
ENGINES = ("eager", "aot_eager", "inductor", "onnxrt")
Function = Callable[[torch.Tensor], torch.Tensor]


def three_operations(x: torch.Tensor) -> torch.Tensor:
    """The smallest graph worth compiling."""
    return torch.relu(x * 2.0) + 1.0


def compiled(name: str, backend: str, chain: list[object] | None = None) -> Function:
    """The graph of three operations, compiled by ``backend`` at its first call."""
    options: dict[str, Any] | None = {"chain": chain} if chain else None
    return torch.compile(own_code(three_operations, name), backend=backend, options=options)


def call_overhead(rounds: int, calls: int) -> dict[str, dict[str, Any]]:
    """Microseconds a call with and without composer, for every engine.

    Args:
        rounds: Paired rounds.
        calls: Calls in a row that make one time.
    """
    x = torch.ones(8)
    rows: dict[str, dict[str, Any]] = {}
    for engine in ENGINES:
        plain = functools.partial(compiled(f"plain_{engine}", engine), x)
        ours = functools.partial(compiled(f"ours_{engine}", "composer", [engine]), x)
        plain()
        ours()
        chosen = composer.reports()[-1].chosen
        if chosen != engine:
            raise RuntimeError(f"meant to measure {engine}, but {chosen} serves")
        taken = measure({"plain": plain, "composer": ours}, rounds, calls=calls)
        rows[engine] = compared(taken)
    return rows


def sums(*tensors: torch.Tensor) -> torch.Tensor:
    """A graph of any number of inputs, none of which is a weight."""
    return torch.stack(tensors).sum(0)


def gives_its_first_input(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
    """The engine whose calls are the cheapest: what is left is the way to it."""
    return lambda *args: (args[0],)


class GivesItsFirstInput(Backend):
    """The same as an engine of which it is known that it writes where the graph does."""

    writes_as_the_graph = True

    def build(self, request: BuildRequest) -> Build:
        """See :func:`gives_its_first_input`."""
        return Build(gives_its_first_input(request.gm, request.example_inputs))


def guard_cost(rounds: int, calls: int) -> dict[str, dict[str, Any]]:
    """Microseconds a call of which the guard is a part, for each kind of engine and inputs.

    Args:
        rounds: Paired rounds.
        calls: Calls in a row that make one time.
    """
    rows: dict[str, dict[str, Any]] = {}
    kinds = {"": gives_its_first_input, ", an engine of composer's own": GivesItsFirstInput}
    for (kind, engine), count in itertools.product(kinds.items(), INPUTS):
        inputs = [torch.ones(8) for _ in range(count)]
        name = f"s{count}_{engine.__name__}"
        calls_of = {"engine": torch.compile(own_code(sums, name), backend=gives_its_first_input)}
        for wish in ("raise", "fallback"):
            options = {"chain": [engine], "on_runtime_error": wish}
            own = own_code(sums, f"{name}_{wish}")
            calls_of[wish] = torch.compile(own, backend="composer", options=options)
        bound = {name: functools.partial(call, *inputs) for name, call in calls_of.items()}
        taken = measure(bound, rounds, calls=calls)
        rows[f"{count}{kind}"] = {
            **compared({"plain": taken["raise"], "composer": taken["fallback"]}),
            "engine_alone": taken["engine"].to_dict(),
        }
    return rows


def fails(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
    """A candidate that fails at once: what is measured is composer's own work around it."""
    raise RuntimeError("this engine always fails")


def compile_overhead(rounds: int) -> dict[str, dict[str, Any]]:
    """Milliseconds that a first candidate adds to a compile when it does not serve."""
    first: dict[str, object] = {"unavailable": "tensorrt", "failing": fails}
    rows: dict[str, dict[str, Any]] = {}
    for kind, candidate in first.items():
        variants = {
            "plain": functools.partial(compile_anew, ["aot_eager"]),
            "composer": functools.partial(compile_anew, [candidate, "aot_eager"]),
        }
        rows[kind] = compared(measure(variants, rounds, settle=0))
        attempt = composer.reports()[-1].attempts[0]
        rows[kind]["status"] = str(attempt.status)
    return rows


def compile_anew(chain: list[object]) -> None:
    """Compile and call the graph once, forgetting what was compiled before."""
    torch.compiler.reset()
    compiled("fresh", "composer", chain)(torch.ones(8))


def compared(taken: Mapping[str, Series]) -> dict[str, Any]:
    """The two series, their ratio, and the difference of their medians in milliseconds."""
    plain, ours = taken["plain"], taken["composer"]
    pairs = zip(ours.milliseconds, plain.milliseconds, strict=True)
    return {
        "plain": plain.to_dict(),
        "composer": ours.to_dict(),
        "ratio": paired_ratio(ours, plain).to_dict(),
        "added_ms": Series(tuple(a - b for a, b in pairs)).to_dict(),
    }


def show_guard(rows: Mapping[str, Mapping[str, Any]]) -> None:
    """Print what the guard adds: the median of the rounds' differences, and that of the minima."""
    table = Table("inputs", "engine alone, us", "without, us", "with, us", "added, us", "of minima")
    table.title = "a call that is answered for if the engine raises; times are minima"
    for count, row in rows.items():
        sides = ("engine_alone", "plain", "composer")
        alone, plain, ours = (row[side]["minimum_ms"] * 1e3 for side in sides)
        added = f"{row['added_ms']['median_ms'] * 1e3:.2f}"
        table.add_row(
            count, *(f"{t:.2f}" for t in (alone, plain, ours)), added, f"{ours - plain:.2f}"
        )
    Console(width=110).print(table)


def show(title: str, rows: Mapping[str, Mapping[str, Any]], unit: str, scale: float) -> None:
    """Print one table; ``scale`` turns milliseconds into ``unit``."""
    table = Table("what", f"without, {unit}", f"with, {unit}", "ratio (p25-p75)", f"added, {unit}")
    table.title = title
    for name, row in rows.items():
        ratio = Ratio(**row["ratio"])
        table.add_row(
            name,
            f"{row['plain']['median_ms'] * scale:.2f}",
            f"{row['composer']['median_ms'] * scale:.2f}",
            f"{ratio.median:.3f} ({ratio.p25:.3f}-{ratio.p75:.3f})",
            f"{row['added_ms']['median_ms'] * scale:.2f}",
        )
    Console(width=110).print(table)


def main() -> int:
    """Measure, print, and write the JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=41, help="paired rounds (default 41)")
    parser.add_argument("--calls", type=int, default=2000, help="calls that make one time")
    parser.add_argument("--guard-rounds", type=int, default=4000, help="for the guard's own cost")
    parser.add_argument("--guard", action="store_true", help="measure only the guard's own cost")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    asked = parser.parse_args()
    described = machine()
    with torch.no_grad():
        if asked.guard:
            guard = guard_cost(asked.guard_rounds, min(asked.calls, 25))
            show_guard(guard)
            if asked.json:
                write_json(asked.json, {"machine": described, "guard": guard})
            return 0
        calls = call_overhead(asked.rounds, asked.calls)
        compiles = compile_overhead(asked.rounds)
    show("a call of three operations through composer", calls, "us", 1e3)
    show("a compile whose first candidate does not serve", compiles, "ms", 1.0)
    if asked.json:
        write_json(asked.json, {"machine": described, "calls": calls, "compiles": compiles})
    return 0


if __name__ == "__main__":
    sys.exit(main())
