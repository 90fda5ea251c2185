"""Backwards of single operators that have no translation, written out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from composer import _torch
from composer.lowering.operators.limits import MOST_ADDED, WIDE

aten = torch.ops.aten

_MEAN = 1
"""What torch calls the reduction."""


def gradients() -> dict[Any, Callable[..., Any]]:
    """The table of this module's decompositions."""
    return {
        aten._weight_norm_interface_backward.default: weight_norm_backward,
        aten._cdist_backward.default: cdist_backward,
        aten.smooth_l1_loss_backward.default: smooth_l1_backward,
        aten.masked_scatter_backward.default: masked_scatter_backward,
    }


def weight_norm_backward(
    grad: torch.Tensor, v: torch.Tensor, g: torch.Tensor, norms: torch.Tensor, dim: int
) -> Any:
    """Gradients of direction and length of ``g * v / norm(v)``; halves are summed up by torch."""
    if v.dtype not in WIDE or v.dim() < 2:
        return NotImplemented
    others = [each for each in range(v.dim()) if each != dim % v.dim()]
    along = (v * grad).sum(others, keepdim=True)
    return g / norms * (grad - v * (along / (norms * norms))), along / norms


def smooth_l1_backward(
    grad: torch.Tensor, x: torch.Tensor, target: torch.Tensor, reduction: int, beta: float
) -> Any:
    """NaN where the loss is; torch's own (2.13) takes the sign of NaN, which is zero."""
    dtype = torch.result_type(x, target)
    wide = dtype if dtype in WIDE else torch.float32
    difference = x.to(wide) - target.to(wide)
    slope = torch.where(difference <= -beta, -1.0, difference / beta)
    slope = torch.where(difference >= beta, 1.0, slope).to(wide)
    found = grad.to(wide) * slope / (x.numel() if reduction == _MEAN else 1)
    return found.to(dtype)


def masked_scatter_backward(grad: torch.Tensor, mask: torch.Tensor, sizes: Sequence[int]) -> Any:
    """Gradient of the source, whose first elements went to the mask's places, in their order.

    What other places are given is scattered behind the last element, and cut off.
    """
    if any(map(_torch.symbols.depends_on_data, sizes)):
        return NotImplemented
    length = math.prod(sizes)
    taken = mask.expand(grad.shape).reshape(-1)
    place = torch.where(taken, taken.to(torch.int64).cumsum(0) - 1, length)
    source = grad.new_zeros(length + 1).scatter(0, place, grad.reshape(-1))
    return source.narrow(0, 0, length).reshape(sizes)


def cdist_backward(
    grad: torch.Tensor, a: torch.Tensor, b: torch.Tensor, p: float, distances: torch.Tensor
) -> Any:
    """Gradient of the first points of Euclidean distances; none between points that are equal."""
    if p != 2 or a.dtype not in WIDE or a.shape[:-2] != b.shape[:-2]:
        return NotImplemented
    sizes = (*a.shape, b.shape[-2])
    if not all(isinstance(size, int) for size in sizes) or not 0 < math.prod(sizes) <= MOST_ADDED:
        return NotImplemented
    slopes = torch.where(distances == 0, 0.0, grad / distances)
    return ((a.unsqueeze(-2) - b.unsqueeze(-3)) * slopes.unsqueeze(-1)).sum(-2)
