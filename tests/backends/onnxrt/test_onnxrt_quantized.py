"""Quantized numbers in ONNX Runtime: none of its fusions rounds otherwise than the program."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.ao.quantization.fx._decomposed  # registers the operators
import torch.nn.functional as F  # noqa: N812  # as torch's own users write it
from common import compiled, fault_of, last, upstream
from torch import Tensor

from composer.backends.onnxrt import session
from composer.lowering.operators import operators

pytestmark = pytest.mark.slow

ops = torch.ops.quantized_decomposed
IMAGES = torch.randn(2, 16, 28, 28, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.no_grad():
        yield


def rounded(x: Tensor, scale: float, zero: int = 0, least: int = -128, most: int = 127) -> Tensor:
    """The multiples of a scale that int8 holds, or a part of it."""
    how = scale, zero, least, most, torch.int8
    return ops.dequantize_per_tensor(ops.quantize_per_tensor(x, *how), *how)


def check(function: Callable[..., Any], *inputs: Tensor) -> None:
    """Compare with eager, exactly: one step of a scale is far more than rounding."""
    found = compiled(function, "onnxrt")(*inputs)
    assert last().attempts[0].coverage == 1.0
    assert torch.equal(found, function(*inputs))


def twice(x: Tensor) -> Tensor:
    return rounded(rounded(rounded(x, 0.02), 0.3), 0.02)


def to_a_part(x: Tensor) -> Tensor:
    return rounded(x, 0.05, 0, -8, 7)


def attend(x: Tensor) -> Tensor:
    return rounded(rounded(x, 0.0471).softmax(1), 0.0077)


AROUND: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "softmax": (lambda x: x.softmax(-1), 0.0077),
    "softmax of channels": (lambda x: x.softmax(1), 0.0077),
    "average pool": (lambda x: F.avg_pool2d(x, 3, 2), 0.0213),
    "padded average pool": (lambda x: F.avg_pool2d(x, 3, 1, 1), 0.0213),
    "average of all": (lambda x: F.adaptive_avg_pool2d(x, 1), 0.0039),
    "average of images": (lambda x: x.mean((-1, -2)), 0.0039),
    "maximum pool": (lambda x: F.max_pool2d(x, 2), 0.0317),
    "sigmoid": (torch.sigmoid, 0.0077),
    "leaky ReLU": (lambda x: F.leaky_relu(x, 0.1), 0.0317),
    "sum": (lambda x: x + x.flip(-1), 0.0613),
}


@pytest.mark.parametrize("name", AROUND)
def test_between_two_roundings_operators_are_eagers(name: str) -> None:
    """Integer kernels that ONNX Runtime makes of the three give the same integers."""
    function, scale = AROUND[name]
    check(lambda x: rounded(function(rounded(x, 0.0471, 3)), scale, -5), IMAGES)


@pytest.mark.parametrize("function", [twice, to_a_part, attend])
def test_each_rounding_is_made(function: Callable[[Tensor], Tensor]) -> None:
    """Larger steps between smaller ones, a part of the integers, and a softmax."""
    check(function, IMAGES)


@upstream
@pytest.mark.parametrize("function", [twice, to_a_part, attend])
def test_roundings_are_still_left_out(function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """When this fails, ``_QUANTIZING``, ``quantized`` or ``compute_softmax_in_floats`` can go."""
    operator = ops.quantize_per_tensor.default
    monkeypatch.setattr(session, "_QUANTIZING", {})
    monkeypatch.setattr(session, "compute_softmax_in_floats", lambda model: None)
    monkeypatch.delitem(operators(), operator)
    package = "onnxscript" if function is to_a_part else "onnxruntime"
    with fault_of(package), pytest.raises(AssertionError):
        check(function, IMAGES)
