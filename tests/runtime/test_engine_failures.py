"""Run time: an engine that fails costs its user time, and nothing else."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import os
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from common import compiled, in_child, in_threads, last
from prometheus_client import CollectorRegistry
from torch.nn import functional
from torch.utils.checkpoint import CheckpointError, checkpoint

import composer
from composer import _torch, session
from composer.errors import FallbackWarning, OptionError, Refusal
from composer.graphs import writes
from composer.graphs.capture import read_request
from composer.policy import read_policy
from composer.telemetry.prometheus import PrometheusSink
from composer.testing import FakeBackend, expect

pytestmark = pytest.mark.filterwarnings("ignore::composer.errors.FallbackWarning")


def test_engine_that_raises_is_answered_for_and_followed() -> None:
    """The eager fallback answers that call; the next candidate serves those that follow."""
    first, second = FakeBackend("raises", at=3), FakeBackend(name="second")
    f = compiled(torch.sin, first, second)
    with expect(graphs=1, calls=6, fallbacks=1, failed=1, succeeded=1, served_by="second"):
        for _ in range(6):
            x = torch.randn(3)
            assert torch.equal(f(x), x.sin())
    assert (first.calls, second.compiles, second.calls) == (3, 1, 3)


def test_failure_is_in_the_record() -> None:
    """The engine's attempt has failed, the new one is appended, and both are told."""
    f = compiled(torch.sin, FakeBackend("raises", at=1), FakeBackend(name="second"))
    with pytest.warns(FallbackWarning, match=r"fake_raises failed \(raised_at_runtime\)"):
        f(torch.ones(2))
    assert last().chosen == "eager"
    f(torch.ones(2))
    report = last()
    assert [(a.backend, a.status, a.reason) for a in report.attempts] == [
        ("fake_raises", "failed", "raised_at_runtime"),
        ("second", "succeeded", None),
    ]
    assert report.chosen == "second"
    assert "made to raise" in report.attempts[0].traceback
    assert report.attempts[0].message == "raised at call 1: fake_raises was made to raise"
    assert report.runtime.last_error == "RuntimeError: fake_raises was made to raise"
    assert len(composer.reports()) == 1


def test_failure_gives_sinks_a_further_record() -> None:
    """Of the same graph and time; it is not followed a second time."""

    class Remembers:
        def __init__(self) -> None:
            self.records: list[dict[str, Any]] = []
            self.followed = 0

        def follow(self, report: composer.CompileReport) -> None:
            self.followed += 1

        def emit(self, record: dict[str, Any]) -> None:
            self.records.append(record)

    sink = Remembers()
    session.add_sink(sink)
    try:
        f = compiled(torch.sin, FakeBackend("raises", at=1), FakeBackend(name="second"))
        f(torch.ones(2))
        f(torch.ones(2))
    finally:
        session.remove_sink(sink)
    assert [record["chosen"] for record in sink.records] == ["fake_raises", "eager", "second"]
    assert len({record["number"] for record in sink.records}) == 1
    assert sink.followed == 1


def test_engines_that_all_fail_leave_the_floor() -> None:
    """One after the other, each answered for."""
    chain = [FakeBackend("raises", at=1, name=f"engine{i}") for i in range(3)]
    f = compiled(torch.sin, *chain)
    with expect(graphs=1, calls=6, fallbacks=3, failed=3, served_by="eager"):
        for _ in range(6):
            x = torch.randn(3)
            assert torch.equal(f(x), x.sin())


def test_engine_that_wrote_to_its_inputs_before_it_raised_is_not_answered_for() -> None:
    """Nobody knows what they were; the error says so, and the next call has another engine."""
    f = compiled(torch.sin, FakeBackend("mutates_inputs_and_raises", at=2), FakeBackend(name="two"))
    x = torch.randn(3)
    f(x)
    with pytest.raises(RuntimeError, match="made to raise") as caught:
        f(x.clone())
    assert "had written to its inputs (mutated_inputs)" in "".join(caught.value.__notes__)
    assert torch.equal(f(x), x.sin())
    assert last().chosen == "two"
    assert last().runtime.fallbacks == 0


@pytest.mark.parametrize("name", ["weight", "running_mean"])
def test_engine_that_wrote_to_a_weight_before_it_raised_is_not_answered_for(name: str) -> None:
    """One of another package may write where the graph does not."""
    net = torch.nn.BatchNorm1d(3).eval()

    def writes(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        calls = itertools.count(1)

        def run(*args: Any) -> Any:
            if next(calls) == 2:
                with torch.no_grad():
                    getattr(net, name).add_(1)
                raise RuntimeError("raised behind a write")
            return [each.clone() for each in gm.forward(*args)]

        return run

    f, x = compiled(net, writes, "aot_eager"), torch.randn(2, 3)
    f(x)
    with pytest.raises(RuntimeError, match="behind a write") as caught:
        f(x)
    assert "had written to its inputs (mutated_inputs)" in "".join(caught.value.__notes__)
    torch.testing.assert_close(f(x), net(x))
    assert last().chosen == "aot_eager"


def test_engine_is_not_said_to_have_written_where_nobody_can_see_it() -> None:
    """An inference tensor that the graph writes to has no version: it may have been, or not."""

    def step(x: torch.Tensor) -> torch.Tensor:
        return x.add_(1) * 2

    f = compiled(step, FakeBackend("raises", at=2))
    with torch.inference_mode():
        f(torch.ones(3))
        with pytest.raises(RuntimeError, match="made to raise") as caught:
            f(torch.ones(3))
    assert "may have written to its inputs" in "".join(caught.value.__notes__)


def test_error_that_eager_raises_too_is_the_programs_own() -> None:
    """An index out of range: the engine is not to blame, and stays."""

    def f(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        return x[i]

    run = compiled(f, "aot_eager")
    x = torch.arange(4.0)
    run(x, torch.tensor([1]))
    with pytest.raises(IndexError, match="out of bounds"):
        run(x, torch.tensor([9]))
    assert torch.equal(run(x, torch.tensor([2])), x[2:3])
    assert last().chosen == "aot_eager"
    assert last().runtime.fallbacks == 0


def test_out_of_memory_is_answered_for_and_the_engine_stays() -> None:
    """Memory may be free again at the next call."""

    class Once(FakeBackend):
        """Has no memory at its second and third call: one call, tried twice."""

        def __call__(self, gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
            honest = super().__call__(gm, example_inputs)

            def run(*args: Any) -> Any:
                outputs = honest(*args)
                if self.calls in (2, 3):
                    raise torch.OutOfMemoryError("tried to allocate 80 GiB")
                return outputs

            return run

    engine = Once(name="once")
    f = compiled(torch.sin, engine)
    with expect(graphs=1, calls=4, fallbacks=1, served_by="once"):
        for _ in range(4):
            x = torch.randn(3)
            assert torch.equal(f(x), x.sin())
    assert engine.calls == 5


def test_engine_that_never_has_the_memory_is_given_up() -> None:
    """After three calls: emptying caches takes its time at each."""
    f = compiled(torch.sin, FakeBackend("out_of_memory", at=1), FakeBackend(name="second"))
    with expect(graphs=1, calls=6, fallbacks=3, failed=1, served_by="second"):
        for _ in range(6):
            x = torch.randn(3)
            assert torch.equal(f(x), x.sin())
    assert last().runtime.last_error == "OutOfMemoryError: tried to allocate 80 GiB"


def test_lack_of_memory_counts_against_the_engine_that_lacked_it() -> None:
    """Not against the one that serves by the time that the call is answered."""
    inside, may_go = threading.Semaphore(0), threading.Event()
    main = threading.current_thread()

    def first(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        def run(*args: Any) -> Any:
            if threading.current_thread() is main:
                raise RuntimeError("not here")
            inside.release()
            assert may_go.wait(60)
            raise torch.OutOfMemoryError("no memory")

        return run

    f = compiled(torch.sin, first, FakeBackend("out_of_memory", at=2))
    late = [threading.Thread(target=f, args=(torch.ones(2),)) for _ in range(2)]
    for each in late:
        each.start()
        assert inside.acquire(timeout=60)
    for _ in range(2):
        f(torch.ones(2))
    may_go.set()
    for each in late:
        each.join()
    for _ in range(2):
        f(torch.ones(2))
        assert last().chosen == "fake_out_of_memory"


def test_engine_that_returns_nothing_at_a_call_is_answered_for() -> None:
    """Dynamo's own code would raise on it."""
    f = compiled(torch.sin, FakeBackend("returns_none", at=2), FakeBackend(name="second"))
    with expect(graphs=1, calls=4, fallbacks=1, served_by="second"):
        for _ in range(4):
            x = torch.randn(3)
            assert torch.equal(f(x), x.sin())
    assert "the engine returned None" in last().attempts[0].message


def test_engine_that_returns_nothing_when_it_has_the_memory_is_answered_for() -> None:
    """What its second try gives is looked at as well."""

    def starved(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        def run(*args: Any) -> Any:
            if next(numbers) == 0:
                raise torch.OutOfMemoryError("no memory")
            return None

        return run

    numbers = itertools.count()
    f = compiled(torch.sin, starved, FakeBackend())
    for _ in range(3):
        x = torch.randn(3)
        assert torch.equal(f(x), x.sin())
    assert last().runtime.fallbacks == 1
    assert last().chosen == "fake_honest"


def starved_once_and_then(
    second: BaseException | None, writes: bool = False
) -> Callable[[torch.fx.GraphModule, list[Any]], Any]:
    """An engine whose second call has no memory, and whose third, if repeated, meets ``second``."""

    def starved(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        calls = iter(range(1000))

        def run(*args: Any) -> Any:
            number = next(calls)
            if number == 1:
                raise torch.OutOfMemoryError("no memory")
            outputs = gm.forward(*args) if writes or number != 2 or second is None else None
            if number == 2 and second is not None:
                raise second
            return outputs

        return run

    return starved


def test_other_error_of_a_call_that_is_repeated_for_lack_of_memory_is_a_failure() -> None:
    """Eager answers, and the record has both errors."""
    f = compiled(torch.sin, starved_once_and_then(RuntimeError("no such kernel")), FakeBackend())
    for _ in range(4):
        x = torch.randn(3)
        assert torch.equal(f(x), x.sin())
    first, second = last().attempts
    assert (first.reason, second.status) == ("raised_at_runtime", "succeeded")
    assert "no such kernel" in first.message
    assert "OutOfMemoryError: no memory" in first.traceback
    assert (last().runtime.last_error, last().runtime.fallbacks) == (
        "RuntimeError: no such kernel",
        1,
    )


@torch.no_grad()
def test_repeated_call_that_writes_and_raises_is_the_last_of_the_engine() -> None:
    """The error reaches the caller, since nobody can answer."""
    engine = starved_once_and_then(RuntimeError("after its write"), writes=True)
    f = compiled(lambda x: x.add_(1), engine, FakeBackend())
    x = torch.zeros(2)
    f(x)
    with pytest.raises(RuntimeError, match="after its write") as caught:
        f(x)
    assert "written to its inputs" in caught.value.__notes__[0]
    f(x)
    assert [each.reason for each in last().attempts] == ["raised_at_runtime", None]


def test_lack_of_memory_that_a_repeated_call_does_not_meet_is_in_the_record() -> None:
    """The engine has answered, so no fallback is counted."""
    f = compiled(torch.sin, starved_once_and_then(None))
    with expect(calls=3, fallbacks=0):
        for _ in range(3):
            x = torch.randn(3)
            assert torch.equal(f(x), x.sin())
    assert last().runtime.last_error == "OutOfMemoryError: no memory"
    assert last().attempts[0].status == "succeeded"


def test_policy_may_want_the_error() -> None:
    """``on_runtime_error = "raise"``, and ``strict``; it is kept in the counters."""
    for wish in ({"on_runtime_error": "raise"}, {"strict": True}):
        torch.compiler.reset()
        f = compiled(torch.sin, FakeBackend("raises", at=1), **wish)
        with pytest.raises(RuntimeError, match="made to raise"):
            f(torch.ones(2))
        assert last().runtime.last_error.startswith("RuntimeError")
        assert last().runtime.fallbacks == 0


def test_engine_that_failed_is_in_quarantine_for_that_graph() -> None:
    """It is skipped when the same graph is compiled again, until ``composer.reset()``."""
    engine = FakeBackend("raises", at=1)
    compiled(torch.sin, engine)(torch.ones(2))
    torch.compiler.reset()
    compiled(torch.sin, engine)(torch.ones(2))
    assert last().attempts[0].reason == "quarantined"
    assert last().attempts[0].status == "skipped"
    torch.compiler.reset()
    compiled(torch.sin, engine)(torch.ones(3))
    assert last().attempts[0].reason == "raised_at_runtime"
    composer.reset()
    torch.compiler.reset()
    compiled(torch.sin, engine)(torch.ones(2))
    assert last().attempts[0].reason == "raised_at_runtime"


def test_dynamic_shapes_outlive_a_failure() -> None:
    """The next engine is compiled with the graph's own symbols: one compile for all sizes."""
    second = FakeBackend(name="second")
    f = compiled(
        lambda x: x.reshape(-1) * x.shape[0], FakeBackend("raises", at=2), second, dynamic=True
    )
    for size in (2, 3, 4, 5, 6):
        x = torch.randn(size, 3)
        assert torch.equal(f(x), x.reshape(-1) * size)
    assert len(composer.reports()) == 1
    assert (second.compiles, last().chosen) == (1, "second")


@torch.no_grad()
def test_a_size_made_of_others_is_that_of_the_call_that_failed() -> None:
    """The next engine is judged by the outputs that the graph has for its inputs."""
    f = compiled(lambda x: torch.cat([x, x]), FakeBackend("raises", at=2), "onnxrt", dynamic=True)
    for size in (2, 3, 4):
        x = torch.randn(size, 3)
        assert torch.equal(f(x), torch.cat([x, x]))
    assert last().chosen == "onnxrt"


def test_training_outlives_a_failure() -> None:
    """Gradients are eager's before, at, and after the call that fails."""
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    twin = copy.deepcopy(net)
    run = compiled(net, FakeBackend("raises", at=2), FakeBackend(name="second"))
    for _ in range(4):
        x = torch.randn(3, 4)
        for model, module in ((run, net), (twin, twin)):
            module.zero_grad()
            model(x).square().sum().backward()
        for mine, theirs in zip(net.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)
    assert last().chosen == "second"


@pytest.mark.parametrize("options", [{}, {"on_runtime_error": "raise"}])
def test_checkpoint_that_ends_its_second_forward_early_is_no_failure(options: Any) -> None:
    """It does so by an exception that it raises where the engine saves the last tensor."""
    module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh())
    f = compiled(module, FakeBackend(), **options)
    with expect(graphs=1, calls=6, fallbacks=0, served_by="fake_honest"):
        for _ in range(3):
            x = torch.randn(3, 4, requires_grad=True)
            twin = x.detach().clone().requires_grad_()
            checkpoint(f, x, use_reentrant=False).square().sum().backward()
            module(twin).square().sum().backward()
            torch.testing.assert_close(x.grad, twin.grad)
    assert last().runtime.last_error == ""


def test_engine_that_fails_in_the_second_forward_of_a_checkpoint_is_followed_at_once() -> None:
    """Eager saves other tensors, which torch refuses; the step after that is well again."""
    f = compiled(torch.nn.Linear(4, 8), FakeBackend("raises", at=2), FakeBackend(name="second"))

    def step() -> None:
        x = torch.randn(3, 4, requires_grad=True)
        checkpoint(f, x, use_reentrant=False).square().sum().backward()

    with pytest.raises(CheckpointError):
        step()
    assert last().attempts[0].reason == "raised_at_runtime"
    assert last().runtime.fallbacks == 1
    step()
    assert last().chosen == "second"


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference_outlives_a_failure(mode: Any) -> None:
    """Inference tensors have no version: a graph that writes to nothing is answered for."""
    f = compiled(torch.sin, FakeBackend("raises", at=2), FakeBackend(name="second"))
    with mode():
        for _ in range(4):
            x = torch.randn(3)
            assert torch.equal(f(x), x.sin())
    assert last().chosen == "second"


def test_in_place_graph_outlives_a_failure() -> None:
    """Each input is written to exactly once."""

    def step(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x * 2

    f = compiled(step, FakeBackend("raises", at=2), FakeBackend(name="second"))
    for _ in range(4):
        x = torch.zeros(3)
        assert torch.equal(f(x), torch.full((3,), 2.0))
        assert torch.equal(x, torch.ones(3))
    assert last().chosen == "second"


def test_passes_hold_after_a_failure() -> None:
    """They are part of the program: the eager fallback and the next engine run them as well."""
    from rewrites import Scale, at

    for stage in ("torch", "aten", "joint", "post_grad"):
        torch.compiler.reset()
        composer.reset()
        chain = [FakeBackend("raises", at=2), FakeBackend(name="second")]
        f = compiled(torch.cos, *chain, passes=[at(stage, Scale)])
        x = torch.randn(3)
        answers = [f(x) for _ in range(4)]
        assert not torch.equal(answers[0], x.cos())
        for answer in answers[1:]:
            torch.testing.assert_close(answer, answers[0])
        assert last().chosen == "second"


def test_threads_are_all_answered() -> None:
    """Eight of them call an engine that fails from its 20th call on."""
    second = FakeBackend(name="second")
    f = compiled(torch.sin, FakeBackend("raises", at=20), second)
    f(torch.ones(3))
    wrong: list[str] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(50):
            x = torch.randn(3, generator=generator)
            if not torch.equal(f(x), x.sin()):
                wrong.append("value")

    in_threads(work, range(8))
    assert wrong == []
    assert last().chosen == "second"
    assert second.compiles == 1
    assert last().runtime.calls == 401
    assert 1 <= last().runtime.fallbacks <= 8


def test_engines_that_fail_in_several_threads_at_once_leave_torch_as_it_was() -> None:
    """Their successors are compiled one at a time; FX's flag for tracing is the process's."""
    graphs = [
        compiled(
            lambda x, n=n: (x * n).tanh().sin().cos() + n,
            FakeBackend("raises", at=2, name=f"first{n}"),
            FakeBackend("raises", at=1, name=f"second{n}"),
            "aot_eager",
        )
        for n in range(4)
    ]
    x = torch.randn(3)
    for f in graphs:
        f(x)
    errors: list[Exception] = []

    def work(first: int) -> None:
        for call in range(20):
            try:
                graphs[(first + call) % 4](x)
            except RuntimeError as error:
                errors.append(error)

    in_threads(work, range(4))
    assert errors == []
    assert [f(x).shape for f in graphs] == [x.shape] * 4


def test_guard_keeps_no_tensor_alive() -> None:
    """Only the graph is kept for the next engine."""
    import gc
    import weakref

    f = compiled(torch.sin, FakeBackend())
    x = torch.randn(3)
    gone = weakref.ref(x)
    f(x)
    del x
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    ("backend", "options"),
    [
        pytest.param("eager", {}, id="of the eager fallback"),
        pytest.param(FakeBackend("raises", at=1), {}, id="of an engine"),
        pytest.param(FakeBackend("mutates_inputs_and_raises", at=1), {}, id="of one that wrote"),
        pytest.param(FakeBackend("fails_in_backward", at=1), {}, id="of a backward"),
        pytest.param(
            FakeBackend("wrong_value", at=2),
            {"verify": {"when": "sample", "every": 1}},
            id="of a comparison",
        ),
    ],
)
def test_error_keeps_nothing_alive_of_the_frames_that_it_came_through(
    backend: Any, options: dict[str, Any]
) -> None:
    """Whoever has handled it can have the memory at once, as after an error of eager's."""
    import gc
    import weakref

    options = {"on_runtime_error": "raise"} | options
    f = compiled(lambda x, at: x[at] * 2, backend, **options)

    def fail() -> weakref.ref[torch.Tensor]:
        x = torch.ones(3, requires_grad=backend != "eager") * 1
        with pytest.raises((RuntimeError, IndexError, Refusal)):
            f(x, torch.tensor([1, 7 if backend == "eager" else 2])).sum().backward()
        return weakref.ref(x)

    gc.collect()
    gc.disable()
    try:
        fail()  # compiles, too
        assert fail()() is None
    finally:
        gc.enable()


def test_compiled_model_can_be_copied_and_pickling_says_no() -> None:
    """As for ``torch.compile`` with any backend."""
    net = torch.nn.Linear(3, 3)
    run = compiled(net, FakeBackend("raises", at=2), FakeBackend(name="second"))
    x = torch.randn(2, 3)
    run(x)
    twin = copy.deepcopy(run)
    torch.testing.assert_close(twin(x), net(x))
    sent = pickle.loads(pickle.dumps(run))  # torch sends the module, and compiles it there
    torch.testing.assert_close(sent(x), net(x))
    refusals = AttributeError, pickle.PicklingError  # by the version of Python, as the words are
    with pytest.raises(refusals, match=r"[Cc]an't (pickle|get) .*watch"):
        pickle.dumps(torch._dynamo.lookup_backend("composer")(torch.fx.symbolic_trace(net), [x]))


def test_report_can_be_copied_and_pickled() -> None:
    """Its counters stay what they were."""
    f = compiled(torch.sin, FakeBackend("raises", at=1))
    f(torch.ones(2))
    for twin in (copy.deepcopy(last()), pickle.loads(pickle.dumps(last()))):
        assert twin == last()
        assert (twin.runtime.calls, twin.runtime.fallbacks) == (1, 1)
    f(torch.ones(2))
    assert (twin.runtime.calls, last().runtime.calls) == (1, 2)


FORK = """
import os, torch, composer
from composer.testing import FakeBackend
chain = [FakeBackend("raises", at=3), FakeBackend(name="second")]
f = torch.compile(torch.sin, backend="composer", options={"chain": chain})
x = torch.ones(2)
f(x)
child = os.fork()
if child == 0:
    right = all(torch.equal(f(x), x.sin()) for _ in range(5))
    os._exit(0 if right and composer.reports()[-1].chosen == "second" else 1)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(code, composer.reports()[-1].chosen, torch.equal(f(x), x.sin()))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_forked_child_is_answered_for(run_python: Any) -> None:
    """An engine that fails there is followed there; the parent goes on with it."""
    done = run_python(FORK, env={"OMP_NUM_THREADS": "1"})
    assert done.stdout.split() == ["0", "fake_raises", "True"], done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_child_forked_while_another_thread_compiles_compiles_itself() -> None:
    """The thread that holds the locks for that is not there."""
    building, may_build = threading.Event(), threading.Event()

    def second(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        building.set()
        assert may_build.wait(60)
        return lambda x: (x.sin(),)

    x = torch.ones(2)
    f = compiled(torch.sin, FakeBackend("raises", at=1), second)
    f(x)
    thread = threading.Thread(target=f, args=(x,))
    thread.start()
    assert building.wait(60)

    def child() -> None:
        may_build.set()
        assert torch.equal(f(x), x.sin())
        assert last().chosen == "second"
        assert torch.equal(compiled(torch.cos, FakeBackend())(x), x.cos())

    code = in_child(child)
    may_build.set()
    thread.join()
    assert code == 0


def test_reduce_overhead_outlives_a_failure() -> None:
    """Torch's mode for CUDA graphs: the answer is the eager fallback's, then the next engine's."""
    f = torch.compile(torch.sin, backend="composer", mode="reduce-overhead")
    with composer.using(chain=[FakeBackend("raises", at=2), "aot_eager"]):
        for _ in range(4):
            x = torch.randn(3)
            assert torch.equal(f(x), x.sin())
    assert last().chosen == "aot_eager"


@pytest.mark.parametrize(
    ("function", "watched"),
    [
        (lambda x, w, b: x + w + b, (0,)),
        (lambda x, w, b: x + w + b.add_(1), (0, 2)),
        (lambda x, w, b: functional.batch_norm(x, b, b, training=True), (0, 2)),
        (lambda x, w, b: functional.batch_norm(x, b, b, training=False), (0,)),
    ],
)
def test_buffers_are_watched_where_the_graph_may_write_to_them(
    function: Any, watched: tuple[int, ...]
) -> None:
    """An input, a parameter, a buffer; where all engines are composer's own, parameters never.

    That saves 40 ns each a call. Of any other engine all weights are watched.
    """
    gm = torch.fx.symbolic_trace(function)
    inputs = [torch.ones(2, 2), torch.nn.Parameter(torch.ones(2)), torch.ones(2)]
    request = dataclasses.replace(read_request(gm, inputs), weights=frozenset({1, 2}))
    assert writes.tracked_inputs(request, weights=False) == (watched, False)
    assert writes.tracked_inputs(request, weights=True) == ((0, 1, 2), False)


def test_inference_tensors_that_a_graph_may_write_to_cannot_be_watched() -> None:
    """They have no version."""
    with torch.inference_mode():
        x = torch.ones(2)
    for function, blind in ((lambda x: x.add_(1), True), (lambda x: x.sin(), False)):
        gm = torch.fx.symbolic_trace(function)
        request = read_request(gm, [x])
        assert writes.tracked_inputs(request, weights=False) == ((), blind)
        assert writes.tracked_inputs(request, weights=True) == ((), blind)


def test_failure_is_seen_by_prometheus_with_the_calls_of_each_engine() -> None:
    """A fallback is the failing engine's; the call that compiles the next one still eager's."""
    registry = CollectorRegistry()
    sink = PrometheusSink(registry)
    session.add_sink(sink)
    try:
        f = compiled(torch.sin, FakeBackend("raises", at=3), FakeBackend(name="second"))
        for _ in range(5):
            f(torch.ones(2))
    finally:
        session.remove_sink(sink)

    def value(series: str, backend: str) -> float | None:
        return registry.get_sample_value(f"composer_runtime_{series}_total", {"backend": backend})

    assert value("fallbacks", "fake_raises") == 1
    calls = [value("calls", backend) for backend in ("fake_raises", "eager", "second")]
    assert calls == [3, 1, 1]


def test_quarantine_is_of_an_engine_with_its_options() -> None:
    """The same engine with others may be well, and is next in line."""

    def engine(gm: torch.fx.GraphModule, inputs: list[Any], *, options: dict[str, Any]) -> Any:
        calls = itertools.count()

        def run(*args: Any) -> Any:
            if next(calls) >= options["lasts"]:
                raise RuntimeError("worn out")
            return gm(*args)

        return run

    chain = [{"backend": engine, "options": {"lasts": lasts}} for lasts in (1, 99)]
    f = compiled(lambda x: x * 2, *chain)
    for _ in range(4):
        assert torch.equal(f(torch.ones(2)), torch.full((2,), 2.0))
    assert [a.reason for a in last().attempts] == ["raised_at_runtime", None]
    assert (last().chosen, last().runtime.fallbacks) == ("engine", 1)


def test_engine_in_quarantine_is_tried_again() -> None:
    """``retry_after`` calls of this graph later, before a call; the others serve until then."""
    first, second = FakeBackend("raises", at=2, name="first"), FakeBackend(name="second")
    f = compiled(torch.sin, first, second, on_runtime_error={"retry_after": 3})
    served = []
    for _ in range(7):
        x = torch.randn(3)
        assert torch.equal(f(x), x.sin())
        served.append(last().chosen)
    assert served == ["first", "eager", "second", "second", "second", "first", "eager"]
    assert first.compiles == 2
    assert [(a.backend, a.reason) for a in last().attempts] == [
        ("first", "raised_at_runtime"),
        ("second", None),
        ("first", "raised_at_runtime"),
    ]
    assert last().attempts[2].message.startswith("raised at call 7: ")


def test_wait_of_an_engine_that_fails_again_doubles() -> None:
    """Whether it raises, or is not built."""
    builds: list[int] = []
    calls = itertools.count(1)

    def fickle(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        builds.append(next(calls))
        if len(builds) == 2:
            raise RuntimeError("not built")
        return FakeBackend("raises", at=1 if len(builds) < 4 else 99)(gm, example_inputs)

    f = compiled(torch.sin, fickle, on_runtime_error={"retry_after": 2})
    served = []
    for call in range(1, 22):
        calls = itertools.count(call)
        x = torch.randn(3)
        assert torch.equal(f(x), x.sin())
        served.append(last().chosen)
    assert builds == [1, 4, 8, 17]  # 2 calls by others, 4 from there on, then 8
    assert served == ["eager"] * 16 + ["fickle"] * 5
    reasons = ["raised_at_runtime", "build_failed", "raised_at_runtime", None]
    assert [attempt.reason for attempt in last().attempts] == reasons


def test_engine_that_is_wrong_when_tried_again_stays_out() -> None:
    """It is verified as at first."""
    built = itertools.count()

    def wrong_later(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        fault = "wrong_value" if next(built) else "raises"
        return FakeBackend(fault, at=1 if fault == "wrong_value" else 2)(gm, example_inputs)

    f = compiled(
        torch.sin,
        wrong_later,
        FakeBackend(name="second"),
        on_runtime_error={"retry_after": 2},
        verify="compile",
    )
    for _ in range(6):
        x = torch.randn(3)
        assert torch.equal(f(x), x.sin())
    assert last().chosen == "second"
    assert [a.reason for a in last().attempts] == ["raised_at_runtime", None, "numeric_mismatch"]


def test_engine_tried_again_that_writes_and_raises_is_told_of_once() -> None:
    """Its error has one note, and the next call another engine."""
    faults = itertools.chain(["raises"], itertools.repeat("mutates_inputs_and_raises"))

    def engine(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        return FakeBackend(next(faults), at=1)(gm, example_inputs)

    f = compiled(torch.sin, engine, FakeBackend(name="second"), on_runtime_error={"retry_after": 2})
    x = torch.randn(3)
    for _ in range(3):
        f(x)
    with pytest.raises(RuntimeError, match="made to raise") as caught:
        f(x.clone())
    assert len(caught.value.__notes__) == 1
    assert torch.equal(f(x), x.sin())
    assert last().chosen == "second"


def test_graph_compiled_anew_waits_for_its_engine_too() -> None:
    """The quarantine is the process's; the calls are counted from the compile."""
    engine = FakeBackend("raises", at=2, name="engine")
    f = compiled(torch.sin, engine, on_runtime_error={"retry_after": 3})
    f(torch.ones(2))
    f(torch.ones(2))
    torch.compiler.reset()
    engine.fault, engine._strike_call = None, None
    f = compiled(torch.sin, engine, on_runtime_error={"retry_after": 3})
    served = []
    for _ in range(5):
        f(torch.ones(2))
        served.append(last().chosen)
    assert served == ["eager"] * 3 + ["engine"] * 2
    assert [a.reason for a in last().attempts] == ["quarantined", None]


def test_retries_in_threads_are_one() -> None:
    """The quickest thread compiles; all are answered."""
    engine = FakeBackend("raises", at=20, name="engine")
    f = compiled(
        torch.sin, engine, FakeBackend(name="second"), on_runtime_error={"retry_after": 30}
    )
    f(torch.ones(3))
    wrong: list[str] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(40):
            x = torch.randn(3, generator=generator)
            if not torch.equal(f(x), x.sin()):
                wrong.append("value")

    in_threads(work, range(4))
    assert wrong == []
    assert engine.compiles >= 2
    assert engine.compiles == sum(a.backend == "engine" for a in last().attempts)


def test_interrupted_build_of_an_engine_in_quarantine_does_not_end_the_quarantine() -> None:
    """It waits twice as long for its next build, in this graph and in equal ones."""
    builds = itertools.count(1)

    def engine(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        build = next(builds)
        if build == 2:
            raise KeyboardInterrupt
        calls = itertools.count(1)

        def run(*args: Any) -> Any:
            if build == 1 and next(calls) == 2:
                raise RuntimeError("not now")
            return gm.forward(*args)

        return run

    x = torch.ones(3)
    chain = engine, FakeBackend(name="second")
    f = compiled(torch.sin, *chain, on_runtime_error={"retry_after": 2})
    served = []
    for _ in range(12):
        try:
            assert torch.equal(f(x), x.sin())
        except KeyboardInterrupt:
            served.append("interrupted")
            compiled(lambda x: torch.sin(x), *chain, on_runtime_error={"retry_after": 2})(x)
            assert last().attempts[0].reason == "quarantined"
        else:
            served.append(composer.reports()[0].chosen)
    first, further = ["engine", "eager", "second", "second"], ["second"] * 3 + ["engine"] * 4
    assert served == [*first, "interrupted", *further]


def test_retry_after_is_at_least_one() -> None:
    """Or ``None``, for never."""
    with pytest.raises(OptionError, match=r"retry_after.*greater than or equal to 1"):
        read_policy({"on_runtime_error": {"retry_after": 0}})


@pytest.mark.parametrize("error", _torch.dynamo.DYNAMO_CONTROL_FLOW)
def test_control_flow_of_dynamo_fails_an_engine_at_run_time(error: type[Exception]) -> None:
    """There is no Dynamo to be steered any more: the next candidate follows."""

    def steers(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        raise error("not this frame")

    f = compiled(torch.sin, FakeBackend("raises", at=1), steers, FakeBackend(name="third"))
    for _ in range(3):
        x = torch.randn(3)
        assert torch.equal(f(x), x.sin())
    attempts = last().attempts
    assert [a.reason for a in attempts] == ["raised_at_runtime", "build_failed", None]
    assert attempts[1].message == "not this frame"
    assert last().chosen == "third"


def on_numpy(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """An engine on arrays of another library, of which autograd knows nothing."""

    def run(*args: Any) -> Any:
        return tuple(each.detach().numpy().copy() for each in gm.forward(*args))

    return lambda *args: tuple(map(torch.from_numpy, run(*args)))


def test_a_function_without_gradients_is_not_trained_with() -> None:
    """Else the weights would stay as they are, and nobody would say so."""
    net = torch.nn.Linear(3, 2)
    run = compiled(net, on_numpy, "aot_eager", verify="off")
    for _ in range(2):
        net.zero_grad()
        run(torch.ones(4, 3)).sum().backward()
        assert net.bias.grad is not None
        assert net.bias.grad.tolist() == [4.0, 4.0]
    first, second = last().attempts
    assert (first.status, first.reason) == ("failed", "raised_at_runtime")
    assert "gives no gradients; without a backward" in first.message
    assert second.backend == "aot_eager"


def test_a_function_without_gradients_serves_inference() -> None:
    """Also in grad mode, where nothing requires a gradient."""
    net = torch.nn.Linear(3, 2)
    run = compiled(net, on_numpy)
    with torch.no_grad():
        run(torch.ones(4, 3))
    assert last().chosen == "on_numpy"
    compiled(torch.sin, on_numpy)(torch.ones(3))
    assert (last().chosen, last().runtime.fallbacks) == ("on_numpy", 0)
