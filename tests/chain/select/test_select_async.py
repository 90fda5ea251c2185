"""In the background: the first engine serves while the others are built and measured."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from common import compiled, in_child, last

import composer
from composer import session
from composer.chain import eager_fallback
from composer.knowledge.verdict import Verdict
from composer.lowering.weights import by_address
from composer.testing import FakeBackend, expect, settle

pytestmark = pytest.mark.filterwarnings("ignore::composer.errors.FallbackWarning")

WAIT = 60.0
SLOW = 0.02


def double(x: torch.Tensor, size: int = 300) -> torch.Tensor:
    square = torch.ones(size, size)  # so that eager is a slow engine
    return x * 2 + (square @ square)[0, 0] * 0


def double_slowly(x: torch.Tensor) -> torch.Tensor:
    return double(x, size=700)


class Engine:
    """Doubles its input, after a sleep of so many seconds.

    ``may_build`` is waited for by its builds, ``building`` is set by them; ``made`` are weak
    references to what it compiled.
    """

    def __init__(self, name: str, seconds: float = 0.0) -> None:
        self.__name__ = name
        self.seconds = seconds
        self.raises = self.starves = False
        self.calls: list[int] = []
        self.built_in: list[str] = []
        self.made: list[weakref.ref[Callable[..., Any]]] = []
        self.building, self.may_build = threading.Event(), threading.Event()
        self.may_build.set()

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        self.built_in.append(threading.current_thread().name)
        self.building.set()
        assert self.may_build.wait(WAIT)

        def run(*args: Any) -> list[torch.Tensor]:
            self.calls.append(threading.get_ident())
            if self.raises:
                raise RuntimeError(f"{self.__name__} was made to raise")
            if self.starves:
                raise torch.OutOfMemoryError(f"{self.__name__} was made to starve")
            time.sleep(self.seconds)
            return [next(each for each in args if isinstance(each, torch.Tensor)) * 2]

        self.made.append(weakref.ref(run))
        return run

    @property
    def served(self) -> int:
        """Calls from this thread."""
        return self.calls.count(threading.get_ident())


class Known(Engine):
    """One on which verdicts are kept."""

    def uuid(self) -> str:
        return self.__name__


@pytest.fixture(autouse=True)
def _settled() -> Iterator[None]:
    yield
    settle(WAIT)


def beside(function: Any, *chain: Any, seconds: float = 20.0, **options: Any) -> Any:
    """Surely decided in so many seconds where it matters, and where it does not: in 1.

    Calls of an engine are counted, so that ``verify`` does not make any of its own.
    """
    options = {"verify": "off"} | options
    options |= {"select": {"by": "fastest", "background": True, "seconds": seconds}}
    return compiled(function, *chain, **options)


def reasons() -> list[Any]:
    return [(a.backend, a.status, a.reason) for a in last().attempts]


def kept() -> list[Any]:
    return Verdict.cache().entries()


def set_precision() -> None:
    torch.backends.cuda.matmul.fp32_precision = "ieee"


def timing(place: int = 0) -> Any:
    return last().attempts[place].engine["timing"]


def test_first_accepted_serves_at_once_and_the_fastest_in_the_end() -> None:
    """The call that finds it does not wait; it is measured with eager; the report follows."""
    refused = FakeBackend("raises")
    slow, quick, slower = Engine("slow", SLOW), Engine("quick"), Engine("slower", SLOW * 2)
    quick.may_build.clear()
    x = torch.randn(3)
    f = beside(double, refused, slow, quick, slower)
    with expect(graphs=1, calls=5, fallbacks=0):
        assert torch.equal(f(x), x * 2)
        assert [attempt.backend for attempt in last().attempts] == ["fake_raises", "slow"]
        assert timing(1) == "in the background, from the second call on"
        assert torch.equal(f(x), x * 2)
        assert quick.building.wait(WAIT)
        assert torch.equal(f(x), x * 2)  # while another is built
        assert (last().chosen, slow.served) == ("slow", 3)
        quick.may_build.set()
        settle()
        for _ in range(2):
            assert torch.equal(f(x), x * 2)
    assert (slow.served, quick.served, slower.served) == (3, 2, 0)
    assert reasons() == [
        ("fake_raises", "failed", "build_failed"),
        ("slow", "not_chosen", "slower"),
        ("quick", "succeeded", None),
        ("slower", "not_chosen", "slower"),
    ]
    assert last().chosen == "quick"
    assert timing(1)["ms"] > timing(2)["ms"]
    assert timing(1)["eager_ms"] > 0
    main = threading.current_thread().name
    assert (slow.built_in, quick.built_in) == ([main], ["composer"])


def test_turns_are_taken_between_the_calls_of_a_program_that_calls() -> None:
    """By its own thread; but for the first call of each, nobody runs beside another."""
    running, met = threading.Lock(), []

    class Alone(Engine):
        def __call__(self, gm: Any, example_inputs: Any) -> Any:
            run = super().__call__(gm, example_inputs)

            def alone(*args: Any) -> Any:
                mine = running.acquire(blocking=False)
                if not mine:
                    met.append(self.__name__)
                try:
                    return run(*args)
                finally:
                    if mine:
                        running.release()

            return alone

    slow, slower = Alone("slow", SLOW / 8), Alone("slower", SLOW / 4)
    x = torch.randn(3)
    f = beside(lambda x: double(x, size=8), slow, slower)  # eager is quick on any machine
    f(x)
    f(x)
    while not session.current().background.settled(0.0):
        assert torch.equal(f(x), x * 2)
    assert last().chosen == "eager"
    assert slower.served >= 3
    assert len(met) <= 2


def test_graph_that_is_called_once_needs_no_other_engine() -> None:
    """Nothing is built for it."""
    other = Engine("other")
    beside(double, Engine("first"), other)(torch.ones(2))
    settle()
    assert other.built_in == []
    assert last().chosen == "first"


def test_first_stays_where_it_is_the_fastest() -> None:
    """It is the very engine; the others are let go."""
    quick, slow = Engine("quick"), Engine("slow", SLOW)
    f = beside(double, quick, slow)
    f(torch.ones(2))
    f(torch.ones(2))
    settle()
    f(torch.ones(2))
    assert (len(quick.built_in), quick.served, slow.served) == (1, 3, 0)
    assert reasons() == [("quick", "succeeded", None), ("slow", "not_chosen", "slower")]
    assert [made() for made in slow.made] == [None]


def test_floor_takes_over_where_all_are_slower() -> None:
    """Nobody is served slower than by eager for longer than it takes to find out."""
    engine = Engine("engine", SLOW * 4)
    f = beside(double, engine)
    f(torch.ones(2))
    f(torch.ones(2))
    settle()
    assert torch.equal(f(torch.ones(2)), torch.full((2,), 2.0))
    assert (last().chosen, engine.served) == ("eager", 2)
    assert reasons() == [("engine", "not_chosen", "slower")]


def test_one_that_took_over_and_fails_gives_way_to_the_one_before() -> None:
    """Which was kept: nothing is built. The eager fallback answers the call that failed."""
    middling, quick = Engine("middling", SLOW / 20), Engine("quick")
    x = torch.randn(3)
    f = beside(double_slowly, middling, quick)
    f(x)
    f(x)
    settle()
    assert last().chosen == "quick"
    quick.raises = True
    for _ in range(3):
        assert torch.equal(f(x), x * 2)
    assert (last().chosen, last().runtime.fallbacks) == ("middling", 1)
    assert reasons() == [
        ("middling", "not_chosen", "slower"),
        ("quick", "failed", "raised_at_runtime"),
        ("middling", "succeeded", None),
    ]
    assert (len(middling.built_in), len(quick.built_in), middling.served) == (1, 1, 4)
    middling.raises = True  # and after that as ever
    f(x)
    f(x)
    assert last().chosen == "eager"


def test_engines_do_not_answer_for_the_memory_that_others_lacked() -> None:
    """One that takes over is given up after three calls of its own, and so is one that returns."""
    slow, quick = Engine("slow", SLOW / 8), Engine("quick")
    quick.may_build.clear()
    x = torch.randn(3)
    f = beside(double_slowly, slow, quick)
    f(x)
    f(x)
    assert quick.building.wait(WAIT)
    served = []
    for starved, calls in ((slow, 2), (quick, 3), (slow, 2)):
        starved.starves = True
        for _ in range(calls):
            assert torch.equal(f(x), x * 2)
            served.append(last().chosen)
        starved.starves = False
        quick.may_build.set()
        settle()
    assert served == ["slow"] * 2 + ["quick"] * 2 + ["slow"] * 3


def test_engine_that_was_taken_over_from_is_let_go() -> None:
    """After the first calls of the one that follows."""
    slow, quick = Engine("slow", SLOW / 20), Engine("quick")
    f = beside(double_slowly, slow, quick)
    x = torch.ones(2)
    f(x)
    f(x)
    settle()
    f(x)
    assert slow.made[0]() is not None
    for _ in range(40):
        f(x)
    gc.collect()
    assert slow.made[0]() is None
    assert quick.made[0]() is not None


def test_engine_that_fails_before_the_others_are_measured() -> None:
    """It is followed as ever, and what was found for it does not count."""
    first, second = Engine("first"), Engine("second")
    f = beside(double, first, second)
    x = torch.ones(2)
    f(x)
    second.may_build.clear()
    f(x)
    assert second.building.wait(WAIT)
    first.raises = True
    f(x)
    second.may_build.set()
    settle()
    assert torch.equal(f(x), x * 2)
    assert (last().chosen, len(second.built_in)) == ("second", 2)
    assert last().attempts[0].reason == "raised_at_runtime"
    assert timing() == "no: the graph was dropped, or its engine failed, before all were measured"


def test_engine_that_fails_at_the_first_call_is_not_measured() -> None:
    """Another serves when that would begin: its times are not those of the one that failed."""
    first, second = Engine("first"), Engine("second")
    first.raises = True
    f = beside(double, first, second)
    for _ in range(4):
        assert torch.equal(f(torch.ones(2)), torch.full((2,), 2.0))
    settle()
    assert reasons() == [("first", "failed", "raised_at_runtime"), ("second", "succeeded", None)]
    assert (last().chosen, len(second.built_in)) == ("second", 1)
    assert timing() == "no: the graph was dropped, or its engine failed, before all were measured"


def test_engine_that_fails_in_the_background_is_recorded() -> None:
    """Whether it does not build, is wrong or raises; the program notices nothing."""
    chain = [Engine("first"), FakeBackend("raises"), FakeBackend("wrong_value")]
    broken = Engine("broken")
    broken.raises = True
    f = beside(double, *chain, broken, verify="compile")
    f(torch.ones(2))
    f(torch.ones(2))
    settle()
    assert reasons() == [
        ("first", "succeeded", None),
        ("fake_raises", "failed", "build_failed"),
        ("fake_wrong_value", "rejected", "numeric_mismatch"),
        ("broken", "failed", "raised_at_runtime"),
    ]
    assert last().runtime.last_error == ""


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_engine_that_exits_in_the_background_ends_nothing_else(error: BaseException) -> None:
    """The program goes on, and so does the thread."""

    def exits(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        raise error

    f = beside(double, Engine("first"), exits)
    for _ in range(3):
        f(torch.ones(2))
    settle()
    assert timing().startswith(f"no: {type(error).__name__}")
    assert last().chosen == "first"


def test_thread_that_is_not_to_be_had_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call is made all the same."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    f = beside(double, Engine("first"), Engine("second"))
    f(torch.ones(2))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert torch.equal(f(torch.ones(2)), torch.full((2,), 2.0))
    assert timing() == "no: RuntimeError: can't start new thread"
    assert (last().chosen, last().runtime.fallbacks) == ("first", 0)


def test_error_of_measuring_itself_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first goes on to serve."""

    def broken(*args: Any) -> Any:
        raise OSError("out of luck")

    monkeypatch.setattr("composer.chain.select.measure", broken)
    f = beside(double, Engine("first"), Engine("second"))
    for _ in range(3):
        f(torch.ones(2))
        settle()
    assert timing() == "no: OSError: out of luck"
    assert last().chosen == "first"


def test_warning_that_is_an_error_does_not_stop_the_change() -> None:
    """Nobody could catch it."""
    f = beside(double, Engine("slow", SLOW), FakeBackend("raises"), Engine("quick"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        f(torch.ones(2))
        f(torch.ones(2))
        settle()
    assert last().chosen == "quick"


class Norm(torch.nn.BatchNorm1d):
    """Moves its statistics."""


ALONE = {
    "training": (torch.nn.Linear(3, 3), "a training graph"),
    "statistics": (Norm(3), "the graph writes"),
    "input": (lambda x: x.add_(1), "the graph writes"),
    "random": (lambda x: torch.nn.functional.dropout(x, 0.5), "the graph draws random numbers"),
}


@pytest.mark.parametrize("case", ALONE)
def test_graph_whose_runs_would_be_felt_is_left_alone(case: str) -> None:
    """The record says why; the program's numbers are its own."""
    function, why = ALONE[case]
    other = FakeBackend(name="other")
    f = beside(function, "aot_eager", other)
    with torch.set_grad_enabled(case == "training"):
        f(torch.ones(2, 3))
        torch.manual_seed(7)
        f(torch.ones(2, 3))
        settle()
    after = torch.get_rng_state()
    torch.manual_seed(7)
    if case == "random":
        torch.nn.functional.dropout(torch.ones(2, 3), 0.5)
    assert torch.equal(torch.get_rng_state(), after)
    assert timing().startswith(f"no: {why}")
    assert (last().chosen, other.compiles) == ("aot_eager", 0)


def test_what_a_graph_writes_to_by_itself_is_no_obstacle() -> None:
    """As a mask put together by ``&``, and a ReLU in place on a product."""

    def masked(x: torch.Tensor) -> torch.Tensor:
        mask = (x > 0) & (x < 2)
        return torch.nn.functional.relu(x @ x.t(), inplace=True).masked_fill(mask, 0.0)

    f = beside(masked, "aot_eager")
    f(torch.ones(2, 2))
    f(torch.ones(2, 2))
    settle()
    assert timing()["ms"] > 0


def test_dropout_that_is_off_draws_nothing() -> None:
    """What may draw is no obstacle, only what does."""
    f = beside(lambda x: torch.nn.functional.dropout(x, 0.5, training=False) * 2, "aot_eager")
    f(torch.ones(2))
    f(torch.ones(2))
    settle()
    assert timing()["ms"] > 0


def draw_meanwhile(f: Any, started: threading.Event, drawn: threading.Event) -> None:
    """Numbers that are drawn while something is built, and after it, follow one another."""
    x = torch.ones(2)
    f(x)
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    f(x)
    assert started.wait(WAIT)
    numbers = [torch.rand(2)]
    drawn.set()
    settle()
    numbers.append(torch.rand(2))
    assert torch.equal(torch.cat(numbers), expected)


def test_program_draws_as_if_it_were_alone() -> None:
    """Tools that put the random state back do so to the program's own, and miss what it drew."""
    other = FakeBackend(name="other")
    started, drawn = threading.Event(), threading.Event()

    def draws_meanwhile(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        with torch.random.fork_rng():
            started.set()
            assert drawn.wait(WAIT)
        return torch._dynamo.lookup_backend("aot_eager")(gm, example_inputs)

    f = beside(double, other, draws_meanwhile, verify="compile", seconds=1.0)
    draw_meanwhile(f, started, drawn)


def test_program_draws_as_if_it_were_alone_while_the_floor_is_compiled() -> None:
    """It is, for passes that run within AOTAutograd, which puts the random state back."""
    from rewrites import Scale, at

    started, drawn = threading.Event(), threading.Event()

    class Waits(Scale):
        def run(self, *args: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                started.set()
                assert drawn.wait(WAIT)
            return super().run(*args)

    f = beside(torch.cos, FakeBackend(name="only"), passes=[at("joint", Waits)], seconds=1.0)
    draw_meanwhile(f, started, drawn)


def test_floor_is_compiled_as_beside_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """So nothing is restored that the program may have changed meanwhile."""
    from rewrites import Scale, at

    seen = []
    usual = eager_fallback.make_fallback

    def noting(request: Any, shared: Any) -> Any:
        seen.append(request.alongside)
        return usual(request, shared)

    monkeypatch.setattr(eager_fallback, "make_fallback", noting)
    f = beside(torch.cos, FakeBackend(name="only"), passes=[at("joint", Scale)], seconds=1.0)
    for _ in range(2):
        f(torch.ones(3))
    settle(WAIT)
    assert seen == [True]


def test_program_may_write_to_weights_meanwhile() -> None:
    """What it wrote stays; no engine is blamed for that."""
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3)).eval()
    building, may_go_on = threading.Event(), threading.Event()

    def waits(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        building.set()
        assert may_go_on.wait(WAIT)
        return torch._dynamo.lookup_backend("aot_eager")(gm, example_inputs)

    x = torch.randn(2, 3)
    f = beside(net, FakeBackend(name="first"), waits, verify="compile")
    with torch.no_grad():
        f(x)
        f(x)
        assert building.wait(WAIT)
        net[0].weight.fill_(0.5)
        net[1].running_mean.fill_(0.25)
        may_go_on.set()
        settle()
        torch.testing.assert_close(f(x), net(x))
    assert bool((net[0].weight == 0.5).all())
    assert bool((net[1].running_mean == 0.25).all())
    assert {a.reason for a in last().attempts} <= {None, "slower"}


def test_engine_compared_while_weights_change_is_not_called_wrong() -> None:
    """By whose doing the numbers differ cannot be told."""
    net = torch.nn.Linear(3, 3)

    class WritesAsTheProgram(Known):
        def __call__(self, gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
            def run(*args: Any) -> Any:
                outputs = gm.forward(*args)
                with torch.no_grad():
                    net.bias.add_(1)
                return [each + 9 for each in outputs]

            return run

    chain = "aot_eager", WritesAsTheProgram("writes")
    f = beside(net, *chain, verify="compile", seconds=1.0)
    with torch.no_grad():
        f(torch.ones(2, 3))
        f(torch.ones(2, 3))
        settle()
    assert reasons()[1][1:] == ("skipped", "policy")
    assert "wrote to weights" in last().attempts[1].message
    assert kept() == []  # the next process may well compare it


def test_programs_own_compile_waits_for_one_build_at_most() -> None:
    """Between two the lock is free."""
    second, third = Engine("second"), Engine("third")
    second.may_build.clear()
    third.may_build.clear()
    f = beside(double, Engine("first"), second, third, seconds=1.0)
    f(torch.ones(2))
    f(torch.ones(2))
    assert second.building.wait(WAIT)
    done = threading.Event()

    def compile_another() -> None:
        compiled(torch.sin, "aot_eager")(torch.ones(2))
        done.set()

    other = threading.Thread(target=compile_another)
    other.start()
    assert not done.is_set()
    second.may_build.set()
    assert done.wait(WAIT)
    third.may_build.set()
    other.join()


def test_dynamic_sizes_are_those_of_the_second_call() -> None:
    """One graph serves all; what takes over does as well."""
    slow, quick = Engine("slow", SLOW), Engine("quick")
    f = beside(double, slow, quick, dynamic=True)
    for size in (3, 5):
        f(torch.ones(size))
    settle()
    assert last().chosen == "quick"
    for size in (7, 3):
        assert torch.equal(f(torch.ones(size)), torch.full((size,), 2.0))
    assert len(composer.reports()) == 1


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_background_has_the_modes_of_the_call(mode: Any) -> None:
    """Grad and autocast are a thread's own, and so are settings of torch's."""
    seen: list[tuple[bool, bool, bool]] = []

    def looks(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        state = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        seen.append((*state, torch.is_autocast_enabled("cpu")))
        return torch._dynamo.lookup_backend("aot_eager")(gm, example_inputs)

    with mode(), torch.autocast("cpu", torch.bfloat16), composer.using(model="mine"):
        f = beside(torch.nn.Linear(3, 3), FakeBackend(), looks, seconds=1.0)
        f(torch.ones(2, 3))
        f(torch.ones(2, 3))
        settle()
    assert seen == [(False, mode is torch.inference_mode, True)]


def test_default_dtype_that_changes_ends_it() -> None:
    """It is all threads', and a graph may mean another by it."""
    second, third = Engine("second"), Engine("third")
    second.may_build.clear()
    f = beside(double, Engine("first"), second, third)
    f(torch.ones(2))
    f(torch.ones(2))
    assert second.building.wait(WAIT)
    torch.set_default_dtype(torch.float64)
    second.may_build.set()
    settle()
    assert "default dtype" in timing()
    assert third.built_in == []


@pytest.mark.parametrize("change", [composer.reset, set_precision, None])
def test_verdict_is_kept_only_where_the_result_is_used(
    newer_precision: None, change: Callable[[], None] | None
) -> None:
    """Not that of a session which is over, nor one of settings that were changed meanwhile."""
    last_one = Known("last")
    last_one.may_build.clear()
    f = beside(double, "aot_eager", last_one, seconds=1.0)
    f(torch.ones(2))
    f(torch.ones(2))
    assert last_one.building.wait(WAIT)
    if change is not None:
        change()
    last_one.may_build.set()
    settle()
    assert len(kept()) == (change is None)


@pytest.mark.parametrize("reset", [torch.compiler.reset, composer.reset])
def test_reset_drops_what_waits(reset: Callable[[], None]) -> None:
    """The candidate under way is the last."""
    second, third = Engine("second"), Engine("third")
    second.may_build.clear()
    f = beside(double, Engine("first"), second, third)
    f(torch.ones(2))
    f(torch.ones(2))
    assert second.building.wait(WAIT)
    thread = threading.Thread(target=reset)  # torch's waits for the lock of compiles
    thread.start()
    second.may_build.set()
    thread.join()
    settle()
    assert third.built_in == []


def test_graph_that_is_gone_is_not_built() -> None:
    """Nothing but what waits for its turn knew of it."""
    other, hold = Engine("other"), threading.Event()
    f = beside(double, Engine("first"), other)
    f(torch.ones(2))
    session.current().background.submit(lambda: assert_waited(hold))
    f(torch.ones(2))
    torch.compiler.reset()
    hold.set()
    settle()
    assert other.built_in == []
    assert "dropped" in timing()


def assert_waited(event: threading.Event) -> None:
    assert event.wait(WAIT)


@pytest.mark.parametrize("why", [{"strict": True}, {"select": {"background": True}}])
def test_setting_that_means_nothing(why: dict[str, Any]) -> None:
    """Under ``strict`` a refusal has to raise at once; with the first there is nothing to find."""
    second = Engine("second")
    f = compiled(
        double, Engine("first"), second, **{"select": {"by": "fastest", "background": True}} | why
    )
    f(torch.ones(2))
    f(torch.ones(2))
    settle()
    main = threading.current_thread().name
    assert second.built_in == ([main] if "strict" in why else [])


def test_strict_builds_all_before_it_serves() -> None:
    """One that is refused raises."""
    f = beside(double, Engine("first"), FakeBackend("raises"), strict=True)
    with pytest.raises(Exception, match="made to raise"):
        f(torch.ones(2))


def test_settle_says_that_there_is_more() -> None:
    """After the time that it was given."""
    hold = threading.Event()
    session.current().background.submit(lambda: assert_waited(hold))
    with pytest.raises(TimeoutError, match=r"after 0\.01 s"):
        settle(0.01)
    hold.set()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="only where a process can fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_child_waits_for_nobody() -> None:
    """It has no thread, and the lock of compiles is free for its own."""
    second = Engine("second")
    second.may_build.clear()
    f = beside(double, Engine("first"), second)
    f(torch.ones(2))
    f(torch.ones(2))
    assert second.building.wait(WAIT)
    child = os.fork()
    if not child:
        signal.alarm(60)
        settled = session.current().background.settled(0.0) and not torch.compiler.is_compiling()
        torch.compile(torch.sin, backend="eager")(torch.ones(2))
        os._exit(0 if settled else 3)
    second.may_build.set()
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="only where a process can fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_child_forked_while_a_sink_is_told_of_the_change_goes_on_after_it() -> None:
    """The engine that took over serves there already, and is followed when it fails."""
    telling, may_go_on = threading.Event(), threading.Event()

    class Slow:
        def emit(self, record: dict[str, Any]) -> None:
            if record["chosen"] == "quick":
                telling.set()
                assert may_go_on.wait(WAIT)

    slow, quick, sink = Engine("slow", SLOW), Engine("quick"), Slow()
    x = torch.ones(2)
    f = beside(double, slow, quick)
    f(x)
    session.add_sink(sink)
    f(x)
    assert telling.wait(WAIT)

    def child() -> None:
        may_go_on.set()
        for quick.raises in (False, True, False):
            assert torch.equal(f(x), x * 2)
        assert (last().chosen, last().runtime.fallbacks) == ("eager", 1)
        assert (slow.served, quick.served) == (2, 2)

    code = in_child(child)
    may_go_on.set()
    session.remove_sink(sink)
    assert code == 0


def test_process_ends_while_an_engine_is_built(run_python: Callable[..., Any]) -> None:
    """At once and in order, though the build would take a minute."""
    done = run_python(
        """
import threading, time, torch, composer

building = threading.Event()

def slow(gm, inputs):
    building.set()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        torch._dynamo.lookup_backend("inductor")(gm, inputs)
    return gm

chain = ["aot_eager", slow]
options = {"chain": chain, "select": {"by": "fastest", "background": True}}
f = torch.compile(lambda x: x.sin() * 2, backend="composer", options=options)
f(torch.ones(8))
f(torch.ones(8))
assert building.wait(60)
print("served by", composer.reports()[-1].chosen)
"""
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "served by aot_eager\n"


def test_calls_of_several_threads_meet_the_change() -> None:
    """Each is answered by one engine, as a whole."""
    slow, quick = Engine("slow", SLOW / 4), Engine("quick")
    f = beside(double, slow, quick)
    f(torch.ones(2))
    wrong: list[torch.Tensor] = []

    def call() -> None:
        while not quick.served and len(wrong) == 0:
            x = torch.randn(2)
            answer = f(x)
            if not torch.equal(answer, x * 2):
                wrong.append(answer)

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    settle()
    assert (wrong, last().chosen, last().runtime.fallbacks) == ([], "quick", 0)
    assert len(quick.made) == 1


@pytest.mark.parametrize("stage", ["aten", "joint"])
def test_passes_hold_for_what_takes_over(stage: str) -> None:
    """The eager fallback runs them as well; its passes are recorded if it is the quickest."""
    from rewrites import Scale, at

    f = beside(torch.cos, FakeBackend("slow", seconds=SLOW, at=1), passes=[at(stage, Scale)])
    x = torch.randn(3)
    scaled = f(x)
    f(x)
    settle()
    assert torch.equal(f(x), scaled)
    assert not torch.equal(scaled, x.cos())
    assert last().chosen == "eager"
    assert [record.stage for record in last().passes] == [stage]


@pytest.mark.slow
def test_real_engines_are_built_while_the_program_calls() -> None:
    """And while it compiles another graph."""
    layers = torch.nn.Linear(64, 128), torch.nn.LayerNorm(128), torch.nn.Linear(128, 64)
    net = torch.nn.Sequential(*layers).eval()
    x = torch.randn(4, 64)
    f = beside(net, "aot_eager", "inductor", "onnxrt", verify="compile")
    with torch.no_grad():
        expected = net(x)
        f(x)
        f(x)
        assert torch.equal(torch.compile(torch.relu, backend="aot_eager")(x), x.relu())
        while not session.current().background.settled(0.0):
            torch.testing.assert_close(f(x), expected)
        report = next(
            each for each in composer.reports() if each.attempts[0].backend == "aot_eager"
        )
        torch.testing.assert_close(f(x), expected)
    assert all(attempt.engine["timing"]["ms"] > 0 for attempt in report.attempts)
    assert report.chosen in ("aot_eager", "inductor", "onnxrt", "eager")
    assert len(report.attempts) == 3


def test_python_random_state_is_left_alone() -> None:
    """The order of the turns is drawn by a generator of its own."""
    random.seed(1)
    before = random.getstate()
    f = beside(double, Engine("first"), Engine("second"), seconds=1.0)
    f(torch.ones(2))
    f(torch.ones(2))
    settle()
    assert random.getstate() == before


class Foreign(torch.optim.SGD):
    """An optimizer of another package, whose kernels may raise no version."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for each in group["params"]:
                each.data.sub_(each.grad)


def test_program_runs_as_if_nothing_compiled_beside_it() -> None:
    """Its eager code asks whether it is compiled, and its optimizer's step raises versions."""
    by_address.count_steps()
    first, second = Engine("first"), Engine("second")
    f, other = beside(double, first, second), torch.compile(torch.sin, backend="eager")
    x = torch.ones(3)
    other(x)
    second.may_build.clear()
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    try:
        for _ in range(3):
            f(x)
        assert second.building.wait(WAIT)
        assert not torch.compiler.is_compiling()
        version = weight._version
        Foreign([weight], lr=1.0).step()
        assert weight._version > version
        assert torch.equal(other(x), x.sin())
    finally:
        second.may_build.set()
    settle(WAIT)


def test_compile_of_another_thread_leaves_a_step_seen() -> None:
    """Torch says that it compiles to all threads, and a step of this one is none of a trace."""
    by_address.count_steps()
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    versions: list[int] = []

    def engine(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        def steps() -> None:
            versions.append(weight._version)
            Foreign([weight], lr=1.0).step()
            versions.append(weight._version)

        thread = threading.Thread(target=steps)
        thread.start()
        thread.join()
        return gm.forward

    torch.compile(torch.sin, backend=engine)(torch.ones(3))
    assert versions[1] > versions[0]
