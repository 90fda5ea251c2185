"""The times of a program's calls over its first minute: who waits, how often, and for how long.

A process calls a model again and again, with empty caches. The variants are ``torch.compile``
(Inductor), composer with ``select = "fastest"``, and the same in the background. Dynamo with
nothing behind it tells how long a capture and a call of eager take. Run from anywhere, with
composer installed::

    python bench/first_minute.py --rounds 3 --json bench/results/first_minute.json

It writes the figures, and a picture of the calls' times for each model beside them. Processes take
turns, ``--rounds`` of each, for ``--seconds``: the choice is to be over by then.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from timing import machine, quartiles, write_json

FASTEST = {"chain": ["openvino", "onnxrt", "inductor"]}
VARIANTS: dict[str, tuple[str, dict[str, Any] | None]] = {
    "dynamo": ("eager", None),
    "torch.compile": ("inductor", None),
    "composer": ("composer", FASTEST | {"select": "fastest"}),
    "composer in the background": (
        "composer",
        FASTEST | {"select": {"by": "fastest", "background": True}},
    ),
}
TRAINS = "_train"
_CHOICE_IS_OVER = 20
"""Calls after the choice, whose median is the steady state."""


def program(model: str, variant: str, seconds: float, *, tiny: bool) -> dict[str, Any]:
    """Call a model for so many seconds; return when each call began, and what it took."""
    import zoo  # here: the parent needs no transformers

    module, inputs = zoo.build(model.removesuffix(TRAINS), tiny=tiny)
    backend, options = VARIANTS[variant]
    began = time.perf_counter()
    compiled = torch.compile(module, backend=backend, options=options)
    call = _step(compiled, inputs) if model.endswith(TRAINS) else _inference(compiled, inputs)
    calls: list[tuple[float, float]] = []
    changes: list[int] = []
    chosen = ""
    while time.perf_counter() - began < seconds:
        started = time.perf_counter()
        call()
        calls.append((started - began, time.perf_counter() - started))
        now = _chosen(backend)
        if now != chosen:
            changes.append(len(calls) - 1)
            chosen = now
    return {"calls": calls, "changes": changes, "chosen": chosen}


def _inference(compiled: Callable[..., Any], inputs: dict[str, Any]) -> Callable[[], Any]:
    def call() -> None:
        with torch.no_grad():
            compiled(**inputs)

    return call


def _step(compiled: Callable[..., Any], inputs: dict[str, Any]) -> Callable[[], Any]:
    def step() -> None:
        outputs = compiled(**inputs)
        first = outputs[0] if isinstance(outputs, tuple) else outputs
        getattr(first, "last_hidden_state", first).float().square().mean().backward()

    return step


def _chosen(backend: str) -> str:
    """Return who serves the graphs now."""
    if backend != "composer":
        return backend
    import composer

    return " ".join(each.chosen for each in composer.reports())


def apart(model: str, variant: str, seconds: float, *, tiny: bool) -> dict[str, Any]:
    """Run :func:`program` in a process of its own, with empty caches.

    Raises:
        RuntimeError: it failed; with what it said last.
    """
    command = [sys.executable, __file__, "--run", variant, "--models", model]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        caches = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "COMPOSER_CACHE_DIR": "own"}
        done = subprocess.run(
            [*command, "--seconds", str(seconds), *(["--tiny"] if tiny else [])],
            env=os.environ | {name: str(Path(folder, path)) for name, path in caches.items()},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(f"{model}, {variant}: {done.stderr.strip().splitlines()[-1]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def figures(found: dict[str, Any], eager: float, first: float) -> dict[str, Any]:
    """Return the figures of one process, beside Dynamo's ``first`` call and a call of ``eager``."""
    taken = [seconds for _, seconds in found["calls"]]
    last = found["changes"][-1] or len(taken)  # no change: the choice was not over, or none is made
    building = sorted(taken[1:last]) or [math.nan]
    steady = taken[last + 1 :][-_CHOICE_IS_OVER:] or taken[1:][-_CHOICE_IS_OVER:] or [math.nan]
    told = {
        "first": taken[0],
        "first_over_dynamo": taken[0] / first,
        "building_calls": last,
        "building_p99_over_eager": building[int(0.99 * (len(building) - 1))] / eager,
        "building_median_over_eager": quartiles(building)[1] / eager,
        "slowest_after_the_first": max(taken[1:], default=math.nan),
        "chosen_after_seconds": found["calls"][last][0] if last < len(taken) else None,
        "steady": quartiles(steady)[1],
        "chosen": found["chosen"],
    }
    unknown = [name for name, each in told.items() if isinstance(each, float) and math.isnan(each)]
    return told | dict.fromkeys(unknown)


def measure(model: str, rounds: int, seconds: float, *, tiny: bool) -> dict[str, Any]:
    """Run every variant of a model in turn; return the figures, and the last round's calls."""
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in VARIANTS}
    calls = {}
    for _ in range(rounds):
        base = apart(model, "dynamo", min(seconds, 20.0), tiny=tiny)
        first = base["calls"][0][1]
        eager = quartiles([taken for _, taken in base["calls"][1:]])[1]
        for name in VARIANTS:
            found = base if name == "dynamo" else apart(model, name, seconds, tiny=tiny)
            rows[name].append(figures(found, eager, first))
            calls[name] = found["calls"]
    return {"rows": rows, "calls": calls}


def draw(model: str, calls: dict[str, list[tuple[float, float]]], path: Path) -> None:
    """Draw the time of each call over the seconds since the start."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    for name, pairs in calls.items():
        if name != "dynamo":
            axes.plot(*zip(*pairs, strict=True), ".", markersize=3, label=name)
    axes.set(
        yscale="log",
        xlabel="seconds since the start, with empty caches",
        ylabel="seconds of a call",
        title=f"The first minute of {model}",
    )
    axes.legend()
    figure.savefig(path, dpi=120)


def show(model: str, rows: dict[str, list[dict[str, Any]]]) -> None:
    """Print the figures of a model, each of the first round and the others behind it."""
    table = Table(title=model)
    names = [name for name in rows["dynamo"][0] if name != "building_calls"]
    for name in ("", *names):
        table.add_column(name.replace("_", " "))
    for variant, found in rows.items():
        texts = [", ".join(_text(each[name]) for each in found) for name in names]
        table.add_row(variant, *texts)
    Console(width=200).print(table)


def _text(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def main() -> None:
    """Measure, show, and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--models", default="bert,resnet,gpt2_train")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--run", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        found = program(arguments.models, arguments.run, arguments.seconds, tiny=arguments.tiny)
        print(json.dumps(found))
        return
    results = {}
    for model in arguments.models.split(","):
        found = measure(model, arguments.rounds, arguments.seconds, tiny=arguments.tiny)
        show(model, found["rows"])
        results[model] = found["rows"]
        if arguments.json:
            name = f"{arguments.json.stem}_{model}.png"
            draw(model, found["calls"], arguments.json.with_name(name))
    if arguments.json:
        write_json(arguments.json, {"machine": machine(), "models": results})


if __name__ == "__main__":
    main()
