"""``verify="sample"``: an engine that goes wrong later is found out, its answer not given."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from common import compiled, last
from rewrites import Scale, at

from composer.errors import FallbackWarning, OptionError, Refusal
from composer.policy import read_policy
from composer.testing import FakeBackend, expect

pytestmark = [
    pytest.mark.filterwarnings("ignore::composer.errors.FallbackWarning"),
    pytest.mark.filterwarnings("ignore:Profiler record function"),
]

WRONG = {
    "nan": "non_finite",
    "wrong_value": "numeric_mismatch",
    "wrong_shape": "output_mismatch",
    "wrong_dtype": "output_mismatch",
    "wrong_stride": "output_mismatch",
    "mutates_inputs": "mutated_inputs",
    "returns_none": "output_mismatch",
}


def sampled(function: Any, *chain: Any, every: int = 1, **options: Any) -> Any:
    return compiled(function, *chain, verify={"when": "sample", "every": every}, **options)


def wrong_from(number: int, run: Callable[..., Any]) -> Callable[..., Any]:
    """An engine that is eager until that call, and ``run(gm, *args)`` from it on."""

    def turns(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        calls = iter(range(1, 1000))
        return lambda *args: gm.forward(*args) if next(calls) < number else run(gm, *args)

    return turns


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("fault", WRONG)
def test_engine_that_goes_wrong_is_rejected_and_eager_answers(fault: str, training: bool) -> None:
    """At that very call; the next candidate serves those that follow."""
    net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6)).train(training)
    twin = copy.deepcopy(net)
    f = sampled(net, FakeBackend(fault, at=3), FakeBackend())
    with torch.set_grad_enabled(training), expect(rejected=1, succeeded=1, fallbacks=1, calls=5):
        for _ in range(5):
            x = torch.randn(3, 4)
            kept = x.clone()
            torch.testing.assert_close(f(x), twin(x))
            assert torch.equal(x, kept)
    for name, buffer in net.named_buffers():
        torch.testing.assert_close(buffer, twin.get_buffer(name))
    wrong, right = last().attempts
    assert (wrong.status, wrong.reason) == ("rejected", WRONG[fault])
    assert wrong.message.startswith("at call 2: ")  # the first run was the comparison before it
    assert (right.status, last().chosen) == ("succeeded", "fake_honest")


@pytest.mark.parametrize("fault", [torch.OutOfMemoryError("no memory for float64"), KeyError("x")])
def test_error_of_the_comparison_is_not_the_engines(
    fault: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answer stands, and the call counts as one that was not compared."""
    engine = FakeBackend()
    f = sampled(lambda x: x.add_(1), engine)
    f(x := torch.zeros(2))

    def broken(*args: Any) -> Any:
        raise fault

    monkeypatch.setattr("composer.chain.verify.judge", broken)
    compared = last().runtime.verified
    assert torch.equal(f(x), torch.full((2,), 2.0))
    assert torch.equal(x, torch.full((2,), 2.0))
    assert (last().runtime.verified, last().runtime.fallbacks) == (compared, 0)


def test_every_nth_call_is_compared_and_counted() -> None:
    """The third, the sixth, the ninth."""
    engine = FakeBackend()
    f = sampled(torch.sin, engine, every=3)
    with expect(calls=10, verified=3, fallbacks=0, served_by="fake_honest"):
        for _ in range(10):
            f(torch.randn(3))
    assert engine.calls == 11, "one run while compiling, one a call"


def test_nothing_is_compared_while_the_program_records_a_cuda_graph(monkeypatch) -> None:
    """A comparison waits for the card, which would end the recording: the next call is compared."""
    recording = False
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: recording)
    engine = FakeBackend("wrong_value", at=5)
    f = sampled(torch.sin, engine, FakeBackend(), every=2)
    x = torch.randn(3)
    f(x)
    recording = True
    assert [torch.equal(f(x), x.sin()) for _ in range(4)] == [True, True, False, False]
    assert last().runtime.verified == 0
    recording = False
    assert torch.equal(f(x), x.sin())
    assert (last().runtime.verified, last().attempts[0].reason) == (1, "numeric_mismatch")


def test_wrong_call_that_is_not_sampled_is_given() -> None:
    """Only every N-th is looked at."""
    f = sampled(torch.sin, FakeBackend("wrong_value", at=3), FakeBackend(), every=4)
    x = torch.randn(3)
    assert [torch.equal(f(x), x.sin()) for _ in range(6)] == [True, False, False, True, True, True]
    assert last().attempts[0].message.startswith("at call 4: output 0 is off by")


def test_sample_compares_while_compiling_too() -> None:
    """It is ``compile`` and more."""
    sampled(torch.sin, FakeBackend("wrong_value"), FakeBackend())(torch.randn(3))
    assert last().attempts[0].reason == "numeric_mismatch"
    assert last().runtime.fallbacks == 0


def test_training_is_eagers_before_at_and_after_the_wrong_call() -> None:
    """Gradients flow through the answer that was given."""
    net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Dropout(0.5))
    twin = copy.deepcopy(net)
    f = sampled(net, FakeBackend("wrong_value", at=3), FakeBackend(), every=2)
    for step in range(5):
        x = torch.randn(3, 4)
        for model, module in ((f, net), (twin, twin)):
            torch.manual_seed(step)
            module.zero_grad()
            model(x).square().sum().backward()
        for mine, theirs in zip(net.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)
    assert last().attempts[0].reason == "numeric_mismatch"
    assert last().chosen == "fake_honest"


def test_input_in_the_autograd_graph_that_is_written_to_has_eagers_gradient() -> None:
    """What autograd records cannot be undone: there the engine is judged on copies."""

    def triples(x: torch.Tensor) -> torch.Tensor:
        x.mul_(3)
        return x * 2

    f = sampled(triples, FakeBackend("wrong_value", at=4), FakeBackend())
    for _ in range(5):
        leaf = torch.randn(3, requires_grad=True)
        x = leaf * 2
        f(x).sum().backward()
        torch.testing.assert_close(leaf.grad, torch.full((3,), 12.0))
        torch.testing.assert_close(x, leaf * 6)
    assert [a.reason for a in last().attempts] == ["numeric_mismatch", None]


def test_inputs_that_the_engine_wrote_to_are_put_back() -> None:
    """Also where several are of one memory, and where the graph writes to one itself."""

    def shifts(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x + y

    def wrecks(gm: torch.fx.GraphModule, x: torch.Tensor, y: torch.Tensor) -> Any:
        y.fill_(7)
        return gm.forward(x, y)

    f = sampled(shifts, wrong_from(3, wrecks), FakeBackend())
    for _ in range(4):
        mine = torch.randn(6, 3)
        other = mine.clone()
        torch.testing.assert_close(f(mine[:3], mine[3:]), shifts(other[:3], other[3:]))
        torch.testing.assert_close(mine, other)
    assert [a.status for a in last().attempts] == ["rejected", "succeeded"]


def test_wrong_step_of_an_optimizer_is_not_taken() -> None:
    """Parameters are written to by eager's step only."""
    weight = torch.nn.Parameter(torch.ones(4))
    weight.grad = torch.ones(4)
    step = torch.optim.SGD([weight], lr=0.1).step
    f = sampled(step, wrong_from(3, lambda gm, *a: (gm.forward(*a), gm.forward(*a))[1]))
    for taken in range(1, 5):
        f()
        torch.testing.assert_close(weight.data, torch.full((4,), 1 - taken / 10))
    assert last().attempts[0].reason == "numeric_mismatch"


def test_random_numbers_are_the_same_for_both_and_drawn_once() -> None:
    """A comparison leaves torch's generator where eager would."""
    net = torch.nn.Dropout(0.5)
    f = sampled(net, FakeBackend("wrong_value", at=4), FakeBackend())
    x = torch.ones(64)
    torch.manual_seed(1)
    mine = [f(x) for _ in range(5)]
    torch.manual_seed(1)
    for answer in mine:
        torch.testing.assert_close(answer, net(x))
    assert last().attempts[0].reason == "numeric_mismatch"


def test_engine_with_random_numbers_of_its_own_is_held_to_structure() -> None:
    """As while compiling."""

    def draws_first(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        honest = FakeBackend()(gm, inputs)
        return lambda *args: (torch.rand(5), honest(*args))[1]

    f = sampled(torch.nn.Dropout(0.5), draws_first)
    with expect(verified=3, succeeded=1, fallbacks=0):
        for _ in range(3):
            f(torch.ones(64))


def test_engine_that_raises_at_a_sampled_call_is_answered_for() -> None:
    """As at any other call."""
    f = sampled(torch.sin, FakeBackend("raises", at=3), FakeBackend())
    for _ in range(4):
        x = torch.randn(3)
        assert torch.equal(f(x), x.sin())
    assert last().attempts[0].reason == "raised_at_runtime"
    assert last().runtime.fallbacks == 1


class Tally(torch.nn.Module):
    """Adds its number of calls to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return x * self.calls


@torch.no_grad()
def test_comparison_leaves_the_version_of_a_buffer_to_the_engines_write() -> None:
    """A call that is compared raises the version of what it writes to no more than another."""
    net = Tally()
    f = sampled(net, "aot_eager", every=2)
    versions = [(f(torch.ones(3)), net.calls._version)[1] for _ in range(5)]
    assert len({after - before for before, after in itertools.pairwise(versions)}) == 1


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(("every", "raises_at"), [(1, 2), (1, 4), (3, 4), (3, 3)])
def test_engine_that_raises_where_the_graph_writes_to_a_buffer_is_answered_for(
    every: int, raises_at: int, training: bool
) -> None:
    """The comparison's own run of eager is no write of the engine."""
    net = Tally()
    twin = copy.deepcopy(net)
    f = sampled(net, FakeBackend("raises", at=raises_at), FakeBackend(), every=every)
    with torch.set_grad_enabled(training):
        for _ in range(6):
            x = torch.randn(3, requires_grad=training)
            assert torch.equal(f(x), twin(x))
    assert torch.equal(net.calls, twin.calls)
    assert [each.reason for each in last().attempts] == ["raised_at_runtime", None]
    assert last().runtime.fallbacks == 1


@torch.no_grad()
def test_engine_that_writes_to_a_buffer_and_raises_at_a_sampled_call_is_an_error() -> None:
    """Nobody can answer, whoever else has run the graph for the comparison."""

    def writes_and_raises(gm: torch.fx.GraphModule, *args: Any) -> Any:
        gm.forward(*args)
        raise RuntimeError("after its write")

    f = sampled(Tally(), wrong_from(3, writes_and_raises), FakeBackend())
    f(torch.ones(3))
    with pytest.raises(RuntimeError, match="after its write") as caught:
        f(torch.ones(3))
    assert "written to its inputs" in caught.value.__notes__[0]


def test_error_of_the_program_at_a_sampled_call_is_its_own() -> None:
    """Eager raises too: nothing is compared, and the engine stays."""
    run = sampled(lambda x, i: x[i], FakeBackend())
    x = torch.arange(4.0)
    run(x, torch.tensor([1]))
    with pytest.raises(IndexError, match="out of bounds"):
        run(x, torch.tensor([9]))
    assert torch.equal(run(x, torch.tensor([2])), x[2:3])
    assert (last().chosen, last().runtime.verified) == ("fake_honest", 2)


def test_call_by_which_a_successor_comes_is_compared() -> None:
    """``every = 1`` looks at every call."""

    def raises(gm: torch.fx.GraphModule, *args: Any) -> Any:
        raise RuntimeError("mine")

    def off(gm: torch.fx.GraphModule, *args: Any) -> Any:
        return [each + 1 for each in gm.forward(*args)]

    f = sampled(torch.sin, wrong_from(3, raises), wrong_from(2, off), "aot_eager")
    for _ in range(5):
        x = torch.randn(3)
        assert torch.equal(f(x), x.sin())
    assert [a.reason for a in last().attempts] == ["raised_at_runtime", "numeric_mismatch", None]


def test_engine_that_comes_out_of_quarantine_is_sampled() -> None:
    """Where it was in it when the graph was compiled, and eager served."""
    engine = FakeBackend("wrong_value", at=3)
    for calls in (2, 8):
        torch.compiler.reset()
        f = sampled(torch.sin, engine, every=2, on_runtime_error={"retry_after": 2})
        for _ in range(calls):
            x = torch.randn(3)
            assert torch.equal(f(x), x.sin())
    assert last().runtime.verified > 0
    assert [a.reason for a in last().attempts][:2] == ["quarantined", "numeric_mismatch"]


def test_successor_is_sampled_as_well() -> None:
    """One wrong engine after the other; the eager fallback is not compared with itself."""
    f = sampled(torch.sin, *(FakeBackend("wrong_value", at=3, name=f"e{i}") for i in range(2)))
    with expect(rejected=2, fallbacks=2, served_by="eager", calls=8):
        for _ in range(8):
            x = torch.randn(3)
            assert torch.equal(f(x), x.sin())


@pytest.mark.parametrize("wish", [{"on_runtime_error": "raise"}, {"strict": True}])
def test_policy_may_want_the_mismatch_as_an_error(wish: dict[str, Any]) -> None:
    """The refusal reaches the caller, who may go on."""
    f = sampled(torch.sin, FakeBackend("wrong_value", at=3), **wish)
    x = torch.randn(3)
    f(x)
    with pytest.raises(Refusal, match="output 0 is off"):
        f(x)
    assert last().runtime.last_error.startswith("Refusal: output 0 is off")


def test_wrong_engine_is_warned_of_and_in_quarantine() -> None:
    """As one that raised."""
    engine = FakeBackend("wrong_value", at=2)
    f = sampled(torch.sin, engine, FakeBackend())
    with pytest.warns(FallbackWarning, match=r"rejected \(numeric_mismatch\): at call 1"):
        f(torch.ones(2))
    torch.compiler.reset()
    sampled(torch.sin, engine, FakeBackend())(torch.ones(2))
    assert last().attempts[0].reason == "quarantined"


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference_and_dynamic_shapes_are_sampled(mode: Any) -> None:
    """Sizes other than the first call's; inference tensors are put back too."""
    f = sampled(
        lambda x: x.reshape(-1) * x.shape[0],
        FakeBackend("mutates_inputs", at=4),
        FakeBackend(),
        dynamic=True,
    )
    with mode():
        for size in (2, 3, 4, 5, 6):
            x = torch.randn(size, 3)
            kept = x.clone()
            assert torch.equal(f(x), kept.reshape(-1) * size)
            assert torch.equal(x, kept)
    assert [a.reason for a in last().attempts] == ["mutated_inputs", None]


def test_passes_are_part_of_what_is_sampled() -> None:
    """The eager fallback runs them as well."""
    for stage in ("torch", "aten", "joint", "post_grad"):
        torch.compiler.reset()
        f = sampled(torch.cos, FakeBackend(), passes=[at(stage, Scale)])
        with expect(verified=3, fallbacks=0, succeeded=1):
            for _ in range(3):
                f(torch.randn(3))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("stage", ["joint", "post_grad"])
def test_what_a_later_pass_changes_hides_no_engine_that_goes_wrong(
    stage: str, training: bool
) -> None:
    """The float64 of a call is of the graph that the passes left, for sizes of its own."""
    engine = wrong_from(3, lambda gm, *args: [each + 1 for each in gm.forward(*args)])
    f = sampled(torch.cos, engine, "aot_eager", passes=[at(stage)], dynamic=True)
    for size in (6, 7, 8):
        x = torch.linspace(-1, 1, size, requires_grad=training)
        torch.testing.assert_close(f(x), x.sin())
    assert [each.reason for each in last().attempts][:1] == ["numeric_mismatch"]


def test_comparison_in_training_keeps_nothing() -> None:
    """Nor do operations that save their own result for a backward which is never run."""
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
    f = sampled(net, FakeBackend())
    for _ in range(3):
        f(torch.randn(2, 4))
    weight = weakref.ref(net[0].weight)
    del net, f
    torch.compiler.reset()
    gc.collect()
    assert weight() is None


def test_every_so_many_calls_is_at_least_every_one() -> None:
    """The message says so."""
    with pytest.raises(OptionError, match=r"verify.every.*greater than or equal to 1"):
        read_policy({"verify": {"when": "sample", "every": 0}})
