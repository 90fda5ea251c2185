"""Operators that are decomposed because their ONNX translation gives other numbers than eager.

Each entry of :func:`decompositions` is for AOTAutograd's table: a function with the operator's
signature that returns ``NotImplemented`` for calls whose translation is right.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from composer import _torch
from composer.lowering.operators.attention import attentions
from composer.lowering.operators.convolution import convolution_backward, far_padded
from composer.lowering.operators.draws import draws
from composer.lowering.operators.dtypes import dtypes
from composer.lowering.operators.elementwise import edges, elementwise
from composer.lowering.operators.gradients import gradients
from composer.lowering.operators.layouts import lying_as_in_eager, lying_as_operands
from composer.lowering.operators.lists import lists
from composer.lowering.operators.pool_gradients import pool_gradients
from composer.lowering.operators.pools import pools
from composer.lowering.operators.reductions import reductions, spreads
from composer.lowering.operators.selections import selections
from composer.lowering.vocabulary import vocabulary

aten = torch.ops.aten

_TRAINING_NORMS = (
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit.no_stats,
    aten.native_batch_norm.default,
)
"""Torchlib drops their training flag: the exported numbers would be eval's."""

_AS_TORCH_DOES = (
    aten.nll_loss_forward.default,
    aten.hardtanh_backward.default,
    aten.glu.default,
)
"""Written out as torch has it.

Torchlib gives the loss's own size for the total weight (onnxscript 0.7), by which the backward
divides: gradients of a mean came out as many times too large as the batch. It has a gradient on the
bounds of ``hardtanh``, and a function for ``glu``, whose sigmoid
:mod:`composer.lowering.tails` is to see.
"""

_BETWEEN_TENSORS = (
    *(aten.linspace.Tensor_Tensor, aten.linspace.Tensor_Scalar, aten.linspace.Scalar_Tensor),
)

_KEPT = (aten.lift_fresh.default, aten.lift.default, aten.diagonal_scatter.default)
"""Their decomposition calls an operator on the literal itself, which fake mode refuses; that of the
last writes to a copy, which is no functional graph."""


Table = Mapping[Any, Callable[..., Any]]
"""Operator to a function of its signature."""


def decompositions(dialect: Table, training: bool) -> dict[Any, Callable[..., Any]]:
    """The table for AOTAutograd: an engine's entries first, then composer's, then the exporter's.

    In ``training`` the engine's are left out, and attention is decomposed, since its backward reads
    a logarithm of sums that its translation leaves at zero.

    Args:
        dialect: The engine's entries.
        training: Whether a backward will be made.
    """
    exporters = _exporters()
    table = dict(exporters)
    for operator in _KEPT:
        table.pop(operator, None)
    unpool, mean_pool = table[aten.max_unpool2d.default], table[aten._adaptive_avg_pool2d.default]
    squeeze = table[aten.squeeze.dims]
    written_out = (*_TRAINING_NORMS, *_AS_TORCH_DOES)
    table |= {operator: _torch.operators.decomposition_of(operator) for operator in written_out}
    table |= {each: functools.partial(_of_floats, table[each]) for each in _BETWEEN_TENSORS}
    table |= lying_as_operands(elementwise()) | lying_as_in_eager(reductions())
    table |= attentions(training) | lists()
    parts = (selections(), pools(), pool_gradients(), gradients(), dtypes(), draws())
    for part in (lying_as_operands(edges()), *parts, spreads()):
        for operator, function in part.items():
            table[operator] = _first_of(function, table.get(operator))
    table |= {
        aten.max_unpool2d.default: functools.partial(in_its_format, unpool),
        aten._adaptive_avg_pool2d.default: functools.partial(in_its_format, mean_pool),
        aten.squeeze.dims: functools.partial(squeeze_several, squeeze),
        aten.convolution.default: far_padded,
        aten.convolution_backward.default: convolution_backward,
        aten.mv.default: matrix_vector,
        aten.addmv.default: add_matrix_vector,
        aten.maximum.default: maximum,
        aten.minimum.default: minimum,
        aten.clamp.default: clamp,
        aten.clamp_min.default: lambda x, low: clamp(x, min=low),
        aten.clamp_max.default: lambda x, high: clamp(x, max=high),
        aten.clamp.Tensor: clamp_by_tensors,
        aten.clamp_min.Tensor: clamp_by_tensors,
        aten.clamp_max.Tensor: lambda x, high: clamp_by_tensors(x, max=high),
        aten.relu.default: relu,
        aten.constant_pad_nd.default: constant_pad,
        aten.copy.default: copy,
        aten._efficientzerotensor.default: torch.zeros,
    }
    for operator, function in () if training else dialect.items():
        table[operator] = _first_of(function, table.get(operator))
    own = {
        each: function for each, function in table.items() if function is not exporters.get(each)
    }
    return table | {operator: _of_real_numbers(function) for operator, function in own.items()}


@functools.cache
def _exporters() -> Table:
    """The exporter's entries; a thousand, so that it pays to make them once.

    None for what draws random numbers, which would be others than those of eager's kernel.
    """
    found = vocabulary().decompositions.items()
    kept = {each: function for each, function in found if not _torch.operators.draws_itself(each)}
    return {operator: _of_real_numbers(function) for operator, function in kept.items()}


def _of_floats(written_out: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Torch's own, which rounds otherwise to what is between integers (2.13)."""
    dtype = kwargs.get("dtype") or torch.get_default_dtype()
    return written_out(*args, **kwargs) if dtype.is_floating_point else NotImplemented


def _of_real_numbers(function: Callable[..., Any]) -> Callable[..., Any]:
    """Leave calls with complex numbers whole: torch runs them, and few entries allow for them."""

    def decompose(*args: Any, **kwargs: Any) -> Any:
        is_complex = any(map(_is_complex, args)) or any(map(_is_complex, kwargs.values()))
        return NotImplemented if is_complex else function(*args, **kwargs)

    return decompose


def _is_complex(given: Any) -> bool:
    if isinstance(given, list | tuple):
        return any(map(_is_complex, given))
    return isinstance(given, torch.Tensor) and given.dtype.is_complex


def _first_of(first: Callable[..., Any], second: Callable[..., Any] | None) -> Callable[..., Any]:
    """What ``first`` returns, or ``second`` where that is ``NotImplemented``."""

    def decompose(*args: Any, **kwargs: Any) -> Any:
        result = first(*args, **kwargs)
        return second(*args, **kwargs) if result is NotImplemented and second else result

    return decompose


def in_its_format(written_out: Callable[..., Any], x: torch.Tensor, *args: Any) -> Any:
    """What loses the memory format that eager takes from the input, put into it.

    Views of the result count with it.
    """
    result = written_out(x, *args)
    if result is NotImplemented or x.dim() != 4:
        return result
    return result.contiguous(memory_format=_torch.tensors.suggested_memory_format(x))


def squeeze_several(written_out: Callable[..., Any], x: torch.Tensor, dims: Sequence[int]) -> Any:
    """By ATen's view: torch's own are primitives, which take it 60 times as long to run.

    It runs them where it makes a returned view, such as the deviations that a batch norm keeps for
    its backward: three a norm, half a millisecond.
    """
    places = {dim % x.dim() for dim in dims} if x.dim() else set()
    if not places or not all(isinstance(x.shape[each], int) for each in places):
        return written_out(x, dims)
    ones = [each for each in sorted(places, reverse=True) if x.shape[each] == 1]
    for each in ones:
        x = aten.squeeze.dim(x, each)
    return x if ones else aten.alias.default(x)


def constant_pad(x: torch.Tensor, pad: Sequence[int], value: Any = 0) -> Any:
    """A pad by zero elements, as models for inputs of any size have it, becomes no pad.

    ONNX Runtime would copy the tensor. Swin pads so before every block: 1.03 times the time of a
    call at a tiny size.
    """
    nothing = all(isinstance(size, int) and size == 0 for size in pad)
    return x.clone() if nothing else NotImplemented


def copy(x: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> Any:
    """Fewer numbers, repeated first: their translation gives them as they are."""
    if x.shape == src.shape:
        return NotImplemented
    return aten.copy.default(x, src.expand(x.shape), non_blocking)


def matrix_vector(matrix: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
    """The product as one of two matrices, the second with one column.

    For a transposed matrix and a vector, ONNX Runtime's optimizer makes a product that forgets the
    transposition (``MatmulTransposeFusion``, 1.31): wrong numbers, or a result of another size.
    """
    return torch.mm(matrix, vector.unsqueeze(1)).squeeze(1)


def add_matrix_vector(
    x: torch.Tensor, matrix: torch.Tensor, vector: torch.Tensor, *, beta: Any = 1, alpha: Any = 1
) -> torch.Tensor:
    """The same, added to ``x`` unless ``beta`` is zero: then ``x`` may hold anything."""
    if not x.dtype.is_floating_point:
        alpha, beta = int(alpha), int(beta)
    product = matrix_vector(matrix, vector)
    product = product if alpha == 1 else product * alpha
    return product if beta == 0 else product + (x if beta == 1 else x * beta)


# ONNX Runtime's Max, Min, Clip, Relu compare only the low half of int64 (1.31, AVX-512); its
# comparisons and Where are right.


def maximum(a: torch.Tensor, b: torch.Tensor) -> Any:
    """The larger of two integers."""
    return torch.where(a > b, a, b) if _are_long(a, b) else NotImplemented


def minimum(a: torch.Tensor, b: torch.Tensor) -> Any:
    """The smaller of two integers."""
    return torch.where(a < b, a, b) if _are_long(a, b) else NotImplemented


def clamp(x: torch.Tensor, min: Any = None, max: Any = None) -> Any:
    """An integer between integer bounds, any other number between two floats."""
    if x.dtype.is_floating_point:
        if any(isinstance(each, float) and math.isnan(each) for each in (min, max)):
            return torch.full_like(x, math.nan)
        both = isinstance(min, float) and isinstance(max, float)
        return NotImplemented if both else _between_floats(x, min, max)
    if isinstance(min, float) or isinstance(max, float):
        return aten.clamp.default(x.to(torch.result_type(x, 0.0)), min, max)
    if x.dtype is not torch.int64:
        return NotImplemented
    if min is not None:
        x = torch.where(x < min, min, x)
    return x if max is None else torch.where(x > max, max, x)


def clamp_by_tensors(x: torch.Tensor, min: Any = None, max: Any = None) -> Any:
    """NaN where either is NaN; of one bound without dimensions torchlib makes two."""
    if min is not None and max is not None:
        return NotImplemented
    for bound, nearer in ((min, torch.maximum), (max, torch.minimum)):
        if bound is not None:
            dtype = torch.result_type(x, bound)
            x = nearer(x.to(dtype), bound.to(dtype))
    return x


def _between_floats(x: torch.Tensor, min: Any, max: Any) -> Any:
    """The exporter breaks on an integer beside a float; a bound that is missing is infinite.

    ONNX Runtime's is the largest finite number.
    """
    bounds = (-math.inf if min is None else min), (math.inf if max is None else max)
    if not all(isinstance(each, int | float) for each in bounds):
        return NotImplemented
    return aten.clamp.default(x, *map(float, bounds))


def relu(x: torch.Tensor) -> Any:
    """An integer, or zero for a negative one."""
    return torch.where(x > 0, x, 0) if x.dtype is torch.int64 else NotImplemented


def _are_long(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype is torch.int64 and b.dtype is torch.int64
