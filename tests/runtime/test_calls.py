"""The calls of a graph: each is answered once, whatever its engine does and other threads do."""

from __future__ import annotations

import random
from typing import Any

import pytest
from common import in_threads
from successors import EAGER, FakeSuccessors

from composer.records import Runtime
from composer.runtime.calls import around, watch
from composer.runtime.served import Built, Compiled, Engine, ServedGraph
from composer.runtime.versions import Versions


class Input:
    """An input that knows what its engine is to do with it, and who has answered."""

    def __init__(self, fault: str = "") -> None:
        self._version = 0
        self.fault = fault
        self.answers: list[Any] = []


class Chain(FakeSuccessors):
    """Its engines raise what their input says; eager answers always."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.fallback = lambda given: self.answered(given, EAGER)

    def answered(self, given: Input, who: Any) -> tuple[Any]:
        given.answers.append(who)
        return (who,)

    def engine(self, place: int) -> Engine:
        return Engine(self.compiled(place), place, bounds=None)

    def compiled(self, place: int) -> Compiled:
        def run(given: Input) -> tuple[Any]:
            if given.fault == "wrote":
                given._version += 1
            if given.fault:
                raise (MemoryError if given.fault == "lacks memory" else RuntimeError)(place)
            return self.answered(given, place)

        return run


@pytest.mark.parametrize("seed", range(5))
def test_each_call_of_several_threads_is_answered_once(seed: int) -> None:
    """By an engine or by eager; by nobody only where the engine had written to its input."""
    chain, runtime = Chain(seed), Runtime()
    chain.record.append(0)
    built = Built(chain.engine(0), order=(0, 1, 2, 3))
    served = ServedGraph(built, chain, runtime, Versions((0,), (), blind=False))
    call = watch(around(served, runtime), served.free)

    def work(number: int) -> None:
        chance = random.Random(100 * seed + number)
        for _ in range(60):
            fault = chance.choice(["raises", "wrote", "lacks memory", *[""] * 12])
            given = Input(fault)
            try:
                outputs = list(call(given))
            except RuntimeError:
                outputs = [] if fault == "wrote" else ["an error"]
            if given.answers != outputs or len(outputs) != (not given._version):
                chain.faults.append(f"{fault}: {outputs}, answered by {given.answers}")

    in_threads(work, range(4))
    assert chain.faults == []
    assert runtime.calls == 240
    assert runtime.fallbacks > 0
