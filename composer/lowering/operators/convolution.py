"""The backward of convolutions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.fx

from composer import _torch
from composer.lowering.operators.entry import Operator, Operators

aten = torch.ops.aten


def entries() -> Operators:
    """The entries of this module."""
    return {
        aten.convolution_backward.default: Operator(convolution_backward),
    }


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

    Args:
        grad: The gradient of the output: (batch, out, *output sizes).
        x: The input: (batch, in, *sizes).
        weight: (out, in / groups, *kernel), or (in, out / groups, *kernel) if ``transposed``.
        bias_sizes: Not used.
        stride: One number per dimension, or one for all; so are padding and dilation.
        padding: See stride.
        dilation: See stride.
        transposed: True for a transposed convolution.
        output_padding: Not used: the sizes of ``grad`` include it.
        groups: The number of groups of channels.
        output_mask: Which of the three gradients are requested.
    """
    dims = x.dim() - 2
    stride, padding, dilation = (of_length(each, dims) for each in (stride, padding, dilation))
    may_vary = all(step == 1 for step in stride) and math.prod(weight.shape[2:]) <= _MOST_TAPS
    if any(map(_torch.symbols.may_be_empty, (x, grad))) or not (may_vary or _are_known(x, grad)):
        return NotImplemented
    geometry = Geometry(stride, padding, dilation, groups)
    moves, zero = geometry[:3], [0] * dims
    grad_x = grad_weight = grad_bias = None
    if output_mask[0] and transposed:
        grad_x = torch.convolution(grad, weight, None, *moves, False, zero, groups)
        if grad_x.shape != x.shape:  # an output padding of a stride or more makes it larger
            for dim, size in enumerate(x.shape[2:]):
                grad_x = grad_x.narrow(dim + 2, 0, size)
            grad_x = grad_x.clone()
    elif output_mask[0]:
        missing = _output_padding(x, grad, weight, geometry) if _are_known(x, grad) else zero
        grad_x = torch.convolution(grad, weight, None, *moves, True, missing, groups)
    if output_mask[1]:
        inner, outer = (grad, x) if transposed else (x, grad)
        grad_weight = _weight_gradient(inner, outer, weight, geometry)
    if output_mask[2]:
        grad_bias = grad.sum([0, *range(2, grad.dim())])
    return grad_x, grad_weight, grad_bias


def _are_known(x: torch.Tensor, grad: torch.Tensor) -> bool:
    return all(isinstance(size, int) for size in (*x.shape[1:], *grad.shape[1:]))


def of_length(values: Sequence[int], dims: int) -> list[int]:
    """One number per dimension; a single one is repeated for all dimensions."""
    return list(values) if len(values) == dims else list(values) * dims


def _output_padding(
    x: torch.Tensor,
    grad: torch.Tensor,
    weight: torch.Tensor,
    geometry: Geometry,
) -> list[int]:
    """The output padding that makes the transposed convolution as large as the input."""
    sizes = zip(x.shape[2:], grad.shape[2:], weight.shape[2:], strict=True)
    return [
        size - ((out - 1) * s - 2 * p + d * (kernel - 1) + 1)
        for (size, out, kernel), s, p, d in zip(sizes, *geometry[:3], strict=True)
    ]


def _weight_gradient(
    x: torch.Tensor,
    grad: torch.Tensor,
    weight: torch.Tensor,
    geometry: Geometry,
) -> torch.Tensor:
    """The gradient of the weight, computed in one of four ways, by the shapes."""
    kernel = list(weight.shape[2:])
    stride, padding, dilation, groups = geometry
    apart = kernel == list(stride) and not any(padding) and all(d == 1 for d in dilation)
    if not _are_known(x, grad):
        return _by_taps(x, grad, weight, geometry)
    if weight.shape[1] == 1 and groups > 1:
        return _by_convolution(x, grad, weight, geometry)
    if apart and groups == 1:
        return _by_patches(x, grad, weight)
    taps, few_channels = math.prod(kernel), x.shape[1] <= _FEW_CHANNELS
    if taps > _MOST_TAPS or (few_channels and taps > _MOST_TAPS // x.shape[1]):
        return _by_convolution(x, grad, weight, geometry)
    if groups == 1 and (few_channels or math.prod(grad.shape[2:]) <= _FEW_PATCHES):
        return _by_overlapping_patches(x, grad, weight, geometry)
    return _by_taps(x, grad, weight, geometry)


def _by_taps(
    x: torch.Tensor,
    grad: torch.Tensor,
    weight: torch.Tensor,
    geometry: Geometry,
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
    seen = [torch.nn.functional.pad(x, [p for p in reversed(padding) for _ in range(2)])]
    for dim, (positions, size) in enumerate(zip(weight.shape[2:], grad.shape[2:], strict=True)):
        spans = [(at * dilation[dim], stride[dim] * (size - 1) + 1) for at in range(positions)]
        seen = [
            torch.ops.aten.slice(each, dim + 2, start, start + length, stride[dim])
            for each in seen
            for start, length in spans
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
    for dim in range(dims):
        x = x.narrow(dim + 2, 0, sizes[dim] * kernel[dim])
    cut = x.reshape(*x.shape[:2], *itertools.chain(*zip(sizes, kernel, strict=True)))
    where, what = range(2, 2 + 2 * dims, 2), range(3, 3 + 2 * dims, 2)
    places = x.shape[0] * math.prod(sizes)
    seen = cut.permute(0, *where, 1, *what).reshape(places, x.shape[1] * math.prod(kernel))
    errors = grad.movedim(1, -1).reshape(places, grad.shape[1])
    return torch.matmul(errors.t(), seen).reshape(weight.shape)


def _by_convolution(
    x: torch.Tensor,
    grad: torch.Tensor,
    weight: torch.Tensor,
    geometry: Geometry,
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
    for dim, size in enumerate(weight.shape[2:]):
        found = found.narrow(dim + 2, 0, size)
    return found.transpose(0, 1).clone(memory_format=torch.contiguous_format)
