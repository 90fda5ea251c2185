"""Which engine a choice takes beside a load, and which one serves when the load is gone.

``python bench/under_load.py --load 0`` has composer choose among the engines of ``choosing.py`` in
the background, ``--selections`` times for each of its models. A process keeps a core busy until the
choice is made. Then it ends, and composer is to find that out and to choose anew. So that this
takes seconds, a lull need last only one, and there is no limit of CPU time. The program calls five
times a second meanwhile: calls that follow each other without a pause are a load themselves.

A choice is good if the engine takes at most 10 % longer than the best beside the load, and at most
5 % longer without it. What the engines take is measured apart, as in ``choosing.py``.
"""

from __future__ import annotations

import argparse
import functools
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from choosing import ENGINES, MODELS, built, load, milliseconds_of
from timing import machine, write_json

import composer
from composer.records import Attempt
from composer.runtime import background
from composer.system import background as worker

SELECT = {"by": "fastest", "background": True}
OPTIONS = {"chain": ENGINES, "select": SELECT, "verify": "compile"}
BESIDE, ALONE = 1.10, 1.05
"""How many times as long as the best a good choice may take, beside the load and without it."""

PAUSE = 0.2


def is_measured(attempt: Attempt) -> bool:
    """Return True if the choice is made."""
    return isinstance(attempt.timing, dict)


def is_final(attempt: Attempt) -> bool:
    """Return True if the choice is made, and not beside a load."""
    return isinstance(attempt.timing, dict) and not attempt.timing.get("under_load")


def serves(call: Callable[[], Any], test: Callable[[Attempt], bool], patience: float) -> str:
    """Call until the record of the graph passes a test, or patience ends; return who serves."""
    until = time.monotonic() + patience
    call()
    while not any(map(test, composer.reports()[-1].attempts)) and time.monotonic() < until:
        time.sleep(PAUSE)
        call()
    return composer.reports()[-1].chosen


def select(
    model: torch.nn.Module, x: torch.Tensor, core: int, patience: float
) -> tuple[str, str, bool]:
    """Return who serves beside the load and without it, and True if that is no longer open."""
    torch.compiler.reset()
    composer.reset()
    call = functools.partial(torch.compile(model, backend="composer", options=OPTIONS), x)
    with load(core):
        beside = serves(call, is_measured, patience)
    alone = serves(call, is_final, patience)
    return beside, alone, any(map(is_final, composer.reports()[-1].attempts))


def good(served: list[str], seconds: dict[str, float], limit: float) -> int:
    """Return how many of the engines that served are within a limit of the best."""
    best = min(seconds.values())
    return sum(seconds[name] <= limit * best for name in served)


def main() -> None:
    """Print the figures of each model; ``--json PATH`` writes them as well."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--selections", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--load", type=int, metavar="CORE", default=0, help="keep this core busy")
    parser.add_argument("--patience", type=float, default=120.0, help="seconds for each choice")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    background._SECONDS = 1.0
    worker._SHARE = math.inf
    record: dict[str, Any] = {"machine": machine(), "models": {}}
    with torch.no_grad(), composer.using({"cache": {"verdicts": 0}}):
        for name, make in MODELS.items():
            torch.manual_seed(0)
            model, x = make()
            request, runs, _ = built(model, x)
            calls = {n: functools.partial(run, *request.example_inputs) for n, run in runs.items()}
            with load(given.load):
                beside = milliseconds_of(calls, given.rounds)
            alone = milliseconds_of(calls, given.rounds)
            chosen = [select(model, x, given.load, given.patience) for _ in range(given.selections)]
            record["models"][name] = found = {
                "milliseconds_beside": beside,
                "milliseconds_alone": alone,
                "chosen": chosen,
                "good_beside": good([each[0] for each in chosen], beside, BESIDE),
                "good_alone": good([each[1] for each in chosen], alone, ALONE),
                "final": sum(each[2] for each in chosen),
                "selections": given.selections,
            }
            print(name, *(f"{key} {value}" for key, value in found.items()), sep="\n  ")
    if given.json:
        write_json(given.json, record)


if __name__ == "__main__":
    main()
