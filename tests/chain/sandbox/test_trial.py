"""Where composer chooses by measurement, a sandbox tries an engine that is not torch's first."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import engines
import pytest
import torch
from common import last
from spies import layers, told

from composer import _torch
from composer.backends import find_backend
from composer.chain import sandbox
from composer.chain.select import choice
from composer.errors import Refusal, SandboxRefusal
from composer.records import Attempt, Reason, Status
from composer.system.subprocesses import Limits
from composer.testing import FakeBackend, settle

pytestmark = pytest.mark.filterwarnings("ignore::composer.errors.FallbackWarning")

SLOW = pytest.mark.slow
"""A sandbox is started."""


def fastest(function: Any, *chain: Any, dynamic: bool | None = None, **options: Any) -> Any:
    options = {"chain": list(chain), "select": {"by": "fastest", "seconds": 0.01}} | options
    return torch.compile(function, backend="composer", options=options, dynamic=dynamic)


LONG = {"by": "fastest", "seconds": 2.0}
"""Time for all rounds, where time is simulated."""


def statuses() -> list[str]:
    return [str(attempt.status) for attempt in last().attempts]


class Asked:
    """Stands for the start of sandboxes: it keeps the limits of each, and answers or raises."""

    def __init__(self) -> None:
        self.limits: list[Limits] = []
        self.error: Exception | None = None
        self.answer: dict[str, Any] = {"status": "succeeded"}

    def __call__(self, work: str, payload: bytes, limits: Limits) -> dict[str, Any]:
        self.limits.append(limits)
        if self.error is not None:
            raise self.error
        return self.answer


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """The sandboxes that would have been started."""
    made = Asked()
    monkeypatch.setattr(sandbox.subprocesses, "ask", made)
    return made


@SLOW
@pytest.mark.parametrize("at", [None, 1], ids=["in the build", "at the first call"])
def test_engine_that_ends_its_process_is_crashed(at: int | None) -> None:
    """The program lives, and nobody wrote ``isolate``."""
    x = torch.randn(3)
    f = fastest(torch.sin, FakeBackend("segfaults", at=at), FakeBackend())
    assert torch.equal(f(x), x.sin())
    crashed, honest = last().attempts
    assert (crashed.status, crashed.reason) == ("crashed", "crashed")
    assert crashed.message == "a child process was killed by SIGSEGV"
    assert honest.status in ("succeeded", "not_chosen")
    assert honest.engine["tried_apart"].keys() == {"seconds"}


@SLOW
def test_openvinos_crash_ends_a_sandbox_and_not_the_program() -> None:
    """A fault of OpenVINO (2026.4), with composer's correction of it taken away."""
    pytest.importorskip("openvino", reason="the engine itself")
    uncorrected = pytest.importorskip("uncorrected").Uncorrected

    def scalar(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a @ b).reshape(()) * 2

    a, b = torch.ones(1, 4), torch.ones(4, 1)
    with torch.no_grad():
        assert fastest(scalar, uncorrected, min_coverage=0.0)(a, b) == 8
    (crashed,) = last().attempts
    assert (crashed.status, crashed.reason) == ("crashed", "crashed")


@SLOW
def test_crash_with_dynamic_sizes() -> None:
    """The sandbox gets the sizes of the first call."""
    x = torch.randn(3, 4)
    f = fastest(torch.sin, FakeBackend("segfaults", at=1), FakeBackend(), dynamic=True)
    assert torch.equal(f(x), x.sin())
    assert last().dynamic
    assert statuses()[0] == "crashed"
    assert torch.equal(f(x[:2]), x[:2].sin())


@SLOW
def test_crash_in_training() -> None:
    """The step is eager's, and an honest engine's backward runs in the sandbox as well."""
    net, x = torch.nn.Linear(4, 2), torch.randn(3, 4)
    net(x).sum().backward()
    wanted = net.weight.grad.clone()
    net.zero_grad()
    f = fastest(net, FakeBackend("segfaults", at=1), FakeBackend())
    f(x).sum().backward()
    assert last().training
    assert statuses()[0] == "crashed"
    assert "why_not" not in last().attempts[1].engine["tried_apart"]
    torch.testing.assert_close(net.weight.grad, wanted)


@SLOW
def test_crash_under_automatic_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 and in float32, each of which is another graph."""
    monkeypatch.setattr(_torch.processor, "multiplies_bf16", lambda: True)
    net, x = layers(), torch.randn(4, 32)
    with torch.no_grad():
        f = fastest(net, FakeBackend("segfaults"), precision="auto")
        torch.testing.assert_close(f(x), net(x))
    engine = "fake_segfaults"
    assert told() == [(engine, each, "crashed", "crashed") for each in ("bf16", "fp32")]
    assert last().chosen == "eager"


def test_crash_is_remembered(asked: Asked) -> None:
    """Also for a program that turns sandboxes off: the engine is not built in this process."""
    asked.error = SandboxRefusal(Status.CRASHED, Reason.CRASHED, "ended")
    for options in ({}, {"isolate": False}):
        torch.compiler.reset()
        fastest(torch.sin, engines.honest, **options)(torch.ones(3))
    assert last().attempts[0].reason == "known_failure"
    assert len(asked.limits) == 1


@pytest.mark.parametrize(
    ("candidate", "options"),
    [
        ({}, {"isolate": False}),
        ({"isolate": False}, {}),
        ({}, {"select": "first"}),
        ({}, {"chain": "auto", "select": "first"}),
    ],
    ids=str,
)
def test_engine_is_not_tried_apart(
    asked: Asked, candidate: dict[str, Any], options: dict[str, Any]
) -> None:
    """If the user turns it off, or the first accepted engine serves."""
    x = torch.ones(3)
    f = fastest(torch.sin, {"backend": FakeBackend()} | candidate, **options)
    assert torch.equal(f(x), x.sin())
    assert not asked.limits
    assert "tried_apart" not in last().attempts[0].engine


@pytest.mark.parametrize("name", ["inductor", "aot_eager", "cudagraphs", "eager"])
def test_torchs_own_engines_are_not_tried_apart(name: str, asked: Asked) -> None:
    """Inductor takes most of the time of a first call."""
    backend = find_backend(name)
    assert backend.comes_with_torch or backend.may_return_original
    if name == "aot_eager":
        fastest(torch.sin, name)(torch.ones(3))
        assert not asked.limits


@pytest.mark.parametrize("name", ["onnxrt", "openvino", "tvm", "tensorrt"])
def test_engines_with_code_of_their_own_are_tried_apart(name: str) -> None:
    """Dynamo's ``tvm`` too: torch has only the few lines that call it."""
    assert not find_backend(name).comes_with_torch


def test_explicit_isolation_is_no_trial(asked: Asked) -> None:
    """Each outcome counts there, and a function that cannot be sent is declined."""
    fastest(torch.sin, lambda gm, inputs: gm.forward, isolate=True)(torch.ones(3))
    assert last().attempts[0].reason == "not_isolatable"


def test_function_that_a_child_cannot_import_competes(asked: Asked) -> None:
    """It is built in this process, and the record says why it was not tried elsewhere."""
    f = fastest(torch.sin, lambda gm, inputs: engines.honest(gm, inputs))
    f(torch.ones(3))
    (attempt,) = last().attempts
    assert attempt.status in ("succeeded", "not_chosen")
    told = attempt.engine["tried_apart"]["why_not"]
    assert told.startswith("the backend '<lambda>' cannot be sent to another process")
    assert not asked.limits


FAILED = {"reason": "build_failed", "message": "x", "error_type": "KeyError", "traceback": ""}


@pytest.mark.parametrize(
    ("error", "answer"),
    [
        (None, {"status": "failed"} | FAILED),
        (None, {"status": "unavailable"} | FAILED | {"reason": "not_registered"}),
        (Refusal(Status.DECLINED, Reason.NOT_ISOLATABLE, "no interpreter"), {}),
        (SandboxRefusal(Status.CRASHED, Reason.CRASHED, "SIGTERM", by_others=True), {}),
        (SandboxRefusal(Status.TIMED_OUT, Reason.TIMEOUT, "never started", by_others=True), {}),
        (OSError("no process left"), {}),
    ],
    ids=["fails", "unknown there", "no sandbox", "killed by others", "never began", "no process"],
)
def test_only_an_end_of_the_sandbox_counts(
    error: Exception | None, answer: dict[str, Any], asked: Asked
) -> None:
    """The build in this process has its own outcome."""
    asked.error, asked.answer = error, answer
    backend = FakeBackend()
    fastest(torch.sin, backend)(torch.ones(3))
    assert backend.compiles == 1
    (attempt,) = last().attempts
    assert attempt.status in ("succeeded", "not_chosen")
    assert attempt.engine["tried_apart"]["why_not"]


def test_hang_is_timed_out(asked: Asked) -> None:
    """With the policy's ``timeout``; a limit on memory belongs to ``isolate``."""
    backend = FakeBackend()
    asked.error = SandboxRefusal(Status.TIMED_OUT, Reason.TIMEOUT, "stopped after 7 s")
    fastest(torch.sin, backend, timeout=7, memory_limit=100)(torch.ones(3))
    assert last().attempts[0].reason == "timeout"
    assert backend.compiles == 0
    assert asked.limits == [Limits(timeout=7.0)]


@torch.library.custom_op("composer_tests::rest", mutates_args=())
def rest(x: torch.Tensor) -> torch.Tensor:
    """Take so long that eager is a slow engine."""
    time.sleep(0.02)
    return x.clone()


rest.register_fake(torch.empty_like)


def slow(x: torch.Tensor) -> torch.Tensor:
    return rest(x) * 2


def doubles(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
    """An engine that is faster than eager."""

    def run(x: torch.Tensor) -> list[torch.Tensor]:
        time.sleep(0.005)
        return [x * 2]

    return run


class FailsLater:
    """An engine that is faster than :func:`doubles`, and raises once it is told to."""

    __name__ = "fails_later"
    is_failing = False

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        def run(x: torch.Tensor) -> list[torch.Tensor]:
            if self.is_failing:
                raise RuntimeError("made to raise")
            return [x * 2]

        return run


@pytest.mark.usefixtures("simulated_time")
def test_winner_of_a_verdict_is_not_tried_apart(asked: Asked) -> None:
    """That it won is a fact that it has run on this machine."""
    for _ in range(2):
        torch.compiler.reset()
        fastest(slow, doubles, select=LONG)(torch.ones(3))
        assert last().chosen == "doubles"
    assert "remembered_in" in last().attempts[0].engine["timing"]
    assert len(asked.limits) == 1


@pytest.mark.usefixtures("simulated_time")
def test_next_engine_after_a_failure_is_not_tried_apart(asked: Asked) -> None:
    """It has run in this process, and a call waits for it."""
    engine = FailsLater()
    f = fastest(slow, engine, doubles, select=LONG)
    f(torch.ones(3))
    assert last().chosen == "fails_later"
    engine.is_failing = True
    f(torch.ones(3))
    f(torch.ones(3))
    assert last().chosen == "doubles"
    assert len(asked.limits) == 2


def test_background_starts_no_sandbox(asked: Asked) -> None:
    """It builds in a thread of this process."""
    x = torch.ones(3)
    f = fastest(
        torch.sin, engines.honest, FakeBackend(), select={"by": "fastest", "background": True}
    )
    f(x)
    f(x)
    settle()
    assert len(last().attempts) == 2
    assert not asked.limits


def test_trial_is_no_part_of_the_build() -> None:
    """The objective ``amortised`` would count it against each engine that is not torch's."""
    made = Attempt("x", Status.SUCCEEDED, None, "", 5.0)
    assert choice.Tried(made, None, trial_seconds=4.0).build_seconds == 1.0
