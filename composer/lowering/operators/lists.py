"""Operators over lists of tensors, written out as the plain operator for each place of the lists.

Optimizers with ``foreach=True`` and ``clip_grad_norm_`` are made of them. Which operators there
are, and what each does at a place, torch itself says: eager runs the same loops on a CPU.
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
    """Zeros; torch's loop writes to copies, which is no functional graph."""
    return [aten.zero.default(each) for each in tensors]
