"""What an engine that fails costs its user: through composer, and through a try/except.

``python bench/faults.py`` puts a fake engine with each fault of ``composer.testing.Fault`` before
``aot_eager``, and calls a small fresh model with it, in inference and in training,

- through the chain of try and except that torch's own documentation shows ("Custom Backends");
- through composer, with ``verify = "off"``, with ``verify = "compile"``, and with every check:
  ``verify = "sample"`` at each call and, for faults that may end or hang the process, ``isolate``.

A fault strikes while the engine compiles, at all of its calls, or from a later call on, when every
check at the start is past. Each call is held against eager. Faults that may end or hang the process
have one of their own each.
"""

from __future__ import annotations

import argparse
import collections
import copy
import functools
import itertools
import multiprocessing
import resource
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tables import fault_cell
from timing import machine, write_json
from torch._dynamo import lookup_backend

import composer
from composer.errors import FallbackWarning
from composer.testing import FakeBackend, Fault
from composer.testing.faults import AT_CALLS, WHILE_COMPILING

CALLS = 6
LATER = 4
SLOW = 0.3
LIMIT = 10.0
START = 120.0
CHECKED = {"timeout": 8.0, "memory_limit": 2048}
HEADROOM = 1 << 26
WAYS = ("try/except", "composer", "composer, verified", "composer, every check")
ENDING = (Fault.EXITS, Fault.OS_EXITS, Fault.SEGFAULTS, Fault.HANGS, Fault.EATS_MEMORY)
MOMENTS = {"compile": None, "calls": 1, "later": LATER}


@dataclass(frozen=True, slots=True)
class Cell:
    """A fault (``None`` for an engine without one), when it strikes, and who deals with it."""

    fault: Fault | None
    strikes: str
    training: bool
    way: str


def cells(faults: Iterable[Fault], ways: Iterable[str] = WAYS) -> Iterator[Cell]:
    """Every one of them, the honest engine first: the others' lost time is above its time."""
    kinds: list[tuple[Fault | None, str]] = [(None, "never")]
    for fault in faults:
        kinds += [(fault, "compile")] if fault in WHILE_COMPILING else []
        kinds += [(fault, "calls")] if fault in AT_CALLS else []
        kinds += [(fault, "later")] if fault in AT_CALLS and fault not in ENDING else []
    for (fault, strikes), training, way in itertools.product(kinds, (False, True), ways):
        yield Cell(fault, strikes, training, way)


class TryExcept:
    """The documentation's chain: the next engine where one raises or gives nothing."""

    def __init__(self, engines: Iterable[Callable[..., Any]]) -> None:
        self._engines = tuple(engines)
        self.chosen = ""

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        """What the first of them compiles."""
        for engine in self._engines:
            self.chosen = getattr(engine, "__name__", "")
            try:
                compiled = engine(gm, example_inputs)
                if compiled is not None:
                    return compiled
            except Exception:  # noqa: BLE001  # as in the documentation
                pass
        self.chosen = "eager"
        return gm.forward


def aot_eager(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
    """The engine that is next in line, by its name."""
    return lookup_backend("aot_eager")(gm, example_inputs)


def played(cell: Cell) -> dict[str, Any]:
    """Compile a fresh model, call it, and hold every call against eager.

    Returns:
        Who answered in the end, calls by what became of them, and the seconds it took.
    """
    torch.compiler.reset()
    composer.reset()
    torch.manual_seed(0)
    at = MOMENTS.get(cell.strikes)
    fake = FakeBackend(cell.fault, at=at, seconds=SLOW, name="fake")
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    twin = copy.deepcopy(net)
    run, served_by = compiled(net, fake, cell)
    seconds, became = 0.0, collections.Counter[str]()
    for x in torch.randn(CALLS, 3, 4):
        started = time.perf_counter()
        try:
            mine = step(run, net, x.clone(), training=cell.training)
        except Exception as error:  # noqa: BLE001  # what reached the user
            became[type(error).__name__] += 1
        else:
            seconds += time.perf_counter() - started
            became[difference(mine, step(twin, twin, x.clone(), training=cell.training))] += 1
            continue
        seconds += time.perf_counter() - started
    return {"served_by": served_by(), "calls": dict(became), "seconds": seconds}


def compiled(
    net: torch.nn.Module, fake: FakeBackend, cell: Cell
) -> tuple[Callable[..., Any], Callable[[], str]]:
    """The model compiled in this way, and who answers for it when asked."""
    if cell.way == "try/except":
        chain = TryExcept((fake, aot_eager))
        return torch.compile(net, backend=chain), lambda: chain.chosen
    options: dict[str, Any] = {"chain": [fake, "aot_eager"]}
    if cell.way == "composer, verified":
        options["verify"] = "compile"
    elif is_checked(cell):
        options |= {"verify": {"when": "sample", "every": 1}}
        options |= {"isolate": True, **CHECKED} if cell.fault in ENDING else {}
    run = torch.compile(net, backend="composer", options=options)
    return run, lambda: composer.reports()[-1].chosen if composer.reports() else ""


def is_checked(cell: Cell) -> bool:
    """Whether composer uses all that it has."""
    return cell.way == "composer, every check"


def step(
    run: Callable[..., Any], net: torch.nn.Module, x: torch.Tensor, *, training: bool
) -> dict[str, Any]:
    """One call, and the backward in training: all that the user can see of it, by name."""
    net.zero_grad()
    with torch.set_grad_enabled(training):
        output = run(x)
        if training:
            output.square().sum().backward()
    gradients = {f"gradient of {n}": p.grad for n, p in net.named_parameters() if training}
    weights = {f"weight {n}": p.detach() for n, p in net.named_parameters()}
    return {"output": output, "input": x, **gradients, **weights}


def difference(mine: Mapping[str, Any], eagers: Mapping[str, Any]) -> str:
    """``"right"``, or the first thing that is not eager's."""
    for name, expected in eagers.items():
        got, what = mine[name], name.partition(" ")[0]
        if type(got) is not type(expected):
            return f"wrong {what}"
        same_kind = got.shape == expected.shape and got.dtype == expected.dtype
        if not same_kind or not torch.allclose(got, expected, rtol=1e-4, atol=1e-6):
            return f"wrong {what}"
        if got.stride() != expected.stride():
            return f"wrong strides of {what}"
    return "right"


def sent(cell: Cell, pipe: Connection) -> None:
    """What one process of its own does: play the cell, and send what came of it."""
    warnings.simplefilter("ignore", FallbackWarning)
    played(Cell(None, "never", cell.training, cell.way))
    if cell.fault is Fault.EATS_MEMORY and not is_checked(cell):
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + HEADROOM, used + HEADROOM))
    pipe.send("ready")
    pipe.send(played(cell))


def apart(cell: Cell) -> dict[str, Any]:
    """Play a cell in a process of its own, for at most ``LIMIT`` seconds after an honest one.

    A child process under ``isolate`` has ``START`` seconds more to start.
    """
    context = multiprocessing.get_context("forkserver")
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=sent, args=(cell, theirs))
    process.start()
    theirs.close()
    try:
        mine.recv()
        started = time.perf_counter()
        if mine.poll(LIMIT + START * is_checked(cell)):
            return dict(mine.recv())
        end = "hung"
    except EOFError:
        end = "process lost"
    finally:
        process.kill()
        process.join()
    seconds = time.perf_counter() - started
    return {"served_by": "", "calls": {end: CALLS}, "seconds": seconds}


def matrix(faults: Iterable[Fault], ways: Iterable[str] = WAYS) -> list[dict[str, Any]]:
    """Every cell and what came of it; those that may end a process run two at a time."""
    wanted = list(cells(faults, ways))
    played(Cell(None, "never", True, "composer"))
    compiling = [name for name in sys.modules if name.startswith(("torch", "composer"))]
    multiprocessing.get_context("forkserver").set_forkserver_preload(compiling)
    with ThreadPoolExecutor(2) as pool:
        alone = [cell for cell in wanted if cell.fault in ENDING]
        found = dict(zip(alone, pool.map(apart, alone), strict=True))
    found |= {cell: played(cell) for cell in wanted if cell.fault not in ENDING}
    honest = {(c.training, c.way): r["seconds"] for c, r in found.items() if c.fault is None}
    return [
        {**asdict(c), **found[c], "lost_s": found[c]["seconds"] - honest[c.training, c.way]}
        for c in wanted
    ]


def show(rows: Iterable[Mapping[str, Any]]) -> None:
    """Print the table."""
    rows = list(rows)
    ways = dict.fromkeys(row["way"] for row in rows)
    headings = [f"{way}, {mode}" for mode in ("inference", "training") for way in ways]
    table = Table("fault", "strikes", *headings)
    key = functools.partial(map, lambda row: (str(row["fault"] or "none"), row["strikes"]))
    for fault, strikes in dict.fromkeys(key(rows)):
        mine = [r for r in rows if (str(r["fault"] or "none"), r["strikes"]) == (fault, strikes)]
        mine.sort(key=lambda row: bool(row["training"]))
        table.add_row(fault, strikes, *(fault_cell(row) for row in mine))
    Console(width=220).print(table)


def main() -> int:
    """Play all cells, print, and write the JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--faults", help="only these, with commas between; all by default")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help="all by default")
    parser.add_argument("--json", type=Path, help="where to write what came of them")
    asked = parser.parse_args()
    faults = [Fault(name) for name in asked.faults.split(",")] if asked.faults else list(Fault)
    warnings.simplefilter("ignore", FallbackWarning)
    described = machine()
    rows = matrix(faults, asked.ways)
    show(rows)
    if asked.json:
        write_json(asked.json, {"machine": described, "calls": CALLS, "cells": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
