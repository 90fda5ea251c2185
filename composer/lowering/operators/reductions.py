"""Sums, means, extremes and norms along dimensions, and losses."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx

from composer import _torch
from composer.lowering.operators.entry import WIDE, Operator, Operators
from composer.lowering.operators.layouts import lying_as_in_eager

aten = torch.ops.aten


def entries() -> Operators:
    """The entries of this module."""
    written_out = {
        aten.mean.default: Operator(mean),
        aten.mean.dim: Operator(mean),
        aten.sum.default: Operator(total),
        aten.sum.dim_IntList: Operator(total),
        aten.prod.dim_int: _over_one_element(aten.prod.dim_int),
        aten.logsumexp.default: _over_one_element(aten.logsumexp.default),
        aten.any.dim: Operator(functools.partial(truth_along, aten.any.dim)),
        aten.any.dims: Operator(functools.partial(truth_along, aten.any.dims)),
        aten.all.dim: Operator(functools.partial(truth_along, aten.all.dim)),
        aten.all.dims: Operator(functools.partial(truth_along, aten.all.dims)),
        aten.amax.default: Operator(
            functools.partial(extreme, aten.amax.default, True), translate="comparisons:amax"
        ),
        aten.amin.default: Operator(
            functools.partial(extreme, aten.amin.default, False), translate="comparisons:amin"
        ),
        aten.max.default: Operator(
            functools.partial(extreme_of_all, True), translate="comparisons:maximum_of_all"
        ),
        aten.min.default: Operator(
            functools.partial(extreme_of_all, False), translate="comparisons:minimum_of_all"
        ),
        aten.max.dim: Operator(
            functools.partial(extreme_along, aten.max.dim), translate="comparisons:max_dim"
        ),
        aten.min.dim: Operator(
            functools.partial(extreme_along, aten.min.dim), translate="comparisons:min_dim"
        ),
        aten.argmax.default: _over_one_element(aten.argmax.default, "comparisons:argmax"),
        aten.argmin.default: _over_one_element(aten.argmin.default, "comparisons:argmin"),
        aten.linalg_vector_norm.default: Operator(vector_norm),
    }
    nll = aten.nll_loss_forward.default
    return lying_as_in_eager(written_out) | {
        aten.var.correction: Operator(variance),
        aten.var_mean.correction: Operator(variance_and_mean),
        aten.mse_loss.default: Operator(mean_square_error),
        aten.smooth_l1_loss_backward.default: Operator(smooth_l1_backward),
        # Onnxscript 0.7 gives a wrong total weight, by which the backward divides: the number of
        # elements of the loss. Gradients of a mean were too large by a factor of the batch size.
        nll: Operator(_torch.operators.decomposition_of(nll)),
    }


def _over_one_element(operator: Any, translate: str = "") -> Operator:
    """The entry of an operator that accepts a tensor without dimensions; ONNX's does not."""
    return Operator(functools.partial(over_one_element, operator), translate=translate)


_MANY, _AT_ONCE = 2**16, 2**7
"""The number of elements from which float32 sums are split, and the number of elements per part.

Engines lose digits in long sums: of four million elements, ONNX Runtime 1.32 loses the third digit
(microsoft/onnxruntime#28450) and OpenVINO 2026.4 the second. Eager sums in parts, too."""


def over_one_element(operator: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """The operator applied to a vector of one element, if ``x`` has no dimensions.

    For all other tensors it returns ``NotImplemented``.
    """
    if x.dim():
        return NotImplemented
    leaves, rebuild = _torch.tensors.flatten((x, args, kwargs))
    vector, args, kwargs = rebuild([_as_vector(leaf) for leaf in leaves])
    leaves, rebuild = _torch.tensors.flatten(operator(vector, *args, **kwargs))
    return rebuild([leaf.reshape(()) if leaf.numel() == 1 else leaf for leaf in leaves])


def _as_vector(value: Any) -> Any:
    is_number = isinstance(value, torch.Tensor) and not value.dim()
    return value.reshape(1) if is_number else value


def truth_along(
    operator: Any, x: torch.Tensor, dim: int | Sequence[int] | None = None, keepdim: bool = False
) -> Any:
    """``aten.any`` or ``aten.all`` along dimensions, which may be none.

    Over an empty list of dimensions torch reduces nothing, where ONNX would reduce all dimensions.
    The result for uint8 is uint8.
    """
    if x.dtype == torch.uint8:
        return operator(x != 0, dim, keepdim).to(torch.uint8)
    if isinstance(dim, Sequence) and not dim:
        return x != 0
    return over_one_element(operator, x, dim, keepdim)


def mean(
    x: torch.Tensor,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    """``aten.mean`` in the requested dtype; torchlib would cast the result instead.

    The mean of many elements is their sum by :func:`cascade`, divided by their number.
    """
    if dtype is not None and dtype is not x.dtype:
        return aten.mean.dim(x.to(dtype), dim, keepdim)
    summed = cascade(x, dim, keepdim)
    if summed is not NotImplemented:
        return summed / count_of(x, dim)
    return NotImplemented if x.dim() else x.clone()


def cascade(x: torch.Tensor, dims: Sequence[int] | None, keepdim: bool = False) -> Any:
    """The sum of many float32 numbers on a CPU, computed in parts; else ``NotImplemented``."""
    places = sorted(dim % x.dim() for dim in dims or range(x.dim())) if x.dim() else []
    if x.dtype is not torch.float32 or x.device.type != "cpu":
        return NotImplemented
    if not all(isinstance(x.shape[dim], int) for dim in places):
        return NotImplemented
    if math.prod(x.shape[dim] for dim in places) < _MANY:
        return NotImplemented
    for dim in reversed(places):
        x = _sum_along(x, dim)
    return x if keepdim else x.squeeze(places)


def _sum_along(x: torch.Tensor, dim: int) -> torch.Tensor:
    """The sum along one dimension, which is kept with size one."""
    size = x.shape[dim]
    if size <= 2 * _AT_ONCE:
        return torch.sum(x, [dim], keepdim=True)
    parts, rest = divmod(size, _AT_ONCE)
    whole = x.narrow(dim, 0, size - rest) if rest else x
    shape = (*x.shape[:dim], parts, _AT_ONCE, *x.shape[dim + 1 :])
    found = _sum_along(whole.reshape(shape).sum(dim + 1), dim)
    return (
        found + torch.sum(x.narrow(dim, size - rest, rest), [dim], keepdim=True) if rest else found
    )


def count_of(x: torch.Tensor, dims: Sequence[int] | None) -> int:
    """The number of elements that are reduced to one."""
    return math.prod(x.shape[dim] for dim in dims or range(x.dim()))


def variance(
    x: torch.Tensor,
    dim: Sequence[int] | None = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> Any:
    """``aten.var`` of many elements, or of fewer than the correction.

    In the second case torchlib divides by a negative number.
    """
    found = variance_and_mean(x, dim, correction=correction, keepdim=keepdim)
    return found if found is NotImplemented else found[0]


def variance_and_mean(
    x: torch.Tensor,
    dim: Sequence[int] | None = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> Any:
    """``aten.var_mean`` in the cases of :func:`variance`."""
    correction = 1 if correction is None else correction
    dims = [each % x.dim() for each in dim or range(x.dim())] if x.dim() else []
    if not dims or not all(isinstance(x.shape[each], int) for each in dims):
        return NotImplemented
    count = count_of(x, dims)
    if x.dtype is not torch.float32 or not (count >= _MANY or 0 < count < correction):
        return NotImplemented
    mean = torch.mean(x, dims, keepdim=True)
    squares = torch.square(x - mean)
    spread = torch.sum(squares, dims, keepdim=keepdim) / float(max(0, count - correction))
    return spread, mean if keepdim else mean.squeeze(dims)


def total(
    x: torch.Tensor,
    dims: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    """``aten.sum``; many float32 elements are summed in parts, see :func:`cascade`."""
    if not x.dim():
        return over_one_element(aten.sum.dim_IntList, x, dims, keepdim, dtype=dtype)
    return cascade(x, dims, keepdim) if dtype in (None, x.dtype) else NotImplemented


def extreme(
    operator: Any, largest: bool, x: torch.Tensor, dim: Sequence[int] = (), keepdim: bool = False
) -> Any:
    """``aten.amax`` or ``aten.amin`` with all dimensions given; of booleans ``any`` or ``all``."""
    if not x.dim():
        return x.clone()
    if x.dtype is torch.bool:
        return (aten.any.dims if largest else aten.all.dims)(x, dim or range(x.dim()), keepdim)
    return NotImplemented if dim else operator(x, list(range(x.dim())), keepdim)


def extreme_of_all(largest: bool, x: torch.Tensor) -> Any:
    """``aten.max`` or ``aten.min`` of booleans, as ``any`` or ``all``."""
    if x.dtype is not torch.bool:
        return NotImplemented
    return torch.any(x) if largest else torch.all(x)


def extreme_along(operator: Any, x: torch.Tensor, dim: int, keepdim: bool = False) -> Any:
    """``aten.max.dim`` or ``aten.min.dim`` of booleans, computed on integers.

    The backward of a product uses it to find the first zero.
    """
    if not x.dim():
        return over_one_element(operator, x, dim)
    if x.dtype is not torch.bool:
        return NotImplemented
    values, places = operator(x.to(torch.int32), dim, keepdim)
    return values.to(torch.bool), places


def vector_norm(
    x: torch.Tensor, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    """``aten.linalg_vector_norm``, written out where its translation is wrong or inexact.

    All dimensions are given where the call gives none. In float64 power and root are written out,
    because the translation rounds the exponent of the root to float32. For ``ord=0`` the elements
    that are not zero are counted, NaN included. The translation counts by signs, and OpenVINO
    2026.4 gives zero as the sign of NaN.
    """
    if not x.dim():
        return over_one_element(aten.linalg_vector_norm.default, x, ord, [0], dtype=dtype)
    dims = dim or list(range(x.dim()))
    if abs(ord) == math.inf:
        largest = (torch.amax if ord > 0 else torch.amin)(torch.abs(x), dims, keepdim)
        return largest if dtype is None else largest.to(dtype)
    if ord == 0:
        return torch.sum((x != 0).to(dtype or x.dtype), dims, keepdim)
    if (dtype or x.dtype) is torch.float64 and ord not in (1, 2):
        powers = torch.pow(torch.abs(x.to(torch.float64)), ord)
        return torch.pow(torch.sum(powers, dims, keepdim), 1 / ord)
    if (dtype or x.dtype) is x.dtype and ord in (1, 2):
        powers = torch.abs(x) if ord == 1 else x * x
        summed = cascade(powers, dims, keepdim)
        if summed is not NotImplemented:
            return summed if ord == 1 else torch.sqrt(summed)
    if dim:
        return NotImplemented
    return aten.linalg_vector_norm.default(x, ord, dims, keepdim, dtype=dtype)


def mean_square_error(x: torch.Tensor, target: torch.Tensor, reduction: int = 1) -> Any:
    """``aten.mse_loss`` of many elements, whose squares are summed by :func:`cascade`."""
    difference = x - target
    squares = difference * difference
    summed = cascade(squares, None) if reduction else NotImplemented
    if summed is NotImplemented:
        return NotImplemented
    return summed / count_of(squares, None) if reduction == 1 else summed


_MEAN = 1
"""Torch's number for the reduction ``"mean"``."""


def smooth_l1_backward(
    grad: torch.Tensor, x: torch.Tensor, target: torch.Tensor, reduction: int, beta: float
) -> Any:
    """``aten.smooth_l1_loss_backward``, with NaN where the loss is NaN.

    The decomposition of torch 2.13 uses the sign of NaN, which is zero.
    """
    dtype = torch.result_type(x, target)
    wide = dtype if dtype in WIDE else torch.float32
    difference = x.to(wide) - target.to(wide)
    slope = torch.where(difference <= -beta, -1.0, difference / beta)
    slope = torch.where(difference >= beta, 1.0, slope).to(wide)
    found = grad.to(wide) * slope / (x.numel() if reduction == _MEAN else 1)
    return found.to(dtype)
