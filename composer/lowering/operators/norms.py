"""Normalization layers: batch, layer, group and weight norm."""

from __future__ import annotations

import functools
from typing import Any

import torch

from composer import _torch
from composer.lowering.operators.entry import Operator, Operators
from composer.lowering.operators.guards import is_on_cpu, is_wide, only_for

aten = torch.ops.aten


def entries() -> Operators:
    """The entries of this module."""
    # Torchlib ignores their training flag, so the results would be those of evaluation.
    training = aten.native_batch_norm.default
    functional = aten._native_batch_norm_legit_functional.default
    layer, group = aten.native_layer_norm.default, aten.native_group_norm.default
    return {
        training: Operator(_torch.operators.decomposition_of(training)),
        functional: Operator(_torch.operators.decomposition_of(functional)),
        layer: Operator(functools.partial(norm, layer)),
        group: Operator(functools.partial(norm, group)),
        aten._weight_norm_interface_backward.default: Operator(weight_norm_backward),
    }


def norm(operator: Any, x: torch.Tensor, *parameters: Any) -> Any:
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
