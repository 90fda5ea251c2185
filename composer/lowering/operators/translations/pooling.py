"""Translations of max pooling, which in torch gives NaN for every window that holds one.

ONNX Runtime's ``MaxPool`` (1.32; microsoft/onnxruntime#24819) passes over NaN. A mean over the same
window of numbers that are not below zero, squares or what ``Relu`` gives, is NaN for no other
cause. For a window of minus infinity it gives the lowest finite float32, unless its places are
used; programs that mask by that number have it in ``x`` themselves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import onnx_ir as ir
import onnxscript
import torch
from onnxscript.function_libs.torch_lib.ops import nn

from composer.lowering.operators.convolution import of_length

if TYPE_CHECKING:  # onnxscript's own, which the exporter reads, are of no use to a type checker
    INT64: TypeAlias = Any
    TReal: TypeAlias = Any
else:
    from onnxscript import INT64
    from onnxscript.function_libs.torch_lib.tensor_typing import TReal

aten = torch.ops.aten
op: Any = onnxscript.opset18


def batched(x: Any, dims: int) -> Any:
    """``x`` with a batch of one in front, if it has none."""
    return x if len(x.shape) == dims + 2 else op.Unsqueeze(x, op.Constant(value_ints=[0]))


def unbatched(result: Any, x: Any, dims: int) -> Any:
    """The result without the batch that :func:`batched` put in front."""
    whole = len(x.shape) == dims + 2
    return result if whole else op.Squeeze(result, op.Constant(value_ints=[0]))


def spoilt(x: Any, window: dict[str, Any]) -> Any:
    """Whether there is NaN in a window; the mean has no dilation, and none of float64."""
    if any(step > 1 for step in window["dilations"]) or x.dtype == ir.DataType.DOUBLE:
        marks = op.Cast(op.IsNaN(x), to=ir.DataType.FLOAT)
        return op.Cast(op.MaxPool(marks, **window)[0], to=ir.DataType.BOOL)
    plain = {name: value for name, value in window.items() if name != "dilations"}
    positive = x if is_relu(x) else op.Mul(x, x)
    return op.IsNaN(op.AveragePool(positive, **plain))


def with_infinity(found: Any, x: Any, window: dict[str, Any]) -> Any:
    """Minus infinity for the lowest of float32, which that kernel of ``MaxPool`` starts from.

    Not if there is none in ``x``, nor a window that may lie in the padding as a whole. Where ``x``
    holds both, they are not told apart.
    """
    lowest = op.Constant(value_float=torch.finfo(torch.float32).min)
    kept = op.Greater(found, lowest)
    if max(window["dilations"]) == 1 or not any(window["pads"]):
        marks = op.Cast(op.IsInf(x, detect_positive=0), to=ir.DataType.FLOAT)
        none = op.Equal(op.ReduceMax(marks, keepdims=False), op.Constant(value_float=0.0))
        kept = op.Or(kept, none)
    return op.Where(kept, found, op.Constant(value_float=float("-inf")))


def is_relu(x: Any) -> bool:
    """Whether no number is below zero; the convolutions that most pools stand behind end so."""
    producer = x.producer()
    return producer is not None and producer.op_type == "Relu"


def last_nan(x: Any, window: dict[str, Any]) -> Any:
    """Where in its plane the last NaN of a window is, row by row; -1 if there is none."""
    sizes = op.Shape(x, start=2)
    count = op.ReduceProd(sizes, keepdims=False)
    zero, one = (op.Constant(value_int=each) for each in (0, 1))
    places = op.Cast(op.Range(zero, count, one), to=ir.DataType.FLOAT)
    marks = op.Where(op.IsNaN(x), op.Reshape(places, sizes), op.Constant(value_float=-1.0))
    return op.Cast(op.MaxPool(marks, **window)[0], to=ir.DataType.INT64)


def pooled(
    plain: Callable[..., Any], dims: int, x: Any, sizes: tuple[Sequence[int], ...], ceil: bool
) -> Any:
    """Torchlib's result for ``x``, with NaN for every window that holds one."""
    window = window_of(dims, *sizes)
    padding = window["pads"][:dims]
    found = plain(x, window["kernel_shape"], window["strides"], padding, window["dilations"], ceil)
    if not x.dtype.is_floating_point():
        return found
    window["ceil_mode"] = ceil
    full = batched(x, dims)
    nan = op.Constant(value=ir.tensor(float("nan"), dtype=x.dtype))
    bad = unbatched(spoilt(full, window), x, dims)
    values, places = found
    if x.dtype == ir.DataType.FLOAT and not is_relu(x):
        values = with_infinity(values, x, window)
    last = unbatched(last_nan(full, window), x, dims)
    at_nan = op.Less(op.Constant(value_int=-1), last)
    return op.Where(bad, nan, values), op.Where(at_nan, last, places)


def translation(plain: Callable[..., Any], dims: int) -> Callable[..., Any]:
    """Torchlib's own pool with places, and with NaN."""

    def max_pool(
        self: TReal,
        kernel_size: Sequence[int],
        stride: Sequence[int] = (),
        padding: Sequence[int] = (0,),
        dilation: Sequence[int] = (1,),
        ceil_mode: bool = False,
    ) -> tuple[TReal, INT64]:
        return pooled(plain, dims, self, (kernel_size, stride, padding, dilation), ceil_mode)  # type: ignore[no-any-return]  # onnxscript's values have no type

    return max_pool


def window_of(
    dims: int,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> dict[str, Any]:
    """The attributes of ONNX's pooling, one number a dimension (two for the padding)."""
    each = functools.partial(of_length, dims=dims)
    return {
        "kernel_shape": each(kernel_size),
        "strides": each(stride or kernel_size),
        "pads": each(padding) * 2,
        "dilations": each(dilation),
    }


max_pool2d_with_indices = translation(nn.aten_max_pool2d_with_indices, 2)
max_pool3d_with_indices = translation(nn.aten_max_pool3d_with_indices, 3)
