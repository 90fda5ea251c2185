"""What is no ``Exception`` is a failure all the same: engines written in Rust panic with such."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from common import compiled, last
from engines import honest
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor.custom_graph_pass import CustomPartitionerFn

import composer
from composer import backends, session
from composer.errors import CandidateError, ChainExhausted, TelemetryWarning
from composer.passes import FunctionPass
from composer.registry import Registry

pytestmark = pytest.mark.filterwarnings("ignore::composer.errors.FallbackWarning")


class PanicException(BaseException):  # pyo3's own name
    """As ``pyo3_runtime.PanicException``, which is no ``Exception`` either."""


class Engine:
    """Eager, which raises in its build (0), or at that call and those behind it."""

    __name__ = "engine"

    def __init__(self, at: int, error: type[BaseException] = PanicException) -> None:
        self.at, self.error, self.calls = at, error, 0

    def uuid(self) -> str:
        return f"{self.error.__name__} {self.at}"

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        if self.at == 0:
            raise self.error("engine panicked")

        def run(*args: Any) -> Any:
            self.calls += 1
            if self.calls >= self.at:
                raise self.error("engine panicked")
            return gm.forward(*args)

        return run


def outcomes() -> list[tuple[str, str | None, str]]:
    return [(each.status, each.reason, each.error_type) for each in last().attempts]


def test_build_that_panics_is_a_failed_attempt() -> None:
    """The next candidate serves."""
    x = torch.ones(3)
    assert torch.equal(compiled(torch.sin, Engine(at=0), honest)(x), x.sin())
    assert outcomes() == [
        ("failed", "build_failed", "PanicException"),
        ("succeeded", None, ""),
    ]


def test_call_that_panics_is_answered_by_the_floor() -> None:
    """The next call has the next candidate."""
    x, f = torch.ones(3), compiled(torch.sin, Engine(at=2), honest)
    for _ in range(3):
        assert torch.equal(f(x), x.sin())
    assert outcomes() == [
        ("failed", "raised_at_runtime", "PanicException"),
        ("succeeded", None, ""),
    ]
    assert last().runtime.fallbacks == 1


def test_call_of_the_successor_that_panics_is_answered_as_well() -> None:
    """It is compiled at that call."""
    x, f = torch.ones(3), compiled(torch.sin, Engine(at=2), Engine(at=0), Engine(at=1))
    for _ in range(3):
        assert torch.equal(f(x), x.sin())
    reasons = [each.reason for each in last().attempts]
    assert reasons == ["raised_at_runtime", "build_failed", "raised_at_runtime"]


def _panics(*_: Any) -> Any:
    raise PanicException("engine panicked")


class MuteError(Exception):
    """One that cannot even be printed."""

    def __str__(self) -> str:
        raise ValueError("no words")


def _is_mute(*_: Any) -> Any:
    raise MuteError


TEXTS = {
    _panics: "PanicException: engine panicked",
    _is_mute: "MuteError: its text cannot be read: ValueError",
}


def test_backward_that_panics_is_answered_by_torch() -> None:
    """As one that raises."""
    engine = aot_autograd(
        fw_compiler=lambda gm, _: gm.forward, bw_compiler=lambda *_: _panics, decompositions={}
    )
    x = torch.ones(3, requires_grad=True)
    compiled(torch.sin, engine, honest)(x).sum().backward()
    torch.testing.assert_close(x.grad, x.detach().cos())
    assert last().attempts[0].reason == "raised_at_runtime"


@pytest.mark.parametrize(
    "fields", [{"verify": "compile"}, {"select": {"by": "fastest", "seconds": 0.2}}]
)
def test_engine_that_panics_when_it_is_tried_is_not_accepted(fields: dict[str, Any]) -> None:
    """In a comparison before it serves, and in a benchmark."""
    x = torch.ones(3)
    f = compiled(torch.sin, Engine(at=1), **fields)
    assert torch.equal(f(x), x.sin())
    assert outcomes()[0] == ("failed", "raised_at_runtime", "PanicException")
    assert last().chosen == "eager"


def test_sampled_call_that_panics_is_answered_by_the_floor() -> None:
    """As any other."""
    x, f = torch.ones(3), compiled(torch.sin, Engine(at=1), verify={"when": "sample", "every": 1})
    assert torch.equal(f(x), x.sin())


@pytest.mark.parametrize("stage", ["torch", "aten", "post_grad"])
@pytest.mark.parametrize("fault", [_panics, _is_mute])
def test_pass_that_panics_is_rolled_back(stage: str, fault: Any) -> None:
    """The graph is compiled without it."""
    x, panics = torch.ones(3), FunctionPass(fault, stage=stage)
    assert torch.equal(compiled(torch.sin, "aot_eager", passes=[panics])(x), x.sin())
    assert TEXTS[fault] in last().passes[0].error
    assert last().chosen == "aot_eager"


class Partitioner(CustomPartitionerFn):
    """One that fails."""

    def __init__(self, fault: Any) -> None:
        self.fault = fault

    def __call__(self, gm: torch.fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
        self.fault()

    def uuid(self) -> str:
        return self.fault.__name__


@pytest.mark.parametrize("fault", [_panics, _is_mute])
def test_partitioner_that_panics_is_left_out(fault: Any) -> None:
    """The usual one takes its place."""
    x = torch.ones(3, requires_grad=True)
    compiled(torch.sin, "aot_eager", passes=[Partitioner(fault)])(x).sum().backward()
    assert TEXTS[fault] in last().passes[0].error
    assert torch.equal(x.grad, x.detach().cos())


@pytest.mark.parametrize("fault", [_panics, _is_mute])
def test_sink_that_panics_is_warned_of(fault: Any) -> None:
    """And the call is answered."""
    sink = type(fault.__name__, (), {"emit": staticmethod(fault)})()  # warned of once by its name
    session.add_sink(sink)
    try:
        with pytest.warns(TelemetryWarning, match=TEXTS[fault]):
            compiled(torch.sin, honest)(torch.ones(3))
    finally:
        session.remove_sink(sink)


def test_module_that_panics_when_it_is_imported_is_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a table names it; where the policy does, the error says what it raised."""
    (tmp_path / "panics.py").write_text("raise BaseException('cannot be imported twice')")
    monkeypatch.syspath_prepend(tmp_path)
    table: Registry[Any] = Registry("backend", {"panics": "panics:engine"})
    monkeypatch.setattr(backends, "BACKENDS", table)
    compiled(torch.sin, "panics", honest)(torch.ones(3))
    assert outcomes()[0] == ("unavailable", "not_installed", "BaseException")
    with pytest.raises(BackendCompilerFailed, match="cannot be imported twice"):
        compiled(torch.cos, "panics:engine", honest)(torch.ones(3))


def test_group_of_errors_has_a_candidates_error_for_a_panic() -> None:
    """An ``ExceptionGroup`` holds exceptions only."""
    with pytest.raises(BackendCompilerFailed) as caught:
        compiled(torch.sin, Engine(at=0), on_exhausted="raise")(torch.ones(3))
    group = caught.value.inner_exception
    assert isinstance(group, ChainExhausted)
    (error,) = group.exceptions
    assert isinstance(error, CandidateError)
    assert isinstance(error.__cause__, PanicException)
    assert error.attempt == group.attempts[0]


def test_strict_raises_for_a_panic() -> None:
    """With the panic as its cause."""
    with pytest.raises(BackendCompilerFailed) as caught:
        compiled(torch.sin, Engine(at=0), honest, strict=True)(torch.ones(3))
    assert isinstance(caught.value.inner_exception, CandidateError)
    assert isinstance(caught.value.inner_exception.__cause__, PanicException)


@pytest.mark.parametrize("at", [0, 2], ids=["build", "call"])
@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_exits_are_the_programs(at: int, stop: type[BaseException]) -> None:
    """Nobody answers for them, and none counts as a failure."""
    x, f = torch.ones(3), compiled(torch.sin, Engine(at, stop), honest)
    if at:
        f(x)
    with pytest.raises(stop):
        f(x)
    assert [each.status for report in composer.reports() for each in report.attempts] == (
        ["succeeded"] if at else []
    )


@pytest.fixture
def _panics_at_a_signal() -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, _panics)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.usefixtures("_panics_at_a_signal")
def test_what_a_signals_handler_raises_is_the_programs() -> None:
    """Be it an ``Exception`` or not."""

    def interrupted(*_: Any) -> Any:
        signal.raise_signal(signal.SIGUSR1)

    with pytest.raises(PanicException):
        compiled(torch.sin, interrupted, honest)(torch.ones(3))
    assert composer.reports() == ()
