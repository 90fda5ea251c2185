"""The backward of mean pooling, for which the exporter has no translation. Sizes must be known."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from composer.lowering.operators.convolution import of_length
from composer.lowering.operators.entry import Function, Operator, Operators
from composer.lowering.operators.guards import are_known
from composer.lowering.operators.layouts import lying_as_in_eager

aten = torch.ops.aten


def entries() -> Operators:
    """The entries of this module."""
    written_out = {
        aten.avg_pool2d_backward.default: Operator(avg_pool_backward(2)),
        aten.avg_pool3d_backward.default: Operator(avg_pool_backward(3)),
        aten._adaptive_avg_pool2d_backward.default: Operator(adaptive_avg_pool_backward),
    }
    return lying_as_in_eager(written_out)


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
        counts = grad.shape[-dims:]
        kernel = of_length(kernel_size, dims)
        step, pad = of_length(stride or kernel_size, dims), of_length(padding, dims)
        along = list(map(_Along, x.shape[-dims:], counts, kernel, step, pad))
        has_equal_windows = not ceil_mode and (count_include_pad or not any(padding))
        if divisor_override is not None:
            grad = grad / divisor_override
        elif has_equal_windows:
            grad = grad / math.prod(kernel)
        else:
            grad = _over_lengths(grad, along, counted=count_include_pad)
        spread = _spread(grad.reshape(-1, 1, *counts), along)
        return spread.reshape(x.shape)

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
    _, _, kernel, step, pad = map(list, zip(*along, strict=True))
    ones = torch.ones([1, 1, *kernel], dtype=planes.dtype, device=planes.device)
    spread = functools.partial(torch.convolution, planes, ones, None, step)
    none, once = [0] * len(along), [1] * len(along)
    if all(0 <= each.spare < each.step for each in along):
        return spread(pad, once, True, [each.spare for each in along], 1)
    ends: list[int] = []
    for each in reversed(along):
        ends += [-each.pad, each.spare - each.pad]
    return torch.constant_pad_nd(spread(none, once, True, none, 1), ends)


def adaptive_avg_pool_backward(grad: torch.Tensor, x: torch.Tensor) -> Any:
    """Each gradient divided and repeated over its window, if all windows have one size."""
    if not _are_known(grad, x):
        return NotImplemented
    (height, width), (rows, columns) = x.shape[-2:], grad.shape[-2:]
    if height % rows or width % columns:
        return NotImplemented
    window = height // rows, width // columns
    spread = (grad / math.prod(window)).unsqueeze(-2).unsqueeze(-1)
    spread = spread.expand(*grad.shape[:-2], rows, window[0], columns, window[1])
    return spread.reshape(x.shape)


def _are_known(grad: torch.Tensor, x: torch.Tensor) -> bool:
    """True if all sizes are known, and none is zero."""
    sizes = (*grad.shape, *x.shape)
    return are_known(sizes) and 0 not in sizes
