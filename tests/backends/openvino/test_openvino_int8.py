"""``precision = "int8"`` on OpenVINO: weights that few rows are multiplied by have eight bits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from common import compiled, last
from spies import error
from torch import nn

pytest.importorskip("openvino")

PRECISION = {"mode": "int8", "max_error": 0.05}


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).eval()


@pytest.mark.parametrize("shape", [(1, 64), (1, 1, 64), (4, 64)])
def test_weights_are_read_in_eight_bits(shape: tuple[int, ...]) -> None:
    """The model that OpenVINO runs says so. Numbers hold on other inputs; weights may change."""
    model = perceptron()
    f = compiled(model, "openvino", precision=PRECISION, verify="compile")
    for _ in range(3):
        x = torch.randn(shape)
        assert 0 < error(f(x), model(x)) < 0.05
    (attempt,) = last().attempts
    assert (attempt.precision, attempt.coverage) == ("int8", 1.0)
    assert attempt.engine["weights_in_int8"] == 2
    before = f(x)
    for each in model.parameters():
        each.mul_(-2)
    assert error(f(x), model(x)) < 0.05
    assert error(f(x), before) > 0.1


def test_many_rows_are_multiplied_in_float32() -> None:
    """Their products take longer with weights of eight bits."""
    model, x = perceptron(), torch.randn(16, 64)
    got = compiled(model, "openvino", precision=PRECISION)(x)
    torch.testing.assert_close(got, model(x))
    (attempt,) = last().attempts
    assert attempt.precision == "fp32"
    assert "few rows" in attempt.engine["not_in_int8"]
    assert "weights_in_int8" not in attempt.engine


def test_columns_of_a_weight_have_a_scale_each() -> None:
    """As of GPT-2's layers, which multiply by a matrix that is not transposed."""
    weight, bias = nn.Parameter(torch.randn(64, 32)), nn.Parameter(torch.randn(32))
    weight *= 10.0 ** torch.linspace(-3, 3, 32)
    x = torch.randn(2, 64)
    expected = torch.addmm(bias, x, weight)
    got = compiled(lambda x: torch.addmm(bias, x, weight), "openvino", precision=PRECISION)(x)
    assert last().attempts[0].engine["weights_in_int8"] == 1
    assert ((got - expected).abs().amax(0) / expected.abs().amax(0)).max() < 0.05
