"""What ONNX Runtime refuses although it can be said in ONNX: asked call by call, the rest taken."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # as torch's own users write it
from common import compiled, last

import composer
from composer.backends import onnxrt
from composer.errors import Refusal
from composer.lowering.engine import ModelRefused
from composer.records import Reason, Status

pytestmark = pytest.mark.slow

PARTITION: Any = importlib.import_module("composer.lowering.partition.by_trial")

INTS = torch.arange(-6, 6, dtype=torch.int32).reshape(1, 3, 4)
BOOLS = INTS % 3 == 0
DOUBLES = INTS.double()

NO_KERNEL = "ONNX Runtime has no kernel for "
REFUSES = "ONNX Runtime refuses it: "

CASES: dict[str, tuple[Callable[..., Any], torch.Tensor, str]] = {
    "sort of bool": (lambda x: torch.sort(x, stable=True), BOOLS, REFUSES),
    "choice among int16": (
        lambda x: torch.where(x > 0, x, 0),
        INTS.short(),
        NO_KERNEL + "bool, int16",
    ),
    "pool of int32": (lambda x: F.max_pool2d(x, 2), INTS, REFUSES),
    "shuffle of int32": (
        lambda x: F.pixel_shuffle(x, 2),
        INTS.reshape(4, 3, 1),
        NO_KERNEL + "int32)",
    ),
    "product of int32": (lambda x: torch.addmm(x, x, x), INTS[0, :, :3], NO_KERNEL + "int32"),
    "convolution of float64": (
        lambda x: F.conv1d(x, x),
        DOUBLES,
        NO_KERNEL + "float64",
    ),
    "pool of float64": (lambda x: F.avg_pool1d(x, 2), DOUBLES, NO_KERNEL + "float64"),
    "error function of float64": (torch.erf, DOUBLES, NO_KERNEL + "float64"),
    "what the exporter fails on": (
        lambda x: torch.repeat_interleave(x[0, :, 0], x[0, :, 3].clamp(0, 2), output_size=3),
        INTS.long(),
        "the exporter fails: ",
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_one_refused_call_leaves_the_rest_to_the_engine(case) -> None:
    """It runs in place; the record has its operator, the reason, and where it stands."""
    refused, x, why = case

    def f(x, w):
        return refused(x), torch.relu(w @ w) + 1

    w = torch.randn(4, 4)
    with torch.no_grad():
        torch.testing.assert_close(compiled(f, "onnxrt")(x, w), f(x, w))
    (attempt,) = last().attempts
    assert attempt.status == "succeeded"
    (line,) = attempt.engine["left_to_torch"]
    assert f" ({why}" in line
    assert "test_refused.py:" in line


@torch.no_grad()
def test_single_calls_around_a_refused_one_are_kept_on_disk() -> None:
    """They were asked alone before, which keeps nothing."""

    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.logical_not(torch.sort(torch.logical_not(x), stable=True)[0])

    for artefacts in ("kept", "graph reused"):
        torch.compiler.reset()
        composer.reset()
        assert torch.equal(compiled(f, "onnxrt", min_coverage=0.0)(BOOLS), f(BOOLS))
        assert last().attempts[0].engine["artefacts"] == artefacts


def test_many_refused_calls_are_found_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind of call is asked once, and one cut leaves all of them out."""
    models: list[str] = []
    original = PARTITION.to_onnx

    def counted(region: Any, *more: Any, **named: Any) -> Any:
        models.append(" ".join(node.name for node in region.gm.graph.nodes))
        return original(region, *more, **named)

    def f(x, w):
        for _ in range(10):
            x = torch.erf(x + 1) * torch.tan(x)
        return x, torch.relu(w @ w)

    monkeypatch.setattr(PARTITION, "to_onnx", counted)
    w = torch.randn(4, 4)
    with torch.no_grad():
        torch.testing.assert_close(compiled(f, "onnxrt")(DOUBLES, w), f(DOUBLES, w))
    (attempt,) = last().attempts
    assert [line.partition(" at ")[0] for line in attempt.engine["left_to_torch"]] == [
        f"aten.{name}.default ({NO_KERNEL}float64)" for name in ("erf", "tan")
    ]
    whole, kinds, regions = 1, 6, 11
    assert len(models) == whole + kinds + regions


def test_results_of_several_parts_stay_with_the_engine() -> None:
    """What only picks one of them is nothing to ask about."""

    def f(x, y):
        values, places = torch.sort(x, stable=True)
        return torch.erf(y) * values, places + 1

    x = torch.randn(3, 4)
    with torch.no_grad():
        torch.testing.assert_close(compiled(f, "onnxrt")(x, DOUBLES), f(x, DOUBLES))
    (attempt,) = last().attempts
    assert attempt.coverage == 3 / 4
    (line,) = attempt.engine["left_to_torch"]
    assert line.startswith("aten.erf.default ")


def test_sizes_may_change_around_a_refused_call() -> None:
    """The call is asked for with the symbols of the graph."""

    def f(x, w):
        return torch.erf(x[: x.shape[0] - 1]) + 1, torch.relu(w @ w)

    w = torch.randn(4, 4)
    run = compiled(f, "onnxrt", dynamic=True)
    with torch.no_grad():
        for x in (torch.randn(5, 2).double(), torch.randn(7, 3).double()):
            torch.testing.assert_close(run(x, w), f(x, w))
    assert last().chosen == "onnxrt"
    assert [line.partition(" at ")[0] for line in last().attempts[0].engine["left_to_torch"]] == [
        f"aten.erf.default ({NO_KERNEL}float64)"
    ]


def test_a_refused_call_in_training_stays_torchs() -> None:
    """In the forward and in the backward, with eager's gradients."""
    x, w = torch.randn(4, 4).double().requires_grad_(), torch.randn(4, 4).double().requires_grad_()

    def f(x, w):
        return (F.avg_pool1d(torch.erf(x @ w)[None], 2) * 2).square().sum()

    run = compiled(f, "onnxrt")
    found, expected = (torch.autograd.grad(each(x, w), (x, w)) for each in (run, f))
    torch.testing.assert_close(found, expected)
    assert last().chosen == "onnxrt"
    left = " ".join(last().attempts[0].engine["left_to_torch"])
    assert f"aten.erf.default ({NO_KERNEL}float64)" in left


def test_a_region_refused_for_no_call_of_its_own_keeps_its_reason(monkeypatch) -> None:
    """Every call is taken by itself: there is nothing to leave out, and nothing is tried again."""
    asked: list[int] = []
    original = onnxrt.load

    def together(region: Any, *args: Any) -> Any:
        asked.append(len(region.graph.model.graph.node))
        if asked[-1] > 1:
            raise ModelRefused(Status.FAILED, Reason.BUILD_FAILED, "not these two together")
        return original(region, *args)

    monkeypatch.setattr(onnxrt, "load", together)
    with torch.no_grad():
        compiled(lambda x: torch.relu(x @ x), "onnxrt")(torch.randn(3, 3))
    (attempt,) = last().attempts
    assert (attempt.reason, attempt.message) == ("build_failed", "not these two together")
    assert asked == [2, 1, 1]


def test_what_is_no_calls_fault_is_not_asked_call_by_call(monkeypatch) -> None:
    """A provider that did not arrive would be missing for each of them."""
    asked: list[int] = []

    def missing(*args: Any) -> Any:
        asked.append(1)
        raise Refusal(Status.FAILED, Reason.WRONG_PROVIDER, "not here")

    monkeypatch.setattr(onnxrt, "load", missing)
    with torch.no_grad():
        compiled(lambda x: torch.relu(x @ x), "onnxrt")(torch.randn(3, 3))
    assert last().attempts[0].reason == "wrong_provider"
    assert asked == [1]
