"""Faults of torch for which an entry of an operator or a copy of a weight's elements is needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from common import upstream
from torch._decomp import decomposition_table
from torch._subclasses import FakeTensorMode

aten = torch.ops.aten


def fakes(mode: FakeTensorMode, *tensors: torch.Tensor) -> list[torch.Tensor]:
    return [mode.from_tensor(each) for each in tensors]


@upstream
@pytest.mark.parametrize("operator", [aten.copysign.Tensor, aten.floor_divide.default], ids=str)
def test_fake_results_have_other_strides(operator: Any) -> None:
    """When this fails, ``with_strides_of_operands`` is no longer needed."""
    operands = torch.ones(3, 4).t(), torch.ones(4, 3)
    with FakeTensorMode() as mode:
        fake = operator(*fakes(mode, *operands))
    assert fake.stride() != operator(*operands).stride()


@upstream
def test_a_fake_norm_has_another_dtype() -> None:
    """When this fails, ``norms.norm`` is no longer needed."""
    x, weight = torch.ones(2, 8, dtype=torch.bfloat16), torch.ones(8)
    with FakeTensorMode() as mode:
        _, fake, _ = aten.native_layer_norm(fakes(mode, x)[0], [8], *fakes(mode, weight, weight), 0)
    assert fake.dtype != aten.native_layer_norm(x, [8], weight, weight, 0)[1].dtype


@upstream
def test_the_gradient_of_a_smooth_loss_drops_nan() -> None:
    """When this fails, ``smooth_l1_backward`` is no longer needed."""
    operator = aten.smooth_l1_loss_backward.default
    arguments = torch.ones(()), torch.tensor(torch.nan), torch.zeros(()), 1, 1.0
    assert operator(*arguments).isnan()
    assert not decomposition_table[operator](*arguments).isnan()


@upstream
def test_integers_between_two_are_rounded_otherwise() -> None:
    """When this fails, ``between_floats`` may decompose integers too."""
    expected = torch.linspace(16, -48, 11, dtype=torch.int64)
    bounds = torch.tensor(16), torch.tensor(-48)
    options = {"dtype": torch.int64, "device": torch.device("cpu")}
    found = decomposition_table[aten.linspace.Tensor_Tensor](*bounds, 11, **options)
    assert not torch.equal(found, expected)


@upstream
def test_memory_that_numpy_saw_cannot_be_resized() -> None:
    """When this fails, ``samples`` may call ``Tensor.numpy()``."""
    weight = torch.ones(4)
    weight.numpy()
    with pytest.raises(RuntimeError, match="not resizable"):
        weight.untyped_storage().resize_(0)
