"""Operators where ONNX Runtime's kernels or optimizer do not compute what ONNX specifies.

Each operator is either rewritten or left to torch. A function that rewrites returns
``NotImplemented`` for arguments that need no change. A function that takes a node returns the
reason why the node is left to torch, or ``None``.

These entries take precedence over composer's own (:mod:`composer.lowering.operators`). All problems
were seen in ONNX Runtime 1.31.1 and 1.32.0. Tests marked ``upstream`` in
``tests/lowering/test_unsupported.py`` fail when an entry is no longer needed.
"""

from __future__ import annotations

import functools
import math
import operator
import struct
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx

from composer import _torch
from composer.graphs.nodes import tensors_of
from composer.lowering.operators.arithmetic import is_integer_division, towards_zero
from composer.lowering.operators.convolution import of_length
from composer.lowering.operators.entry import (
    Function,
    Operator,
    Operators,
    always,
    is_integral,
    is_negative_zero,
    operands_of,
    refuse_integers,
)
from composer.lowering.operators.fused import fusions
from composer.lowering.operators.layouts import lying_as_in_eager, with_strides_of_operands

aten = torch.ops.aten

_COMPARISONS = (
    *(aten.eq.Scalar, aten.ne.Scalar, aten.lt.Scalar),
    *(aten.le.Scalar, aten.gt.Scalar, aten.ge.Scalar),
)


@functools.cache
def entries() -> Operators:
    """The entries for ONNX Runtime, by torch operator."""
    accumulate, traps = Operator(accumulated, unsupported=(added_at_once,)), (integer_division,)
    crashes = Operator(unsupported=(always("ONNX Runtime's optimizer crashes on it"),))
    compared = {each: Operator(functools.partial(compare, each)) for each in _COMPARISONS}
    return {
        **fusions(),
        **_of_large_integers(),
        **with_strides_of_operands({**compared, aten.fmod.Scalar: Operator(fmod)}),
        aten.div: Operator(unsupported=traps),
        aten.div.Tensor_mode: Operator(unsupported=(rounded_quotient,)),
        aten.floor_divide: Operator(unsupported=traps),
        aten.remainder: Operator(unsupported=traps),
        aten.fmod: Operator(unsupported=traps),
        aten.pow: Operator(unsupported=(refuse_integers("powers of integers saturate"),)),
        aten._log_softmax.default: Operator(log_softmax),
        aten.mv.default: Operator(matrix_vector),
        aten._int_mm.default: Operator(unsigned_product),
        aten.convolution.default: Operator(far_padded, unsupported=(padded_output,)),
        aten.index_put.default: accumulate,
        aten._unsafe_index_put.default: accumulate,
        aten._embedding_bag: crashes,
        aten._embedding_bag_forward_only: crashes,
        aten.where.self: Operator(where, unsupported=(chosen_zero,)),
        aten.masked_fill.Scalar: Operator(masked_fill, unsupported=(chosen_zero,)),
        aten.masked_fill.Tensor: Operator(masked_fill),
        aten._to_copy.default: Operator(unsupported=(cast_of_cast,)),
    }


def _of_large_integers() -> Operators:
    """Entries for operators that compare only the low 32 bits of int64.

    These are ONNX's Max, Min, Clip, Relu, Sign and reductions. The cause is Eigen's code for SSE2
    (microsoft/onnxruntime#32475). Comparisons, ``Where`` and ``TopK`` are correct, so the rewrites
    use them.
    """
    large = (large_integers,)
    reductions = {
        aten.sum.default: Operator(sum_of_integers),
        aten.sum.dim_IntList: Operator(sum_of_integers),
        aten.amax.default: Operator(functools.partial(extreme, True), unsupported=large),
        aten.amin.default: Operator(functools.partial(extreme, False), unsupported=large),
        aten.max.default: Operator(functools.partial(extreme, True), unsupported=large),
        aten.min.default: Operator(functools.partial(extreme, False), unsupported=large),
        aten.max.dim: Operator(functools.partial(extreme_along, True), unsupported=large),
        aten.min.dim: Operator(functools.partial(extreme_along, False), unsupported=large),
    }
    return lying_as_in_eager(reductions) | {
        aten.prod: Operator(unsupported=large),
        aten.sign: Operator(unsupported=large),
        aten.maximum.default: Operator(
            _of_int64(lambda a, b: torch.where(a > b, a, b)), unsupported=large
        ),
        aten.minimum.default: Operator(
            _of_int64(lambda a, b: torch.where(a < b, a, b)), unsupported=large
        ),
        aten.relu.default: Operator(
            _of_int64(lambda x: torch.where(x > 0, x, 0)), unsupported=large
        ),
        aten.clamp: Operator(unsupported=large),
        aten.clamp.default: Operator(clamp),
        aten.clamp_min: Operator(unsupported=large),
        aten.clamp_min.default: Operator(lambda x, low: clamp(x, min=low)),
        aten.clamp_max: Operator(unsupported=large),
        aten.clamp_max.default: Operator(lambda x, high: clamp(x, max=high)),
    }


def large_integers(node: torch.fx.Node) -> str | None:
    """Reject int64: the kernels use only 32 bits of it, or saturate."""
    value, *_ = tensors_of(node)  # indices come second
    is_long = value.dtype is torch.int64
    return "int64 is computed with 32 bits, or saturates" if is_long else None


def _of_int64(function: Function) -> Function:
    """A decorator that declines calls with a tensor of another dtype than int64."""

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        dtypes = {each.dtype for each in args if isinstance(each, torch.Tensor)}
        return function(*args, **kwargs) if dtypes == {torch.int64} else NotImplemented

    return guarded


@_of_int64
def clamp(x: torch.Tensor, min: Any = None, max: Any = None) -> Any:
    """Clamp int64 by comparisons and ``where``. ``min`` or ``max`` may be ``None``."""
    if float in (type(min), type(max)):
        return NotImplemented
    if min is not None:
        x = torch.where(x < min, min, x)
    if max is not None:
        x = torch.where(x > max, max, x)
    return x


@_of_int64
def extreme(largest: bool, x: torch.Tensor, dims: Sequence[int] = (), keepdim: bool = False) -> Any:
    """The largest or smallest int64, by ``TopK``, whose kernel compares all 64 bits.

    ``dims`` are the dimensions to reduce; all if empty. A tensor without dimensions is declined.
    """
    if not x.dim():
        return NotImplemented
    dims = dims or range(x.dim())
    for dim in dims:
        x = torch.topk(x, 1, dim, largest).values
    return x if keepdim else x.squeeze([*dims])


@_of_int64
def extreme_along(largest: bool, x: torch.Tensor, dim: int, keepdim: bool = False) -> Any:
    """The largest or smallest int64 along one dimension, and its index."""
    if not x.dim():
        return NotImplemented
    values, places = torch.topk(x, 1, dim, largest)
    return (values, places) if keepdim else (values.squeeze(dim), places.squeeze(dim))


def sum_of_integers(
    x: torch.Tensor,
    dims: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    """Sum int32 or int64 by a matrix product with ones.

    ONNX Runtime sums integers in float64, and its sums saturate (microsoft/onnxruntime#28743). Its
    integer products wrap on overflow, as torch's sums do. Integers of up to 16 bits are left as
    they are, since float64 is exact enough for them. On a GPU, neither torch nor the engines have
    integer products.
    """
    if x.dtype not in (torch.int32, torch.int64) or x.device.type != "cpu" or not x.dim():
        return NotImplemented
    dtype = dtype or torch.int64
    if dtype.is_floating_point:
        return NotImplemented
    summed = [dim % x.dim() for dim in dims or range(x.dim())]
    moved = x.to(torch.int64).movedim(summed, [*range(-len(summed), 0)])
    kept, reduced = moved.shape[: -len(summed)], moved.shape[-len(summed) :]
    table = moved.reshape(math.prod(kept), math.prod(reduced))
    ones = torch.ones(table.shape[1], 1, dtype=torch.int64, device=x.device)
    sums = torch.mm(table, ones).reshape(kept)
    if keepdim:
        for dim in sorted(summed):
            sums = sums.unsqueeze(dim)
    return sums.to(dtype)


def log_softmax(x: torch.Tensor, dim: int, half_to_float: bool) -> Any:
    """Log-softmax in float64, written out.

    ONNX Runtime's kernel gives finite numbers for a row that holds NaN or an infinity.
    """
    if x.dtype is not torch.float64 or not x.dim() or x.shape[dim] == 0:
        return NotImplemented
    x = x.contiguous()  # as eager gives it
    shifted = x - torch.amax(x, dim, keepdim=True)
    return shifted - torch.log(torch.exp(shifted).sum(dim, keepdim=True))


def fmod(a: torch.Tensor, b: Any) -> Any:
    """Remainder of integers, computed from the quotient.

    ONNX Runtime before 1.32 computes it in float64; 1.31 is the newest release for GPUs.
    """
    return a - towards_zero(a, b) * b if is_integer_division(a, b) else NotImplemented


def integer_division(node: torch.fx.Node) -> str | None:
    """Reject integer divisions that may end the process.

    ONNX Runtime uses the division instruction of the processor, which traps on overflow. In ONNX
    Runtime 1.32.0 the smallest integer divided by -1 still traps. A division by zero is an error
    since ONNX Runtime 1.31 (microsoft/onnxruntime#16998). A divisor outside the range of the dtype
    wraps, and may become -1.
    """
    if not all(map(is_integral, tensors_of(node))):
        return None
    divisor = node.args[1]
    if isinstance(divisor, torch.fx.Node):
        return "an integer division by a tensor may end the process"
    limits = torch.iinfo(next(tensors_of(node)).dtype)
    wrapped = (int(divisor) - limits.min) % 2**limits.bits + limits.min  # type: ignore[arg-type]
    return "an integer division by -1 may end the process" if wrapped == -1 else None


def rounded_quotient(node: torch.fx.Node) -> str | None:
    """Reject a truncated quotient of two float16 tensors.

    ONNX Runtime does not round the quotient to float16 before it truncates.
    """
    if len(node.all_input_nodes) < 2 or next(tensors_of(node)).dtype is not torch.float16:
        return None
    truncates = _torch.operators.argument(node, "rounding_mode") == "trunc"
    return "a quotient in float16 is rounded before its fraction goes" if truncates else None


def compare(comparison: Any, x: torch.Tensor, number: Any) -> Any:
    """Compare float16 with a number that is rounded to float16 first, as torch does.

    ONNX Runtime compares in float32, with the number unrounded.
    """
    if x.dtype is not torch.float16 or not isinstance(number, int | float):
        return NotImplemented
    try:
        (rounded,) = struct.unpack("e", struct.pack("e", float(number)))
    except OverflowError:
        rounded = math.copysign(math.inf, number)
    if rounded == number or math.isnan(number):
        return NotImplemented
    return comparison(x, rounded)


def matrix_vector(matrix: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
    """Compute a matrix-vector product as a product with a matrix of one column.

    ONNX Runtime's ``MatmulTransposeFusion`` drops the transposition of a matrix that is multiplied
    by a vector. The result is then wrong, or has another size.
    """
    return torch.mm(matrix, vector.unsqueeze(1)).squeeze(1)


def unsigned_product(a: torch.Tensor, b: torch.Tensor) -> Any:
    """Multiply uint8 by int8 as int8 by int8, where sums of the former would saturate.

    They do on processors without instructions for such products, unless ``b`` is a weight.
    """
    if a.dtype is not torch.uint8 or _torch.processor.multiplies_int8():
        return NotImplemented
    signed = (a.to(torch.int32) - 128).to(torch.int8)
    return aten._int_mm.default(signed, b) + 128 * b.sum(0, keepdim=True, dtype=torch.int32)


def far_padded(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Any:
    """Compute a transposed convolution without padding, then crop and pad the result.

    This is for output padding that is not smaller than the stride. ONNX Runtime raises an error
    for it when the model runs.
    """
    dims = x.dim() - 2
    geometry = stride, padding, dilation, output_padding
    steps, cropped, gaps, added = (of_length(each, dims) for each in geometry)
    allowed = all(map(operator.lt, added, map(max, steps, gaps)))  # torch refuses any other
    if not (transposed and allowed and _is_far(added, steps)) or not _torch.tensors.is_row_major(x):
        return NotImplemented
    zero = [0] * dims
    whole = torch.convolution(x, weight, None, stride, zero, dilation, True, zero, groups)
    edges: list[int] = []  # of the last dimension first
    for crop, more in zip(reversed(cropped), reversed(added), strict=True):
        edges += -crop, more - crop
    result = torch.nn.functional.pad(whole, edges)
    return result if bias is None else result + bias.reshape(-1, *[1] * dims)


def padded_output(node: torch.fx.Node) -> str | None:
    """Reject a transposed convolution whose output padding is not smaller than the stride.

    ONNX Runtime raises an error for it when the model runs.
    """
    if not _torch.operators.argument(node, "transposed"):
        return None
    padding = _torch.operators.argument(node, "output_padding")
    stride = _torch.operators.argument(node, "stride")
    return "its output is padded by a stride or more" if _is_far(padding, stride) else None


def _is_far(output_padding: Sequence[int], stride: Sequence[int]) -> bool:
    """True if the output is padded by a stride or more in some dimension."""
    return any(map(operator.ge, output_padding, stride))


def accumulated(
    x: torch.Tensor,
    indices: Sequence[torch.Tensor | None],
    values: torch.Tensor,
    accumulate: bool = False,
) -> Any:
    """Accumulate values at indices along one dimension by ``scatter_add``.

    The backward of an embedding does this. ONNX Runtime's kernel for ``index_put`` adds with
    several threads at once, and loses values where an index occurs twice
    (microsoft/onnxruntime#18048 describes these threads).
    """
    indexed = {dim: index for dim, index in enumerate(indices) if index is not None}
    if not accumulate or len(indexed) != 1 or x.device.type != "cpu":
        return NotImplemented
    ((dim, index),) = indexed.items()
    if index.dtype is not torch.int64:  # others are masks
        return NotImplemented
    if any(map(_torch.symbols.depends_on_data, index.shape)):
        return NotImplemented
    before, after = x.shape[:dim], x.shape[dim + 1 :]
    added = values.expand(*before, *index.shape, *after).reshape(*before, index.numel(), *after)
    places = index.reshape(-1)
    places = torch.where(places < 0, places + x.shape[dim], places)
    places = places.reshape(-1, *([1] * len(after))).expand(added.shape)
    return _in_memory_as(x, aten.scatter_add.default(x, dim, places, added))


def _in_memory_as(x: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """The result, copied where needed so that its dimensions lie in memory as those of ``x``."""
    order = _torch.tensors.order_of_memory(x)
    if order == sorted(order):
        return result
    inverse = [order.index(dim) for dim in range(x.dim())]
    return result.permute(order).contiguous().permute(inverse)


def added_at_once(node: torch.fx.Node) -> str | None:
    """Reject an accumulating ``index_put`` with integer indices: threads race, and values are lost.

    Accumulation along one dimension is rewritten by :func:`accumulated` instead.
    """
    if not _torch.operators.argument(node, "accumulate"):
        return None
    indices = filter(None, _torch.operators.argument(node, "indices"))
    counts = any(is_integral(index.meta["val"]) for index in indices)  # others are masks
    return "several threads would add to one element at once" if counts else None


def where(condition: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Any:
    """``where`` of booleans, by logical operators.

    ONNX Runtime has no kernel for it (microsoft/onnxruntime#24127).
    """
    if a.dtype is not torch.bool or b.dtype is not torch.bool:
        return NotImplemented
    return (condition & a) | (~condition & b)


def masked_fill(x: torch.Tensor, mask: torch.Tensor, value: Any) -> Any:
    """``masked_fill`` of booleans, by logical operators, for the same reason as :func:`where`."""
    if x.dtype is not torch.bool:
        return NotImplemented
    if isinstance(value, torch.Tensor):
        return where(mask, value, x)
    return x | mask if value else x & ~mask


def chosen_zero(node: torch.fx.Node) -> str | None:
    """Reject a choice of the number ``-0.0``.

    ONNX Runtime's kernel for ``Where`` drops the sign of a zero of its first choice. Zeros among
    the numbers of a tensor are not looked for (``docs/reference/engines/onnxrt-numbers.md``).
    """
    chosen = node.args[1 if node.target is aten.where.self else 2]
    numbers = chosen.args if isinstance(chosen, torch.fx.Node) else (chosen,)
    return "the sign of a zero would be lost" if any(map(is_negative_zero, numbers)) else None


def cast_of_cast(node: torch.fx.Node) -> str | None:
    """Reject a cast to an integer dtype whose operand is itself a cast from floating point.

    ONNX Runtime merges two successive casts into one (microsoft/onnxruntime#13418).
    """
    if not is_integral(node.meta["val"]):
        return None
    (source,) = node.all_input_nodes
    if source.target is not aten._to_copy.default:
        return None
    (first,) = operands_of(source)
    return "two casts would become one" if first.dtype.is_floating_point else None
