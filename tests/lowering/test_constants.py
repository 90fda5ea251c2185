"""Constants that compare equal and are not the same: zeros of both signs, 1, 1.0 and True."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # as torch's own users write it
from common import compiled, fault_of, last, upstream
from torch.fx.experimental.proxy_tensor import make_fx

from composer import _torch
from composer.lowering.operators.translations import translator_with

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::composer.errors.FallbackWarning"),
]

NAN = math.nan
X = torch.tensor([1.0, -2.0, 3.0])
MASK = torch.tensor([True, False, True])
INTEGERS = torch.tensor([1, 2, 3])


def same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """True if dtype, numbers and the signs of zeros are the same."""
    if found.dtype != expected.dtype or not torch.allclose(found, expected, 0, 0, equal_nan=True):
        return False
    return not found.is_floating_point() or torch.equal(found.signbit(), expected.signbit())


def check(function: Callable[..., Any], *inputs: torch.Tensor, engine: str) -> None:
    """Compare all results with eager's, bit by bit but for NaN."""
    expected = function(*inputs)
    found = compiled(function, engine, min_coverage=0.0)(*inputs)
    for ours, eager in zip(found, expected, strict=True):
        assert same_bits(ours, eager), (ours, eager)


ZEROS: dict[str, tuple[Any, ...]] = {
    "divisors": (lambda x: (x / 0.0, x / -0.0), X),
    "divisors, the other first": (lambda x: (x / -0.0, x / 0.0), X),
    "divisors in float16": (lambda x: (x / 0.0, x / -0.0), X.half()),
    "factors": (lambda x: (x * 0.0, x * -0.0), X),
    "filled": (lambda x: (torch.full((3,), 0.0) / x, torch.full((3,), -0.0) / x), X),
    "filled alike": (lambda x: (torch.full_like(x, 0.0) / x, torch.full_like(x, -0.0) / x), X),
    "scalars": (lambda x: (x / torch.scalar_tensor(0.0), x / torch.scalar_tensor(-0.0)), X),
    "literals": (lambda x: (x / torch.tensor(0.0), x / torch.tensor(-0.0)), X),
    "chosen": (lambda c: (torch.where(c, -0.0, 0.0), torch.where(c, 0.0, -0.0)), MASK),
    "chosen beside": (lambda c, x: (torch.where(c, x, 0.0), torch.where(c, x, -0.0)), MASK, X),
    "chosen first": (
        lambda c, x: (torch.where(c, -0.0, x), torch.where(c, x.new_full((3,), -0.0), x)),
        *(MASK, X),
    ),
    "masks": (lambda c, x: (x.masked_fill(c, 0.0), x.masked_fill(c, -0.0)), MASK, X),
    "written": (lambda x: (x.clone().fill_(0.0), x.clone().fill_(-0.0)), X),
    "bases": (lambda x: (0.0**x, (-0.0) ** x), X),
    "signs": (lambda x: (x.copysign(0.0), x.copysign(-0.0)), X),
    "ranges": (lambda x: (torch.arange(0.0, 3.0) * x, torch.arange(-0.0, 3.0) * x), X),
}
ZEROS_OF_ONNX_RUNTIME: dict[str, tuple[Any, ...]] = {
    "bounds": (lambda x: (x.clamp(min=0.0), x.clamp(min=-0.0)), X),
    "margins": (lambda x: (F.pad(x, (1, 1)), F.pad(x, (1, 1), value=-0.0)), X),
    "addends": (lambda x: ((-(x - x)) + 0.0, (-(x - x)) + -0.0), X),
}
"""OpenVINO differs here, as docs/reference/engines/openvino.md says."""

NUMBERS: dict[str, tuple[Any, ...]] = {
    "one of three types": (
        lambda x: (x + True, x + 1, x + 1.0, x * True, x * 1, x * 1.0),
        INTEGERS,
    ),
    "one of three types to floats": (lambda x: (x + True, x + 1, x + 1.0, x * True), X),
    "one of three types chosen": (
        lambda c: (torch.where(c, 1, 0), torch.where(c, 1.0, 0.0), torch.where(c, True, False)),
        MASK,
    ),
    "one of three types filled": (
        lambda x: (torch.full((3,), 1) + x, torch.full((3,), 1.0) + x, torch.full((3,), True) & x),
        INTEGERS,
    ),
    "NaN": (lambda x: (x + NAN, torch.where(x > 0, x, NAN), torch.where(x > 0, NAN, x)), X),
    "beyond 2^53": (lambda x: (x + 2**53, x + (2**53 + 1), x * (2**62 + 1)), INTEGERS),
    "beyond 2^53, compared": (lambda x: (x == 2**53 + 1, x > 2**53), INTEGERS + 2**53),
    "beyond 2^53, filled": (
        lambda x: (torch.full((3,), 2**53) + x, torch.full((3,), 2**53 + 1) + x),
        INTEGERS,
    ),
    "beyond 2^53, in float64": (lambda x: (x + 2**53, x + (2**53 + 1), x + 2.0**53), X.double()),
}


@pytest.mark.parametrize("engine", ["onnxrt", "openvino"])
@pytest.mark.parametrize("name", [*ZEROS, *NUMBERS])
@torch.no_grad()
def test_equal_constants_that_differ_stay_apart(name: str, engine: str) -> None:
    """Each call has its own constant, by every engine that reads ONNX."""
    check(*(ZEROS | NUMBERS)[name], engine=engine)


@pytest.mark.parametrize("name", ZEROS_OF_ONNX_RUNTIME)
@torch.no_grad()
def test_zeros_stay_apart_in_onnx_runtime(name: str) -> None:
    """Bounds, margins and addends have the sign that the program gave them."""
    check(*ZEROS_OF_ONNX_RUNTIME[name], engine="onnxrt")


@torch.no_grad()
def test_graphs_that_differ_in_the_sign_of_a_zero_are_two() -> None:
    """Neither the report's key nor the model on disk is the same."""
    for zero in (0.0, -0.0):
        torch.compiler.reset()
        check(lambda x, zero=zero: (x / zero,), X, engine="onnxrt")
        assert last().chosen == "onnxrt"


def two_zeros(x: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.where(c, 1.0, x.sin() * 0.0), torch.where(c, 1.0, x.sin() * -0.0)


_calls = itertools.count()


@torch.library.custom_op("composer_tests::number_of_call", mutates_args=())
def number_of_call(size: int) -> torch.Tensor:
    """Return another number at each call, as an operator that reads a schedule does."""
    return torch.full((size,), float(next(_calls)))


number_of_call.register_fake(lambda size: torch.empty(size))


@pytest.mark.parametrize("engine", ["onnxrt", "openvino"])
@torch.no_grad()
def test_operator_of_a_program_runs_at_each_call(engine: str) -> None:
    """Although it has no operands that change."""
    f = compiled(lambda x: x.exp() * 2 + number_of_call(3), engine, min_coverage=0.0)
    first, second, third = (f(torch.zeros(3))[0].item() for _ in range(3))
    assert first < second < third
    assert last().chosen == engine


def test_zeros_of_both_signs_are_kept_apart_in_training() -> None:
    """The forward of a training graph has both."""
    check(two_zeros, X.clone().requires_grad_(), MASK, engine="onnxrt")
    assert last().chosen == "onnxrt"


@upstream
def test_the_partitioner_takes_zeros_of_both_signs_for_one() -> None:
    """When this fails, ``_torch.aot._repetitions_kept`` is no longer needed."""
    zeros = torch.compile(two_zeros, backend="aot_eager")(X.clone().requires_grad_(), MASK)
    with fault_of("torch"):
        assert same_bits(*zeros)


@upstream
@torch.no_grad()
def test_the_exporter_takes_zeros_of_both_signs_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """When this fails, ``OnnxTranslator._constants_kept_by_text`` is no longer needed."""
    exporter = _torch.exporter.OnnxTranslator
    monkeypatch.setattr(exporter, "_constants_kept_by_text", lambda self: contextlib.nullcontext())
    gm = make_fx(ZEROS["divisors"][0], tracing_mode="fake")(X)
    model = translator_with({}).translate(gm)
    with fault_of("torch"):
        assert [node.op_type for node in model.graph] == ["Constant", "Div", "Div"]
