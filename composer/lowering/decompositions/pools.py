"""Pooling, for what ONNX makes of ``ceil_mode`` and has no word for, ``divisor_override``.

With ``ceil_mode`` torch leaves a window out that begins behind the input and its first padding.
ONNX Runtime's kernels (1.31) do so too, but its shape inference counts that window.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from composer.lowering.decompositions.convolution import of_length

aten = torch.ops.aten


def pools() -> dict[Any, Callable[..., Any]]:
    """The table of this module's decompositions."""
    return {
        aten.avg_pool2d.default: functools.partial(mean_pool, aten.avg_pool2d.default, 2),
        aten.avg_pool3d.default: functools.partial(mean_pool, aten.avg_pool3d.default, 3),
        aten.max_pool2d_with_indices.default: functools.partial(
            max_pool, aten.max_pool2d_with_indices.default, 2
        ),
        aten.max_pool3d_with_indices.default: functools.partial(
            max_pool, aten.max_pool3d_with_indices.default, 3
        ),
    }


def mean_pool(
    operator: Any,
    dims: int,
    x: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Any:
    """A sum over ``divisor_override``, from the mean over the whole of each window."""
    if ceil_mode and not reaches_further(x.shape[-dims:], kernel_size, stride, padding):
        how = (count_include_pad, divisor_override)
        return operator(x, kernel_size, stride, padding, False, *how)
    if divisor_override is None or ceil_mode or not x.dtype.is_floating_point:
        return NotImplemented
    size = math.prod(of_length(kernel_size, dims))
    return operator(x, kernel_size, stride, padding) * (size / divisor_override)


def max_pool(
    operator: Any,
    dims: int,
    x: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> Any:
    """Without ``ceil_mode`` where that adds no window."""
    if not ceil_mode or reaches_further(x.shape[-dims:], kernel_size, stride, padding, dilation):
        return NotImplemented
    return operator(x, kernel_size, stride, padding, dilation, False)


def reaches_further(sizes: Sequence[int], *window: Sequence[int]) -> bool:
    """Whether ``ceil_mode`` adds a window in some dimension; taken as so where a size is dynamic.

    Args:
        sizes: Of the dimensions that are pooled.
        window: Kernel, stride, padding and perhaps dilation, as the operators have them.
    """
    return any(each is None or each[0] < each[1] for each in _counts(sizes, *window))


def miscounted(sizes: Sequence[int], *window: Sequence[int]) -> bool:
    """Whether ONNX's shape inference counts a window that torch leaves out."""
    return any(each is not None and each[1] < each[2] for each in _counts(sizes, *window))


def _counts(
    sizes: Sequence[int],
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
) -> list[tuple[int, int, int] | None]:
    """Numbers of windows by dimension: without ``ceil_mode``, torch's with it, and ONNX's."""
    each = functools.partial(of_length, dims=len(sizes))
    windows = map(each, (kernel_size, stride or kernel_size, padding, dilation))
    return [_count(*one) for one in zip(sizes, *windows, strict=True)]


def _count(size: Any, kernel: int, step: int, pad: int, gap: int) -> tuple[int, int, int] | None:
    if not isinstance(size, int):
        return None
    room = size + 2 * pad - gap * (kernel - 1) - 1
    plain, most = room // step + 1, -(-room // step) + 1
    return plain, most - ((most - 1) * step >= size + pad), most
