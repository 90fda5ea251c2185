"""Operators over lists of tensors, decomposed into one plain operator per list element.

Optimizers with ``foreach=True`` and ``clip_grad_norm_`` use them. The list of these operators and
their loops come from torch: eager runs the same loops on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from composer import _torch
from composer.lowering.operators.entry import Operator, Operators

aten = torch.ops.aten


def entries() -> Operators:
    """The entries of this module."""
    loops = _torch.operators.loops_over_lists()
    written_out = {each: Operator(loop) for each, loop in loops.items()}
    return written_out | {aten._foreach_zero.default: Operator(zero)}


def zero(tensors: Sequence[torch.Tensor]) -> Any:
    """``aten._foreach_zero``; torch's own loop writes in place, so its graph is not functional."""
    return [aten.zero.default(each) for each in tensors]
