"""Operators over lists of tensors, written out as the plain operator for each place of the lists.

Optimizers with ``foreach=True`` and ``clip_grad_norm_`` are made of them. Which operators there
are, and what each does at a place, torch itself says: eager runs the same loops on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from composer import _torch

aten = torch.ops.aten


def lists() -> dict[Any, Callable[..., Any]]:
    """The table of this module's decompositions."""
    return {**_torch.operators.loops_over_lists(), aten._foreach_zero.default: zero}


def zero(tensors: Sequence[torch.Tensor]) -> Any:
    """Zeros; torch's loop writes to copies, which is no functional graph."""
    return [aten.zero.default(each) for each in tensors]
