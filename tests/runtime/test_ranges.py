"""``select`` with ``ranges``: each range of sizes has the engine that is the fastest there."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from common import compiled, last
from naps import NAP, short_nap

import composer
from composer.chain import walk
from composer.chain.lock.observed import observing
from composer.chain.sandbox import Undecided
from composer.chain.select import lengths
from composer.chain.select.decision import Decision
from composer.chain.select.timer import Timer
from composer.graphs import sizes
from composer.knowledge.verdict import Verdict
from composer.policy import read_policy
from composer.records import Attempt, Reason, SizeRange, Status
from composer.runtime import background, ranges
from composer.system import disk, hardware
from composer.system.subprocesses import Unwanted
from composer.testing import expect, settle

pytestmark = [
    pytest.mark.filterwarnings("ignore::composer.errors.FallbackWarning"),
    pytest.mark.usefixtures("simulated_time"),
]


def double(x: torch.Tensor) -> torch.Tensor:
    return short_nap(x) * 2


class Engine:
    """Doubles its input, in a time that depends on the size.

    ``given`` is the input of its last call. Measurements are made with copies. ``alive`` counts
    what it compiled and is still held.
    """

    def __init__(self, name: str, seconds: Callable[[int], float]) -> None:
        self.__name__ = name
        self.seconds = seconds
        self.given: torch.Tensor | None = None
        self.made: list[weakref.ref[Callable[..., Any]]] = []
        self.raises = False

    def uuid(self) -> str:
        return self.__name__

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        def run(*args: Any) -> list[torch.Tensor]:
            (x,) = (each for each in args if isinstance(each, torch.Tensor))
            if self.raises:
                raise RuntimeError(f"{self.__name__} was made to raise")
            self.given = x
            time.sleep(self.seconds(len(x)))
            return [x * 2]

        self.made.append(weakref.ref(run))
        return run

    @property
    def alive(self) -> int:
        return sum(made() is not None for made in self.made)


class Program:
    """A function with a dynamic size, and two engines: one for small sizes, one for large ones."""

    def __init__(self, *further: Engine, **options: Any) -> None:
        self.small = Engine("small", lambda size: NAP / 4 if size > 20 else NAP / 40)
        self.large = Engine("large", lambda size: NAP / 40 if size > 20 else NAP / 4)
        self.chain = [self.small, self.large, *further]
        self.options = options
        self.compile()

    def compile(self) -> None:
        """Compile anew."""
        torch.compiler.reset()
        select = {"by": "fastest", "ranges": 3} | self.options.get("select", {})
        options = {"verify": "off"} | self.options | {"select": select}
        self.compiled = compiled(double, *self.chain, dynamic=True, **options)

    def call(self, size: int, times: int = 3) -> str:
        """Make calls of this size; return who made the last one."""
        for _ in range(times):
            x = torch.randn(size)
            assert torch.equal(self.compiled(x), x * 2)
        return next((each.__name__ for each in self.chain if each.given is x), "eager")

    def call_only(self, size: int) -> str:
        """Make one call; return who made it."""
        return self.call(size, times=1)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines have no threads to wait for, and hold no memory."""
    monkeypatch.setattr(walk, "free_memory", lambda: None)
    monkeypatch.setattr(lengths, "_LEAD", 0.0)


def test_each_range_of_sizes_has_its_engine() -> None:
    """The boundary is the geometric mean of the sizes that were measured."""
    program = Program()
    with expect(graphs=1, fallbacks=0):
        assert program.call(4) == "small"
        assert program.call(64) == "large"
        assert [program.call_only(size) for size in (5, 15, 16)] == ["small"] * 3
        assert [program.call_only(size) for size in (40, 200)] == ["large"] * 2
    assert last().chosen == "small"
    assert last().ranges == (SizeRange(0, "small"), SizeRange(17, "large"))
    told = " ".join(str(composer.report()).split())
    assert "runs on small (sizes up to 16), large (from 17), 11 calls" in told
    assert "a call of size 64" in told


def test_sizes_of_the_first_call_decide_for_all_without_ranges() -> None:
    """As the default has it; the record has the size that was measured."""
    program = Program(select={"ranges": 1})
    assert [program.call(size) for size in (4, 64)] == ["small", "small"]
    assert last().ranges == ()
    assert last().attempts[0].timing["size"] == 4


def test_choice_is_made_at_the_second_call_of_a_size_that_is_far() -> None:
    """Sizes that are close to a measured one, or that come once, are not measured."""
    program = Program()
    program.call(4)
    assert [program.call_only(size) for size in (15, 15, 2, 64)] == ["small"] * 4
    assert len(program.small.made) == 1
    assert program.call_only(65) == "large"
    assert last().ranges[1].least == 17


def test_same_winner_has_a_wider_range() -> None:
    """It is not held twice, and the record has its times at both sizes."""
    program = Program()
    for size in (32, 512):
        assert program.call(size) == "large"
    assert program.large.alive == 1
    assert program.small.alive == 0
    assert last().ranges == ()
    measured = [each.timing["size"] for each in last().attempts if each.backend == "large"]
    assert measured == [32, 512]


def test_range_between_two_engines_is_measured_more_finely() -> None:
    """A boundary is where it costs most."""
    program = Program()
    for size in (4, 64, 16, 32):
        program.call(size)
    assert [each.least for each in last().ranges] == [0, 23]


def test_losers_are_let_go() -> None:
    """Each engine is held once."""
    program = Program(Engine("slow", lambda size: NAP / 2))
    for size in (4, 64, 16, 32):
        program.call(size)
    assert [each.alive for each in program.chain] == [1, 1, 0]


def test_no_more_engines_are_kept_than_the_policy_says() -> None:
    """The best of those that are kept serves the others' sizes."""
    huge = Engine("huge", lambda size: NAP / 400 if size > 1000 else NAP / 2)
    program = Program(huge, select={"ranges": 2})
    assert [program.call(size) for size in (4, 64, 4000)] == ["small", "large", "large"]
    assert huge.alive == 0
    assert not any(each.accepted for each in last().attempts if each.backend == "huge")
    assert [each.chosen for each in last().ranges] == ["small", "large"]


def test_eager_may_serve_a_range() -> None:
    """Where no engine is faster."""
    program = Program()
    program.large.seconds = program.small.seconds = lambda size: NAP * 2 if size < 20 else NAP / 4
    program.call(4)
    assert last().chosen == "eager"
    assert program.call(64) == "small"
    assert last().ranges == (SizeRange(0, "eager"), SizeRange(17, "small"))


def test_no_size_goes_to_an_engine_that_is_slower_than_eager() -> None:
    """Also where the policy allows no further engine. Eager is none."""
    huge = Engine("huge", lambda size: NAP / 400 if size > 1000 else NAP * 2)
    program = Program(huge, select={"ranges": 2})
    program.large.seconds = lambda size: NAP / 40 if 20 < size < 1000 else NAP * 2
    program.small.seconds = lambda size: NAP / 40 if size <= 20 else NAP * 2
    assert [program.call(size) for size in (4, 64, 4000)] == ["small", "large", "eager"]
    assert [each.chosen for each in last().ranges] == ["small", "large", "eager"]
    assert huge.alive == 0


def test_size_is_settled_after_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its calls ask nobody any more."""
    program = Program()
    for size in (4, 64, 4):
        program.call(size)
    monkeypatch.setattr(ranges.Ranges, "_server", None)
    assert [program.call(size) for size in (4, 64)] == ["small", "large"]


def test_number_of_settled_sizes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are settled anew."""
    monkeypatch.setattr(ranges, "_KEPT", 2)
    program = Program()
    program.call(4)
    assert {program.call_only(size) for size in (5, 6, 7, 8, 9, 5)} == {"small"}


def test_failure_in_a_range_is_a_matter_of_that_range() -> None:
    """Eager answers, the next of its ranking follows, and the other range keeps its engine."""
    program = Program(Engine("other", lambda size: NAP / 8))
    for size in (4, 64):
        program.call(size)
    program.large.raises = True
    assert program.call_only(64) == "eager"
    assert last().runtime.fallbacks == 1
    assert last().ranges == (SizeRange(0, "small"), SizeRange(17, "eager"))
    assert program.call(64) == "other"
    assert program.call(4) == "small"
    assert last().ranges == (SizeRange(0, "small"), SizeRange(17, "other"))
    assert [a.reason for a in last().attempts if a.backend == "large"][1] == "raised_at_runtime"
    assert last().chosen == "small"


def test_failure_of_the_first_engine_leaves_the_other_range() -> None:
    """``chosen`` follows the first."""
    program = Program()
    for size in (4, 64):
        program.call(size)
    program.small.raises = True
    program.call(4)
    assert (last().chosen, program.call(64)) == ("large", "large")
    assert last().runtime.fallbacks == 1


def test_engine_that_is_refused_when_it_is_loaded_gives_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To the next of that size."""
    program = Program(Engine("other", lambda size: NAP / 8))
    program.call(4)
    program.call_only(64)
    build = Engine.__call__

    def refuses(self: Engine, gm: Any, example_inputs: Any) -> Any:
        if self.__name__ == "large" and self.made[1:]:
            raise RuntimeError("no more")
        return build(self, gm, example_inputs)

    monkeypatch.setattr(Engine, "__call__", refuses)
    assert program.call(64) == "other"
    assert program.call(4) == "small"


def test_choice_that_fails_costs_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine that is there serves, and the record has the error."""

    def fails(*_: Any, **__: Any) -> Any:
        raise MemoryError("no room to measure")

    program = Program()
    program.call(4)
    monkeypatch.setattr(ranges.Successors, "decide", fails)
    assert program.call(64) == "small"
    assert "no room to measure" in last().runtime.last_error
    assert last().runtime.fallbacks == 0


def test_build_that_fails_leaves_its_sizes_to_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """And is not tried at each call."""
    built: list[Any] = []

    def fails(*_: Any, **__: Any) -> Any:
        built.append(0)
        raise MemoryError("no room to build")

    program = Program()
    program.call(4)
    monkeypatch.setattr(ranges.Successors, "follow", fails)
    assert program.call(64) == "small"
    assert len(built) == 1
    assert last().ranges == ()


def test_interrupted_build_is_made_at_a_later_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was measured is not lost."""
    program = Program()
    program.call(4)
    program.call_only(64)
    with monkeypatch.context() as patch:

        def interrupted(*_: Any, **__: Any) -> Any:
            raise KeyboardInterrupt

        patch.setattr(ranges.Successors, "follow", interrupted)
        with pytest.raises(KeyboardInterrupt):
            program.call_only(64)
    assert program.call_only(64) == "large"


def test_interrupted_choice_is_made_at_a_later_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The size is not taken for measured."""

    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    program = Program()
    program.call(4)
    program.call_only(64)
    with monkeypatch.context() as patch:
        patch.setattr(ranges.Successors, "decide", interrupted)
        with pytest.raises(KeyboardInterrupt):
            program.call_only(64)
    assert program.call(64) == "large"


def test_size_that_cannot_be_measured_is_its_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one for which there is no time."""
    program = Program()
    program.call(4)
    monkeypatch.setattr(Timer, "time", lambda *_: time.sleep(100.0) or 1.0)
    assert program.call(64) == "small"
    assert last().ranges == ()


def test_other_calls_do_not_wait_for_a_choice() -> None:
    """The engine that is there makes them."""
    program = Program()
    program.call(4)
    measuring, may_go_on = threading.Event(), threading.Event()
    usual = program.large.seconds

    def waits(size: int) -> float:
        measuring.set()
        assert may_go_on.wait(60)
        return usual(size)

    program.large.seconds = waits
    program.compiled(torch.randn(64))
    chooses = threading.Thread(target=program.compiled, args=(torch.randn(64),))
    chooses.start()
    assert measuring.wait(60)
    assert [program.call_only(size) for size in (5, 64)] == ["small"] * 2
    may_go_on.set()
    chooses.join()
    program.large.seconds = usual
    assert program.call(64) == "large"


def test_each_range_is_compared_with_eager() -> None:
    """``verify = "sample"``: an engine that answers wrongly gives way in its range."""
    program = Program(verify={"when": "sample", "every": 1})
    for size in (4, 64):
        program.call(size)
    assert last().runtime.verified > 0
    assert [each.chosen for each in last().ranges] == ["small", "large"]


def test_gradients_are_those_of_the_engine_of_the_forward() -> None:
    """Forwards of two ranges, then their backwards."""
    net = torch.nn.Linear(3, 2)
    same = torch.nn.Linear(3, 2)
    same.load_state_dict(net.state_dict())
    slow = {"small": 20, "large": 0}

    def engine(name: str) -> Any:
        def build(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
            run = torch._dynamo.lookup_backend("aot_eager")(gm, example_inputs)

            def timed(*args: Any) -> Any:
                batch = next(each for each in args if isinstance(each, int))
                time.sleep(NAP if (batch > 20) == bool(slow[name]) else 0)
                return run(*args)

            return timed

        build.__name__ = name
        return build

    chain = [engine("small"), engine("large")]
    select = {"by": "fastest", "ranges": 2}
    f = compiled(net, *chain, select=select, verify="off")
    batches = [torch.randn(size, 3) for size in (4, 4, 64, 64, 4, 64)]
    for x in batches:
        torch._dynamo.mark_dynamic(x, 0)
    sum(f(x).sum() for x in batches).backward()
    sum(same(x).sum() for x in batches).backward()
    assert last().training
    assert [each.chosen for each in last().ranges] == ["small", "large"]
    torch.testing.assert_close(net.weight.grad, same.weight.grad)


# What is remembered


def as_if_of_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    composer.reset()
    monkeypatch.setattr(disk, "_PROCESS", "another")


def test_another_process_loads_both_winners(monkeypatch: pytest.MonkeyPatch) -> None:
    """It measures nothing."""
    program = Program()
    for size in (4, 64, 16):
        program.call(size)
    as_if_of_another_process(monkeypatch)
    before = [len(each.made) for each in program.chain]
    program.compile()
    assert [program.call_only(size) for size in (16, 23, 64)] == ["small", "small", "large"]
    assert [len(each.made) for each in program.chain] == [each + 1 for each in before]
    assert [each.least for each in last().ranges] == [0, 33]
    assert all("remembered_in" in each.timing for each in last().attempts)
    assert [each.timing["size"] for each in last().attempts] == [16, 16, 64, 64]


def test_first_call_of_another_process_has_the_engine_of_its_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That of the nearest size."""
    program = Program()
    for size in (4, 64):
        program.call(size)
    as_if_of_another_process(monkeypatch)
    program.compile()
    assert program.call_only(100) == "large"
    assert last().chosen == "large"
    assert program.call_only(4) == "small"


def test_verdict_has_all_sizes_that_were_measured() -> None:
    """Also one that has confirmed an engine; one file for a graph."""
    program = Program()
    for size in (32, 512, 4):
        program.call(size)
    (entry,) = Verdict.cache().entries()
    verdict = Verdict.model_validate(entry.facts)
    known = {each.size: each.chosen for each in verdict.at_all_sizes}
    assert known == {32: "large", 512: "large", 4: "small"}


@pytest.mark.filterwarnings("ignore::composer.errors.CacheWarning")
def test_verdict_of_which_a_size_is_on_another_chain_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Others may write to the folder."""
    program = Program()
    for size in (4, 64):
        program.call(size)
    (entry,) = Verdict.cache().entries()
    entry.facts["further"][0]["candidates"][0]["backend"] = "another"
    Verdict.cache().put(entry.facts["key"], entry.facts)
    as_if_of_another_process(monkeypatch)
    program.compile()
    program.call_only(4)
    assert "remembered_in" not in last().attempts[0].timing


def test_provisional_choice_for_a_further_size_is_made_anew_by_another_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the first one is."""
    program = Program()
    program.call(4)
    with monkeypatch.context() as patch:
        patch.setattr(hardware.Waits, "beside_load", lambda _: True)
        program.call(64)
    as_if_of_another_process(monkeypatch)
    program.compile()
    for size in (4, 64):
        program.call(size)
    by_size = {each.timing["size"]: each.timing for each in last().attempts}
    assert "remembered_in" in by_size[4]
    assert "remembered_in" not in by_size[64]


def test_size_that_json_holds_as_no_whole_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """The product of many sizes may be larger than any number that a verdict may hold."""
    program = Program()
    for size in (4, 64):
        program.call(size)
    (entry,) = Verdict.cache().entries()
    for each in entry.facts["further"][0]["candidates"]:
        each["timing"]["size"] = (1 << 53) + 2
    Verdict.cache().put(entry.facts["key"], entry.facts)
    as_if_of_another_process(monkeypatch)
    program.compile()
    for size in (4, 5):
        assert program.call(size) == "small"
    assert not last().runtime.last_error


def test_verdict_without_ranges_stays_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sizes are those of the first call, whatever is called later."""
    program = Program(select={"ranges": 1})
    program.call(4)
    as_if_of_another_process(monkeypatch)
    program.compile()
    assert program.call_only(64) == "small"
    assert "remembered_in" in last().attempts[0].timing


def test_reset_has_sizes_measured_anew() -> None:
    """What was compiled goes on meanwhile."""
    program = Program()
    for size in (4, 64):
        program.call(size)
    composer.reset()
    before = len(program.small.made)
    assert program.call_only(64) == "large"
    program.compile()
    program.call(4)
    assert len(program.small.made) > before


def test_lock_has_one_engine_for_all_sizes() -> None:
    """``composer lock`` writes it down as it then serves."""
    with observing():
        program = Program()
        assert [program.call(size) for size in (4, 64)] == ["small", "small"]
    assert last().ranges == ()


def test_strict_has_one_engine_for_all_sizes() -> None:
    """A candidate that is refused later could not raise."""
    program = Program(strict=True)
    assert [program.call(size) for size in (4, 64)] == ["small", "small"]


def test_graph_without_dynamic_sizes_has_one_engine() -> None:
    """Each of its sizes is a graph of its own."""
    program = Program()
    f = compiled(double, *program.chain, select={"by": "fastest", "ranges": 3}, dynamic=False)
    for size in (4, 64):
        f(torch.ones(size))
        assert last().ranges == ()
        assert "size" not in last().attempts[0].timing
    assert last().chosen == "large"


def test_ranges_are_a_whole_number_of_engines() -> None:
    """One at least."""
    assert read_policy({"select": {"by": "fastest", "ranges": 2}}).select.ranges == 2
    with pytest.raises(composer.errors.OptionError, match="ranges"):
        read_policy({"select": {"by": "fastest", "ranges": 0}})


# In the background


class Sandbox:
    """Decides for the engine that is the fastest at the size of the inputs."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.why = ""
        self.may_end = threading.Event()
        self.may_end.set()
        self.unwanted = threading.Event()
        self.began = threading.Event()

    def __call__(
        self, request: Any, *_: Any, is_wanted: Callable[[], bool], **__: Any
    ) -> Decision | Undecided:
        size = sizes.size_of(request)
        assert size is not None
        self.sizes.append(size)
        self.began.set()
        while not self.may_end.wait(0.01):
            if not is_wanted():
                self.unwanted.set()
                raise Unwanted
        if self.why and size > 20:
            return Undecided(self.why)
        timing = {"ms": 1.0, "ratio": 1.0, "rounds": 9, "eager_ms": 2.0, "seconds": 0.1}
        lost = Attempt("small", Status.NOT_CHOSEN, Reason.SLOWER, "slower", 2.0)
        attempts = [lost, dataclasses.replace(lost, backend="large")]
        place = int(size > 20)
        attempts[place] = dataclasses.replace(
            attempts[place], status=Status.SUCCEEDED, reason=None, message=""
        )
        timed = (each.timed(timing | {"size": size}) for each in attempts)
        return Decision(tuple(timed), (place, 1 - place))


@pytest.fixture
def sandbox(monkeypatch: pytest.MonkeyPatch) -> Sandbox:
    made = Sandbox()
    monkeypatch.setattr(background.sandbox, "decide", made)
    return made


def beside() -> Program:
    return Program(select={"background": True})


def test_choices_are_made_in_the_background(sandbox: Sandbox) -> None:
    """The engine that is there serves meanwhile, and one call loads the winner of its size."""
    program = beside()
    program.call(4, times=2)
    assert last().chosen == "eager"
    settle()
    assert program.call(4) == "small"
    assert program.call(64, times=2) == "small"
    assert not program.large.made
    settle()
    assert program.call_only(4) == "small"
    assert not program.large.made
    assert program.call_only(64) == "large"
    assert sandbox.sizes == [4, 64]
    assert last().ranges == (SizeRange(0, "small"), SizeRange(17, "large"))
    assert [each.alive for each in program.chain] == [1, 1]


def test_size_without_a_decision_is_its_neighbours(sandbox: Sandbox) -> None:
    """It is not asked for again."""
    sandbox.why = "there is no process left"
    program = beside()
    for _ in range(2):
        program.call(4)
        settle()
    for _ in range(2):
        assert program.call(64) == "small"
        settle()
    assert sandbox.sizes == [4, 64]
    assert last().ranges == ()


def test_background_loads_what_is_remembered(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the first call of each range."""
    program = beside()
    for size in (4, 64):
        for _ in range(2):
            program.call(size)
            settle()
    as_if_of_another_process(monkeypatch)
    program.compile()
    assert [program.call_only(size) for size in (4, 64)] == ["small", "large"]
    assert sandbox.sizes == [4, 64]


def test_reset_ends_a_choice_under_way(sandbox: Sandbox) -> None:
    """The engine that is there goes on."""
    program = beside()
    for _ in range(2):
        program.call(4)
        settle()
    program.call_only(64)
    sandbox.may_end.clear()
    sandbox.began.clear()
    program.call_only(64)
    assert sandbox.began.wait(60)
    composer.reset()
    assert sandbox.unwanted.wait(60)
    assert program.call(64) == "small"


def test_dropped_graph_frees_all_its_engines(sandbox: Sandbox) -> None:
    """Those of further sizes too."""
    program = beside()
    for size in (4, 64):
        for _ in range(2):
            program.call(size)
            settle()
    del program.compiled
    torch.compiler.reset()
    gc.collect()
    assert [each.alive for each in program.chain] == [0, 0]


def test_engine_that_wins_a_further_size_before_it_is_built_is_built_once(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if that is decided while a call builds it. The record has the times at each size."""
    program = beside()
    for size in (4, 4, 4, 64, 64):
        program.call_only(size)
        settle()
    follow = ranges.Successors.follow

    def follow_slowly(*given: Any) -> Any:
        program.call_only(1024)
        program.call_only(1024)
        settle()
        program.call_only(5)  # takes the decision
        return follow(*given)

    with monkeypatch.context() as patch:
        patch.setattr(ranges.Successors, "follow", follow_slowly)
        assert program.call_only(64) == "large"
    assert program.call(1024) == "large"
    assert sandbox.sizes == [4, 64, 1024]
    assert len(program.large.made) == 1
    assert last().ranges == (SizeRange(0, "small"), SizeRange(17, "large"))
    assert {each.timing["size"] for each in last().attempts} == {4, 64, 1024}


def test_size_is_not_settled_while_a_decision_waits(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may arrive before the call that has asked for it is made."""
    program = beside()
    for size in (4, 4, 4):
        program.call_only(size)
        settle()
    program.call_only(64)
    publish = ranges.Successors.publish

    def publish_slowly(self: Any) -> None:
        publish(self)
        settle()

    with monkeypatch.context() as patch:
        patch.setattr(ranges.Successors, "publish", publish_slowly)
        program.call_only(64)
    assert program.call_only(64) == "large"


def test_first_choice_is_learnt_when_it_serves(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread may call while a call loads the winner."""
    program = beside()
    program.call(64, times=2)
    settle()
    follow = ranges.Successors.follow

    def follow_slowly(*given: Any) -> Any:
        built = follow(*given)
        other = threading.Thread(target=program.call_only, args=(64,))
        other.start()
        other.join()
        return built

    with monkeypatch.context() as patch:
        patch.setattr(ranges.Successors, "follow", follow_slowly)
        program.call_only(64)
    for _ in range(3):
        program.call_only(4)
        settle()
    assert program.call(4) == "small"
    assert last().ranges == (SizeRange(0, "small"), SizeRange(17, "large"))


def test_sizes_are_settled_where_nothing_could_be_measured(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first engine that was accepted serves all of them."""
    sandbox.why = "there is no process left"
    program = beside()
    program.call(64)
    settle()
    assert program.call(64) == "small"
    monkeypatch.setattr(ranges.Ranges, "_server", None)
    assert program.call(64) == "small"


def test_error_when_a_choice_is_remembered_ends_no_other_selection(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread of the background does not meet it."""

    def fails(*_: Any) -> None:
        raise RuntimeError("the disk is gone")

    program = beside()
    for _ in range(3):
        program.call_only(4)
        settle()
    program.call_only(64)
    with monkeypatch.context() as patch:
        patch.setattr(ranges.Successors, "remember", fails)
        program.call_only(64)
        settle()
        assert program.call(64) == "large"
    assert "the disk is gone" in last().runtime.last_error


# Sizes


def test_size_is_the_product_of_the_dynamic_sizes() -> None:
    """Numbers that are dynamic and no size are left out."""
    seen: list[Any] = []

    def looks(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        seen.append(sizes.reader(sizes.positions(gm)))
        seen.append(len(sizes.positions(gm)))

        def run(*args: Any) -> Any:
            seen.append(seen[0](args))
            return gm(*args)

        return run

    f = torch.compile(lambda x, y, k: x.sum() * k + y, backend=looks, dynamic=True)
    f(torch.ones(3, 5), torch.ones(7), 11)
    assert seen[1:] == [3, 3 * 5 * 7]


def test_ranges_meet_at_the_geometric_mean() -> None:
    """The first begins at 0, and neighbours that are equal are one range."""
    found = sizes.ranges({16: "b", 1: "a", 64: "b", 4: "a", 1024: "a"})
    assert found == [(0, "a"), (9, "b"), (257, "a")]
    assert [sizes.at(size, found) for size in (0, 8, 9, 256, 257)] == ["a", "a", "b", "b", "a"]


PROGRAM = """
import json, sys, torch
sys.path[:0] = sys.argv[1:]
import composer, engines
select = {"by": "fastest", "seconds": 1, "ranges": 2}
options = {"chain": [engines.honest, "eager"], "select": select}
f = torch.compile(torch.sin, backend="composer", options=options, dynamic=True)
for size in (4, 4, 64, 64, 64):
    torch.testing.assert_close(f(torch.ones(size)), torch.ones(size).sin())
attempts = composer.reports()[-1].attempts
timings = [each.timing for each in attempts]
print(json.dumps({
    "sizes": sorted({each["size"] for each in timings}),
    "remembered": sorted({each["size"] for each in timings if "remembered_in" in each}),
    "loaded": sorted({each["size"] for each in timings if "under_load" in each}),
    "here": any("measured_here" in each.engine for each in attempts),
}))
"""


@pytest.mark.slow
def test_real_sandboxes_measure_at_each_size_and_the_next_program_remembers() -> None:
    """Each gets the size of its call. What met a load of the machine is measured again."""
    said: list[dict[str, Any]] = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, *sys.path],
            env=dict(os.environ),
            capture_output=True,
            text=True,
            timeout=500,
        )
        assert not done.returncode, done.stderr
        said.append(json.loads(done.stdout.splitlines()[-1]))
    first, again = said
    assert (first["sizes"], first["remembered"], first["here"]) == ([4, 64], [], False)
    assert not again["here"]
    assert {*again["sizes"]} - {*again["remembered"]} <= {*first["loaded"]}
