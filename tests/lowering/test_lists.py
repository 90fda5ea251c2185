"""Operators over lists of tensors, and the optimizers made of them, through ONNX Runtime."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from common import compiled, last, thorough
from torch import nn, optim
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from composer import _torch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Profiler record function"),
]

NOT_TRACED = {"_foreach_addcmul.Tensor", "_foreach_addcdiv.Tensor"}
"""They read a tensor as numbers, for which torch has no fake kernel (2.13)."""

LEFT = {"_foreach_powsum.Scalar", "_foreach_erfc.default"}
"""A part of torch's own that the exporter does not translate, or not well."""

OPERATORS = {str(each).removeprefix("aten."): each for each in _torch.operators.loops_over_lists()}


def are_eagers(function: Callable[..., Any], *args: Any, coverage: float = 1.0, **how: Any) -> None:
    """ONNX Runtime takes this share and gives eager's results, strides and dtypes included."""
    found = compiled(function, "onnxrt", **how)(*args)
    torch.testing.assert_close(found, function(*args), check_stride=True, equal_nan=True)
    assert (last().chosen, last().attempts[0].coverage) == ("onnxrt", coverage)


def arguments(operator: Any) -> list[Any]:
    """One for each that has no default: tensors of several shapes, a number for each of them."""
    square = "mm" in str(operator)
    shapes = [(3, 3)] * 3 if square else [(3, 4), (), (5,)]
    made = {
        "List[Tensor]": lambda: [torch.rand(shape) + 0.1 for shape in shapes],
        "Tensor": lambda: torch.tensor(1.5),
        "number": lambda: 0.75,
        "List[number]": lambda: [0.75, 2, -1.5],
    }
    wanted = [each for each in operator._schema.arguments if not each.has_default_value()]
    return [made[str(each.type)]() for each in wanted]


@pytest.mark.parametrize("name", sorted(OPERATORS.keys() - NOT_TRACED - LEFT))
def test_operator_over_lists_is_onnx_runtimes(name: str) -> None:
    """All that torch has, each the plain operator for each place of the lists.

    The exporter of torch 2.11 loses a copy that is returned as it is.
    """
    operator = OPERATORS[name]
    are_eagers(lambda *args: torch._foreach_neg(operator(*args)), *arguments(operator))


def tensors() -> list[torch.Tensor]:
    return [torch.randn(3, 4), torch.randn(()), torch.randn(5)]


LISTS = {
    "of several dtypes": lambda xs: torch._foreach_add(
        [xs[0], xs[1].double(), xs[2].half()], [xs[0].double(), xs[1], xs[2].half()], alpha=0.5
    ),
    "of integers with a float": lambda xs: torch._foreach_mul([x.long() for x in xs], 1.5),
    "of integers divided": lambda xs: torch._foreach_div([x.long() for x in xs], 4),
    "transposed": lambda xs: torch._foreach_exp([xs[0].mT, xs[2]]),
    "one without elements": lambda xs: torch._foreach_norm([xs[0], xs[2][:0]]),
    "a norm in double": lambda xs: torch._foreach_norm(xs, 1, torch.float64),
    "NaN among the larger": lambda xs: torch._foreach_maximum([x / x.sin().relu() for x in xs], 2),
    "views of one": lambda xs: torch._foreach_sub(xs[0].unbind(), xs[0].flip(0).unbind()),
    "a tensor as factor": lambda xs: torch._foreach_mul(xs, xs[1]),
}


@pytest.mark.parametrize("name", LISTS)
def test_lists_promote_as_eagers(name: str) -> None:
    """Each place by itself."""
    are_eagers(LISTS[name], tensors())


WRITTEN = {
    "filled with zeros": torch._foreach_zero_,
    "added to": lambda xs: torch._foreach_add_(xs, xs, alpha=2),
    "copied to": lambda xs: torch._foreach_copy_(xs, [x.double() + 1 for x in xs]),
    "copied to from fewer numbers": lambda xs: torch._foreach_copy_(
        xs, [xs[0][0] + 1, xs[1].sin(), xs[2][:1] * 2]
    ),
    "an average that moves": lambda xs: torch._foreach_lerp_(xs, [x.sin() for x in xs], 0.9),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_lists_are_written_to(name: str) -> None:
    """The tensors that the program passes are those that change."""

    def program(xs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        WRITTEN[name](xs)
        return torch._foreach_mul(xs, 2)

    xs = tensors()
    found, expected = ([x.clone() for x in xs] for _ in range(2))
    results = compiled(program, "onnxrt")(found), program(expected)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(*results)
    assert (last().chosen, last().attempts[0].coverage) == ("onnxrt", 1.0)


def test_lists_have_gradients_and_sizes_that_change() -> None:
    """The backward is ONNX Runtime's as well."""

    def program(x):
        first, second = torch._foreach_exp(torch._foreach_mul([x, x[:, 1:]], 0.5))
        return first.sum() + second.sum()

    step = compiled(program, "onnxrt", dynamic=True)
    for size in (3, 5, 6):
        leaves = [torch.ones(size, 4).requires_grad_() for _ in range(2)]
        step(leaves[0]).backward()
        program(leaves[1]).backward()
        torch.testing.assert_close(leaves[0].grad, leaves[1].grad)
    assert (last().chosen, last().attempts[0].coverage) == ("onnxrt", 1.0)


def test_complex_numbers_within_a_list_are_torchs() -> None:
    """The operator stays whole."""

    def program(x):
        real, turned = torch._foreach_mul([x, x * 1j], 2.0)
        return torch.sin(real) + torch.cos(turned.imag) + 1

    compiled(program, "onnxrt", min_coverage=0.1)(torch.randn(3))
    assert any("_foreach_mul" in each for each in last().attempts[0].engine["left_to_torch"])


def twins() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Tanh(), nn.Linear(7, 3))
    twin = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Tanh(), nn.Linear(7, 3))
    twin.load_state_dict(model.state_dict())
    return model, twin


def fill_gradients(*models: nn.Module) -> None:
    x = torch.randn(4, 5)
    for model in models:
        model.zero_grad()
        model(x).square().mean().backward()


def held(optimizer: optim.Optimizer) -> list[torch.Tensor]:
    """Every parameter and every tensor of its state."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    states = (optimizer.state[each] for each in parameters)
    kept = [each for state in states for each in state.values() if torch.is_tensor(each)]
    return [each.detach() for each in (*parameters, *kept)]


OPTIMIZERS: dict[str, Callable[..., optim.Optimizer]] = {
    "SGD": lambda weights: optim.SGD(weights, 0.1, foreach=True),
    "SGD with momentum": lambda weights: optim.SGD(
        weights, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01, foreach=True
    ),
    "Adam": lambda weights: optim.Adam(weights, 0.01, foreach=True),
    "Adam with a maximum": lambda weights: optim.Adam(
        weights, 0.01, amsgrad=True, maximize=True, foreach=True
    ),
    "AdamW": lambda weights: optim.AdamW(weights, 0.01, foreach=True),
    "Adamax": lambda weights: optim.Adamax(weights, 0.01, foreach=True),
    "NAdam": lambda weights: optim.NAdam(weights, 0.01, foreach=True),
    "RAdam": lambda weights: optim.RAdam(weights, 0.01, foreach=True),
    "RMSprop": lambda weights: optim.RMSprop(
        weights, 0.01, centered=True, momentum=0.9, foreach=True
    ),
    "Adagrad": lambda weights: optim.Adagrad(weights, 0.01, lr_decay=0.01, foreach=True),
    "Adadelta": lambda weights: optim.Adadelta(weights, foreach=True),
    "Rprop": lambda weights: optim.Rprop(weights, foreach=True),
    "ASGD": lambda weights: optim.ASGD(weights, foreach=True),
    "AdamW, one by one": lambda weights: optim.AdamW(weights, 0.01, foreach=False),
    "RMSprop, one by one": lambda weights: optim.RMSprop(weights, 0.01, foreach=False),
    "Adagrad, one by one": lambda weights: optim.Adagrad(weights, 0.01, foreach=False),
}


RARE = ("Adamax", "NAdam", "RAdam", "Adadelta", "Rprop", "ASGD")
USUAL = [each for each in OPTIMIZERS if each not in RARE]


@pytest.mark.parametrize("name", [*USUAL, *thorough(*RARE)])
def test_step_of_an_optimizer_is_onnx_runtimes(name: str) -> None:
    """Parameters and states after three steps are those of eager."""
    models = twins()
    optimizer, expected = (OPTIMIZERS[name](each.parameters()) for each in models)
    step = compiled(optimizer.step, "onnxrt")
    for _ in range(3):
        fill_gradients(*models)
        step()
        expected.step()
    torch.testing.assert_close(held(optimizer), held(expected), rtol=1e-5, atol=1e-5)
    assert (last().chosen, last().attempts[0].coverage) == ("onnxrt", 1.0)


CLIPPING = {
    "norm": lambda weights: clip_grad_norm_(weights, 0.1),
    "norm, by lists": lambda weights: clip_grad_norm_(weights, 0.1, foreach=True),
    "largest, by lists": lambda weights: clip_grad_norm_(weights, 0.1, math.inf, foreach=True),
    "sum, by lists": lambda weights: clip_grad_norm_(weights, 0.1, 1.0, foreach=True),
    "value": lambda weights: clip_grad_value_(weights, 0.01),
    "value, by lists": lambda weights: clip_grad_value_(weights, 0.01, foreach=True),
}


@pytest.mark.parametrize("name", CLIPPING)
def test_clipping_of_gradients_is_onnx_runtimes(name: str) -> None:
    """The gradients, and the norm that is returned."""
    clip = CLIPPING[name]
    model, twin = twins()
    step = compiled(lambda: clip(list(model.parameters())), "onnxrt")
    for _ in range(2):
        fill_gradients(model, twin)
        found, expected = step(), clip(list(twin.parameters()))
        clipped = ([weight.grad for weight in each.parameters()] for each in (model, twin))
        torch.testing.assert_close(*clipped)
        torch.testing.assert_close(found, expected) if "value" not in name else None
    assert (last().chosen, last().attempts[0].coverage) == ("onnxrt", 1.0)
