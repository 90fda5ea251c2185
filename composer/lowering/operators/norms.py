"""Norms by mean and deviation."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.fx

from composer import _torch
from composer.lowering.operators.entry import WIDE, Operator, Operators

aten = torch.ops.aten


def entries() -> Operators:
    """The entries of this module."""
    # Torchlib drops the training flag of these: the exported numbers would be eval's.
    training = (
        aten._native_batch_norm_legit_functional.default,
        aten.native_batch_norm.default,
    )
    layer, group = aten.native_layer_norm.default, aten.native_group_norm.default
    return {
        **{each: Operator(_torch.operators.decomposition_of(each)) for each in training},
        layer: Operator(functools.partial(norm, layer)),
        group: Operator(functools.partial(norm, group)),
        aten._weight_norm_interface_backward.default: Operator(weight_norm_backward),
    }


def norm(operator: Any, x: torch.Tensor, *given: Any) -> Any:
    """A norm of halves by weights of float32, as autocast leaves it, computed in float32.

    On the CPU its mean and deviation are float32, but torch's fake kernel says halves (2.13).
    """
    wide = any(isinstance(each, torch.Tensor) and each.dtype is torch.float32 for each in given)
    if not wide or x.dtype not in (torch.bfloat16, torch.float16) or x.device.type != "cpu":
        return NotImplemented
    result, mean, deviation = operator(x.float(), *given)
    return result.to(x.dtype), mean, deviation


def weight_norm_backward(
    grad: torch.Tensor, v: torch.Tensor, g: torch.Tensor, norms: torch.Tensor, dim: int
) -> Any:
    """Gradients of direction and length of ``g * v / norm(v)``; halves are summed up by torch."""
    if v.dtype not in WIDE or v.dim() < 2:
        return NotImplemented
    others = [each for each in range(v.dim()) if each != dim % v.dim()]
    along = (v * grad).sum(others, keepdim=True)
    return g / norms * (grad - v * (along / (norms * norms))), along / norms
