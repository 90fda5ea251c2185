"""What the handler of a signal raises is the program's, in an engine as well."""

from __future__ import annotations

import asyncio
import functools
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from common import compiled, last
from torch._dynamo.exc import BackendCompilerFailed

import composer
from composer.knowledge import failure
from composer.passes import FunctionPass
from composer.system import disk
from composer.system.disk import DiskCache
from composer.testing import FakeBackend

pytestmark = pytest.mark.filterwarnings("ignore::composer.errors.FallbackWarning")


class TimeIsUpError(Exception):
    """As Celery's ``SoftTimeLimitExceeded``: an exception like any other."""


def time_is_up(*_: Any) -> None:
    raise TimeIsUpError


class Queue:
    """Handlers of signals that are methods, and objects."""

    def end(self, *_: Any) -> None:
        raise TimeIsUpError

    __call__ = end


HANDLERS = [time_is_up, Queue().end, Queue(), functools.partial(time_is_up, "a job")]
KINDS = ["function", "method", "object", "partial"]


def end_the_job() -> None:
    signal.raise_signal(signal.SIGUSR1)


ENDS: list[bool] = []


@torch.library.custom_op("composer_test::ends_the_job", mutates_args=())
def ends_the_job(x: torch.Tensor) -> torch.Tensor:
    """Once, where it has been told so."""
    if ENDS:
        ENDS.clear()
        end_the_job()
    return x.clone()


ends_the_job.register_fake(torch.empty_like)


@pytest.fixture(autouse=True, params=HANDLERS[:1], ids=KINDS[:1])
def _handled(request: pytest.FixtureRequest) -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, request.param)
    yield
    signal.signal(signal.SIGUSR1, before)


class Engine:
    """Eager, which is interrupted in its build, or at that call; ``wrapped`` by an error or not."""

    __name__ = "engine"

    def __init__(self, at: int, wraps: Callable[[Exception], Exception] | None = None) -> None:
        self.at, self.wraps, self.calls = at, wraps, 0

    def uuid(self) -> str:
        return f"{self.__name__} {self.at}"

    def interrupted(self) -> None:
        try:
            end_the_job()
        except TimeIsUpError as error:
            if self.wraps is None:
                raise
            raise self.wraps(error) from error

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        if self.at == 0:
            self.at = -1
            time.sleep(failure.WORTH_SECONDS)
            self.interrupted()

        def run(*args: Any) -> Any:
            self.calls += 1
            if self.calls == self.at:
                self.interrupted()
            return gm.forward(*args)

        return run


@pytest.mark.parametrize("_handled", HANDLERS, indirect=True, ids=KINDS)
@pytest.mark.parametrize("wraps", [None, RuntimeError], ids=["plain", "wrapped"])
def test_build_that_is_interrupted_has_not_failed(wraps: Any) -> None:
    """Nobody follows the engine, and the next compile tries it again."""
    engine = Engine(at=0, wraps=wraps)
    with pytest.raises(BackendCompilerFailed) as caught:
        compiled(torch.sin, engine)(torch.ones(3))
    assert isinstance(caught.value.inner_exception, TimeIsUpError)
    assert composer.reports() == ()
    engine.at = -1
    compiled(torch.sin, engine)(torch.ones(3))
    assert [attempt.status for attempt in last().attempts] == ["succeeded"]


@pytest.mark.parametrize("wraps", [None, RuntimeError], ids=["plain", "wrapped"])
def test_call_that_is_interrupted_is_not_answered(wraps: Any) -> None:
    """The engine stays."""
    engine, x = Engine(at=2, wraps=wraps), torch.ones(3)
    f = compiled(torch.sin, engine)
    f(x)
    with pytest.raises(TimeIsUpError):
        f(x)
    assert torch.equal(f(x), x.sin())
    assert (engine.calls, last().chosen, last().runtime.last_error) == (3, "engine", "")


def test_failure_while_the_program_handles_an_interruption_is_the_engines() -> None:
    """Python chains it to that, which has not led to it."""
    x = torch.ones(3)
    f = compiled(torch.sin, FakeBackend("raises", at=2))
    f(x)
    try:
        end_the_job()
    except TimeIsUpError:
        assert torch.equal(f(x), x.sin())
    assert last().runtime.fallbacks == 1


def test_comparison_before_an_engine_serves_is_interrupted() -> None:
    """The engine is not said to raise."""
    with pytest.raises(BackendCompilerFailed, match="TimeIsUpError"):
        compiled(torch.sin, Engine(at=1), verify="compile")(torch.ones(3))
    assert composer.reports() == ()


def test_comparison_of_a_call_is_interrupted() -> None:
    """The engine's run of it; the next call is compared again."""
    x, engine = torch.ones(3), Engine(at=2)
    f = compiled(torch.sin, engine, verify={"when": "sample", "every": 1})
    with pytest.raises(TimeIsUpError):
        f(x)
    assert torch.equal(f(x), x.sin())
    assert (last().chosen, last().runtime.verified) == ("engine", 1)


def test_eagers_run_of_a_comparison_is_interrupted() -> None:
    """Before an engine serves, and at a call, which goes no further."""
    f = compiled(ends_the_job, FakeBackend(), verify={"when": "sample", "every": 1})
    ENDS.append(True)
    with pytest.raises(BackendCompilerFailed, match="TimeIsUpError"):
        f(torch.ones(3))
    f(torch.ones(3))
    ENDS.append(True)
    with pytest.raises(TimeIsUpError):
        f(torch.ones(3))
    assert last().runtime.fallbacks == 0


def test_benchmark_that_is_interrupted_is_not_decided() -> None:
    """The next compile holds it."""
    engine, x = Engine(at=5), torch.ones(3)
    with pytest.raises(BackendCompilerFailed, match="TimeIsUpError"):
        compiled(torch.sin, engine, select={"by": "fastest", "seconds": 1.0})(x)
    assert composer.reports() == ()


class OutOfTimeError(TimeoutError):
    """As a handler of an alarm raises it: an error of the system like any other."""


def out_of_time(*_: Any) -> None:
    raise OutOfTimeError


@pytest.mark.parametrize("_handled", [out_of_time], indirect=True)
@pytest.mark.parametrize(
    "use",
    [
        lambda path: DiskCache("things", limit=1000, root=path).get("a" * 64),
        lambda path: DiskCache("things", limit=1000, root=path).put("a" * 64, {}),
        lambda path: DiskCache("things", limit=1000, root=path).remove("a" * 64),
        lambda path: DiskCache("things", limit=1000, root=path).entries(),
        lambda path: DiskCache("things", limit=1000, root=path).clear(),
    ],
    ids=["get", "put", "remove", "entries", "clear"],
)
def test_interruption_of_a_cache_is_not_taken_for_trouble_with_it(
    use: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor lost in a warning."""
    monkeypatch.setattr(disk, "check_owner", lambda _: end_the_job())
    with pytest.raises(OutOfTimeError):
        use(tmp_path)


@pytest.mark.parametrize("stage", ["torch", "aten", "post_grad"])
def test_pass_that_is_interrupted_is_not_rolled_back(stage: str) -> None:
    """Nor is the graph compiled without it."""

    def ends(_: torch.fx.GraphModule) -> None:
        end_the_job()

    with pytest.raises(BackendCompilerFailed, match="TimeIsUpError"):
        compiled(torch.sin, "aot_eager", passes=[FunctionPass(ends, stage=stage)])(torch.ones(3))
    assert composer.reports() == ()


@pytest.mark.parametrize(
    "exit_of",
    [
        BaseExceptionGroup("tasks", [KeyboardInterrupt(), ValueError()]),
        asyncio.CancelledError(),
    ],
    ids=["a group with a keyboard's", "a task's end"],
)
def test_exits_of_tasks_pass_through(exit_of: BaseException) -> None:
    """An interruption comes out of a group of tasks with what else ended there."""

    def ends(gm: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> object:
        raise exit_of

    with pytest.raises(type(exit_of)):
        compiled(torch.sin, ends)(torch.ones(2))
