"""Operators that create tensors from numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.fx

from composer import _torch
from composer.graphs.nodes import tensors_of
from composer.lowering.operators.entry import (
    Operator,
    Operators,
    always,
    is_negative_zero,
    numbers_of,
    refuse_integers,
    stays,
)
from composer.lowering.operators.guards import only_for

aten = torch.ops.aten


def entries() -> Operators:
    """The entries of this module."""
    linspace = aten.linspace
    between = (linspace.Tensor_Tensor, linspace.Tensor_Scalar, linspace.Scalar_Tensor)
    others = (always("its coefficients are others"),)
    rounded = refuse_integers("what is between is rounded otherwise")
    return {
        **{each: Operator(partial(between_floats, each), or_whole=True) for each in between},
        aten.full_like.default: Operator(full_like),
        aten.new_full.default: Operator(new_full),
        aten._efficientzerotensor.default: Operator(torch.zeros),
        # Their decomposition calls an operator on the real constant, which fake mode refuses.
        aten.lift_fresh.default: Operator(stays, or_whole=True),
        aten.lift.default: Operator(stays, or_whole=True),
        aten.arange: Operator(unsupported=(fractional_range, far_range, from_negative_zero)),
        aten.linspace: Operator(unsupported=(fractional_range, rounded)),
        aten.hamming_window: Operator(unsupported=others),
        aten.hann_window: Operator(unsupported=others),
        aten.blackman_window: Operator(unsupported=others),
    }


def between_floats(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Torch's own decomposition of ``linspace``, for floats only.

    For integers, up to torch 2.15, it rounds otherwise (``tests/lowering/test_torch_faults.py``).
    """
    dtype = kwargs.get("dtype") or torch.get_default_dtype()
    if not dtype.is_floating_point:
        return NotImplemented
    return _torch.operators.decomposition_of(operator)(*args, **kwargs)


@only_for(_torch.tensors.is_row_major)
def full_like(
    x: torch.Tensor, value: Any, *, memory_format: torch.memory_format | None = None, **options: Any
) -> Any:
    """``aten.full_like`` in float64 as ``torch.full``; float32 might not hold the value."""
    if memory_format not in (None, torch.preserve_format):
        return NotImplemented
    return new_full(x, x.shape, value, **options)


def new_full(x: torch.Tensor, size: Sequence[int], value: Any, **options: Any) -> Any:
    """``aten.new_full`` in float64 as ``torch.full``; float32 might not hold the value."""
    options = options_of(x, options)
    if options["dtype"] is not torch.float64:
        return NotImplemented
    return torch.full(size, value, **options)


def options_of(x: torch.Tensor, options: Mapping[str, Any]) -> dict[str, Any]:
    """The dtype, device and other options of a new tensor: those given, else those of ``x``."""
    named = {name: value for name, value in options.items() if value is not None}
    return {"dtype": x.dtype, "device": x.device} | named


_EXACT = 2**24
"""All integers up to this one are exact in float32."""


def fractional_range(node: torch.fx.Node) -> str | None:
    """Why a range must not be translated: a bound or the step is a fraction."""
    is_whole = all(float(number).is_integer() for number in numbers_of(node))
    return None if is_whole else "the number of steps is rounded otherwise"


def far_range(node: torch.fx.Node) -> str | None:
    """Why a range must not be translated: float32 does not hold its numbers exactly.

    The translation computes all ranges but those of int64 in float32.
    """
    is_far = any(abs(number) > _EXACT for number in numbers_of(node))
    is_long = next(tensors_of(node)).dtype is torch.int64
    return "it is counted in float32" if is_far and not is_long else None


def from_negative_zero(node: torch.fx.Node) -> str | None:
    """Why a range must not be translated: it begins at ``-0.0``, for which eager begins at 0.0."""
    begins = any(map(is_negative_zero, numbers_of(node)))
    return "its first number would be a negative zero" if begins else None
