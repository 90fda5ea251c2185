"""Sums over many numbers are as close to float64 as eager's, by each ONNX engine.

``bench/reductions.py`` draws the whole table: more operators, from 2**8 to 2**26 numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # as torch's own users write it
from common import compiled, last, upstream

import composer
from composer.lowering.operators import operators

pytestmark = pytest.mark.slow

EQUAL = torch.full((2**21,), 0.1)
FAR = torch.rand(2**20, generator=torch.Generator().manual_seed(0)) + 1000
ENGINES = pytest.mark.parametrize("engine", ["onnxrt", "openvino"])
SIZES = pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])

OF_EQUAL: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mean": lambda x: x.mean(),
    "sum of columns": lambda x: x.view(-1, 4).sum(0),
    "mean of an image": lambda x: x.view(1, 1, -1, 64).mean((2, 3)),
    "norm": lambda x: x.norm(),
    "norm of the third power": lambda x: x.norm(3),
    "mse_loss": lambda x: F.mse_loss(x, x * 2),
    "l1_loss": lambda x: F.l1_loss(x, x * 2),
    "bce": lambda x: F.binary_cross_entropy(x, x * 2),
    "pool": lambda x: F.adaptive_avg_pool2d(x.view(1, 1, -1, 64), 1),
    "logsumexp": lambda x: x.logsumexp(0),
    "rms_norm": lambda x: F.rms_norm(x, x.shape),
    "dot": lambda x: x @ x,
    "einsum": lambda x: torch.einsum("bi,bi->", x.view(2, -1), x.view(2, -1)),
}
OF_FAR: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "logsumexp of a spread": lambda x: (x - 1000).logsumexp(0),
    "log_softmax": lambda x: x.log_softmax(0),
    "var": lambda x: x.var(),
    "var of columns": lambda x: x.view(-1, 4).var(0),
    "layer_norm": lambda x: F.layer_norm(x, x.shape),
    "group_norm": lambda x: F.group_norm(x.view(1, 4, -1, 64), 2),
    "instance_norm": lambda x: F.instance_norm(x.view(1, 4, -1, 64)),
    "batch_norm": lambda x: F.batch_norm(x.view(2, 2, -1, 64), None, None, training=True),
}


def error_of(result: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest error over the largest number; a zero is taken for one."""
    largest = exact.abs().max().item()
    scale = largest if largest > 2**-21 else 1.0
    return (result.double() - exact).abs().max().item() / scale


def as_close_as_eager(function, x: torch.Tensor, engine: str, dynamic: bool) -> None:
    """The first call with a dynamic size is a small one, which tells nothing of the second."""
    f = compiled(function, engine, dynamic=dynamic)
    with torch.no_grad():
        if dynamic:
            f(x[:1024])
        result, eager, exact = f(x), function(x), function(x.double())
    assert last().chosen == engine, last().attempts[0].message
    assert error_of(result, exact) <= 4 * max(error_of(eager, exact), 2**-21)


@ENGINES
@SIZES
@pytest.mark.parametrize("function", OF_EQUAL.values(), ids=OF_EQUAL)
def test_equal_numbers_do_not_add_up_to_less(function, engine: str, dynamic: bool) -> None:
    """Each of them is rounded alike, so a sum in one go is off in the second digit."""
    as_close_as_eager(function, EQUAL, engine, dynamic)


@ENGINES
@SIZES
@pytest.mark.parametrize("function", OF_FAR.values(), ids=OF_FAR)
def test_a_small_spread_far_from_zero_is_seen(function, engine: str, dynamic: bool) -> None:
    """The mean must have all its digits before it is subtracted."""
    as_close_as_eager(function, FAR, engine, dynamic)


OF_FEW: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "var": lambda x: x.var(),
    "group_norm": lambda x: F.group_norm(x.view(1, 2, -1, 16), 1),
    "instance_norm": lambda x: F.instance_norm(x.view(1, 2, -1, 16)),
    "batch_norm": lambda x: F.batch_norm(x.view(2, 2, -1), None, None, training=True),
}


@ENGINES
@pytest.mark.parametrize("numbers", [FAR, EQUAL], ids=["far", "equal"])
@pytest.mark.parametrize("function", OF_FEW.values(), ids=OF_FEW)
def test_few_numbers_are_normalised_as_exactly_as_many(function, numbers, engine: str) -> None:
    """Engines' own kernels are off by 1e-4 at 256 numbers far from zero, or equal ones."""
    as_close_as_eager(function, numbers[:256], engine, dynamic=False)


OF_ANY_SIZE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum of columns": lambda x: x.view(-1, 4).sum(0),
    "sum of rows": lambda x: x.view(-1, 4).t().sum(1),
    "mean": lambda x: x.mean(),
    "var": lambda x: x.var(),
    "logsumexp": lambda x: x.logsumexp(0),
    "group_norm": lambda x: F.group_norm(x.view(1, 2, -1), 1),
}


@ENGINES
@pytest.mark.parametrize("first", [8, 256, 16388])
@pytest.mark.parametrize("function", OF_ANY_SIZE.values(), ids=OF_ANY_SIZE)
def test_one_graph_sums_any_number_of_numbers(function, first: int, engine: str) -> None:
    """Whatever the size in the first call, its sum is split without a guard on the size."""
    f = compiled(function, engine, dynamic=True)
    for size in (first, 12, 256, 260, 520, 16384, 20000, 2**18 + 4):
        x = FAR[:size]
        with torch.no_grad():
            result, eager, exact = f(x), function(x), function(x.double())
        assert error_of(result, exact) <= 4 * max(error_of(eager, exact), 2**-21)
    (report,) = composer.reports()
    assert report.chosen == engine


def of_bias(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x.view(-1, 4) + w[:4]) * 0.1


def of_factor(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x * w[0]


def of_linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.linear(x.view(-1, 4), w.view(2, 4), w[:2])


def of_group_norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.group_norm(x.view(1, 4, -1, 64), 2, w[:4], w[4:])


@SIZES
@pytest.mark.parametrize("function", [of_bias, of_factor, of_linear, of_group_norm])
def test_gradients_that_are_long_sums_have_all_digits(function, dynamic: bool) -> None:
    """A parameter that meets each element sums as many gradients."""
    f = compiled(function, "onnxrt", dynamic=dynamic)

    def gradient(function, x: torch.Tensor) -> torch.Tensor:
        w = torch.full((8,), 0.5, dtype=x.dtype, requires_grad=True)
        result = function(x, w)
        return torch.autograd.grad(result, w, torch.full_like(result, 0.1))[0]

    if dynamic:
        gradient(f, EQUAL[:1024])
    exact = gradient(function, EQUAL.double())
    eager = gradient(function, EQUAL)
    assert error_of(gradient(f, EQUAL), exact) <= 8 * max(error_of(eager, exact), 2**-21)
    assert last().chosen == "onnxrt", last().attempts[0].message


NEEDED = {
    "dot": ("onnxrt", torch.ops.aten.dot.default),
    "logsumexp of a spread": ("onnxrt", torch.ops.aten.logsumexp.default),
    "layer_norm": ("openvino", torch.ops.aten.native_layer_norm.default),
    "group_norm": ("onnxrt", torch.ops.aten.native_group_norm.default),
    "instance_norm": ("onnxrt", torch.ops.aten._native_batch_norm_legit.no_stats),
    "sum of columns": ("onnxrt", torch.ops.aten.sum.dim_IntList),
}
"""Cases, the engine that is off without an entry of the lowering, and the entry's operator."""


@upstream
@pytest.mark.parametrize("case", NEEDED)
def test_entries_are_still_needed(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the operator's decomposition the engine is further off than eager."""
    engine, operator = NEEDED[case]
    entry = dataclasses.replace(operators()[operator], decompose=None)
    monkeypatch.setitem(operators(), operator, entry)
    x = FAR if case in OF_FAR else EQUAL
    with pytest.raises(AssertionError):
        as_close_as_eager((OF_FAR | OF_EQUAL)[case], x, engine, dynamic=False)
