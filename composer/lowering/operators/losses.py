"""Losses, and their backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from composer import _torch
from composer.lowering.operators.entry import Operator, Operators
from composer.lowering.operators.limits import WIDE
from composer.lowering.operators.reductions import cascade, count_of

aten = torch.ops.aten


def entries() -> Operators:
    """The entries of this module."""
    nll = aten.nll_loss_forward.default
    return {
        # Torchlib gives the loss's own size for the total weight (onnxscript 0.7), by which the
        # backward divides: gradients of a mean came out as many times too large as the batch.
        nll: Operator(_torch.operators.decomposition_of(nll)),
        aten.mse_loss.default: Operator(mean_square_error),
        aten.smooth_l1_loss_backward.default: Operator(smooth_l1_backward),
    }


def mean_square_error(x: torch.Tensor, target: torch.Tensor, reduction: int = 1) -> Any:
    """Of many elements, written out."""
    difference = x - target
    squares = difference * difference
    summed = cascade(squares, None) if reduction else NotImplemented
    if summed is NotImplemented:
        return NotImplemented
    return summed / count_of(squares, None) if reduction == 1 else summed


_MEAN = 1
"""What torch calls the reduction."""


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
