"""Pooling and resampling calls that ONNX expresses differently or not at all.

With ``ceil_mode`` torch drops a window that begins after the input and its left padding. The
kernels of ONNX Runtime 1.31 do so too, but its shape inference counts that window.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.fx

from composer import _torch
from composer.lowering.operators.convolution import of_length
from composer.lowering.operators.entry import Operator, Operators, Rule, always, operands_of
from composer.lowering.operators.guards import are_known, only_for

aten = torch.ops.aten


def entries() -> Operators:
    """The entries of this module."""
    mean2, mean3 = aten.avg_pool2d.default, aten.avg_pool3d.default
    max2, max3 = aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default
    read_otherwise = (always("scales and corners are read otherwise"),)
    return {
        mean2: Operator(partial(mean_pool, mean2), unsupported=(divisor_override, _in_padding(2))),
        mean3: Operator(partial(mean_pool, mean3), unsupported=(divisor_override, _in_padding(3))),
        max2: _max_pool(max2, 2, "pooling:max_pool2d_with_indices"),
        max3: _max_pool(max3, 3, "pooling:max_pool3d_with_indices"),
        aten._adaptive_avg_pool2d.default: _in_its_format(aten._adaptive_avg_pool2d.default),
        aten._adaptive_avg_pool3d.default: Operator(adaptive_mean_pool3d),
        aten.max_unpool2d.default: _in_its_format(aten.max_unpool2d.default),
        aten._upsample_bilinear2d_aa: Operator(unsupported=read_otherwise),
        aten._upsample_bicubic2d_aa: Operator(unsupported=read_otherwise),
        aten.grid_sampler_2d: Operator(unsupported=(reflected_neighbour,)),
    }


def _max_pool(operator: Any, dims: int, translate: str) -> Operator:
    in_padding = _in_padding(dims, "dilation")
    decompose = partial(max_pool, operator, dims)
    return Operator(decompose, translate=translate, unsupported=(in_padding,))


def _in_its_format(operator: Any) -> Operator:
    written_out = _torch.operators.decomposition_of(operator)
    return Operator(partial(in_its_format, written_out))


def _in_padding(dims: int, *more: str) -> Rule:
    return partial(windows_in_padding, dims, ("kernel_size", "stride", "padding", *more))


_MOST_WINDOWS = 32
"""The most windows per dimension that get a mean each; more would make too large a graph."""


def mean_pool(
    operator: Any,
    x: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Any:
    """A mean pool without ``ceil_mode`` if that adds no window, else without ``divisor_override``.

    A mean with another divisor is the mean over the whole window, times its size, over the divisor.
    """
    dims = 2 if operator is aten.avg_pool2d.default else 3
    if ceil_mode and not reaches_further(x.shape[-dims:], kernel_size, stride, padding):
        rest = (False, count_include_pad, divisor_override)
        return operator(x, kernel_size, stride, padding, *rest)
    if divisor_override is None or not x.dtype.is_floating_point:
        return NotImplemented
    if ceil_mode:
        if not are_known(x.shape[-dims:]):
            return NotImplemented
        x = _with_whole_windows(x, kernel_size, stride or kernel_size, padding, dims)
        padding = (0,)
    size = math.prod(of_length(kernel_size, dims))
    return operator(x, kernel_size, stride, padding) * (size / divisor_override)


def _with_whole_windows(
    x: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dims: int,
) -> torch.Tensor:
    """The input padded with zeros up to the end of the last window of ``ceil_mode``."""
    sizes = x.shape[-dims:]
    pads: list[int] = []
    for size, kernel, step, pad, gap in reversed(_windows(sizes, kernel_size, stride, padding)):
        _, count, _ = _count(size, kernel, step, pad, gap)
        pads += [pad, (count - 1) * step + kernel - size - pad]
    return torch.nn.functional.pad(x, pads)


@only_for(_torch.tensors.is_row_major)
def adaptive_mean_pool3d(x: torch.Tensor, output_size: Sequence[int]) -> Any:
    """Adaptive mean pooling along one dimension after the other, with one mean per window.

    It is declined if there are many windows, or if a size is not known.
    """
    if not are_known((*x.shape[-3:], *output_size)) or max(output_size) > _MOST_WINDOWS:
        return NotImplemented
    if _torch.symbols.may_be_empty(x) or x.dtype.itemsize < 4:
        return NotImplemented
    for dim, count in enumerate(output_size, -3):
        x = _means_along(x, dim, count)
    return x


def _means_along(x: torch.Tensor, dim: int, count: int) -> torch.Tensor:
    size = x.shape[dim]
    if size % count == 0:  # windows of one length, side by side
        return torch.unflatten(x, dim, (count, size // count)).mean(dim)
    means = []
    for i in range(count):
        start, end = i * size // count, -(-(i + 1) * size // count)
        means.append(x.narrow(dim, start, end - start).mean(dim, keepdim=True))
    return torch.cat(means, dim)


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
    """A max pool without ``ceil_mode``, if that adds no window."""
    if not ceil_mode or reaches_further(x.shape[-dims:], kernel_size, stride, padding, dilation):
        return NotImplemented
    return operator(x, kernel_size, stride, padding, dilation, False)


def in_its_format(written_out: Callable[..., Any], x: torch.Tensor, *args: Any) -> Any:
    """The result of a decomposition, copied to the memory format that eager takes from the input.

    The decomposition loses that format, and views of the result depend on it.
    """
    result = written_out(x, *args)
    if result is NotImplemented or x.dim() != 4:
        return result
    return result.contiguous(memory_format=_torch.tensors.suggested_memory_format(x))


def reaches_further(sizes: Sequence[int], *window: Sequence[int]) -> bool:
    """True if ``ceil_mode`` adds a window in some dimension, or if a size is dynamic.

    Args:
        sizes: The sizes of the pooled dimensions.
        window: Kernel, stride, padding and optionally dilation, as the operators take them.
    """
    if not are_known(sizes):
        return True
    return any(floored < counted for floored, counted, _ in _counts(sizes, *window))


def miscounted(sizes: Sequence[int], *window: Sequence[int]) -> bool:
    """True if ONNX's shape inference counts a window that torch drops."""
    return any(counted < inferred for _, counted, inferred in _counts(sizes, *window))


def _windows(
    sizes: Sequence[int],
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
) -> list[tuple[int, int, int, int, int]]:
    """For each dimension its size, and the kernel, stride, padding and dilation along it."""
    along = partial(of_length, dims=len(sizes))
    window = map(along, (kernel_size, stride or kernel_size, padding, dilation))
    return list(zip(sizes, *window, strict=True))


def _counts(sizes: Sequence[int], *window: Sequence[int]) -> list[tuple[int, int, int]]:
    """The numbers of windows along each dimension whose size is known, see :func:`_count`."""
    return [_count(*each) for each in _windows(sizes, *window) if isinstance(each[0], int)]


def _count(size: int, kernel: int, step: int, pad: int, gap: int) -> tuple[int, int, int]:
    """The number of windows: without ``ceil_mode``, torch's with it, and ONNX's with it."""
    room = size + 2 * pad - gap * (kernel - 1) - 1
    floored, inferred = room // step + 1, -(-room // step) + 1
    return floored, inferred - ((inferred - 1) * step >= size + pad), inferred


def divisor_override(node: torch.fx.Node) -> str | None:
    """Why a mean must not be translated: the translation ignores the divisor."""
    overridden = _torch.operators.argument(node, "divisor_override") is not None
    return "divisor_override is dropped" if overridden else None


def windows_in_padding(dims: int, names: Sequence[str], node: torch.fx.Node) -> str | None:
    """Why a pool must not be translated: ONNX's shape inference counts a window that torch drops.

    The pool has ``dims`` dimensions; ``names`` are those of the arguments that define its window.
    """
    if not _torch.operators.argument(node, "ceil_mode"):
        return None
    window = [_torch.operators.argument(node, name) for name in names]
    sizes = next(operands_of(node)).shape[-dims:]
    return "windows that begin in the padding" if miscounted(sizes, *window) else None


def reflected_neighbour(node: torch.fx.Node) -> str | None:
    """Why a grid sample must not be translated: nearest pixels with reflection at the border.

    ONNX Runtime and OpenVINO round to a pixel before they reflect; torch rounds afterwards.
    """
    modes = [
        _torch.operators.argument(node, name) for name in ("interpolation_mode", "padding_mode")
    ]
    return "the nearest pixel is found otherwise" if modes == [1, 2] else None
