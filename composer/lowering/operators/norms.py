"""Normalization layers: batch, layer, group and weight norm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from composer import _torch
from composer.lowering.operators.entry import Operator, Operators
from composer.lowering.operators.guards import is_float32, is_on_cpu, is_wide, only_for
from composer.lowering.operators.layouts import lying_as_in_eager
from composer.lowering.operators.reductions import is_row_of_norm

aten = torch.ops.aten


def entries() -> Operators:
    """The entries of this module."""
    # Torchlib ignores their training flag, so the results would be those of evaluation.
    training = aten.native_batch_norm.default
    functional = aten._native_batch_norm_legit_functional.default
    written_out = {
        aten._native_batch_norm_legit.no_stats: Operator(batch_norm),
        aten.native_layer_norm.default: Operator(layer_norm),
        aten.native_group_norm.default: Operator(group_norm),
    }
    return lying_as_in_eager(written_out) | {
        training: Operator(_torch.operators.decomposition_of(training)),
        functional: Operator(_torch.operators.decomposition_of(functional)),
        aten._weight_norm_interface_backward.default: Operator(weight_norm_backward),
    }


@only_for(is_float32)
@only_for(is_on_cpu)
def batch_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """A batch norm by each channel's own moments, written out.

    ``F.instance_norm`` is one, too. The means of engines' own kernels lose digits (ONNX Runtime
    1.32, OpenVINO 2026.4): over 2**18 numbers between 1000 and 1001 nothing was right.
    """
    dims = [0, *range(2, x.dim())]
    per_channel = [1, -1] + [1] * (x.dim() - 2)
    result, mean, inverse = _written_out(x, dims, eps, *_shaped(per_channel, weight, bias))
    return result, mean.reshape(-1), inverse.reshape(-1)


def layer_norm(
    x: torch.Tensor,
    shape: Sequence[Any],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> Any:
    """A layer norm, written out over more elements than models have in a row."""
    if is_row_of_norm(math.prod(shape)) or not _is_written_out(x):
        return _in_float32(aten.native_layer_norm.default, x, shape, weight, bias, eps)
    dims = [*range(x.dim() - len(shape), x.dim())]
    return _written_out(x, dims, eps, weight, bias)


def group_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    batch: Any,
    channels: Any,
    size: Any,
    groups: int,
    eps: float,
) -> Any:
    """A group norm in float32 on a CPU, written out as a batch norm is."""
    of_group = channels // groups
    if not _is_written_out(x):
        sizes = (batch, channels, size, groups)
        return _in_float32(aten.native_group_norm.default, x, weight, bias, *sizes, eps)
    by_group = x.reshape(batch, groups, of_group, size)
    parameters = _shaped([1, groups, of_group, 1], weight, bias)
    result, mean, inverse = _written_out(by_group, [2, 3], eps, *parameters)
    moments = (mean.reshape(batch, groups), inverse.reshape(batch, groups))
    return result.reshape(x.shape), *moments


def _is_written_out(x: torch.Tensor) -> bool:
    return is_float32(x) and is_on_cpu(x)


def _shaped(shape: Sequence[Any], *parameters: torch.Tensor | None) -> list[torch.Tensor | None]:
    return [None if each is None else each.reshape(shape) for each in parameters]


def _written_out(
    x: torch.Tensor,
    dims: list[int],
    eps: float,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A norm along dimensions, with the mean and the inverse of the deviation, which are kept."""
    near = torch.mean(x, dims, keepdim=True)
    centred = x - near
    # Float32 does not hold the mean of numbers far from zero exactly. What is left of it is small.
    left = torch.mean(centred, dims, keepdim=True)
    variance = torch.mean(torch.square(centred), dims, keepdim=True) - torch.square(left)
    inverse = torch.rsqrt(variance + eps)
    factor = inverse if weight is None else inverse * weight
    shift = -left * factor if bias is None else bias - left * factor
    return centred * factor + shift, near + left, inverse


def _in_float32(operator: Any, x: torch.Tensor, *parameters: Any) -> Any:
    """A layer or group norm in half precision with float32 weights, computed in float32.

    Autocast makes such calls. On the CPU their mean and deviation are float32, but up to torch 2.15
    the fake kernel says half precision (``tests/lowering/test_torch_faults.py``).
    """
    if x.dtype not in (torch.bfloat16, torch.float16) or not is_on_cpu(x):
        return NotImplemented
    dtypes = {each.dtype for each in parameters if isinstance(each, torch.Tensor)}
    if torch.float32 not in dtypes:
        return NotImplemented
    result, mean, deviation = operator(x.float(), *parameters)
    return result.to(x.dtype), mean, deviation


@only_for(is_wide)
def weight_norm_backward(
    grad: torch.Tensor, v: torch.Tensor, g: torch.Tensor, norms: torch.Tensor, dim: int
) -> Any:
    """Gradients of ``v`` and ``g`` in ``g * v / norm(v)``; half precision is left to torch."""
    if v.dim() < 2:
        return NotImplemented
    others = [*range(v.dim())]
    del others[dim]
    along = (v * grad).sum(others, keepdim=True)
    return g / norms * (grad - v * (along / (norms * norms))), along / norms
