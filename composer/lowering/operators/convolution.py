"""The backward of convolutions."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from composer import _torch
from composer.lowering.operators.entry import Operator, Operators
from composer.lowering.operators.guards import are_known

aten = torch.ops.aten


def entries() -> Operators:
    """The entries of this module."""
    return {aten.convolution_backward.default: Operator(convolution_backward)}


class Geometry(NamedTuple):
    """How a kernel moves over the input: one number per dimension each, and the groups."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    groups: int


_MOST_TAPS = 64
"""The most kernel positions that get a product each; more would make too large a graph."""

_FEW_CHANNELS = 4
"""Up to this number of channels, as in an image, one product per kernel position is slow."""

_FEW_PATCHES = 256
"""Up to this number of output positions per image, one product over all patches is used."""


def convolution_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> Any:
    """Gradients of input, weight and bias of ``aten.convolution``; those not requested are None.

    If a stride is more than one, all sizes but that of the batch have to be known, because the
    output padding of a transposed convolution is an attribute in ONNX. Calls with tensors that may
    be empty are declined.

    Shapes are (batch, out, *output sizes) for ``grad``, (batch, in, *sizes) for ``x``, and (out, in
    / groups, *kernel) for ``weight``, or (in, out / groups, *kernel) if ``transposed``. Stride,
    padding and dilation are one number per dimension, or one for all. ``output_padding`` is not
    used, since the sizes of ``grad`` include it.
    """
    dims = x.dim() - 2
    stride, padding, dilation = (of_length(each, dims) for each in (stride, padding, dilation))
    geometry = Geometry(stride, padding, dilation, groups)
    if any(map(_torch.symbols.may_be_empty, (x, grad))):
        return NotImplemented
    may_vary = max(stride) == 1 and math.prod(weight.shape[2:]) <= _MOST_TAPS
    if not may_vary and not _are_known(x, grad):
        return NotImplemented
    grad_x = grad_weight = grad_bias = None
    if output_mask[0]:
        gradient = _transposed_input_gradient if transposed else _input_gradient
        grad_x = gradient(x, grad, weight, geometry)
    if output_mask[1]:
        inner, outer = (grad, x) if transposed else (x, grad)
        grad_weight = _weight_gradient(inner, outer, weight, geometry)
    if output_mask[2]:
        grad_bias = grad.sum([0, *range(2, grad.dim())])
    return grad_x, grad_weight, grad_bias


def _are_known(x: torch.Tensor, grad: torch.Tensor) -> bool:
    """True if all sizes but that of the batch are known."""
    return are_known((*x.shape[1:], *grad.shape[1:]))


def of_length(values: Sequence[int], dims: int) -> list[int]:
    """One number per dimension; a single one is repeated for all dimensions."""
    return list(values) if len(values) == dims else list(values) * dims


def _cut(x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """A view of the first elements along each dimension after the first two."""
    for dim, size in enumerate(sizes, 2):
        x = x.narrow(dim, 0, size)
    return x


def _input_gradient(
    x: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor, geometry: Geometry
) -> torch.Tensor:
    missing = [0] * (x.dim() - 2)
    if _are_known(x, grad):
        missing = _output_padding(x, grad, weight, geometry)
    return torch.convolution(grad, weight, None, *geometry[:3], True, missing, geometry.groups)


def _transposed_input_gradient(
    x: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor, geometry: Geometry
) -> torch.Tensor:
    none = [0] * (x.dim() - 2)
    grad_x = torch.convolution(grad, weight, None, *geometry[:3], False, none, geometry.groups)
    # An output padding of a stride or more makes the gradient larger than the input.
    return grad_x if grad_x.shape == x.shape else _cut(grad_x, x.shape[2:]).clone()


def _output_padding(
    x: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor, geometry: Geometry
) -> list[int]:
    """The output padding that makes the transposed convolution as large as the input."""
    sizes = zip(x.shape[2:], grad.shape[2:], weight.shape[2:], strict=True)
    return [
        size - ((out - 1) * s - 2 * p + d * (kernel - 1) + 1)
        for (size, out, kernel), s, p, d in zip(sizes, *geometry[:3], strict=True)
    ]


def _weight_gradient(
    x: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor, geometry: Geometry
) -> torch.Tensor:
    """The gradient of the weight, computed in one of four ways, by the shapes."""
    if not _are_known(x, grad):
        return _by_taps(x, grad, weight, geometry)
    kernel, dims, is_grouped = list(weight.shape[2:]), x.dim() - 2, geometry.groups > 1
    if is_grouped and weight.shape[1] == 1:
        return _by_convolution(x, grad, weight, geometry)
    side_by_side = Geometry(kernel, [0] * dims, [1] * dims, groups=1)
    if geometry == side_by_side:
        return _by_patches(x, grad, weight)
    few_channels = x.shape[1] <= _FEW_CHANNELS
    most_taps = _MOST_TAPS // x.shape[1] if few_channels else _MOST_TAPS
    if math.prod(kernel) > most_taps:
        return _by_convolution(x, grad, weight, geometry)
    few_patches = few_channels or math.prod(grad.shape[2:]) <= _FEW_PATCHES
    if few_patches and not is_grouped:
        return _by_overlapping_patches(x, grad, weight, geometry)
    return _by_taps(x, grad, weight, geometry)


def _by_taps(
    x: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor, geometry: Geometry
) -> torch.Tensor:
    """One matrix product per kernel position, with the input elements that it is applied to."""
    batch, groups = x.shape[0], geometry.groups
    outputs, inputs = grad.shape[1] // groups, x.shape[1] // groups
    positions = math.prod(grad.shape[2:])  # given, because inferring it would divide symbols
    errors = grad.reshape(batch * groups, outputs, positions)
    taps = []
    for seen in _seen(x, grad, weight, geometry):
        product = torch.bmm(errors, seen.reshape(batch * groups, inputs, positions).transpose(1, 2))
        taps.append(product.reshape(batch, groups * outputs, inputs).sum(0))
    return torch.stack(taps, -1).reshape(weight.shape)


def _seen(
    x: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor, geometry: Geometry
) -> list[torch.Tensor]:
    """For each kernel position, in row-major order, a view of the input that it is applied to."""
    stride, padding, dilation, _ = geometry
    pads: list[int] = []
    for pad in reversed(padding):
        pads += [pad, pad]
    seen = [torch.nn.functional.pad(x, pads)]
    for dim, (positions, size) in enumerate(zip(weight.shape[2:], grad.shape[2:], strict=True)):
        step, length = stride[dim], stride[dim] * (size - 1) + 1
        starts = range(0, positions * dilation[dim], dilation[dim])
        seen = [
            aten.slice(view, dim + 2, start, start + length, step)
            for view in seen
            for start in starts
        ]
    return seen


def _by_overlapping_patches(
    x: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor, geometry: Geometry
) -> torch.Tensor:
    """One matrix product over all patches of all images; it needs memory for all patches."""
    channels_first = x.transpose(0, 1)
    seen = torch.stack(_seen(channels_first, grad, weight, geometry), 1)
    places = grad.shape[0] * math.prod(grad.shape[2:])
    patches = seen.reshape(math.prod(weight.shape[1:]), places)
    errors = grad.transpose(0, 1).reshape(grad.shape[1], places)
    return torch.mm(errors, patches.t()).reshape(weight.shape)


def _by_patches(x: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """One matrix product, for a stride equal to the kernel size: patches do not overlap."""
    dims = x.dim() - 2
    sizes, kernel = grad.shape[2:], weight.shape[2:]
    whole = _cut(x, list(map(operator.mul, sizes, kernel)))
    cut = whole.reshape(*x.shape[:2], *itertools.chain(*zip(sizes, kernel, strict=True)))
    patch_dims, kernel_dims = range(2, 2 + 2 * dims, 2), range(3, 3 + 2 * dims, 2)
    places = x.shape[0] * math.prod(sizes)
    seen = cut.permute(0, *patch_dims, 1, *kernel_dims)
    seen = seen.reshape(places, x.shape[1] * math.prod(kernel))
    errors = grad.movedim(1, -1).reshape(places, grad.shape[1])
    return torch.matmul(errors.t(), seen).reshape(weight.shape)


def _by_convolution(
    x: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor, geometry: Geometry
) -> torch.Tensor:
    """A convolution of the input with the gradient, in which batch and channels are swapped."""
    stride, padding, dilation, groups = geometry
    batch, sizes = x.shape[0], x.shape[2:]
    per_group = x.shape[1] // groups
    images = x.reshape(batch, groups, per_group, *sizes).movedim(2, 0)
    images = images.transpose(1, 2).reshape(per_group, groups * batch, *sizes)
    errors = grad.transpose(0, 1)
    zero = [0] * len(sizes)
    found = torch.convolution(images, errors, None, dilation, padding, stride, False, zero, groups)
    found = _cut(found, weight.shape[2:])
    return found.transpose(0, 1).clone(memory_format=torch.contiguous_format)
