"""Where composer chooses by measurement, a sandbox tries and measures the engines."""

from __future__ import annotations

import importlib
from typing import Any

import engines
import pytest
import rewrites
import torch
from common import last
from spies import layers, told

from composer import _torch
from composer.backends import find_backend
from composer.chain.sandbox import parcel
from composer.errors import Refusal, SandboxRefusal
from composer.knowledge.failure import Failure
from composer.records import Attempt, Reason, Status, plain
from composer.system.subprocesses import Limits
from composer.testing import FakeBackend

decide = importlib.import_module("composer.chain.sandbox.decide")

pytestmark = pytest.mark.filterwarnings("ignore::composer.errors.FallbackWarning")

SLOW = pytest.mark.slow
"""A sandbox is started."""


def fastest(function: Any, *chain: Any, dynamic: bool | None = None, **options: Any) -> Any:
    options = {"chain": list(chain), "select": {"by": "fastest", "seconds": 2.0}} | options
    return torch.compile(function, backend="composer", options=options, dynamic=dynamic)


def statuses() -> list[str]:
    return [str(attempt.status) for attempt in last().attempts]


def written(backend: str, status: str, reason: str | None = None, **more: Any) -> dict[str, Any]:
    """The record of a candidate, as a sandbox answers it."""
    reason = Reason(reason) if reason else None
    return dict(plain(Attempt(backend, Status(status), reason, "said so", 2.0, **more)))


TIMED = {"ms": 1.0, "ratio": 1.0, "rounds": 9, "eager_ms": 2.0, "seconds": 0.1, "least_ms": 1.0}


class Asked:
    """Stands for the start of sandboxes: it keeps what each was told, and answers or raises.

    Attributes:
        barred: The places of the chain that are barred, for each sandbox.
        steps: The steps that each sandbox tells of.
        errors: What the sandboxes raise, the first first.
        answer: What a sandbox answers that does not raise.
    """

    def __init__(self) -> None:
        self.barred: list[list[int]] = []
        self.limits: list[Limits] = []
        self.steps: list[tuple[int, list[dict[str, Any]]]] = []
        self.errors: list[Exception] = []
        self.answer: dict[str, Any] = {}

    def __call__(
        self, work: str, payload: bytes, limits: Limits, heard: Any = None, **_: Any
    ) -> Any:
        chain, *_ = parcel.opened(parcel.unpack(payload))
        self.barred.append([place for place, each in enumerate(chain) if each.barred])
        self.limits += [heard(*step) for step in self.steps if heard]
        if self.errors:
            raise self.errors.pop(0)
        return self.answer


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """The sandboxes that would have been started."""
    made = Asked()
    monkeypatch.setattr(decide.subprocesses, "ask", made)
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
    assert honest.timing["ms"] > 0


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
    assert last().attempts[1].timing["ms"] > 0
    torch.testing.assert_close(net.weight.grad, wanted)


@SLOW
def test_crash_under_automatic_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16, where the processor of the sandbox has it, and in float32."""
    monkeypatch.setattr(_torch.processor, "multiplies_bf16", lambda: True)
    net, x = layers(), torch.randn(4, 32)
    with torch.no_grad():
        f = fastest(net, FakeBackend("segfaults"), precision="auto")
        torch.testing.assert_close(f(x), net(x))
    assert len(told()) == 2
    assert told()[1] == ("fake_segfaults", "fp32", "crashed", "crashed")
    assert last().chosen == "eager"


@SLOW
def test_engine_that_hangs_is_timed_out() -> None:
    """With its own ``timeout``; the next candidate has the policy's."""
    x = torch.randn(3)
    hangs = {"backend": FakeBackend("hangs"), "timeout": 3}
    f = fastest(torch.sin, hangs, FakeBackend(), timeout=300)
    assert torch.equal(f(x), x.sin())
    hung, honest = last().attempts
    assert (hung.status, hung.reason) == ("timed_out", "timeout")
    assert honest.timing["ms"] > 0


@SLOW
def test_only_the_winner_is_built_here() -> None:
    """The others have run in the sandbox, and the record has their times and seconds."""
    first, second = FakeBackend(name="first"), FakeBackend(name="second")
    f = fastest(torch.sin, first, second, "eager")
    f(torch.ones(3))
    f(torch.ones(3))
    assert first.compiles + second.compiles == (last().chosen != "eager")
    assert [type(each.timing) for each in last().attempts] == [dict] * 3
    torch.compiler.reset()
    fastest(torch.sin, first, second, "eager")(torch.ones(3))
    assert "remembered_in" not in last().attempts[0].engine  # functions have no identity


def test_winner_is_built_here_and_has_the_times_of_the_sandbox(asked: Asked) -> None:
    """Its seconds are those of now; the seconds in the sandbox are a fact."""
    asked.answer = {
        "attempts": [
            written("fake", "not_chosen", "slower", timing=TIMED),
            written("honest", "succeeded", timing=TIMED),
        ],
        "ranking": [1, 0],
        "lasts": True,
        "cpu_seconds": 1.5,
    }
    other = FakeBackend()
    fastest(torch.sin, other, engines.honest)(torch.ones(3))
    slower, winner = last().attempts
    assert (last().chosen, other.compiles) == ("honest", 0)
    assert (slower.status, slower.seconds, slower.timing) == ("not_chosen", 2.0, TIMED)
    assert winner.engine["built_apart"] == {"seconds": 2.0}
    assert winner.timing == TIMED


def test_next_of_the_ranking_serves_where_the_winner_is_refused_here(asked: Asked) -> None:
    """Nothing is measured again, and an engine that ended a sandbox is not built here."""
    asked.answer = {
        "attempts": [
            written("fake_raises", "succeeded", timing=TIMED),
            written("honest", "not_chosen", "slower", timing=TIMED),
        ],
        "ranking": [0, 1],
        "lasts": True,
        "cpu_seconds": 1.5,
    }
    fastest(torch.sin, FakeBackend("raises"), engines.honest)(torch.ones(3))
    assert last().chosen == "honest"
    assert [str(each.status) for each in last().attempts] == ["failed", "succeeded"]


def test_eager_serves_where_it_is_the_fastest(asked: Asked) -> None:
    """No engine is built."""
    backend = FakeBackend()
    slower = written("fake", "not_chosen", "slower", timing=TIMED)
    asked.answer = {"attempts": [slower], "ranking": [], "lasts": True, "cpu_seconds": 1.5}
    fastest(torch.sin, backend)(torch.ones(3))
    assert (last().chosen, backend.compiles) == ("eager", 0)


def test_another_sandbox_goes_on_without_an_engine_that_ended_the_first(asked: Asked) -> None:
    """It is remembered, so that the next program does not try it either."""
    asked.steps = [(0, [])]
    asked.errors = [SandboxRefusal(Status.CRASHED, Reason.CRASHED, "ended")]
    asked.answer = {
        "attempts": [
            written("fake", "skipped", "policy"),
            written("honest", "succeeded", timing=TIMED),
        ],
        "ranking": [1],
        "lasts": True,
        "cpu_seconds": 1.5,
    }
    ended = FakeBackend()
    fastest(torch.sin, ended, engines.honest, timeout=7, memory_limit=100)(torch.ones(3))
    assert asked.barred == [[], [0]]
    assert asked.limits == [Limits(timeout=7.0)] * 2  # memory_limit belongs to isolate
    assert ended.compiles == 0
    assert [str(each.reason) for each in last().attempts] == ["crashed", "None"]


def test_crash_is_remembered(asked: Asked) -> None:
    """Also for a program that turns sandboxes off: the engine is not built in this process."""
    asked.steps = [(0, [])]
    asked.errors = [SandboxRefusal(Status.CRASHED, Reason.CRASHED, "ended")]
    barred = written("honest", "skipped", "policy")
    asked.answer = {"attempts": [barred], "ranking": [], "lasts": True, "cpu_seconds": 1.5}
    for options in ({}, {"isolate": False}):
        torch.compiler.reset()
        fastest(torch.sin, engines.honest, **options)(torch.ones(3))
    assert last().attempts[0].reason == "known_failure"


def test_first_accepted_serves_where_the_measurement_ended_the_sandbox(asked: Asked) -> None:
    """Any of those measured may have ended it; each had run alone before that."""
    tried = [written("fake", "declined", "unsupported_op"), written("honest", "succeeded")]
    asked.steps = [(0, []), (1, tried[:1]), (decide.MEASURING, tried)]
    asked.errors = [SandboxRefusal(Status.CRASHED, Reason.CRASHED, "ended")]
    fastest(torch.sin, FakeBackend(), engines.honest)(torch.ones(3))
    assert last().chosen == "honest"
    assert last().attempts[1].timing == "no: when they were measured, ended"


def test_one_engine_at_most_serves_where_nothing_could_be_measured(asked: Asked) -> None:
    """A later failure is that one's."""
    tried = [written("fake", "succeeded"), written("honest", "succeeded")]
    asked.steps = [(0, []), (1, tried[:1]), (decide.MEASURING, tried)]
    asked.errors = [SandboxRefusal(Status.CRASHED, Reason.CRASHED, "ended")]
    fastest(torch.sin, engines.honest, FakeBackend())(torch.ones(3))
    assert [str(each.status) for each in last().attempts] == ["succeeded", "skipped"]


def test_remembered_winner_is_isolated_if_the_policy_says_so(asked: Asked) -> None:
    """Another machine may have run it."""
    winner = written("honest", "succeeded", timing=TIMED)
    asked.answer = {"attempts": [winner], "ranking": [0], "lasts": True, "cpu_seconds": 1.5}
    for options in ({}, {"isolate": True}):
        torch.compiler.reset()
        fastest(torch.sin, engines.honest, **options)(torch.ones(3))
    assert "remembered_in" in last().attempts[0].timing
    assert "isolated" in last().attempts[0].engine
    assert len(asked.barred) == 2


@SLOW
def test_pass_that_fails_is_not_the_engines_fault() -> None:
    """Its error reaches the user, and no engine is said to have crashed."""
    options = {"passes": [rewrites.Fails()], "on_pass_error": "raise"}
    with pytest.raises(Exception, match="PassError"):
        fastest(torch.sin, engines.honest, **options)(torch.ones(3))
    assert Failure.cache().entries() == []


@pytest.mark.parametrize(
    ("candidate", "options"),
    [
        ({}, {"isolate": False}),
        ({"isolate": False}, {}),
        ({}, {"select": "first"}),
        ({}, {"chain": "auto", "select": "first"}),
        ({"backend": "aot_eager"}, {}),
    ],
    ids=str,
)
def test_no_sandbox_is_started(
    asked: Asked, candidate: dict[str, Any], options: dict[str, Any]
) -> None:
    """If the user turns it off, the first accepted engine serves, or all engines are torch's."""
    x = torch.ones(3)
    f = fastest(torch.sin, {"backend": FakeBackend()} | candidate, **options)
    torch.testing.assert_close(f(x), x.sin())
    assert not asked.barred


@pytest.mark.parametrize("name", ["onnxrt", "openvino", "tvm", "tensorrt"])
def test_engines_with_code_of_their_own_are_not_torchs(name: str) -> None:
    """Dynamo's ``tvm`` too: torch has only the few lines that call it."""
    assert not find_backend(name).comes_with_torch


def test_function_that_a_child_cannot_import_competes(asked: Asked) -> None:
    """All are measured in this process, and the record says why."""
    f = fastest(torch.sin, lambda gm, inputs: engines.honest(gm, inputs))
    f(torch.ones(3))
    (attempt,) = last().attempts
    assert attempt.status in ("succeeded", "not_chosen")
    told = attempt.engine["measured_here"]
    assert told.startswith("the backend '<lambda>' cannot be sent to another process")
    assert not asked.barred


def test_sandbox_needs_memory(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is short, nothing is built beside."""
    monkeypatch.setattr("composer.system.memory.available_memory", lambda: 100 << 20)
    fastest(torch.sin, engines.honest)(torch.ones(3))
    told = last().attempts[0].engine["measured_here"]
    assert told == "a child process may take 1024 MiB of memory, and 100 MiB are available"
    assert not asked.barred


ANSWER = {"attempts": [written("fake", "unavailable", "not_registered")], "ranking": []}


@pytest.mark.parametrize(
    "error",
    [
        None,
        Refusal(Status.DECLINED, Reason.NOT_ISOLATABLE, "no interpreter"),
        SandboxRefusal(Status.CRASHED, Reason.CRASHED, "SIGTERM", by_others=True),
        SandboxRefusal(Status.TIMED_OUT, Reason.TIMEOUT, "never started", by_others=True),
        OSError("no process left"),
    ],
    ids=["unknown there", "no sandbox", "killed by others", "never began", "no process"],
)
def test_trouble_that_is_no_engines_is_no_outcome(error: Exception | None, asked: Asked) -> None:
    """The engines are measured in this process."""
    asked.errors = [error] if error else []
    asked.steps = [(0, [])]
    asked.answer = {**ANSWER, "lasts": True, "cpu_seconds": 1.5}
    backend = FakeBackend()
    fastest(torch.sin, backend)(torch.ones(3))
    assert backend.compiles == 1
    (attempt,) = last().attempts
    assert attempt.status in ("succeeded", "not_chosen")
    assert attempt.engine["measured_here"]
