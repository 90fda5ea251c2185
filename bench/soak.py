"""Many calls from several threads while engines fail behind each other: is every answer eager's?

``python bench/soak.py`` compiles small graphs, each with a chain of fake engines that raise from a
random call on, and calls them with changing shapes. Between rounds of calls the weights change, in
place and by ``load_state_dict`` in turn. All faults fall into the first half of the calls; in the
second half memory has to stay what it is.
"""

from __future__ import annotations

import argparse
import collections
import random
import resource
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from timing import machine, write_json

import composer
from composer.errors import FallbackWarning
from composer.records import Reason
from composer.testing import FakeBackend

ENGINES = 5
ROUNDS = 10
WIDTH = 8
GROWTH_MB = 32.0


class Net(torch.nn.Module):
    """Layers of one kind; every number makes another graph."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(WIDTH, WIDTH) for _ in range(1 + number % 4)
        )
        self.act = (torch.tanh, torch.relu, torch.sigmoid, torch.sin, torch.abs)[number % 5]
        self.writes = number % 3 == 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A third of them write to their input."""
        y = x
        for layer in self.layers:
            y = self.act(layer(y)) + x.shape[0]
        if self.writes:
            x.mul_(0.5)
        return y * 2


@dataclass(frozen=True, slots=True)
class Subject:
    """A module, the same compiled, its engines, and whether gradients are compared."""

    net: Net
    run: Callable[[torch.Tensor], torch.Tensor]
    engines: tuple[FakeBackend, ...]
    training: bool

    def call(self, size: int, seed: int) -> str:
        """One call of both: what is not eager's, or nothing."""
        source = torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(seed))
        try:
            mine = self._seen(self.run, source.clone())
        except Exception as error:  # noqa: BLE001  # what reached the user
            return f"{type(error).__name__}: {str(error)[:60]}"
        eagers = self._seen(self.net, source.clone())
        same = all(torch.allclose(a, b, atol=1e-5) for a, b in zip(mine, eagers, strict=True))
        return "" if same else "wrong"

    def _seen(
        self, function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor
    ) -> list[torch.Tensor]:
        if not self.training:
            with torch.no_grad():
                return [function(x), x]
        leaf = x.requires_grad_()
        given = leaf * 1.0
        output = function(given)
        return [output.detach(), given.detach(), *torch.autograd.grad(output.sum(), leaf)]


def subjects(graphs: int, calls: int, draw: random.Random) -> list[Subject]:
    """Each with engines that fail one after the other, all within the first half of its calls."""
    longest = max(calls // graphs // ENGINES // 2, 2)
    made = []
    for number in range(graphs):
        engines = tuple(
            FakeBackend("raises", at=draw.randint(1, longest), name=f"engine_{number}_{place}")
            for place in range(ENGINES)
        )
        # Torch's threads can wait for each other over a weight that needs a gradient; see
        # docs/how-to/train.md. The inputs need theirs all the same.
        net = Net(number).requires_grad_(False)
        options = {"chain": [*engines, "aot_eager"], "model": f"net_{number}"}
        run = torch.compile(net, backend="composer", dynamic=True, options=options)
        made.append(Subject(net, run, engines, training=number % 3 == 1))
    return made


@dataclass
class Soak:
    """The subjects under calls from several threads.

    ``became`` counts calls that were not as eager's, ``resident`` has MB after every round.
    """

    subjects: Sequence[Subject]
    seed: int
    became: collections.Counter[str] = field(default_factory=collections.Counter)
    resident: list[float] = field(default_factory=list)

    def run(self, calls: int, threads: int) -> None:
        """Call, in rounds; the last thread to end one changes the weights.

        Every subject is compiled before: Dynamo would let each thread compile what it waits for.
        """
        for subject in self.subjects:
            self.became.update(filter(None, [subject.call(3, self.seed)]))
        barrier = threading.Barrier(threads, action=self._between)
        share = calls // threads // ROUNDS
        workers = [
            threading.Thread(target=self._work, args=(number, share, barrier))
            for number in range(threads)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    def _work(self, number: int, share: int, barrier: threading.Barrier) -> None:
        draw = random.Random(f"{self.seed} {number}")
        for _ in range(ROUNDS):
            for _ in range(share):
                subject = draw.choice(self.subjects)
                what = subject.call(draw.randint(2, 9), draw.randrange(1 << 30))
                self.became.update(filter(None, [what]))
            barrier.wait()

    def _between(self) -> None:
        in_place = len(self.resident) % 2 == 0
        for subject in self.subjects:
            if in_place:
                with torch.no_grad():
                    for parameter in subject.net.parameters():
                        parameter.mul_(0.9).add_(0.01)
            else:
                state = subject.net.state_dict()
                subject.net.load_state_dict({name: -value for name, value in state.items()})
        self.resident.append(resident_mb())


def resident_mb() -> float:
    """What this process holds in memory now."""
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * resource.getpagesize() / 1e6


def struck(engine: FakeBackend) -> int:
    """How many of an engine's calls its fault ended."""
    return max(engine.calls - (engine.at or 1) + 1, 0)


def figures(soak: Soak, seconds: float) -> dict[str, Any]:
    """What was injected, and what composer's records say of it."""
    reports = composer.reports()
    attempts = [attempt for report in reports for attempt in report.attempts]
    engines = [engine for subject in soak.subjects for engine in subject.engines]
    return {
        "graphs": len(reports),
        "calls": sum(report.runtime.calls for report in reports),
        "not_as_eager": dict(soak.became),
        "engines_that_raised": sum(struck(engine) > 0 for engine in engines),
        "recorded_as_raised": sum(a.reason == Reason.RAISED_AT_RUNTIME for a in attempts),
        "calls_ended_by_faults": sum(map(struck, engines)),
        "recorded_fallbacks": sum(report.runtime.fallbacks for report in reports),
        "resident_mb": soak.resident,
        "growth_mb": soak.resident[-1] - soak.resident[ROUNDS // 2],
        "seconds": seconds,
    }


def mistakes(found: dict[str, Any]) -> list[str]:
    """What should not have been."""
    return [
        *(f"{n} calls: {what}" for what, n in found["not_as_eager"].items()),
        *differ(found, "engines_that_raised", "recorded_as_raised"),
        *differ(found, "calls_ended_by_faults", "recorded_fallbacks"),
        *([f"memory grows by {found['growth_mb']:.0f} MB"] * (found["growth_mb"] > GROWTH_MB)),
    ]


def differ(found: dict[str, Any], one: str, other: str) -> list[str]:
    """A sentence where two figures that should be equal are not."""
    a, b = found[one], found[other]
    return [] if a == b else [f"{one} is {a}, {other} is {b}"]


def main() -> int:
    """Soak, print, and write the JSON if asked to; 1 where anything was not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--graphs", type=int, default=20)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    asked = parser.parse_args()
    warnings.simplefilter("ignore", FallbackWarning)
    torch.manual_seed(asked.seed)
    described = machine()
    started = time.perf_counter()
    torch._dynamo.config.recompile_limit = 2 * asked.graphs  # all nets share one ``forward``
    soak = Soak(subjects(asked.graphs, asked.calls, random.Random(asked.seed)), asked.seed)
    soak.run(asked.calls, asked.threads)
    found = figures(soak, time.perf_counter() - started)
    wrong = mistakes(found)
    print(found, *wrong, sep="\n")
    if asked.json:
        write_json(asked.json, {"machine": described, "mistakes": wrong, **found})
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
