"""``verify = { retry = true }``: an engine whose numbers are off is built once more, stricter."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import sandboxes
import torch
from common import compiled, last
from spies import layers
from torch import Tensor

from composer import _torch
from composer.backends import find_backend
from composer.backends.base import Backend, BuildRequest
from composer.system.subprocesses import Limits

decide = importlib.import_module("composer.chain.sandbox.decide")

RETRIES = {"when": "compile", "retry": True}


class Rough(Backend):
    """Is off by as much as its option says, which can be as little as ``least``."""

    least = 0.0

    def check_options(self, options: Mapping[str, Any]) -> None:
        assert options.keys() <= {"off", "other"}

    def stricter(self, options: Mapping[str, Any]) -> dict[str, Any] | None:
        return None if options.get("off") == self.least else {**options, "off": self.least}

    def build(self, request: BuildRequest) -> Callable[..., Any]:
        off = request.options.get("off", 1.0)
        return lambda *args: tuple(each + off for each in request.gm(*args))


class AlwaysRough(Rough):
    least = 0.5


def double(x: Tensor) -> Tensor:
    return x.sin() * 2


def test_engine_that_is_off_serves_with_stricter_settings() -> None:
    """The record says which settings held, and why they were needed."""
    x = torch.randn(4)
    candidate = {"backend": Rough, "options": {"other": 1}}
    torch.testing.assert_close(compiled(double, candidate, verify=RETRIES)(x), double(x))
    (attempt,) = last().attempts
    assert (attempt.status, attempt.options) == ("succeeded", {"other": 1})
    assert attempt.engine["stricter"] == {"off": 0.0}
    assert "off" in attempt.engine["retried_after"]


@pytest.mark.parametrize(
    ("engine", "options", "verify", "tried"),
    [
        (Rough, {}, "compile", None),
        (Rough, {"off": 0.0}, RETRIES, None),
        (AlwaysRough, {}, RETRIES, {"off": 0.5}),
        (AlwaysRough, {"off": 0.5}, RETRIES, None),
    ],
    ids=["not asked for", "right at once", "off again", "strict already"],
)
def test_it_is_tried_once_where_that_can_help(
    engine: type[Rough], options: dict[str, Any], verify: Any, tried: Any
) -> None:
    """Numbers that are off are never served."""
    x = torch.randn(4)
    candidate = {"backend": engine, "options": options}
    torch.testing.assert_close(compiled(double, candidate, verify=verify)(x), double(x))
    (attempt,) = last().attempts[:1]
    assert attempt.engine.get("stricter") == tried
    assert attempt.reason == (None if options == {"off": 0.0} else "numeric_mismatch")


def test_other_failures_are_not_tried_again() -> None:
    """A stricter setting is no remedy for an engine that raises."""
    built: list[Any] = []

    class Raises(Rough):
        def build(self, request: BuildRequest) -> Callable[..., Any]:
            built.append(request.options)
            raise RuntimeError("no such kernel")

    x = torch.randn(4)
    torch.testing.assert_close(compiled(double, Raises, verify=RETRIES)(x), double(x))
    assert (last().attempts[0].reason, built) == ("build_failed", [{}])


def test_low_precision_has_float32_as_its_second_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """``precision = "auto"`` goes on to the same engine in float32, which may be stricter then."""
    monkeypatch.setattr(_torch.processor, "multiplies_bf16", lambda: True)
    model, x = layers(), torch.randn(4, 32)
    with torch.no_grad():
        f = compiled(model, Rough, verify=RETRIES, precision="auto")
        torch.testing.assert_close(f(x), model(x))
    low, full = last().attempts
    assert (low.precision, low.status, "stricter" in low.engine) == ("bf16", "rejected", False)
    assert (full.precision, full.engine["stricter"]) == ("fp32", {"off": 0.0})


def test_fastest_measures_the_engine_as_it_serves() -> None:
    """The settings that held are those that were measured."""
    x = torch.randn(4)
    f = compiled(double, Rough, verify=RETRIES, select="fastest")
    torch.testing.assert_close(f(x), double(x))
    assert last().attempts[0].engine["stricter"] == {"off": 0.0}


def test_each_build_has_its_own_timeout_in_a_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sandbox says when one begins, and the limit of time counts from then on."""
    steps: list[tuple[int, float | None]] = []
    hear = decide._Deciding._hear

    def heard(deciding: Any, place: int, *tried: Any) -> Limits:
        limits = hear(deciding, place, *tried)
        steps.append((place, limits.timeout))
        return limits

    monkeypatch.setattr(decide._Deciding, "_hear", heard)
    monkeypatch.setattr(decide.subprocesses, "ask", sandboxes.ask)
    options = {"chain": [Rough], "verify": RETRIES, "select": "fastest", "timeout": 100}
    torch.compile(double, backend="composer", options=options)(torch.randn(4))
    assert last().attempts[0].engine["stricter"] == {"off": 0.0}
    assert steps == [(0, 100)] * 3 + [(decide.MEASURING, None)]


@pytest.mark.parametrize("name", ["onnxrt", "openvino", "inductor"])
def test_engines_take_their_stricter_settings(name: str) -> None:
    """They accept them, compute right with them, and have nothing stricter."""
    backend = find_backend(name)
    options = backend.stricter({})
    assert options
    assert backend.stricter(options) is None
    backend.check_options(options)
    x = torch.randn(4, 8)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 2))
    with torch.no_grad():
        f = compiled(model, {"backend": name, "options": options}, verify="compile")
        torch.testing.assert_close(f(x), model(x))
    attempt = last().attempts[0]
    if attempt.status == "unavailable":
        pytest.skip(attempt.message)
    assert attempt.status == "succeeded", attempt.message
