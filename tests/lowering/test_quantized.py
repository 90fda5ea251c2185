"""Models that torchao quantized: their weights are bound, and the numbers are those of eager."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from common import compiled, last
from torch import nn

pytest.importorskip("torchao")
from torchao.kernel import intmm
from torchao.quantization import (
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    PerGroup,
    quantize_,
)
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

pytestmark = pytest.mark.slow

X = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))

CONFIGS: dict[str, Callable[[], Any]] = {
    "int8 weights": Int8WeightOnlyConfig,
    "int8": Int8DynamicActivationInt8WeightConfig,
    "int4 weights in groups": lambda: IntxWeightOnlyConfig(torch.int4, PerGroup(32)),
}


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    """Leave Inductor's settings as they were, which torchao changes for the whole process."""
    settings = torch._inductor.config.get_config_copy()
    with torch.no_grad(), torch._inductor.config.patch(settings):
        yield


def quantized(config: Any) -> nn.Sequential:
    """Two linear layers whose weights torchao quantized."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 32)).eval()
    quantize_(model, config)
    return model


@pytest.mark.parametrize("engine", ["onnxrt", "openvino"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_with_quantized_weights_runs(name: str, engine: str) -> None:
    """An engine computes all of it, and its numbers are those of the quantized model in eager."""
    pytest.importorskip(engine.replace("onnxrt", "onnxruntime"))
    model = quantized(CONFIGS[name]())
    found = compiled(model, engine)(X)
    assert last().attempts[0].coverage == 1.0, last().attempts[0].engine["left_to_torch"]
    torch.testing.assert_close(found, model(X))


def static() -> nn.Module:
    """The layers quantized by PT2E: the scales of activations are constants of the graph."""
    return by_pt2e(is_dynamic=False)


def dynamic() -> nn.Module:
    """The layers quantized by PT2E: the scales of activations are computed at each call."""
    return by_pt2e(is_dynamic=True)


def by_pt2e(*, is_dynamic: bool) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 32)).eval()
    quantizer = x86.X86InductorQuantizer()
    quantizer.set_global(x86.get_default_x86_inductor_quantization_config(is_dynamic=is_dynamic))
    prepared = prepare_pt2e(torch.export.export(model, (X,)).module(), quantizer)
    prepared(X)
    return convert_pt2e(prepared)


@pytest.mark.parametrize("engine", ["onnxrt", "openvino"])
@pytest.mark.parametrize("make", [static, dynamic])
def test_a_model_of_pt2e_runs(make: Callable[[], nn.Module], engine: str) -> None:
    """An engine computes all of it, with eager's integers; ONNX Runtime does in eight bits."""
    pytest.importorskip(engine.replace("onnxrt", "onnxruntime"))
    model = make()
    found = compiled(model, engine)(X)
    (attempt,) = last().attempts
    assert attempt.coverage == 1.0, attempt.engine["left_to_torch"]
    torch.testing.assert_close(found, model(X))
    if engine == "onnxrt":
        assert attempt.engine["products_in_int8"] == 2


def test_the_record_counts_products_in_eight_bits() -> None:
    """As many as the optimized model has; a model without quantized activations says nothing."""
    compiled(quantized(Int8DynamicActivationInt8WeightConfig()), "onnxrt")(X)
    assert last().attempts[0].engine["products_in_int8"] == 2
    compiled(quantized(Int8WeightOnlyConfig()), "onnxrt")(X)
    assert "products_in_int8" not in last().attempts[0].engine


@pytest.mark.parametrize("engine", ["onnxrt", "openvino"])
def test_activations_that_are_made_unsigned_are_multiplied(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torchao does on processors with VNNI; a correction is subtracted from the sums."""
    pytest.importorskip(engine.replace("onnxrt", "onnxruntime"))
    monkeypatch.setattr(intmm, "_cpu_is_vnni_supported", lambda: True)
    monkeypatch.setattr(intmm, "_cpu_is_amx_tile_supported", lambda: False)
    model = quantized(Int8DynamicActivationInt8WeightConfig())
    found = compiled(model, engine)(X)
    assert last().attempts[0].coverage == 1.0, last().attempts[0].engine["left_to_torch"]
    torch.testing.assert_close(found, model(X))


def update(model: nn.Sequential) -> None:
    model[0].weight.qdata.neg_()


def replace(model: nn.Sequential) -> None:
    model[0].weight = nn.Parameter(copy.deepcopy(model[0].weight), requires_grad=False)
    update(model)


def load(model: nn.Sequential) -> None:
    other = copy.deepcopy(model)
    update(other)
    model.load_state_dict(other.state_dict())


@pytest.mark.parametrize("change", [update, replace, load])
def test_a_changed_quantized_weight_is_found(change: Callable[[nn.Sequential], None]) -> None:
    """The tensors within the weight are what the engine has bound, and what composer watches."""
    model = quantized(Int8WeightOnlyConfig())
    f = compiled(model, "onnxrt")
    before = f(X)
    change(model)
    torch.testing.assert_close(f(X), model(X))
    assert not torch.allclose(before, f(X))


def test_the_tensors_within_a_quantized_weight_are_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """By their addresses, so that no call passes them."""
    from composer.lowering.weights.bindings import BindingEngine

    bound: list[torch.Tensor] = []
    bind = BindingEngine._bind

    def recorded(engine: Any, weights: tuple[torch.Tensor, ...], members: Any) -> Any:
        bound.extend(weights)
        return bind(engine, weights, members)

    monkeypatch.setattr(BindingEngine, "_bind", recorded)
    model = quantized(Int8WeightOnlyConfig())
    compiled(model, "onnxrt")(X)
    expected = {id(layer.weight.qdata) for layer in (model[0], model[2])}
    assert expected <= {id(each) for each in bound}


def test_a_quantized_model_in_training_is_declined() -> None:
    """A gradient would have to be a tensor of the same class; eager answers."""
    model, x = quantized(Int8WeightOnlyConfig()), X.clone().requires_grad_()
    with torch.enable_grad():
        compiled(model, "onnxrt")(x).sum().backward()
    (attempt,) = last().attempts
    assert (attempt.status, attempt.reason) == ("declined", "unsupported_dtype")
    assert "Int8Tensor" in attempt.message
    assert x.grad is not None
