"""Normalization layers: batch, layer, group and weight norm."""

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
    # Torchlib ignores their training flag, so the results would be those of evaluation.
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
    """A layer or group norm in half precision with float32 weights, computed in float32.

    Autocast makes such calls. On the CPU their mean and deviation are float32, but the fake kernel
    of torch 2.13 says half precision.
    """
    wide = any(isinstance(each, torch.Tensor) and each.dtype is torch.float32 for each in given)
    if not wide or x.dtype not in (torch.bfloat16, torch.float16) or x.device.type != "cpu":
        return NotImplemented
    result, mean, deviation = operator(x.float(), *given)
    return result.to(x.dtype), mean, deviation


def weight_norm_backward(
    grad: torch.Tensor, v: torch.Tensor, g: torch.Tensor, norms: torch.Tensor, dim: int
) -> Any:
    """Gradients of ``v`` and ``g`` in ``g * v / norm(v)``; half precision is left to torch."""
    if v.dtype not in WIDE or v.dim() < 2:
        return NotImplemented
    others = [each for each in range(v.dim()) if each != dim % v.dim()]
    along = (v * grad).sum(others, keepdim=True)
    return g / norms * (grad - v * (along / (norms * norms))), along / norms
