"""The backward of mean pooling, for which the exporter has no translation. Sizes must be known."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from composer.lowering.decompositions.convolution import of_length

aten = torch.ops.aten


def pool_gradients() -> dict[Any, Callable[..., Any]]:
    """The table of this module's decompositions."""
    return {
        aten.avg_pool2d_backward.default: functools.partial(avg_pool_backward, 2),
        aten.avg_pool3d_backward.default: functools.partial(avg_pool_backward, 3),
        aten._adaptive_avg_pool2d_backward.default: adaptive_avg_pool_backward,
    }


def avg_pool_backward(
    dims: int,
    grad: torch.Tensor,
    x: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Any:
    """Each gradient spread over its window: a transposed convolution with ones."""
    if not _are_known(grad, x) or ceil_mode or (any(padding) and not count_include_pad):
        return NotImplemented
    kernel, padding = of_length(kernel_size, dims), of_length(padding, dims)
    stride = of_length(stride or kernel_size, dims)
    spare = [
        size - ((out - 1) * s - 2 * p + k)
        for size, out, s, p, k in zip(
            *(x.shape[-dims:], grad.shape[-dims:], stride, padding, kernel), strict=True
        )
    ]
    if any(rest >= step for rest, step in zip(spare, stride, strict=True)):
        return NotImplemented
    ones = torch.ones([1, 1, *kernel], dtype=grad.dtype, device=grad.device)
    planes = (grad / (divisor_override or math.prod(kernel))).reshape(-1, 1, *grad.shape[-dims:])
    spread = torch.convolution(planes, ones, None, stride, padding, [1] * dims, True, spare, 1)
    return _laid_out_as(spread.reshape(x.shape), x)


def adaptive_avg_pool_backward(grad: torch.Tensor, x: torch.Tensor) -> Any:
    """Each gradient repeated over its window, where all windows are of one size."""
    if not _are_known(grad, x):
        return NotImplemented
    (height, width), (rows, columns) = x.shape[-2:], grad.shape[-2:]
    if not rows or not columns or height % rows or width % columns:
        return NotImplemented
    window = height // rows, width // columns
    spread = (grad / math.prod(window)).unsqueeze(-2).unsqueeze(-1)
    spread = spread.expand(*grad.shape[:-2], rows, window[0], columns, window[1])
    return _laid_out_as(spread.reshape(x.shape), x)


def _laid_out_as(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
    usual = not last or x.is_contiguous()
    return grad if usual else grad.contiguous(memory_format=torch.channels_last)


def _are_known(*tensors: torch.Tensor) -> bool:
    return all(isinstance(size, int) and size for each in tensors for size in each.shape)
