"""How often ``select = "fastest"`` picks the wrong engine, and what picking costs.

``python bench/choosing.py`` builds Inductor, ONNX Runtime and, where it is installed, OpenVINO once
for each of two small models, with empty caches, and then has composer choose among them and eager,
over and over, with the budget that the policy gives by default. ``--load`` runs a process beside it
that keeps one core busy.

A pick is wrong if the engine takes more than 5 % longer than the best. What an engine takes is
measured apart from the selections, under the same load, by ``timing.measure``, before them and
after them: the mean of all calls, since a load is waited for as well, in turns long enough to be
what a program sees that goes on calling one engine. On a machine that others use too that is a
moving target: the figures of both halves are in the JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import math
import os
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from compiles import cold_compiles
from timing import machine, measure, write_json

from composer.chain import select
from composer.chain.attempt import try_candidate
from composer.chain.candidates import entries_of
from composer.graphs import capture, keys
from composer.passes.within_aotautograd import LatePasses
from composer.policy import Cache, Policy
from composer.records import GraphRequest

ENGINES: tuple[str, ...] = ("inductor", "onnxrt")
if importlib.util.find_spec("openvino") is not None:
    ENGINES += ("openvino",)
WRONG = 1.05
SETTLE, TURN = 0.3, 0.5
"""Seconds before an engine's turn and, of the quickest, of the turn. Beside a load, Linux took 200
ms to part an engine's threads that had woken on one core."""
SPIN = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
parent = os.getppid()
while os.getppid() == parent:  # also if that is killed
    for _ in range(10_000_000):
        pass
"""


def convolutions() -> tuple[torch.nn.Module, torch.Tensor]:
    """Two convolutions, with a norm behind each."""
    layers = [torch.nn.Conv2d(3, 32, 3, padding=1), torch.nn.BatchNorm2d(32), torch.nn.ReLU()]
    layers += [torch.nn.Conv2d(32, 32, 3, padding=1), torch.nn.BatchNorm2d(32), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers).eval(), torch.randn(4, 3, 64, 64)


def perceptron() -> tuple[torch.nn.Module, torch.Tensor]:
    """Two linear layers, with a GELU between them."""
    layers = torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256)
    return torch.nn.Sequential(*layers).eval(), torch.randn(32, 256)


MODELS = {"convolutions": convolutions, "perceptron": perceptron}


@contextlib.contextmanager
def load(core: int | None) -> Iterator[None]:
    """Keep a core busy; none for ``None``."""
    if core is None:
        yield
        return
    process = subprocess.Popen([sys.executable, "-c", SPIN, str(core)])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def built(model: torch.nn.Module, x: torch.Tensor) -> tuple[GraphRequest, dict[str, Any], float]:
    """The model's graph, what each engine made of it, and the seconds that all builds took."""
    found: list[tuple[GraphRequest, dict[str, Any], float]] = []

    def backend(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        request = keys.with_key(capture.read_request(gm, inputs), None, "", "")
        candidates = entries_of(Policy(chain=ENGINES), Cache(failures=0))
        made: dict[str, object] = {}
        tried = [try_candidate(request, each, LatePasses(), made=made) for each in candidates]
        runs = {each.attempt.backend: each.compiled for each in tried if each.compiled is not None}
        runs["eager"] = gm.forward
        found.append((request, runs, sum(each.attempt.seconds for each in tried)))
        return gm.forward

    torch.compiler.reset()
    with cold_compiles():
        torch.compile(model, backend=backend, dynamic=False)(x)
    return found[0]


def choose(
    selections: int, rounds: int, request: GraphRequest, runs: dict[str, Any], seconds: float
) -> dict[str, Any]:
    """Who was picked how often, and how long picking took."""
    participants = [select.Participant(name, run) for name, run in runs.items()]
    budget = select.Benchmark().budget(seconds)
    calls = {n: functools.partial(run, *request.example_inputs) for n, run in runs.items()}
    halves = [milliseconds_of(calls, rounds)]
    picks: Counter[str] = Counter()
    taken = []
    for _ in range(selections):
        result = select.measure(participants, request, budget)
        picks["nobody" if result.winner is None else participants[result.winner].name] += 1
        taken.append(result.seconds)
    halves.append(milliseconds_of(calls, rounds))
    truth = {name: statistics.fmean(half[name] for half in halves) for name in runs}
    best = min(truth.values())
    wrong = sum(n for name, n in picks.items() if truth.get(name, best) > WRONG * best)
    return {
        "milliseconds": truth,
        "halves": halves,
        "picks": dict(picks),
        "wrong": wrong,
        "selections": selections,
        "build_seconds": seconds,
        "budget_seconds": budget.seconds,
        "seconds": {"median": statistics.median(taken), "most": max(taken)},
        "share_of_build": {
            "median": statistics.median(taken) / seconds,
            "most": max(taken) / seconds,
        },
        "load_average": os.getloadavg()[0],
    }


def milliseconds_of(calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Milliseconds of a call of each, the mean of all rounds."""
    first = measure(calls, 1, calls=20, settle=SETTLE)
    number = math.ceil(TURN * 1e3 / min(series.median for series in first.values()))
    taken = measure(calls, rounds, calls=number, settle=SETTLE)
    return {name: statistics.fmean(series.milliseconds) for name, series in taken.items()}


def main() -> None:
    """Print the figures of each model; ``--json PATH`` writes them as well."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--selections", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--load", type=int, metavar="CORE", help="keep this core busy")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    record: dict[str, Any] = {"machine": machine(), "load": given.load is not None, "models": {}}
    with load(given.load), torch.no_grad():
        for name, make in MODELS.items():
            torch.manual_seed(0)
            found = choose(given.selections, given.rounds, *built(*make()))
            record["models"][name] = found
            print(name, *(f"{key} {value}" for key, value in found.items()), sep="\n  ")
    if given.json:
        write_json(given.json, record)


if __name__ == "__main__":
    main()
