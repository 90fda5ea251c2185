"""Quantized numbers in ONNX Runtime: none of its fusions rounds otherwise than the program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.ao.quantization.fx._decomposed  # registers the operators
import torch.nn.functional as F  # noqa: N812  # as torch's own users write it
from common import compiled, fault_of, last, upstream
from torch import Tensor, nn

from composer import _torch
from composer.backends.onnxrt import session
from composer.lowering.operators import operators

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("inference")]

ops = torch.ops.quantized_decomposed
IMAGES = torch.randn(2, 16, 28, 28, generator=torch.Generator().manual_seed(0))


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


UINT8, INT8 = (0.02, 7, 0, 255, torch.uint8), (0.02, 3, -128, 127, torch.int8)


class Layer(nn.Module):
    """A linear layer or a convolution, as PT2E writes it; all weights are at the ends of int8.

    Args:
        kind: How the layer's input is quantized.
        shape: The shape of the weight.
        bias: True for a layer with a bias.
    """

    def __init__(self, kind: tuple[Any, ...], shape: tuple[int, ...], *, bias: bool) -> None:
        super().__init__()
        weight = torch.full(shape, 127, dtype=torch.int8)
        weight[::2] = -128
        self.kind = kind
        self.register_buffer("weight", weight)
        self.register_buffer("scales", torch.linspace(0.01, 0.1, shape[0]))
        self.register_buffer("zeros", torch.zeros(shape[0], dtype=torch.int64))
        self.bias = nn.Parameter(torch.ones(shape[0])) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        x = ops.dequantize_per_tensor(ops.quantize_per_tensor(x, *self.kind), *self.kind)
        given = self.weight, self.scales, self.zeros, 0, -128, 127, torch.int8
        weight = ops.dequantize_per_channel(*given)
        if weight.dim() == 2:
            return F.linear(x, weight, self.bias)
        y = F.conv2d(x, weight, self.bias)
        how = (20.0, *self.kind[1:])
        return ops.dequantize_per_tensor(ops.quantize_per_tensor(y, *how), *how)


class Shifted(nn.Module):
    """A product of quantized numbers, to which one number is added."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randint(-128, 127, (24, 100), dtype=torch.int8))
        self.number = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        x = ops.dequantize_per_tensor(ops.quantize_per_tensor(x, *UINT8), *UINT8)
        given = self.weight, torch.ones(24), torch.zeros(24).long(), 0, -128, 127, torch.int8
        return torch.addmm(self.number, x, ops.dequantize_per_channel(*given).t())


def test_a_bias_for_all_columns_is_added() -> None:
    """ONNX Runtime's integer product takes a bias with a number for each column, and no other."""
    model, x = Shifted(), torch.randn(16, 100)
    found = compiled(model, "onnxrt")(x)
    assert last().chosen == "onnxrt"
    torch.testing.assert_close(found, model(x), rtol=1e-5, atol=1e-2)


def run_at_the_ends(layer: Layer, *sizes: int) -> tuple[Tensor, Tensor, int]:
    """The layer's result by ONNX Runtime and in eager, and the number of products in int8."""
    x = torch.full(sizes, 9.0)
    x[0] = -9.0
    found = compiled(layer, "onnxrt")(x)
    engine = last().attempts[0].engine
    assert last().chosen == "onnxrt"
    return found, layer(x), engine["products_in_int8"]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sizes", [(16, 100), (2, 8, 100)])
def test_a_linear_layer_is_computed_in_eight_bits(bias: bool, sizes: tuple[int, ...]) -> None:
    """With a bias or without one, and sums of the largest numbers do not saturate."""
    found, expected, products = run_at_the_ends(Layer(UINT8, (24, 100), bias=bias), *sizes)
    assert products == 1
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-2)


@pytest.mark.parametrize("kind", [UINT8, INT8], ids=["uint8", "int8"])
def test_a_convolution_is_computed_in_eight_bits(kind: tuple[Any, ...]) -> None:
    """Its integers are eager's."""
    layer = Layer(kind, (16, 16, 3, 3), bias=True)
    found, expected, products = run_at_the_ends(layer, 2, 16, 8, 8)
    assert products == 1
    assert torch.equal(found, expected)


@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer_of_int8_is_right(bias: bool) -> None:
    """ONNX Runtime has no kernel that adds the bias; then it computes in floats."""
    found, expected, products = run_at_the_ends(Layer(INT8, (24, 100), bias=bias), 16, 100)
    assert products == (0 if bias else 1)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-2)


@pytest.mark.parametrize("first", [UINT8, INT8], ids=["uint8", "int8"])
@pytest.mark.parametrize("second", [UINT8, INT8], ids=["uint8", "int8"])
def test_a_product_of_two_activations_is_right(first: Any, second: Any) -> None:
    """Neither saturates, nor is there no kernel for their dtypes."""

    def multiply(x: Tensor, y: Tensor) -> Tensor:
        pairs = ((x, first), (y, second))
        x, y = (ops.dequantize_per_tensor(ops.quantize_per_tensor(v, *k), *k) for v, k in pairs)
        return x @ y

    x, y = torch.full((8, 100), 9.0), torch.full((100, 8), 9.0)
    found = compiled(multiply, "onnxrt")(x, y)
    assert last().chosen == "onnxrt"
    torch.testing.assert_close(found, multiply(x, y))


class Product(nn.Module):
    """A product of integers with a weight."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight)

    def forward(self, x: Tensor) -> Tensor:
        return torch._int_mm(x, self.weight)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
@pytest.mark.parametrize("is_weight", [True, False])
def test_integer_products_are_eagers(dtype: torch.dtype, is_weight: bool) -> None:
    """At the ends of the range, of a weight and of two inputs."""
    a = torch.full((5, 64), torch.iinfo(dtype).max, dtype=dtype)
    b = torch.full((64, 7), 127, dtype=torch.int8)
    b[:, ::2] = -128
    if is_weight:
        found = compiled(Product(b), "onnxrt")(a)
    else:
        found = compiled(lambda a, b: torch._int_mm(a, b), "onnxrt")(a, b)
    assert last().attempts[0].coverage == 1.0
    assert torch.equal(found, torch._int_mm(a, b))


@upstream
@pytest.mark.skipif(_torch.processor.multiplies_int8(), reason="the processor has VNNI")
def test_sums_of_unsigned_products_still_saturate(monkeypatch: pytest.MonkeyPatch) -> None:
    """When this fails, ``session.x64quantprecision`` and ``unsigned_product`` can go."""
    monkeypatch.setitem(session._QUANTIZING, "session.x64quantprecision", "0")
    layer = Layer(UINT8, (16, 16, 3, 3), bias=True)
    found, expected, _ = run_at_the_ends(layer, 2, 16, 8, 8)
    with fault_of("onnxruntime"):
        assert not torch.equal(found, expected)


def test_a_weight_without_zero_points_is_right() -> None:
    """Where ONNX Runtime reads weights in uint8, it would add one for all channels, and fail."""
    layer = Layer(UINT8, (24, 100), bias=True)

    def weight_only(x: Tensor) -> Tensor:
        given = layer.weight, layer.scales, None, 0, -128, 127, torch.int8
        return F.linear(x, ops.dequantize_per_channel(*given), layer.bias)

    x = torch.randn(16, 100)
    found = compiled(weight_only, "onnxrt")(x)
    assert last().chosen == "onnxrt"
    torch.testing.assert_close(found, weight_only(x), rtol=1e-4, atol=1e-4)


class Repeated(Layer):
    """A layer that is applied twice, between roundings."""

    def forward(self, x: Tensor) -> Tensor:
        how = (20.0, *self.kind[1:])
        near = ops.dequantize_per_tensor(ops.quantize_per_tensor(super().forward(x), *how), *how)
        return super().forward(near)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(16, 16), (16, 16, 3, 3)], ids=["linear", "convolution"])
@pytest.mark.parametrize("kind", [UINT8, INT8], ids=["uint8", "int8"])
def test_a_weight_of_two_products_is_right(
    kind: tuple[Any, ...], shape: tuple[int, ...], bias: bool
) -> None:
    """ONNX Runtime would fail at the second, where it reads weights in uint8."""
    layer = Repeated(kind, shape, bias=bias)
    x = torch.randn(2, 16, *(8 for _ in shape[2:]))
    found = compiled(layer, "onnxrt")(x)
    assert last().chosen == "onnxrt"
    torch.testing.assert_close(found, layer(x), rtol=1e-4, atol=1e-2)
