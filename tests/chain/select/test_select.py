"""``select = "fastest"``: who is accepted is measured, and the quickest serves."""

from __future__ import annotations

import copy
import gc
import os
import random
import subprocess
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from common import compiled, last

import composer
from composer import _torch
from composer.chain import select
from composer.chain.select import rules
from composer.chain.select.benchmark import MOST_BESIDE
from composer.chain.select.choice import Tried
from composer.chain.select.decision import Decision
from composer.chain.select.rules import lost_a_tie
from composer.chain.select.timer import Timer
from composer.errors import CandidateError, OptionError
from composer.graphs.capture import read_request
from composer.policy import read_policy
from composer.records import Attempt, Reason, Status
from composer.system import hardware
from composer.testing import FakeBackend, expect

pytestmark = [
    pytest.mark.filterwarnings("ignore::composer.errors.FallbackWarning"),
    pytest.mark.usefixtures("simulated_time"),
]

NAP = 0.02
ENDLESS = select.Budget(60.0)


@torch.library.custom_op("composer_tests::nap", mutates_args=())
def nap(x: torch.Tensor) -> torch.Tensor:
    """Take so long that eager is a slow engine."""
    time.sleep(NAP)
    return x.clone()


nap.register_fake(torch.empty_like)
nap.register_autograd(
    lambda ctx, gradient: gradient, setup_context=lambda ctx, inputs, output: None
)


def double(x: torch.Tensor) -> torch.Tensor:
    return nap(x) * 2


class Engine:
    """Doubles its input, after a sleep of so many seconds.

    ``made`` are weak references to what it compiled, ``calls`` counts their calls.
    """

    def __init__(self, name: str, seconds: float = 0.0, fails_at: int | None = None) -> None:
        self.__name__ = name
        self.seconds = seconds
        self.fails_at = fails_at
        self.calls = 0
        self.made: list[weakref.ref[Callable[..., Any]]] = []

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        def run(x: torch.Tensor) -> list[torch.Tensor]:
            self.calls += 1
            if self.calls == self.fails_at:
                raise RuntimeError(f"{self.__name__} was made to raise")
            time.sleep(self.seconds)
            return [x * 2]

        self.made.append(weakref.ref(run))
        return run


def fastest(function: Any, *chain: Any, **options: Any) -> Any:
    select = {"by": "fastest", "seconds": 2.0} | options.pop("select", {})
    return compiled(function, *chain, select=select, **options)


def reasons() -> list[Any]:
    return [(a.backend, a.status, a.reason) for a in last().attempts]


@pytest.mark.parametrize(("reason", "stays"), [("quarantined", True), ("crashed", False)])
def test_candidate_that_waits_in_quarantine_stays_in_the_ranking(reason: str, stays: bool) -> None:
    """It may serve when its quarantine is over. One that was refused may not."""
    accepted = Attempt("next", Status.SUCCEEDED, None, "", 1.0)
    decision = Decision((accepted, accepted), ranking=(0, 1))
    refused = Tried(Attempt("best", Status.SKIPPED, Reason(reason), "", 0.0), None)
    outcome = decision.outcome(1, Tried(accepted, torch.sin), {0: refused})
    assert outcome.ranking == ((0, 1) if stays else (1,))


def test_fastest_of_the_chain_serves() -> None:
    """Not the first; the others are ``slower``, and nobody is warned of that."""
    chain = [Engine("slow", NAP / 2), Engine("quick"), Engine("slower", NAP * 0.8)]
    x = torch.randn(3)
    with expect(graphs=1, served_by="quick", not_chosen=2, reasons={"slower": 2}, calls=3):
        f = fastest(double, *chain)
        for _ in range(3):
            assert torch.equal(f(x), x * 2)
    assert reasons() == [
        ("slow", "not_chosen", "slower"),
        ("quick", "succeeded", None),
        ("slower", "not_chosen", "slower"),
    ]


@pytest.mark.filterwarnings("error::composer.errors.FallbackWarning")
def test_slower_engines_are_no_news() -> None:
    """Measuring is what was asked for."""
    fastest(double, Engine("slow", NAP / 2), Engine("quick"))(torch.ones(2))
    assert last().chosen == "quick"


def test_record_has_the_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of everyone that was measured, the eager fallback's with each; the report shows them."""
    fastest(double, Engine("slow", NAP / 4), Engine("quick"))(torch.ones(2))
    slow, quick = (attempt.engine["timing"] for attempt in last().attempts)
    assert quick["ratio"] == 1.0
    assert slow["ratio"] > 2
    assert slow["rounds"] >= 2
    assert quick["least_ms"] <= quick["ms"] < slow["ms"] < slow["eager_ms"] == quick["eager_ms"]
    assert quick["seconds"] > 0
    assert last().attempts[0].message.endswith(f"quick takes {quick['ms']:.3g} ms")
    text = str(composer.report())
    assert "slower" in text
    assert quick["over_eager_p25"] <= quick["over_eager"] <= quick["over_eager_p75"]
    assert f"times as fast as eager in {quick['rounds']} rounds" in " ".join(text.split())
    assert "ms a call; quick takes" in text.replace("\n", " ")


@pytest.mark.parametrize("chain", [["here", "there"], ["there", "here"]])
def test_one_that_lost_a_tie_is_not_called_slower_by_a_shorter_time(chain: list[str]) -> None:
    """Where the time in a message is the shorter one, the message says why it did not win."""
    fastest(double, *(Engine(name, NAP / 4) for name in chain))(torch.ones(2))
    first, second = last().attempts
    beaten, winner = (first, second) if second.reason is None else (second, first)
    mine, best = (each.engine["timing"]["ms"] for each in (beaten, winner))
    if mine != best:  # they are rounded
        assert ("a tie goes to whoever stands first" in beaten.message) == lost_a_tie(mine, best)


def test_a_tie_is_lost_by_one_that_was_no_slower() -> None:
    """One that took longer was slower; one that was far ahead lost by something else."""
    assert lost_a_tie(1.59, 1.62)
    assert lost_a_tie(1.6, 1.6)
    assert not lost_a_tie(1.62, 1.6)
    assert not lost_a_tie(1.5, 1.62)


def test_floor_serves_where_all_are_slower() -> None:
    """Nobody is served slower than by eager."""
    chain = [Engine("slow", NAP * 2), Engine("slower", NAP * 3)]
    f = fastest(double, *chain)
    x = torch.randn(3)
    with expect(served_by="eager", not_chosen=2, reasons={"slower": 2}, fallbacks=0):
        for _ in range(3):
            assert torch.equal(f(x), x * 2)
    calls = chain[0].calls
    f(x)
    assert chain[0].calls == calls
    assert "eager takes" in last().attempts[0].message


def test_slow_fake_loses_against_eager() -> None:
    """As :mod:`composer.testing` offers it to users."""
    fastest(double, FakeBackend("slow", seconds=NAP * 2, at=1))(torch.ones(2))
    assert (last().chosen, last().attempts[0].reason) == ("eager", "slower")


def test_tie_goes_to_the_earlier_in_the_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    """And to an engine rather than to eager; here all take the same time to the last digit."""
    monkeypatch.setattr(Timer, "time", lambda *_: 1e-3)
    fastest(double, Engine("one"), Engine("two"))(torch.ones(2))
    assert last().chosen == "one"
    assert [attempt.engine["timing"]["ratio"] for attempt in last().attempts] == [1.0, 1.0]


def test_eager_in_the_chain_is_the_floor() -> None:
    """It is measured once, and ends the chain, as it does without measuring."""
    behind = Engine("behind")
    fastest(double, Engine("slow", NAP * 2), "eager", behind)(torch.ones(2))
    assert reasons() == [("slow", "not_chosen", "slower"), ("eager", "succeeded", None)]
    assert last().chosen == "eager"
    assert behind.made == []


class Net(torch.nn.Module):
    """What a run may change: statistics, random numbers, a buffer written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(6)
        self.drop = torch.nn.Dropout(0.5)
        self.up = torch.nn.Linear(6, 6)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        return self.drop(self.norm(self.up(x)))


@pytest.mark.parametrize("training", [False, True])
def test_measuring_leaves_everything_as_it_was(training: bool) -> None:
    """Inputs, statistics, buffers, gradients, the random states: one call is one call."""
    net = Net()
    twin = copy.deepcopy(net)
    x = torch.randn(4, 6, requires_grad=training)
    kept = x.detach().clone()
    random.seed(5)
    before = random.getstate()
    with torch.set_grad_enabled(training):
        torch.manual_seed(3)
        expected = twin(x)
        after = torch.get_rng_state()
        torch.manual_seed(3)
        answer = fastest(net, "aot_eager", FakeBackend())(x)
    assert torch.equal(answer, expected)
    assert torch.equal(torch.get_rng_state(), after)
    assert random.getstate() == before
    assert torch.equal(x, kept)
    for name, buffer in net.named_buffers():
        assert torch.equal(buffer, twin.get_buffer(name)), name
    assert x.grad is None
    assert all(each.grad is None for each in net.parameters())
    assert all("timing" in attempt.engine for attempt in last().attempts)


def test_graph_that_writes_to_its_input_starts_each_call_from_the_same_values() -> None:
    """An index that grew from call to call would be out of range."""

    def step(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        index.add_(1)
        return table[index]

    table, index = torch.arange(4.0), torch.tensor([0])
    assert fastest(step, "aot_eager")(table, index) == 1.0
    assert index == 1
    assert "ms" in last().attempts[0].engine["timing"]


def test_engine_that_writes_to_its_inputs_does_not_reach_the_users() -> None:
    """It is slower; what it was measured on were copies."""
    x = torch.ones(3)
    slow = {"fault": "mutates_inputs", "at": 1}
    fastest(double, FakeBackend(**slow), Engine("quick"))(x)
    assert last().chosen == "quick"
    assert torch.equal(x, torch.ones(3))


def test_training_is_measured_with_its_backward() -> None:
    """An engine whose backward is slow loses; gradients are eager's."""

    class SlowBack(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            time.sleep(NAP / 2)
            return gradient * 2

    def slow_back(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        return lambda x: [SlowBack.apply(x)]

    x = torch.randn(3, requires_grad=True)
    fastest(double, slow_back, Engine("quick", NAP / 8))(x).sum().backward()
    assert last().training
    assert last().chosen == "quick"
    assert torch.equal(x.grad, torch.full((3,), 2.0))


def test_losers_are_let_go() -> None:
    """Nothing refers to what they compiled; the winner's is there."""
    slow, quick = Engine("slow", NAP / 2), Engine("quick")
    f = fastest(double, slow, quick)
    f(torch.ones(2))
    assert [made() for made in slow.made] == [None]
    assert quick.made[0]() is not None


def test_inputs_are_let_go() -> None:
    """The copies and the user's own."""
    f = fastest(double, Engine("slow", NAP / 2), Engine("quick"))
    x = torch.randn(3)
    gone = weakref.ref(x)
    f(x)
    del x
    gc.collect()
    assert gone() is None


def test_wrong_engine_is_not_measured() -> None:
    """Under ``verify`` speed is no excuse."""
    wrong = FakeBackend("wrong_value")
    fastest(double, wrong, Engine("quick"), verify="compile")(torch.ones(2))
    assert reasons() == [
        ("fake_wrong_value", "rejected", "numeric_mismatch"),
        ("quick", "succeeded", None),
    ]
    assert "timing" not in last().attempts[0].engine
    assert wrong.calls == 1


def test_engine_that_raises_when_measured_has_failed() -> None:
    """The others go on; it is not called again."""
    broken = Engine("broken", fails_at=1)
    f = fastest(double, broken, Engine("slow", NAP / 2), verify="off")
    x = torch.randn(3)
    assert torch.equal(f(x), x * 2)
    assert reasons() == [("broken", "failed", "raised_at_runtime"), ("slow", "succeeded", None)]
    assert "when it was measured on the first inputs" in last().attempts[0].message
    assert (broken.calls, last().runtime.fallbacks) == (1, 0)


def test_engine_that_writes_to_a_weight_when_measured_is_rejected() -> None:
    """Those that are measured after it are not to blame."""

    def writes(gm, example_inputs):
        def run(*args):
            with torch.no_grad():
                next(each for each in args if each.dim() == 1).zero_()
            return gm.forward(*args)

        return run

    net, x = torch.nn.Linear(3, 3), torch.randn(2, 3)
    answer = compiled(net, writes, "aot_eager", FakeBackend(), select="fastest")(x)
    assert reasons()[0] == ("writes", "rejected", "mutated_inputs")
    assert "mutated_inputs" not in [reason for *_, reason in reasons()[1:]]
    assert "wrote to the model's weights" in last().attempts[0].message
    torch.testing.assert_close(answer, net(x))


def test_winner_that_fails_is_followed_by_the_next_fastest() -> None:
    """By the times measured, not in the order of the chain; never by one slower than eager."""
    quick = Engine("quick")
    third, second = Engine("third", NAP / 2), Engine("second", NAP / 5)
    hopeless = Engine("hopeless", NAP * 3)
    f = fastest(double, hopeless, third, quick, second)
    x = torch.randn(3)
    f(x)
    served = [last().chosen]
    for engine in (quick, second, third):
        engine.fails_at = engine.calls + 1
        assert torch.equal(f(x), x * 2)
        assert torch.equal(f(x), x * 2)
        served.append(last().chosen)
    assert served == ["quick", "second", "third", "eager"]
    assert len(hopeless.made) == 1
    assert last().runtime.fallbacks == 3


def test_engine_in_quarantine_is_measured_when_it_is_tried_again() -> None:
    """Where the eager fallback serves: one that is slower stays out, and waits twice as long."""
    engine = Engine("engine")
    x = torch.ones(2)
    f = fastest(double, engine)
    f(x)
    engine.fails_at = engine.calls + 1
    f(x)
    torch.compiler.reset()
    engine.fails_at, engine.seconds = None, NAP * 3
    f = fastest(double, engine, on_runtime_error={"retry_after": 1})
    for _ in range(3):
        f(x)
    assert [a.reason for a in last().attempts] == ["quarantined", "slower"]
    assert last().chosen == "eager"


def test_max_autotune_selects_and_reaches_inductor() -> None:
    """What torch's own mode does, and the fastest of the chain."""
    x = torch.randn(3)
    f = torch.compile(lambda x: x.sin() * 1.75, backend="composer", mode="max-autotune")
    with composer.using(chain=["inductor", "aot_eager"]):
        torch.testing.assert_close(f(x), x.sin() * 1.75)
    inductor, other = last().attempts
    assert inductor.engine["mode"] == "max-autotune"
    assert "timing" in inductor.engine
    assert "timing" in other.engine
    assert last().policy[0] == "mode"


def test_users_own_select_goes_before_the_mode() -> None:
    """Wherever it is said."""
    f = torch.compile(double, backend="composer", mode="max-autotune")
    with composer.using(chain=[Engine("slow", NAP / 2), Engine("quick")], select="first"):
        f(torch.ones(2))
    assert [attempt.backend for attempt in last().attempts] == ["slow"]


def test_strict_is_no_matter_of_speed() -> None:
    """One that is slower was accepted; one that is refused raises, as ever."""
    fastest(double, Engine("slow", NAP / 2), Engine("quick"), strict=True)(torch.ones(2))
    assert last().chosen == "quick"
    torch.compiler.reset()
    with pytest.raises(Exception, match="made to raise") as caught:
        fastest(double, Engine("quick"), FakeBackend("raises"), strict=True)(torch.ones(2))
    assert isinstance(caught.value.inner_exception, CandidateError)


def test_chain_whose_engines_are_all_slower_is_not_exhausted() -> None:
    """They were accepted: ``on_exhausted = "raise"`` has nothing to say."""
    f = fastest(double, Engine("slow", NAP * 2), on_exhausted="raise")
    assert torch.equal(f(torch.ones(2)), torch.full((2,), 2.0))
    assert last().chosen == "eager"


def test_dynamic_shapes_are_measured_at_the_first_sizes() -> None:
    """One graph serves all sizes."""

    class Sized(Engine):
        def __call__(self, gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
            run = super().__call__(gm, example_inputs)
            return lambda *args: run(next(a for a in args if isinstance(a, torch.Tensor)))

    f = fastest(double, Sized("slow", NAP / 2), Sized("quick"), dynamic=True)
    for size in (3, 4, 5):
        x = torch.randn(size)
        assert torch.equal(f(x), x * 2)
    assert last().dynamic
    assert (last().chosen, len(composer.reports())) == ("quick", 1)


def test_passes_are_part_of_what_is_measured() -> None:
    """Eager runs them as well, in every stage; its passes are recorded if it serves."""
    from rewrites import Scale, at

    for stage in ("torch", "aten", "joint", "post_grad"):
        torch.compiler.reset()
        x = torch.randn(3)
        slow = FakeBackend("slow", seconds=NAP, at=1)
        answer = fastest(torch.cos, slow, passes=[at(stage, Scale)])(x)
        assert not torch.equal(answer, x.cos())
        assert last().chosen == "eager"
        assert [record.stage for record in last().passes] == [stage]


def test_inputs_that_cannot_be_copied_are_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be too little memory for that: nothing is measured, and the record says why."""

    def starve(storage: torch.UntypedStorage) -> torch.UntypedStorage:
        raise torch.OutOfMemoryError("tried to allocate 80 GiB")

    monkeypatch.setattr(_torch.tensors, "copy_storage", starve)
    assert torch.equal(fastest(torch.cos, "eager")(torch.zeros(2)), torch.ones(2))
    timing = last().attempts[0].engine["timing"]
    assert timing == "no: inputs cannot be copied: OutOfMemoryError: tried to allocate 80 GiB"


def test_error_that_eager_raises_is_the_programs() -> None:
    """Nothing can be measured: the first that is accepted serves, and the record says why."""
    run = fastest(lambda x, i: x[i], "aot_eager", FakeBackend())
    with pytest.raises(IndexError, match="out of bounds"):
        run(torch.ones(3), torch.tensor([7]))
    first, second = last().attempts
    assert "no: eager itself raises IndexError" in first.engine["timing"]
    assert (second.status, second.reason) == ("skipped", "policy")
    assert "not measured" in second.message


def test_fake_inputs_are_not_measured() -> None:
    """As with ``DistributedDataParallel``: the first serves, and nothing else is built."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    second = FakeBackend(name="second")
    gm = torch.fx.symbolic_trace(lambda x: x.sin())
    with FakeTensorMode():
        fake = torch.empty(3)
    options = {"chain": [FakeBackend(name="first"), second], "select": "fastest"}
    composer_backend = torch._dynamo.lookup_backend("composer")
    composer_backend(gm, [fake], options=options)
    (attempt,) = last().attempts
    assert attempt.engine["timing"] == "no: the graph was compiled without real inputs"
    assert second.compiles == 0


def test_time_is_bounded() -> None:
    """Where there is none for two calls of each, the first serves; a call is all it can be late."""
    engines = [Engine("one", 0.05), Engine("two")]
    started = time.perf_counter()
    fastest(double, *engines, select={"seconds": 0.03})(torch.ones(2))
    assert last().chosen == "one"
    assert "too short" in last().attempts[0].engine["timing"]
    assert last().attempts[1].reason == "policy"
    assert time.perf_counter() - started < 30  # a broken bound never ends; the machine may be slow
    assert sum(engine.calls for engine in engines) <= 3


@pytest.mark.parametrize(
    ("built", "seconds", "first"),
    [(0.0, 1.0, 5.0), (2.0, 1.0, 5.0), (20.0, 3.0, 5.0), (34.0, 5.0, 5.1), (100.0, 5.0, 15.0)],
)
def test_budget_is_a_share_of_the_builds(built: float, seconds: float, first: float) -> None:
    """Within limits; a budget of the policy's own is what it says."""
    found = select.Benchmark().budget(built)
    assert (found.seconds, found.first) == pytest.approx((seconds, first))
    assert select.Benchmark(seconds=60.0).budget(built) == select.Budget(60.0)


def test_what_stands_back_may_take_longer() -> None:
    """The limit is a larger one, and it is still a share of the builds."""
    found = select.Benchmark(most=MOST_BESIDE)
    assert found.budget(100.0).seconds == pytest.approx(15.0)
    assert found.budget(1000.0).seconds == MOST_BESIDE


CALLS = {"far": [0.2], "near": [0.11], "best": [0.1], "floor": [0.25]}
"""Seconds of a participant's calls, the last one for all that follow."""


@pytest.mark.parametrize(
    ("budget", "rounds"),
    [
        (select.Budget(1.2, 5.0), {"far": 0, "near": 2, "best": 2, "floor": 0}),
        (select.Budget(0.7, 5.0), {"far": 0, "near": 0, "best": 0, "floor": 0}),
        (select.Budget(1.4), {"far": 0, "near": 0, "best": 0, "floor": 0}),
        (select.Budget(5.7, 4.0), {"far": 6, "near": 10, "best": 10, "floor": 6}),
    ],
)
def test_long_calls_are_measured_within_a_short_time(
    budget: select.Budget, rounds: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """First calls belong to the builds; time that is left is for those close to the front.

    No round is begun that cannot be ended.
    """
    seen = measure_by_the_clock(CALLS, budget, monkeypatch)
    assert (seen.winner, seen.rounds) == ("best", rounds)
    assert sum(seen.calls.values()) == 8 + sum(rounds.values())


@pytest.mark.parametrize("budget", [select.Budget(1.0), select.Budget(0.4, 5.0)])
def test_time_that_is_too_short_for_two_calls_of_each(
    budget: select.Budget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether first calls count or not."""
    seen = measure_by_the_clock(CALLS, budget, monkeypatch)
    assert seen.winner is None
    assert "too short for two calls of each" in seen.why


def test_who_does_not_go_on_for_want_of_time_may_still_win(monkeypatch: pytest.MonkeyPatch) -> None:
    """The captured graph: no engine serves that was measured to be slower."""
    calls = {"one": [0.1, 0.1, 0.17], "two": [0.12, 0.12, 0.17], "floor": [0.16]}
    seen = measure_by_the_clock(calls, select.Budget(0.75, 5.0), monkeypatch)
    assert (seen.winner, seen.rounds) == ("floor", {"one": 1, "two": 1, "floor": 0})


def test_all_that_go_on_may_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits with the time it has wins; where none does, nobody."""
    calls = {"one": [0.1, 0.1, -1], "two": [0.12, 0.12, -1], "floor": [0.16]}
    seen = measure_by_the_clock(calls, select.Budget(0.75, 5.0), monkeypatch)
    assert (seen.winner, seen.raised) == ("floor", {"one", "two"})
    calls = {"one": [0.001] * 60 + [-1], "two": [0.001] * 60 + [-1], "floor": [0.1]}
    seen = measure_by_the_clock(calls, ENDLESS, monkeypatch)
    assert (seen.winner, seen.raised) == (None, {"one", "two"})
    assert seen.why == "all that were left raised"


def test_round_that_takes_longer_than_expected_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next sample is not begun once the time is over; what was known before decides."""
    calls = {"one": [0.1, 0.1, 0.5], "two": [0.12, 0.12, 0.5], "floor": [0.16, 0.16, 0.5]}
    seen = measure_by_the_clock(calls, select.Budget(1.0, 5.0), monkeypatch)
    assert (seen.winner, set(seen.rounds.values())) == ("one", {0})
    assert sum(seen.calls.values()) == 7


@dataclass
class Seen:
    """A benchmark's result, by the names of the participants."""

    winner: str | None
    rounds: dict[str, int]
    raised: set[str]
    calls: Counter[str]
    why: str


def measure_by_the_clock(
    seconds: dict[str, list[float]], budget: select.Budget, monkeypatch: pytest.MonkeyPatch
) -> Seen:
    """Run a benchmark between calls of so many seconds, a negative number of which raises.

    The clock is the test's.
    """
    now, calls, names = 0.0, Counter(), list(seconds)
    monkeypatch.setattr("time.perf_counter", lambda: now)

    def participant(name: str) -> select.Participant:
        def run(x: torch.Tensor) -> list[torch.Tensor]:
            nonlocal now
            taken = seconds[name][min(calls[name], len(seconds[name]) - 1)]
            if taken < 0:
                raise RuntimeError(f"{name} was made to raise")
            calls[name] += 1
            now += taken
            return [x]

        return select.Participant(name, run)

    gm = torch.fx.symbolic_trace(lambda x: x.sin())
    request = read_request(gm, [torch.ones(2)])
    result = select.measure([participant(each) for each in names], request, budget)
    winner = None if result.winner is None else names[result.winner]
    rounds = {names[at]: each.rounds for at, each in result.timings.items()}
    return Seen(winner, rounds, {names[at] for at in result.errors}, calls, result.why)


@pytest.mark.parametrize(("least", "found"), [(0, 2), (7, 7)])
def test_least_rounds_keep_in_who_is_far_behind(
    least: int, found: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table of all engines needs them; a choice does not."""
    times = {"quick": [0.01], "slow": [0.5], "floor": [0.02]}
    budget = select.Budget(60.0, least_rounds=least)
    seen = measure_by_the_clock(times, budget, monkeypatch)
    assert (seen.winner, seen.rounds["slow"]) == ("quick", found)


def test_amortised_counts_the_build() -> None:
    """Few calls are expected: what takes long to build is not worth it."""

    class SlowToBuild(Engine):
        def __call__(self, gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
            time.sleep(0.2)
            return super().__call__(gm, example_inputs)

    amortised = {"objective": "amortised", "calls": 10}
    for how, chosen in (({"objective": "latency"}, "dear"), (amortised, "cheap")):
        torch.compiler.reset()
        chain = [SlowToBuild("dear"), Engine("cheap", NAP / 4)]
        fastest(double, *chain, select=how)(torch.ones(2))
        assert last().chosen == chosen
    assert "its build counted" in last().attempts[0].message
    assert last().attempts[0].engine["timing"]["build_ms"] > 19


def test_wrong_objective_is_named() -> None:
    """With what it may be."""
    with pytest.raises(OptionError, match=r"objective.*latency.*amortised"):
        read_policy({"select": {"objective": "speed"}})
    with pytest.raises(OptionError, match="did you mean 'calls'"):
        read_policy({"select": {"objective": "amortised", "cals": 3}})


def test_choice_is_part_of_the_graphs_key() -> None:
    """A failure under one is not one under the other, and a first has the key it had."""
    keys = []
    for options in ({}, {"select": "first"}, {"select": "fastest"}):
        torch.compiler.reset()
        compiled(double, FakeBackend(), **options)(torch.ones(2))
        keys.append(last().graph_key)
    assert keys[0] == keys[1] != keys[2]


STEADY = [1.0] * 12
BURSTS = [1.0, 4.0] * 6


@pytest.mark.parametrize(
    ("front", "other", "ahead"),
    [
        ([1.0] * 2, [4.5] * 2, True),
        ([1.0], [40.0], False),
        ([1.0] * 4, [3.5] * 4, True),
        ([1.0] * 3, [3.5] * 3, False),
        ([1.0] * 4, [2.0] * 4, False),
        ([1.0] * 6, [1.6] * 6, True),
        ([1.0] * 9, [1.1] * 9, False),
        ([1.0] * 10, [1.1] * 10, True),
        (STEADY, [1.05] * 12, True),
        (STEADY, [1.01] * 12, False),
        (STEADY, STEADY, False),
        (STEADY, BURSTS, False),
        (BURSTS, BURSTS[::-1], False),
        (BURSTS, [1.1 * each for each in BURSTS], True),
        (STEADY, [1.0] * 11 + [1000.0], False),
        ([1.0] * 8 + [3.0] * 4, [1.0] * 4 + [3.0] * 8, False),
        ([1.0] * 30 + [3.0] * 2, [1.0] * 2 + [3.0] * 30, True),
        ([1.0, 5.0, 50.0] * 4, [1.1, 5.5, 55.0] * 4, True),
    ],
)
def test_who_is_surely_ahead(front: Sequence[float], other: Sequence[float], ahead: bool) -> None:
    """By far after a few rounds, by a little after many; a burst of load decides nothing."""
    assert select.surely_ahead(front, other, select.TIE) is ahead


def test_who_is_surely_no_slower() -> None:
    """By the same test, with the margin on the other side."""
    assert select.surely_ahead([1.01] * 12, STEADY, 1 / select.TIE)
    assert not select.surely_ahead([1.03] * 12, STEADY, 1 / select.TIE)
    assert not select.surely_ahead([], [], select.TIE)


def test_load_that_comes_and_goes_leaves_the_ratios_of_the_rounds() -> None:
    """The one in front has the least ratio to the others, whatever the means of its times are."""
    loads = [1.0, 1.0, 9.0, 1.0, 30.0]
    costs = {7: [1.2 * each for each in loads], 3: loads, 5: [1.01 * each for each in loads]}
    assert rules.in_front(costs) == 3
    assert rules.first_of_the_best(costs) == 3
    assert rules.first_of_the_best({5: costs[5], 3: costs[3]}) == 5
    stalls_once = {0: [1.0, 1.0, 1.0, 1.0, 1000.0], 1: [1.1] * 5}
    assert rules.first_of_the_best(stalls_once) == 0


def test_only_rounds_that_both_took_part_in_are_compared() -> None:
    """One that left early was measured at a quieter time."""
    costs = {0: [1.5, 1.5], 1: [1.0, 1.0, 3.0, 3.0, 3.0]}
    assert rules.first_of_the_best(costs) == 1


def test_samples_grow_while_nothing_is_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most to 160 ms."""
    lengths, noise = [], random.Random(0)

    def time_taken(timer: Timer, run: Any, calls: int, lead: float) -> float:
        lengths.append(calls * 0.001)
        return noise.choice((0.0009, 0.0011))

    monkeypatch.setattr(Timer, "time", time_taken)
    assert measure_two() == 40
    assert max(lengths) == pytest.approx(0.160, rel=0.5)


def measure_two() -> int:
    """Run a benchmark between equals; in how many rounds they took part."""
    gm = torch.fx.symbolic_trace(lambda x: x.sin())
    participants = [select.Participant(name, gm.forward) for name in ("one", "floor")]
    result = select.measure(participants, read_request(gm, [torch.ones(2)]), ENDLESS)
    (rounds,) = {each.rounds for each in result.timings.values()}
    return rounds


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")
@pytest.mark.usefixtures("real_time")
def test_waiting_for_a_core_is_counted() -> None:
    """Two processes that share one core each wait for half of the time, which the other takes."""
    cores = os.sched_getaffinity(0)
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as rival:
        try:
            only = {min(cores)}
            os.sched_setaffinity(rival.pid, only)
            os.sched_setaffinity(0, only)
            waits = hardware.Waits.from_now()
            until = time.process_time() + 0.3
            while time.process_time() < until:
                pass
            found = hardware.Waits.from_now()
            is_load = waits.beside_load()
        finally:
            os.sched_setaffinity(0, cores)
            rival.kill()
    assert found.waited - waits.waited > 0.5 * (found.ran - waits.ran)
    assert is_load


@pytest.mark.parametrize(("waited", "is_load"), [(0.05, False), (0.3, True)])
def test_load_is_a_share_of_the_time_beyond_what_own_threads_take_from_each_other(
    waited: float, is_load: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four threads on two cores wait for half of their time at most, without any load."""
    before = hardware.Waits(waited=1.0, ran=2.0)
    for threads, own in ((2, 0.0), (4, 1.0)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        monkeypatch.setattr(hardware, "cores", lambda: 2)
        now = 1.0 + own + waited * (1.0 + own) / (1.0 - waited)
        monkeypatch.setattr(hardware, "seconds_without_a_core", lambda now=now: now)
        monkeypatch.setattr(time, "process_time", lambda: 3.0)
        assert before.beside_load() is is_load


@pytest.mark.parametrize(("taken", "is_load"), [(0.02, False), (0.5, True)])
def test_own_threads_that_wake_on_one_core_are_no_load(
    taken: float, is_load: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They wait for each other, and nobody else takes the cores."""
    monkeypatch.setattr(hardware, "seconds_of_others", lambda: 7.0)
    before = hardware.Waits.from_now()
    waited, since = before.waited + 10.0 + time.process_time(), before.began + 1.0
    monkeypatch.setattr(hardware, "seconds_without_a_core", lambda: waited)
    monkeypatch.setattr(hardware, "seconds_of_others", lambda: 7.0 + taken)
    monkeypatch.setattr(time, "perf_counter", lambda: since)
    assert before.beside_load() is is_load


def test_how_long_measuring_takes_is_no_part_of_the_graphs_key() -> None:
    """What is measured for is one."""
    usual = read_policy({"select": "fastest"})
    longer = read_policy({"select": {"by": "fastest", "seconds": 9, "background": True}})
    dear = read_policy({"select": {"by": "fastest", "objective": "amortised"}})
    assert usual.key == longer.key != dear.key
