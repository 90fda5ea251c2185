"""Sums, means, extremes and norms along dimensions, and losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from composer import _torch
from composer.lowering.operators.entry import Function, Operator, Operators, stays
from composer.lowering.operators.guards import are_known, is_float32, is_on_cpu, only_for
from composer.lowering.operators.layouts import lying_as_in_eager

aten = torch.ops.aten


def entries() -> Operators:
    """The entries of this module."""
    amax, amin, most, least = aten.amax.default, aten.amin.default, aten.max.dim, aten.min.dim
    norm = aten.linalg_vector_norm.default
    of_booleans = only_for(lambda x: x.dtype is torch.bool)
    any_of_booleans, all_of_booleans = of_booleans(torch.any), of_booleans(torch.all)
    written_out = {
        aten.mean.default: Operator(mean),
        aten.mean.dim: Operator(mean),
        aten.sum.default: over_vector(aten.sum.default, total),
        aten.sum.dim_IntList: over_vector(aten.sum.dim_IntList, total),
        aten.prod.dim_int: over_vector(aten.prod.dim_int),
        aten.logsumexp.default: over_vector(aten.logsumexp.default, long_log_sum_exp),
        aten.any.dim: over_vector(aten.any.dim, partial(truth_along, aten.any.dim)),
        aten.any.dims: over_vector(aten.any.dims, partial(truth_along, aten.any.dims)),
        aten.all.dim: over_vector(aten.all.dim, partial(truth_along, aten.all.dim)),
        aten.all.dims: over_vector(aten.all.dims, partial(truth_along, aten.all.dims)),
        amax: Operator(partial(extreme, amax, aten.any.dims), translate="comparisons:amax"),
        amin: Operator(partial(extreme, amin, aten.all.dims), translate="comparisons:amin"),
        aten.max.default: Operator(any_of_booleans, translate="comparisons:maximum_of_all"),
        aten.min.default: Operator(all_of_booleans, translate="comparisons:minimum_of_all"),
        most: over_vector(most, partial(extreme_along, most), translate="comparisons:max_dim"),
        least: over_vector(least, partial(extreme_along, least), translate="comparisons:min_dim"),
        aten.argmax.default: over_vector(aten.argmax.default, translate="comparisons:argmax"),
        aten.argmin.default: over_vector(aten.argmin.default, translate="comparisons:argmin"),
        norm: over_vector(norm, vector_norm),
    }
    nll = aten.nll_loss_forward.default
    return lying_as_in_eager(written_out) | {
        aten.var.correction: Operator(variance),
        aten.var_mean.correction: Operator(variance_and_mean),
        aten.mse_loss.default: Operator(mean_square_error),
        aten.smooth_l1_loss_backward.default: Operator(smooth_l1_backward),
        # In onnxscript 0.7 the total weight, by which the backward divides, is the loss's number of
        # elements (microsoft/onnxscript#1784): the batch size was a factor of a mean's gradients.
        nll: Operator(_torch.operators.decomposition_of(nll)),
    }


_AT_ONCE = 2**6
"""The number of elements per part of a split sum.

Engines lose digits in long sums: of four million elements, ONNX Runtime 1.32 loses the third digit
(microsoft/onnxruntime#28450) and OpenVINO 2026.4 the second. Eager sums in parts, too."""

_STAGES = 3
"""How often a sum over a dynamic size is split.

The parts of the last stage are summed at once. Of 2**26 elements there are 2**8 such parts."""

_MOST_IN_FUSED_NORM = 2**13
"""The most elements of a row whose sum is left whole, because an engine may fuse it into a norm.

Rows of models are shorter. Sums of many times as many elements lose digits."""


_MOST_EXPONENTIALS = 2**16
"""The most exponentials that engines' own kernels of ``logsumexp`` and ``log_softmax`` add up.

Of a million, ONNX Runtime 1.32 and OpenVINO 2026.4 lose the sixth digit; of four, the fourth."""


def over_vector(operator: Any, decompose: Function = stays, **fields: Any) -> Operator:
    """The entry of an operator that accepts a tensor without dimensions; ONNX's does not.

    Such a call is made on a vector of one element instead. Calls with other tensors are decomposed
    by ``decompose``. ``fields`` are other fields of the entry.
    """
    return Operator(partial(_over_vector, operator, decompose), **fields)


def _over_vector(
    operator: Any, decompose: Function, x: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    if x.dim():
        return decompose(x, *args, **kwargs)
    leaves, rebuild = _torch.tensors.flatten((x, args, kwargs))
    vector, args, kwargs = rebuild([*map(_as_vector, leaves)])
    leaves, rebuild = _torch.tensors.flatten(operator(vector, *args, **kwargs))
    return rebuild([*map(_as_number, leaves)])


def _as_vector(value: Any) -> Any:
    is_number = isinstance(value, torch.Tensor) and not value.dim()
    return value.reshape(1) if is_number else value


def _as_number(result: torch.Tensor) -> torch.Tensor:
    return result.reshape(()) if result.numel() == 1 else result


def truth_along(
    operator: Any, x: torch.Tensor, dim: int | Sequence[int] | None = None, keepdim: bool = False
) -> Any:
    """``aten.any`` or ``aten.all`` along dimensions, which may be none.

    Over an empty list of dimensions torch reduces nothing, where ONNX would reduce all dimensions.
    The result for uint8 is uint8.
    """
    if x.dtype == torch.uint8:
        return operator(x != 0, dim, keepdim).to(torch.uint8)
    return x != 0 if dim in ([], ()) else NotImplemented


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
    if not x.dim():
        return x.clone()
    summed = cascade(x, dim, keepdim)
    return summed if summed is NotImplemented else summed / count_of(x, dim)


@only_for(is_float32)
@only_for(is_on_cpu)
def cascade(x: torch.Tensor, dims: Sequence[int] | None, keepdim: bool = False) -> Any:
    """The sum of many float32 numbers on a CPU, computed in parts; else ``NotImplemented``.

    Dynamic sizes are split whatever they are in the first call, since they may grow.
    """
    places = sorted(all_dims(x, dims))
    if not is_long(count_of(x, dims)) or _may_belong_to_norm(x, places, keepdim):
        return NotImplemented
    # The last dimensions come first, since engines sum rows fastest, and dynamic sizes come last,
    # since splitting one of them copies what is left.
    by_rows = reversed(_runs(places))
    runs = sorted(by_rows, key=lambda run: not are_known(x.shape[run[0] : run[-1] + 1]))
    for first, *others in runs:
        x = _sum_along(x.flatten(first, first + len(others)), first)
        for _ in others:
            x = x.unsqueeze(first)
    return x if keepdim else x.squeeze(places)


def _runs(places: Sequence[int]) -> list[list[int]]:
    """The dimensions, in order, those that are adjacent together."""
    runs: list[list[int]] = []
    for place in places:
        if not runs or runs[-1][-1] + 1 != place:
            runs.append([])
        runs[-1].append(place)
    return runs


def is_long(count: Any) -> bool:
    """True if a sum of so many elements must be split; also if their number is not known."""
    if isinstance(count, int):
        return count > 2 * _AT_ONCE
    # No engine takes a size that only the data tell, so torch computes this sum.
    return not _torch.symbols.depends_on_data(count)


def _may_belong_to_norm(x: torch.Tensor, places: Sequence[int], keepdim: bool) -> bool:
    """True for a sum that engines fuse into a norm over the last dimension, as of a layer."""
    is_of_rows = keepdim and [*places] == [x.dim() - 1]
    return is_of_rows and is_row_of_norm(x.shape[-1])


def is_row_of_norm(count: Any) -> bool:
    """True for a number of elements that a model may have in a row that is normalised."""
    return isinstance(count, int) and count <= _MOST_IN_FUSED_NORM


def _sum_along(x: torch.Tensor, dim: int) -> torch.Tensor:
    """The sum along one dimension, which is kept with size one."""
    size = x.shape[dim]
    if not isinstance(size, int):
        return _sum_along_symbol(x, dim)
    if size == 1:
        return x
    if not is_long(size):
        return torch.sum(x, [dim], keepdim=True)
    parts, rest = divmod(size, _AT_ONCE)
    if rest:
        whole = x.narrow(dim, 0, size - rest)
        last = x.narrow(dim, size - rest, rest)
        return _sum_along(whole, dim) + torch.sum(last, [dim], keepdim=True)
    in_parts = x.reshape(*x.shape[:dim], parts, _AT_ONCE, *x.shape[dim + 1 :])
    return _sum_along(in_parts.sum(dim + 1), dim)


def _sum_along_symbol(x: torch.Tensor, dim: int) -> torch.Tensor:
    """The sum along a dimension of any size, in stages of nearly equal parts.

    The parts are as long as they must be, so few zeros fill them up: a batch of eight stays eight.
    """
    size = x.shape[dim]
    lengths: list[Any] = [size]
    for _ in range(_STAGES):
        whole = lengths[0]
        parts = whole // _AT_ONCE + 1
        lengths[:1] = [parts, (whole - 1) // parts + 1]
    behind = [0, math.prod(lengths) - size]
    # Torch asks which lengths are one, to tell the order of memory. The operators are right for any
    # answer, and with guards a model would be compiled again at 64, 4,096 and 262,144 elements.
    with _torch.symbols.without_guards(size):
        padded = aten.constant_pad_nd.default(x, [0, 0] * (x.dim() - 1 - dim) + behind)
        x = padded.reshape(*x.shape[:dim], *lengths, *x.shape[dim + 1 :])
        for stage in reversed(range(len(lengths))):
            # This operator has no entry, so the sum over a part is not split again.
            x = torch.ops.prims.sum.default(x, [dim + stage])
    return x.unsqueeze(dim)


@only_for(is_float32)
@only_for(is_on_cpu)
def long_log_sum_exp(x: torch.Tensor, dims: Sequence[int], keepdim: bool = False) -> Any:
    """``aten.logsumexp`` of many numbers, written out; else ``NotImplemented``."""
    if is_for_kernel_of_exponentials(count_of(x, dims)):
        return NotImplemented
    return log_sum_exp(x, dims, keepdim)


def is_for_kernel_of_exponentials(count: Any) -> bool:
    """True for a number of exponentials that an engine's own kernel may add up."""
    return isinstance(count, int) and count <= _MOST_EXPONENTIALS


def log_sum_exp(x: torch.Tensor, dims: Sequence[int], keepdim: bool = False) -> torch.Tensor:
    """The log-sum-exp along dimensions, in operators of which the sum has its own entry."""
    dims = all_dims(x, dims)
    most = torch.amax(x, dims, keepdim=True)
    # The difference of two infinities would be NaN.
    most = torch.where(most.isinf(), 0.0, most)
    summed = torch.sum(torch.exp(x - most), dims, keepdim=True)
    result = torch.log(summed) + most
    return result if keepdim else result.squeeze(dims)


@only_for(is_float32)
def long_log_softmax(x: torch.Tensor, dim: int, half_to_float: bool) -> Any:
    """``aten._log_softmax`` of long rows, with a split sum; else ``NotImplemented``."""
    if not x.dim() or is_for_kernel_of_exponentials(x.shape[dim]):
        return NotImplemented
    x = x.contiguous()  # as eager gives it
    # The maximum is subtracted first: the log-sum-exp of numbers far from zero lacks digits.
    shifted = x - torch.amax(x, [dim], keepdim=True)
    return shifted - torch.log(torch.sum(torch.exp(shifted), [dim], keepdim=True))


def all_dims(x: torch.Tensor, dims: Sequence[int] | None) -> list[int]:
    """The reduced dimensions, counted from the front; if none are given, all."""
    return [dim % x.dim() for dim in dims or range(x.dim())]


def count_of(x: torch.Tensor, dims: Sequence[int] | None) -> int:
    """The number of elements that are reduced to one; a symbol if a size is dynamic."""
    return math.prod(x.shape[dim] for dim in all_dims(x, dims))


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


@only_for(is_float32)
@only_for(torch.Tensor.dim)
def variance_and_mean(
    x: torch.Tensor,
    dim: Sequence[int] | None = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> Any:
    """``aten.var_mean`` in the cases of :func:`variance`."""
    dims = all_dims(x, dim)
    count = count_of(x, dim)
    correction = 1 if correction is None else correction
    if not is_long(count) and not 0 < count < correction:
        return NotImplemented
    # A mean that is kept might be left whole for a norm, see _may_belong_to_norm.
    mean = torch.mean(x, dims)
    kept = mean
    for each in sorted(dims):
        kept = kept.unsqueeze(each)
    squares = torch.square(x - kept)
    spread = torch.sum(squares, dims, keepdim=keepdim) / _degrees_of_freedom(count, correction)
    return spread, kept if keepdim else mean


def _degrees_of_freedom(count: Any, correction: float) -> Any:
    """The number of elements less the correction, but at least zero."""
    # A symbol less a float would be computed in float64, which OpenVINO leaves to torch.
    whole = int(correction) if float(correction).is_integer() else correction
    if isinstance(count, int):
        return float(max(0, count - whole))
    at_least = _torch.symbols.least(count)
    is_enough = at_least is not None and at_least >= whole
    largest: Any = torch.sym_max  # without types
    return count - whole if is_enough else largest(0, count - whole)


def total(
    x: torch.Tensor,
    dims: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    """``aten.sum``; many float32 elements are summed in parts, see :func:`cascade`."""
    return cascade(x, dims, keepdim) if dtype in (None, x.dtype) else NotImplemented


def extreme(
    operator: Any,
    of_booleans: Callable[..., torch.Tensor],
    x: torch.Tensor,
    dim: Sequence[int] = (),
    keepdim: bool = False,
) -> Any:
    """``aten.amax`` or ``aten.amin`` with all dimensions given; of booleans ``any`` or ``all``."""
    if not x.dim():
        return x.clone()
    dims = all_dims(x, dim)
    if x.dtype is torch.bool:
        return of_booleans(x, dims, keepdim)
    return NotImplemented if dim else operator(x, dims, keepdim)


def extreme_along(operator: Any, x: torch.Tensor, dim: int, keepdim: bool = False) -> Any:
    """``aten.max.dim`` or ``aten.min.dim`` of booleans, computed on integers.

    The backward of a product uses it to find the first zero.
    """
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
    dims, result_dtype = all_dims(x, dim), dtype or x.dtype
    if abs(ord) == math.inf:
        extreme = torch.amax if ord > 0 else torch.amin
        return extreme(torch.abs(x), dims, keepdim).to(result_dtype)
    if ord == 0:
        return torch.sum((x != 0).to(result_dtype), dims, keepdim)
    norm: Any = NotImplemented
    if result_dtype is x.dtype:
        norm = _cascaded_norm(x, ord, dims, keepdim)
    if norm is NotImplemented and ord not in (1, 2) and result_dtype is torch.float64:
        powers = torch.pow(torch.abs(x.to(torch.float64)), ord)
        norm = torch.pow(torch.sum(powers, dims, keepdim), 1 / ord)
    if norm is NotImplemented and not dim:
        return aten.linalg_vector_norm.default(x, ord, dims, keepdim, dtype=dtype)
    return norm


def _cascaded_norm(x: torch.Tensor, ord: Any, dims: Sequence[int], keepdim: bool) -> Any:
    if ord == 1:
        return cascade(torch.abs(x), dims, keepdim)
    powers = x * x if ord == 2 else torch.pow(torch.abs(x), ord)
    summed = cascade(powers, dims, keepdim)
    if summed is NotImplemented:
        return NotImplemented
    return torch.sqrt(summed) if ord == 2 else torch.pow(summed, 1 / ord)


_NO_REDUCTION, _MEAN = 0, 1
"""Torch's numbers for the reductions ``"none"`` and ``"mean"``."""


def mean_square_error(x: torch.Tensor, target: torch.Tensor, reduction: int = _MEAN) -> Any:
    """``aten.mse_loss`` of many elements, whose squares are summed by :func:`cascade`."""
    if reduction == _NO_REDUCTION:
        return NotImplemented
    difference = x - target
    summed = cascade(difference * difference, None)
    is_mean = reduction == _MEAN and summed is not NotImplemented
    return summed / difference.numel() if is_mean else summed


def smooth_l1_backward(
    grad: torch.Tensor, x: torch.Tensor, target: torch.Tensor, reduction: int, beta: float
) -> Any:
    """``aten.smooth_l1_loss_backward``, with NaN where the loss is NaN.

    Torch's decomposition drops NaN up to version 2.15 (``tests/lowering/test_torch_faults.py``).
    """
    dtype = torch.result_type(x, target)
    wide = torch.promote_types(dtype, torch.float32)
    difference = x.to(wide) - target.to(wide)
    slope = torch.where(difference <= -beta, -1.0, difference / beta)
    slope = torch.where(difference >= beta, 1.0, slope).to(wide)
    found = grad.to(wide) * slope / (x.numel() if reduction == _MEAN else 1)
    return found.to(dtype)
