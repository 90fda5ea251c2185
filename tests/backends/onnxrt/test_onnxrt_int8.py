"""``precision = "int8"`` on ONNX Runtime: products with weights are computed in eight bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import onnx
import pytest
import torch
from common import compiled, last
from spies import error
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from composer import _torch
from composer.backends.base import Backend, Build, BuildRequest
from composer.backends.onnxrt import session

pytestmark = pytest.mark.slow

PRECISION = {"mode": "int8", "max_error": 0.05}


class Layer(nn.Module):
    """A layer of BERT: attention and two linear layers, with norms after the sums."""

    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.first, self.second = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in self.qkv)
        seen = scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = self.norms[0](x + self.out(seen))
        result: Tensor = self.norms[1](x + self.second(gelu(self.first(x))))
        return result


def in_eager(_: Backend, request: BuildRequest) -> Build:
    """Build what runs a graph in eager."""
    run = _torch.dynamo.lookup_backend("aot_eager")
    return Build(run(request.gm, request.example_inputs))


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))


def bert() -> nn.Module:
    return nn.Sequential(Layer(), Layer())


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


@pytest.mark.parametrize(("make", "products"), [(perceptron, 2), (bert, 12)])
def test_a_model_is_multiplied_in_eight_bits(make: Any, products: int) -> None:
    """All products with a weight are; numbers hold on other inputs, and weights may change."""
    model = make().eval()
    f = compiled(model, "onnxrt", precision=PRECISION, verify="compile")
    for _ in range(2):
        x = torch.randn(2, 16, 64)
        assert 0 < error(f(x), model(x)) < 0.05
    (attempt,) = last().attempts
    assert (attempt.precision, attempt.coverage) == ("int8", 1.0)
    assert attempt.engine["products_in_int8"] == products
    assert attempt.engine["keeps_nan"] is False
    before = f(x)
    for each in model.parameters():
        each.mul_(-2)
    assert error(f(x), model(x)) < 0.05
    assert error(f(x), before) > 0.1


def test_sums_of_the_largest_numbers_do_not_saturate() -> None:
    """All weights and activations are at the ends of their ranges, and so are exact."""
    model = nn.Linear(128, 24)
    model.weight.fill_(1.0)
    model.weight[::2] = -1.0
    x = torch.full((4, 128), 255.0)
    x[:, 0] = 0.0
    got = compiled(model, "onnxrt", precision=PRECISION)(x)
    assert last().attempts[0].engine["products_in_int8"] == 1
    torch.testing.assert_close(got, model(x), rtol=1e-5, atol=1e-2)


@pytest.mark.parametrize("dynamic", [True, False])
def test_integers_are_those_of_the_graph_in_eager(dynamic: bool) -> None:
    """With sizes that are known only at a call as well."""
    model, x = perceptron(), torch.randn(6, 64)
    mine = compiled(model, "onnxrt", precision=PRECISION, dynamic=dynamic)
    got = mine(x)
    assert last().attempts[0].engine["products_in_int8"] == 2
    Integers = type("Integers", (Backend,), {"gains_by_int8": "products", "build": in_eager})  # noqa: N806
    torch.compiler.reset()
    torch.testing.assert_close(got, compiled(model, Integers, precision=PRECISION)(x))
    x = torch.randn(3, 64)
    assert error(mine(x), model(x)) < 0.05


def test_an_activation_is_quantized_by_one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """``DynamicQuantizeLinear``, and none of the steps that PT2E's operators stand for."""
    models: list[onnx.ModelProto] = []
    use = session._use_own_operators
    spied: Any = lambda model, providers: (use(model, providers), models.append(model))  # noqa: E731
    monkeypatch.setattr(session, "_use_own_operators", spied)
    compiled(perceptron(), "onnxrt", precision=PRECISION)(torch.randn(4, 64))
    kinds = [node.op_type for node in models[-1].graph.node]
    assert kinds.count("DynamicQuantizeLinear") == kinds.count("MatMulIntegerToFloat") == 2
    assert not {"QuantizeLinear", "DequantizeLinear", "Round", "ReduceMax"} & set(kinds)


@pytest.mark.parametrize("case", ["both signs", "one sign", "zeros"])
def test_scales_that_are_chosen_at_a_call_are_eagers(case: str) -> None:
    """ONNX Runtime's kernel chooses scale, zero point and integers as eager does."""
    _torch.operators.load_quantizing()
    ops = torch.ops.quantized_decomposed
    least = torch.finfo(torch.float32).tiny

    def quantize(x: Tensor) -> tuple[Tensor, ...]:
        scale, zero = ops.choose_qparams.tensor(x, 0, 255, least, torch.uint8)
        how = scale, zero, 0, 255, torch.uint8
        integers = ops.quantize_per_tensor.tensor(x, *how)
        return integers, ops.dequantize_per_tensor.tensor(integers, *how)

    x = torch.randn(8, 32)
    x = {"both signs": x, "one sign": x.abs() + 1, "zeros": 0 * x}[case]
    found = compiled(quantize, "onnxrt")(x)
    assert last().attempts[0].coverage == 1.0
    for mine, eagers in zip(found, quantize(x), strict=True):
        torch.testing.assert_close(mine, eagers, rtol=1e-6, atol=1e-6)


def test_a_child_process_builds_it_first() -> None:
    """The graph arrives there, with operators that torch loads only when they are needed."""
    model, x = perceptron(), torch.randn(4, 64)
    got = compiled(model, "onnxrt", precision=PRECISION, isolate=True)(x)
    assert 0 < error(got, model(x)) < 0.05
    assert "isolated" in last().attempts[0].engine


def test_inductor_keeps_float32_and_says_so() -> None:
    """It would compute the integers in floats."""
    model, x = perceptron(), torch.randn(4, 64)
    got = compiled(model, "inductor", precision="int8", verify="compile")(x)
    torch.testing.assert_close(got, model(x))
    assert last().chosen == "inductor"
    assert "no kernels that are faster" in last().attempts[0].engine["not_in_int8"]
