"""Translations of max pooling that give NaN for every window with NaN, as torch does.

``MaxPool`` of ONNX Runtime 1.32 ignores NaN (microsoft/onnxruntime#24819). So a mean over the same
window tells where NaN is: over numbers that are not negative, such as squares or the output of
``Relu``, it is NaN only if an element is NaN.

If the indices are not used, that ``MaxPool`` gives the lowest finite float32 for a window that
holds only minus infinity. Programs that use that number as a mask have it in ``x`` themselves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir
import onnxscript
import torch
from onnxscript.function_libs.torch_lib.ops import nn

from composer.lowering.operators.convolution import of_length
from composer.lowering.operators.translations.annotations import INT64, TReal

op: Any = onnxscript.opset18


def batched(x: Any, dims: int) -> Any:
    """``x`` with a batch of one in front, if it has none."""
    return x if len(x.shape) == dims + 2 else op.Unsqueeze(x, op.Constant(value_ints=[0]))


def unbatched(result: Any, x: Any, dims: int) -> Any:
    """The result without the batch that :func:`batched` put in front."""
    whole = len(x.shape) == dims + 2
    return result if whole else op.Squeeze(result, op.Constant(value_ints=[0]))


def spoilt(x: Any, window: dict[str, Any]) -> Any:
    """True for each window with NaN.

    It is found by a mean. With dilation or float64, where the mean is not available, it is found by
    a max pool over marks.
    """
    if max(window["dilations"]) > 1 or x.dtype == ir.DataType.DOUBLE:
        marks = op.Cast(op.IsNaN(x), to=ir.DataType.FLOAT)
        return op.Cast(op.MaxPool(marks, **window)[0], to=ir.DataType.BOOL)
    window = dict(window)
    del window["dilations"]
    positive = x if is_relu(x) else op.Mul(x, x)
    return op.IsNaN(op.AveragePool(positive, **window))


def with_infinity(found: Any, x: Any, window: dict[str, Any]) -> Any:
    """The result with minus infinity in place of the lowest finite float32.

    The kernel of ``MaxPool`` starts from that number. It is kept if ``x`` holds no minus infinity
    and no window can lie wholly in the padding. If ``x`` holds both numbers, they cannot be told
    apart, and minus infinity is given for both.
    """
    lowest = op.Constant(value_float=torch.finfo(torch.float32).min)
    kept = op.Greater(found, lowest)
    if max(window["dilations"]) == 1 or not any(window["pads"]):
        marks = op.Cast(op.IsInf(x, detect_positive=0), to=ir.DataType.FLOAT)
        none = op.Equal(op.ReduceMax(marks, keepdims=False), op.Constant(value_float=0.0))
        kept = op.Or(kept, none)
    return op.Where(kept, found, op.Constant(value_float=float("-inf")))


def is_relu(x: Any) -> bool:
    """True if ``x`` is the output of ``Relu``, so that no number is negative.

    Most pools follow a convolution with ReLU.
    """
    producer = x.producer()
    return producer is not None and producer.op_type == "Relu"


def last_nan(x: Any, window: dict[str, Any]) -> Any:
    """The row-major index in its plane of the last NaN of each window; -1 if there is none."""
    sizes = op.Shape(x, start=2)
    count = op.ReduceProd(sizes, keepdims=False)
    zero, one = (op.Constant(value_int=each) for each in (0, 1))
    places = op.Cast(op.Range(zero, count, one), to=ir.DataType.FLOAT)
    marks = op.Where(op.IsNaN(x), op.Reshape(places, sizes), op.Constant(value_float=-1.0))
    return op.Cast(op.MaxPool(marks, **window)[0], to=ir.DataType.INT64)


def pooled(
    plain: Callable[..., Any], dims: int, x: Any, sizes: tuple[Sequence[int], ...], ceil: bool
) -> Any:
    """The maxima and indices of max pooling, right for NaN and infinity.

    Args:
        plain: Torchlib's translation.
        dims: The number of pooled dimensions.
        x: The input, with or without a batch dimension.
        sizes: Kernel, stride, padding and dilation, as the operator takes them.
        ceil: The operator's ``ceil_mode``.
    """
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
    """A translation of max pooling with indices over ``dims`` dimensions; see :func:`pooled`."""

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
    """The attributes of ONNX's pooling, one number per dimension (two for the padding)."""
    each = functools.partial(of_length, dims=dims)
    return {
        "kernel_shape": each(kernel_size),
        "strides": each(stride or kernel_size),
        "pads": each(padding) * 2,
        "dilations": each(dilation),
    }


max_pool2d_with_indices = translation(nn.aten_max_pool2d_with_indices, 2)
max_pool3d_with_indices = translation(nn.aten_max_pool3d_with_indices, 3)
