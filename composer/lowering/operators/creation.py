"""Operators that create tensors from numbers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx

from composer import _torch
from composer.graphs.nodes import tensors_of
from composer.lowering.operators.entry import Operator, Operators, always, of_integers, stays

aten = torch.ops.aten


def entries() -> Operators:
    """The entries of this module."""
    between = (
        *(aten.linspace.Tensor_Tensor, aten.linspace.Tensor_Scalar, aten.linspace.Scalar_Tensor),
    )
    others = (always("its coefficients are others"),)
    return {
        **{
            each: Operator(functools.partial(between_floats, each), or_whole=True)
            for each in between
        },
        aten.full_like.default: Operator(full_like),
        aten.new_full.default: Operator(new_full),
        aten._efficientzerotensor.default: Operator(torch.zeros),
        # Their decomposition calls an operator on the real constant, which fake mode refuses.
        aten.lift_fresh.default: Operator(stays, or_whole=True),
        aten.lift.default: Operator(stays, or_whole=True),
        aten.arange: Operator(unsupported=(fractional_range, far_range)),
        aten.linspace: Operator(
            unsupported=(
                fractional_range,
                of_integers("what is between is rounded otherwise"),
            )
        ),
        aten.hamming_window: Operator(unsupported=others),
        aten.hann_window: Operator(unsupported=others),
        aten.blackman_window: Operator(unsupported=others),
    }


def between_floats(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Torch's own decomposition of ``linspace``, for floats only.

    For integers torch 2.13 rounds differently in it than in eager.
    """
    dtype = kwargs.get("dtype") or torch.get_default_dtype()
    if not dtype.is_floating_point:
        return NotImplemented
    return _torch.operators.decomposition_of(operator)(*args, **kwargs)


def full_like(x: torch.Tensor, value: Any, *, dtype: Any = None, **others: Any) -> Any:
    """``aten.full_like`` in float64 as ``torch.full``; float32 might not hold the value."""
    dtype = dtype or x.dtype
    plain = _torch.tensors.is_row_major(x) and others.get("memory_format") in (
        None,
        torch.preserve_format,
    )
    if not plain or dtype is not torch.float64:
        return NotImplemented
    return torch.full(x.shape, value, dtype=dtype, device=others.get("device") or x.device)


def new_full(x: torch.Tensor, size: Sequence[int], value: Any, **others: Any) -> Any:
    """``aten.new_full`` in float64 as ``torch.full``; float32 might not hold the value."""
    dtype = others.get("dtype") or x.dtype
    if dtype is not torch.float64:
        return NotImplemented
    return torch.full(size, value, dtype=dtype, device=others.get("device") or x.device)


_EXACT = 2**24
"""All integers up to this one are exact in float32."""


def fractional_range(node: torch.fx.Node) -> str | None:
    """Why a range must not be translated: a bound or the step is a fraction."""
    is_fraction = any(isinstance(v, float) and not v.is_integer() for v in node.args)
    return "the number of steps is rounded otherwise" if is_fraction else None


def far_range(node: torch.fx.Node) -> str | None:
    """Why a range must not be translated: float32 does not hold its numbers exactly.

    The translation computes all ranges but those of int64 in float32.
    """
    far = any(isinstance(v, int | float) and abs(v) > _EXACT for v in node.args)
    is_long = next(tensors_of(node)).dtype is torch.int64
    return "it is counted in float32" if far and not is_long else None
