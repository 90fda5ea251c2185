"""Norms written out, through ONNX Runtime: one operator each, and nothing else taken for one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from common import compiled, fault_of, last, upstream
from torch import Tensor

from composer.backends.onnxrt import session

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("inference")]


@pytest.fixture
def operators(optimized) -> Callable[[], list[str]]:
    """What ONNX Runtime runs for the last model."""
    return lambda: [node.op_type for node in optimized().node]


class Norm(torch.nn.Module):
    """A function of the input, of a weight and of a bias, and of any other numbers."""

    def __init__(self, function: Callable[..., Any], *buffers: Tensor) -> None:
        super().__init__()
        self.function = function
        self.weight = torch.nn.Parameter(torch.rand(16) + 0.5)
        self.bias = torch.nn.Parameter(torch.rand(16))
        for i, each in enumerate(buffers):
            self.register_buffer(f"buffer{i}", each)

    def forward(self, x):
        return self.function(x, self.weight, self.bias, *self.buffers())


def mean(x: Tensor, dim: int = -1) -> Tensor:
    return x.mean(dim, keepdim=True)


def centre(x: Tensor) -> Tensor:
    return x - mean(x)


def root(x: Tensor) -> Tensor:
    return torch.sqrt(mean(x.pow(2)) + 0.05)


RMS_NORMS = {
    "reciprocal": lambda x, w, b: w * (x * torch.rsqrt(mean(x.pow(2)) + 0.05)),
    "quotient": lambda x, w, b: x / root(x) * w,
    "square": lambda x, w, b: torch.rsqrt(0.05 + mean(x.square())) * x * w,
    "product": lambda x, w, b: x * torch.rsqrt(mean(x * x) + 0.05) * w,
}

LAYER_NORMS = {
    "quotient": lambda x, w, b: centre(x) / root(centre(x)) * w + b,
    "centred once": lambda x, w, b: (lambda c: c / root(c) * w + b)(centre(x)),
    "reciprocal": lambda x, w, b: b + w * (centre(x) * torch.rsqrt(mean(centre(x) ** 2) + 0.05)),
    "square": lambda x, w, b: centre(x) / torch.sqrt(0.05 + mean(centre(x).square())) * w + b,
    "product": lambda x, w, b: (lambda c: c / torch.sqrt(mean(c * c) + 0.05) * w + b)(centre(x)),
    "without a bias": lambda x, w, b: centre(x) / root(centre(x)) * w,
    "bias of all": lambda x, w, b: centre(x) / root(centre(x)) * w + 0.5,
}


def inputs() -> Tensor:
    """Vectors of usual numbers, of tiny ones, of numbers whose squares overflow, and of zeros."""
    return torch.randn(2, 4, 16) * torch.tensor([1.0, 1e-4, 1e20, 0.0]).view(4, 1)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("norm", RMS_NORMS.values(), ids=RMS_NORMS)
def test_a_root_mean_square_norm_is_one_operator(norm, dynamic: bool, operators) -> None:
    """Infinity and NaN are as in eager, too; so is a new weight."""
    model, x = Norm(norm), inputs()
    f = compiled(model, "onnxrt", dynamic=dynamic)
    x[0, 0, 3], x[1, 0, 3] = torch.inf, torch.nan
    torch.testing.assert_close(f(x), model(x), equal_nan=True)
    assert operators() == ["SimplifiedLayerNormalization"]
    model.weight.mul_(2)
    torch.testing.assert_close(f(x[:, :3]), model(x[:, :3]), equal_nan=True)
    assert last().chosen == "onnxrt"


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("norm", LAYER_NORMS.values(), ids=LAYER_NORMS)
def test_a_layer_norm_is_one_operator(norm, dynamic: bool, operators) -> None:
    """With a bias that it can read, a vector; any other is added after it."""
    model, x = Norm(norm), inputs()
    f = compiled(model, "onnxrt", dynamic=dynamic)
    x[0, 0, 3], x[1, 0, 3] = torch.inf, torch.nan
    torch.testing.assert_close(f(x), model(x), equal_nan=True)
    assert operators() in (["LayerNormalization"], ["LayerNormalization", "Add"])
    assert ("Add" in operators()) == (norm is LAYER_NORMS["bias of all"])
    model.weight.mul_(2)
    torch.testing.assert_close(f(x[:, :3]), model(x[:, :3]), equal_nan=True)
    assert last().chosen == "onnxrt"


NO_NORMS: dict[str, Callable[..., Any]] = {
    "of another": lambda x, w, b: (x + 1) / root(x) * w,
    "of another mean": lambda x, w, b: (x.sin() - mean(x)) / root(centre(x)) * w,
    "along another dimension": lambda x, w, b: x / torch.sqrt(mean(x.pow(2), 0) + 0.05) * w,
    "centred along another": lambda x, w, b: (x - mean(x, 0)) / root(x - mean(x)) * w,
    "of fourth powers": lambda x, w, b: centre(x) / torch.sqrt(mean(centre(x) ** 4) + 0.05) * w + b,
    "without the mean": lambda x, w, b: x / torch.sqrt(mean(x.pow(4)) + 0.05) * w,
    "of cubes": lambda x, w, b: x * torch.rsqrt(mean(x.abs().pow(3)) + 0.05) * w,
    "of products": lambda x, w, b: x * torch.rsqrt(mean((x * x.sin()).abs()) + 0.05) * w,
    "of any powers": lambda x, w, b, p: centre(x) / torch.sqrt(mean(centre(x) ** p) + 0.05) * w,
    "mean minus x": lambda x, w, b: (mean(x) - x) / root(mean(x) - x) * w + b,
    "upside down": lambda x, w, b: root(x) / x * w,
    "of a copy upside down": lambda x, w, b: root(centre(x)).clone() / centre(x) * w + b,
    "mean not kept": lambda x, w, b: (x - x.mean(-1)) / root(x - x.mean(-1)) * w + b,
    "epsilons": lambda x, w, b, e: centre(x) / torch.sqrt(mean(centre(x) ** 2) + e) * w + b,
    "epsilons first": lambda x, w, b, e: x / torch.sqrt(e + mean(x.pow(2))) * w,
    "mean as epsilon": lambda x, w, b: x / torch.sqrt(mean(x.pow(2)) + mean(x.abs())) * w,
    "two epsilons": lambda x, w, b: x / torch.sqrt(mean(x.pow(2)) + 0.05 + 0.05) * w,
    "returned, too": lambda x, w, b: (lambda r: (x / r * w, r))(root(x)),
    "weights of its own": lambda x, w, b: centre(x) / root(centre(x)) * x.exp() + b,
    "one weight": lambda x, w, b: x / root(x) * w[0],
}

BUFFERS = {
    "of any powers": [torch.tensor(4.0)],
    "epsilons": [torch.rand(16, 1)],
    "epsilons first": [torch.rand(16)],
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", NO_NORMS)
def test_what_is_no_such_norm_is_left_as_it_is(name: str, dynamic: bool, operators) -> None:
    """Right, whatever else it is."""
    model, x = Norm(NO_NORMS[name], *BUFFERS.get(name, [])), torch.randn(16, 16)
    found = compiled(model, "onnxrt", dynamic=dynamic)(x)
    torch.testing.assert_close(found, model(x), rtol=1e-5, atol=1e-5)
    assert last().chosen == "onnxrt"
    assert not {"LayerNormalization", "SimplifiedLayerNormalization"}.intersection(operators())


def by_hand(x: Tensor, eps: Any) -> Tensor:
    return centre(x) / torch.sqrt(mean(centre(x).pow(2)) + eps)


def by_root(x: Tensor, eps: Any) -> Tensor:
    return x / torch.sqrt(mean(x.pow(2)) + eps)


class WithEpsilon(torch.nn.Module):
    """A norm of an epsilon that is a number of the module or a buffer."""

    def __init__(self, norm: Callable[..., Tensor], eps: Any) -> None:
        super().__init__()
        self.norm = norm
        self.weight = torch.nn.Parameter(torch.rand(16) + 0.5)
        if isinstance(eps, Tensor):
            self.register_buffer("eps", eps)
        else:
            self.eps = eps

    def forward(self, x):
        return self.norm(x, self.eps) * self.weight


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("eps", [0.05, torch.tensor(0.05)], ids=["number", "buffer"])
@pytest.mark.parametrize("norm", [by_hand, by_root])
def test_the_epsilon_of_a_norm_is_the_models(norm, eps, dynamic: bool) -> None:
    """Of one that changes, too: the number is an input with dynamic sizes, the buffer from then."""
    model, x = WithEpsilon(norm, eps), torch.randn(4, 16) / 10
    f = compiled(model, "onnxrt", dynamic=dynamic)
    for _ in range(4):
        torch.testing.assert_close(f(x), model(x))
        model.eps *= 2
    assert last().chosen == "onnxrt"


@pytest.mark.parametrize("norm", [by_hand, by_root])
def test_a_norm_keeps_the_digits_of_float64(norm) -> None:
    """With the operators for it the epsilon would be one of float32."""
    model, x = WithEpsilon(norm, 1e-6).double(), torch.randn(4, 16).double()
    torch.testing.assert_close(compiled(model, "onnxrt")(x), model(x), rtol=1e-13, atol=1e-13)
    assert last().chosen == "onnxrt"


@upstream
@pytest.mark.parametrize("name", ["of fourth powers", "mean minus x", "mean not kept", "epsilons"])
def test_onnxruntime_still_takes_for_norms_what_is_none(name: str, monkeypatch) -> None:
    """``FUSIONS``, and with it ``fuse_norms``, can go once this fails for all."""
    monkeypatch.setattr(session, "optimizers_to_disable", lambda model: ())
    monkeypatch.setattr(session, "fuse_norms", lambda model: None)
    model, x = Norm(NO_NORMS[name], *BUFFERS.get(name, [])), torch.randn(16, 16)
    error = compiled(model, "onnxrt")(x) - model(x)
    with fault_of("onnxruntime", before="1.32" if name == "epsilons" else None):
        assert error.abs().max() > 0.1
