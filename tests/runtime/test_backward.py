"""Run time: a compiled backward that raises costs its user time, and nothing else."""

from __future__ import annotations

import copy
import functools
import itertools
import random
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from common import compiled, last, thorough
from rewrites import Scale, at
from torch._dynamo.utils import counters
from torch._inductor.output_code import CompiledFxGraph

import composer
from composer import _torch
from composer.lowering.loaded import BoundRegion
from composer.testing import FakeBackend, expect

pytestmark = pytest.mark.filterwarnings("ignore::composer.errors.FallbackWarning")


@torch.library.custom_op("composer_test::refuses", mutates_args=())
def _refuses(x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("refuses them all")


_refuses.register_fake(torch.empty_like)


@torch.library.custom_op("composer_test::picky", mutates_args=())
def _picky(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


_picky.register_fake(torch.empty_like)
_picky.register_autograd(lambda ctx, gradient: torch.ops.composer_test.refuses(gradient))


def net() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


def steps(run: Any, module: torch.nn.Module, count: int) -> None:
    """So many training steps, each with eager's gradients."""
    twin = copy.deepcopy(module)
    for _ in range(count):
        x = torch.randn(3, 4)
        for model, own in ((run, module), (twin, twin)):
            own.zero_grad()
            model(x).square().sum().backward()
        for mine, theirs in zip(module.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)


def aot(strike: Callable[[list[Any]], None], *, empties: bool = False) -> Any:
    """An engine whose backward calls ``strike`` first; it may empty the list of its arguments."""

    def build(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        def honest(functional: torch.fx.GraphModule, _: Any) -> Any:
            return _torch.aot.boxed(functional.forward)

        def striking(functional: torch.fx.GraphModule, _: Any) -> Any:
            def run(args: list[Any]) -> Any:
                given = list(args)
                if empties:
                    args.clear()
                strike(given)
                return functional.forward(*given)

            return _torch.aot.takes_a_list(run)

        return _torch.aot.aot_compile(
            gm,
            example_inputs,
            forward=honest,
            backward=striking,
            inference=honest,
            partition=_torch.aot.min_cut,
            decompositions={},
        )

    return build


def test_backward_that_raises_is_answered_for_and_its_engine_followed() -> None:
    """Gradients are eager's at that step; the next candidate serves those that follow."""
    module = net()
    run = compiled(module, FakeBackend("fails_in_backward", at=2), FakeBackend(name="second"))
    with expect(graphs=1, calls=4, fallbacks=1, failed=1, succeeded=1, served_by="second"):
        steps(run, module, 4)
    attempt = last().attempts[0]
    assert (attempt.status, attempt.reason) == ("failed", "raised_at_runtime")
    assert attempt.message == "its backward raised at call 2: the backward was made to raise"
    assert last().runtime.last_error == "RuntimeError: the backward was made to raise"


@pytest.mark.parametrize("stage", ["joint", "post_grad"])
def test_backward_under_passes_is_answered_for(stage: str) -> None:
    """By the graph that the passes left: the engine compiles a forward and a backward."""
    compiles = itertools.count()

    def second_raises(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        return FakeBackend("raises" if next(compiles) == 1 else None, at=2)(gm, example_inputs)

    x = torch.randn(3, requires_grad=True)
    f = compiled(torch.sin, second_raises, FakeBackend(name="second"), passes=[at(stage, Scale)])
    with expect(graphs=1, calls=4, fallbacks=1, served_by="second"):
        for _ in range(4):
            (gradient,) = torch.autograd.grad(f(x).sum(), x)
            torch.testing.assert_close(gradient, 2 * x.cos())


def test_backward_that_has_emptied_its_arguments_raises_once() -> None:
    """Inductor frees what the forward saved as it goes: the error says so, the next step works."""

    def strike(given: list[Any]) -> None:
        raise RuntimeError("no such kernel")

    module = net()
    run = compiled(module, aot(strike, empties=True), FakeBackend(name="second"))
    with pytest.raises(RuntimeError, match="no such kernel") as caught:
        run(torch.randn(3, 4)).sum().backward()
    assert "its backward raised" not in str(caught.value)
    assert "its arguments are gone or changed" in "".join(caught.value.__notes__)
    with expect(graphs=0):
        steps(run, module, 2)
    assert (last().chosen, last().attempts[0].reason) == ("second", "raised_at_runtime")
    assert last().runtime.fallbacks == 0


def test_backward_that_wrote_to_its_arguments_raises_once() -> None:
    """Nobody knows what they were."""

    def strike(given: list[Any]) -> None:
        given[0].zero_()
        raise RuntimeError("no such kernel")

    x = torch.randn(3, requires_grad=True)
    f = compiled(lambda x: x.sin().cos(), aot(strike), FakeBackend(name="second"))
    with pytest.raises(RuntimeError, match="no such kernel") as caught:
        f(x).sum().backward()
    assert "gone or changed" in "".join(caught.value.__notes__)


def test_backward_that_a_signal_interrupts_is_not_answered_for() -> None:
    """What its handler raises is the program's, and the engine stays."""

    def end_the_job(*_: Any) -> None:
        raise TimeoutError("the job's time is up")

    before = signal.signal(signal.SIGUSR1, end_the_job)
    interrupted = aot(lambda given: signal.raise_signal(signal.SIGUSR1))
    x = torch.randn(3, requires_grad=True)
    try:
        f = compiled(torch.sin, interrupted)
        with pytest.raises(TimeoutError, match="the job's time is up"):
            f(x).sum().backward()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert (last().chosen, last().runtime.last_error) == ("build", "")


def test_backward_without_memory_keeps_its_engine_for_two_steps() -> None:
    """It may have the memory at the next; at the third it is given up."""

    def strike(given: list[Any]) -> None:
        raise torch.OutOfMemoryError("tried to allocate 80 GiB")

    module = net()
    run = compiled(module, aot(strike), FakeBackend(name="second"))
    with expect(graphs=1, calls=5, fallbacks=3, failed=1, served_by="second"):
        steps(run, module, 5)


def test_policy_may_want_the_error_of_a_backward() -> None:
    """``on_runtime_error = "raise"`` lets it through; it is in the counters."""
    x = torch.randn(3, requires_grad=True)
    f = compiled(torch.sin, FakeBackend("fails_in_backward"), on_runtime_error="raise")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="made to raise"):
            f(x).sum().backward()
    assert last().chosen == "fake_fails_in_backward"
    assert last().runtime.last_error == "RuntimeError: the backward was made to raise"


def test_error_that_the_graph_of_the_backward_raises_too_is_the_programs_own() -> None:
    """The engine is not to blame, and stays."""
    x = torch.randn(3, requires_grad=True)
    f = compiled(lambda x: torch.ops.composer_test.picky(x), aot(lambda given: None))
    with pytest.raises(RuntimeError, match="refuses them all"):
        f(x).sum().backward()
    assert (last().chosen, last().runtime.fallbacks) == ("build", 0)


def test_backward_of_onnxrt_is_answered_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its session raises once."""
    module = net()
    run = compiled(module, "onnxrt", FakeBackend(name="second"))
    x, twin = torch.ones(3, 4), copy.deepcopy(module)
    loss = run(x).square().sum()
    assert last().chosen == "onnxrt"

    def breaks(*_: Any) -> None:
        raise RuntimeError("no such kernel")

    with monkeypatch.context() as patch:
        patch.setattr(BoundRegion, "__call__", breaks)
        loss.backward()
    twin(x).square().sum().backward()
    for mine, theirs in zip(module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    steps(run, module, 2)
    assert last().chosen == "second"
    assert last().attempts[0].message == "its backward raised at call 1: no such kernel"


@pytest.mark.parametrize("engine", ["onnxrt", *thorough("inductor")])
def test_gradients_of_several_outputs_at_once_are_torchs(engine: str) -> None:
    """And the engine stays: it has done nothing wrong."""

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ w).sin().exp().sum(1)

    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, 2, requires_grad=True)
    run = compiled(function, engine)
    for _ in range(2):
        found = [
            torch.autograd.grad(each(x, w), (x, w), torch.eye(3), is_grads_batched=True)
            for each in (run, function)
        ]
        torch.testing.assert_close(*found)
    torch.testing.assert_close(
        *(
            torch.autograd.functional.jacobian(lambda x, f=f: f(x, w), x, vectorize=True)
            for f in (run, function)
        )
    )
    torch.autograd.grad(run(x, w).sum(), (x, w))
    assert (last().chosen, last().runtime.fallbacks) == (engine, 0)


def test_backward_of_inductor_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled, or from its cache: the step after the one that failed has another engine."""
    factor = random.SystemRandom().random()  # in no cache of an earlier run
    x = torch.randn(64, requires_grad=True)

    def program(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() * x).exp() * factor

    def breaks(self: CompiledFxGraph, inputs: list[Any]) -> Any:
        inputs.clear()
        raise RuntimeError("no such kernel")

    for hits in (0, 1):
        torch.compiler.reset()
        composer.reset()
        counters.clear()
        f = compiled(program, "inductor", FakeBackend(name="second"))
        f(x).sum().backward()
        assert counters["aot_autograd"]["autograd_cache_hit"] == hits
        loss = f(x).sum()
        with monkeypatch.context() as patch:
            patch.setattr(CompiledFxGraph, "__call__", breaks)
            with pytest.raises(RuntimeError, match="no such kernel") as caught:
                loss.backward()
        assert "composer: an engine's backward raised" in caught.value.__notes__[0]
        x.grad = None
        f(x).sum().backward()
        torch.testing.assert_close(x.grad, torch.autograd.grad(program(x).sum(), x)[0])
        assert (last().chosen, last().attempts[0].reason) == ("second", "raised_at_runtime")


@pytest.mark.parametrize("engine", ["aot_eager", "inductor", "onnxrt"])
def test_backward_may_run_twice_with_any_engine(engine: str) -> None:
    """Also after one that did not keep its graph: what it may overwrite is copied for the others.

    ``torch.compile`` alone raises there; Inductor does write to what this forward saves.
    """

    def program(*given: torch.Tensor) -> torch.Tensor:
        x, first, second = given
        return (x @ first).softmax(-1) @ second

    run = compiled(program, engine)
    given = [torch.randn(64, 64, requires_grad=True) for _ in range(3)]
    upstream = torch.randn(64, 64)
    expected = torch.autograd.grad(program(*given), given, upstream)
    for times in (1, 3, 1, 2):
        y = run(*given)
        for left in reversed(range(times)):
            gradients = torch.autograd.grad(y, given, upstream, retain_graph=left > 0)
            torch.testing.assert_close(gradients, expected)
    assert last().chosen == engine


def test_inductor_is_offered_what_the_forward_saved() -> None:
    """The memory of activations is its to use in the backward, as without composer."""
    seen: list[_torch.backwards.BuiltBackward] = []

    def guard(built: _torch.backwards.BuiltBackward) -> Any:
        seen.append(built)
        return built.compiled

    with _torch.backwards.backwards_by(guard), _torch.aot.backward_lowering_at_once():
        torch.compile(net())(torch.randn(3, 4)).sum().backward()
    assert seen[0].donated


def assert_steps_alike(engine: str, **options: Any) -> None:
    """Three compiled steps, each with its own ``loss.backward()``, give eager's gradients."""
    model = net()
    twin = copy.deepcopy(model)

    def step(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).pow(2).mean()
        loss.backward()
        return loss

    run = compiled(functools.partial(step, model), engine, **options)
    for _ in range(3):
        x = torch.randn(3, 4)
        torch.testing.assert_close(run(x), step(twin, x))
    for mine, expected in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, expected.grad)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"verify": "compile"},
        {"verify": {"when": "sample", "every": 1}},
        {"select": {"by": "fastest", "seconds": 0.1}},
    ],
)
def test_backward_that_torch_traces_is_a_graph_like_any_other(options: dict[str, Any]) -> None:
    """It takes one list of tensors, which a call empties; checks and measurements call it often."""
    with torch._dynamo.config.patch(compiled_autograd=True):
        assert_steps_alike("aot_eager", **options)
    assert len(composer.reports()) > 1


@pytest.mark.parametrize("engine", ["aot_eager", *thorough("inductor"), "onnxrt"])
def test_guard_of_a_backward_within_a_compiled_function_is_not_traced(engine: str) -> None:
    """Dynamo goes on below ``loss.backward()``; composer's own code is no graph of the user's."""
    assert_steps_alike(engine)
    assert [report.chosen for report in composer.reports()] == [engine]


def test_gradients_that_are_compared_are_not_traced() -> None:
    """Dynamo traces the program's backwards; that of the comparison would be one graph more."""

    def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x @ w).cos().sum()

    traced: list[torch.fx.GraphModule] = []

    def noted(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
        traced.append(gm)
        return gm

    w = torch.randn(4, 4, requires_grad=True)
    with torch._dynamo.compiled_autograd._enable(noted):
        loss = compiled(step, "aot_eager", verify="compile")(torch.randn(3, 4), w)
        assert not traced
        loss.backward()
    assert len(traced) == 1
