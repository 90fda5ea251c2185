"""The backward of mean pooling, for which the exporter has no translation. Sizes must be known."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from composer.lowering.operators.convolution import of_length
from composer.lowering.operators.entry import Function, Operator, Operators

aten = torch.ops.aten


def entries() -> Operators:
    """The entries of this module."""
    return {
        aten.avg_pool2d_backward.default: Operator(avg_pool_backward(2)),
        aten.avg_pool3d_backward.default: Operator(avg_pool_backward(3)),
        aten._adaptive_avg_pool2d_backward.default: Operator(adaptive_avg_pool_backward),
    }


def avg_pool_backward(dims: int) -> Function:
    """A decomposition that adds each gradient, divided, to all elements of its window.

    Args:
        dims: The number of pooled dimensions.
    """

    def spread_over_windows(
        grad: torch.Tensor,
        x: torch.Tensor,
        kernel_size: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        ceil_mode: bool,
        count_include_pad: bool,
        divisor_override: int | None,
    ) -> Any:
        if not _are_known(grad, x):
            return NotImplemented
        sizes, counts = x.shape[-dims:], grad.shape[-dims:]
        windows = [of_length(each, dims) for each in (kernel_size, stride or kernel_size, padding)]
        along = [_Along(*each) for each in zip(sizes, counts, *windows, strict=True)]
        if divisor_override is not None:
            grad = grad / divisor_override
        elif not ceil_mode and (count_include_pad or not any(padding)):
            grad = grad / math.prod(each.kernel for each in along)
        else:
            grad = _over_lengths(grad, along, counted=count_include_pad)
        spread = _spread(grad.reshape(-1, 1, *counts), along)
        return _laid_out_as(spread.reshape(x.shape), x)

    return spread_over_windows


def _over_lengths(grad: torch.Tensor, along: Sequence[_Along], *, counted: bool) -> torch.Tensor:
    """Each gradient divided by the size of its window; windows at the borders are smaller."""
    for dim, each in enumerate(along, -len(along)):
        lengths = each.lengths(counted=counted).to(grad)
        grad = grad / lengths.reshape(-1, *[1] * (-1 - dim))
    return grad


class _Along(NamedTuple):
    """How one dimension is pooled: its size, the number of windows, kernel, stride and padding."""

    size: int
    windows: int
    kernel: int
    step: int
    pad: int

    @property
    def spare(self) -> int:
        """The distance from the end of the last window to the end of the padded input.

        It is negative if the window goes beyond that end.
        """
        return self.size - ((self.windows - 1) * self.step - 2 * self.pad + self.kernel)

    def lengths(self, *, counted: bool) -> torch.Tensor:
        """The number of input elements in each window; with the padding if ``counted``."""
        start = torch.arange(self.windows) * self.step - self.pad
        stop = torch.clamp(start + self.kernel, max=self.size + self.pad)
        if not counted:
            start, stop = torch.clamp(start, min=0), torch.clamp(stop, max=self.size)
        return stop - start


def _spread(planes: torch.Tensor, along: Sequence[_Along]) -> torch.Tensor:
    """The planes in which every number is added to all elements of its window.

    The kernel is first cut to what can lie within the input. EfficientNet's last kernel, for
    example, is as large as the largest map that the model is made for, and would otherwise be
    computed in full for every smaller map.
    """
    along = [each._replace(kernel=min(each.kernel, each.size + each.pad)) for each in along]
    kernel, step, pad = ([each[i] for each in along] for i in (2, 3, 4))
    ones = torch.ones([1, 1, *kernel], dtype=planes.dtype, device=planes.device)
    spread = functools.partial(torch.convolution, planes, ones, None, step)
    none, once = [0] * len(along), [1] * len(along)
    if all(0 <= each.spare < each.step for each in along):
        return spread(pad, once, True, [each.spare for each in along], 1)
    ends = [end for each in reversed(along) for end in (-each.pad, each.spare - each.pad)]
    return torch.constant_pad_nd(spread(none, once, True, none, 1), ends)


def adaptive_avg_pool_backward(grad: torch.Tensor, x: torch.Tensor) -> Any:
    """Each gradient divided and repeated over its window, if all windows have one size."""
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
