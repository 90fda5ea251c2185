"""What torch itself compiles wrongly: ``verify`` rejects what Inductor makes of it, where it can.

The table is that of docs/reference/engines/inductor.md.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # as torch's own users write it
from common import compiled, fault_of, last, upstream

import composer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::composer.errors.FallbackWarning"),
    pytest.mark.filterwarnings("ignore:An output with one or more elements was resized"),
]


def put_then_flipped(x: torch.Tensor) -> torch.Tensor:
    x.index_put_((torch.arange(4),), x * 2)
    return x.add_(x.flip(0))


def read_as_another_dtype(x: torch.Tensor) -> torch.Tensor:
    y = x.view(torch.int32) * 2
    y.sub_(-4)
    x[:, 2:4] = 2
    return y.view(x.dtype)


def a_view_resized(x: torch.Tensor) -> torch.Tensor:
    base = x + 1
    base.view(-1).resize_(12)
    return base + 1


def zeroed_after_a_scatter(x: torch.Tensor) -> torch.Tensor:
    y = torch.slice_scatter(x, x[:2] + 1, 0, 1, 3)
    x.zero_()
    return y


def shifted(x: torch.Tensor) -> torch.Tensor:
    x[1:] = x[:-1].clone()
    return x


def scaled_along_one_dimension(x: torch.Tensor) -> torch.Tensor:
    return F.interpolate(x, scale_factor=(1.3, 1.5), mode="nearest")


NUMBERS = torch.arange(24.0).reshape(4, 6)
BY_INDUCTOR = [
    pytest.param(put_then_flipped, NUMBERS, "2.15", id="198270"),
    pytest.param(read_as_another_dtype, NUMBERS.long(), None, id="198101"),
    pytest.param(a_view_resized, torch.zeros(1), "2.15", id="191449"),
    pytest.param(zeroed_after_a_scatter, NUMBERS, None, id="198094"),
    pytest.param(shifted, NUMBERS, "2.15", id="197829"),
    pytest.param(scaled_along_one_dimension, NUMBERS[None, None, :3, :4], None, id="198201"),
]
"""Program, input, and the first release of torch in which Inductor is right."""


@pytest.mark.parametrize(("function", "x", "mended"), BY_INDUCTOR)
def test_verify_rejects_what_inductor_gets_wrong(function: Any, x: Any, mended: str | None) -> None:
    """The answer is eager's, whatever this release of torch makes of it."""
    found = compiled(function, "inductor", verify="compile")(x.clone())
    assert torch.equal(found, function(x.clone()))


@upstream
@pytest.mark.parametrize(("function", "x", "mended"), BY_INDUCTOR)
def test_inductor_is_wrong(function: Any, x: Any, mended: str | None) -> None:
    """Its row in docs/reference/engines/inductor.md can go when no supported release is wrong."""
    with fault_of("torch", before=mended):
        found = torch.compile(function, backend="inductor")(x.clone())
        assert not torch.equal(found, function(x.clone()))


def test_two_outputs_that_are_one_tensor_are_rejected() -> None:
    """What is done to one would be done to the other."""

    def joins(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        return lambda x: [gm.forward(x)[0]] * 2

    compiled(lambda x: (x + 1, 1 + x), joins, verify="compile")(torch.ones(2))
    (attempt,) = last().attempts
    assert attempt.reason == "output_mismatch"
    assert attempt.message == "output 0 and output 1 are one tensor, and two in eager"


class ZeroBackward(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is saved."""

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(gradient)


@upstream
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by Dynamo
def test_dynamo_drops_backwards_within_func_grad() -> None:
    """Before any backend is called, which sees the captured operations only (#193279)."""
    gradient = torch.func.grad(lambda x: ZeroBackward.apply(x).sum())
    x = torch.ones(3)
    with fault_of("torch", before="2.15"):
        assert not torch.equal(torch.compile(gradient, backend="eager")(x), gradient(x))
    assert composer.reports() == ()
