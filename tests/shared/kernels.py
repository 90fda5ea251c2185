"""A Triton kernel of a user's own, behind custom operators, and the passes that bring it in.

It needs triton, and a GPU or ``TRITON_INTERPRET=1`` to run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import custom_op, triton_op, wrap_triton

from composer.passes import PatternPass

aten = torch.ops.aten
BLOCK = 128


@triton.jit
def gate_kernel(x_ptr, y_ptr, out_ptr, count, BLOCK: tl.constexpr):  # noqa: N803  # Triton's way
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    x = tl.load(x_ptr + places, mask=inside).to(tl.float32)
    y = tl.load(y_ptr + places, mask=inside).to(tl.float32)
    gated = x * tl.sigmoid(x) * y
    tl.store(out_ptr + places, gated, mask=inside)


def grid(count: int) -> tuple[int]:
    return ((count + BLOCK - 1) // BLOCK,)


@custom_op("composer_tests::gate", mutates_args=())
def gate(x: Tensor, y: Tensor) -> Tensor:
    """``silu(x) * y`` in one kernel; nobody sees into it."""
    x, y = x.contiguous(), y.contiguous()
    out = torch.empty_like(x)
    gate_kernel[grid(x.numel())](x, y, out, x.numel(), BLOCK=BLOCK)
    return out


@gate.register_fake
def _(x: Tensor, y: Tensor) -> Tensor:
    return torch.empty_like(x.contiguous())


@triton_op("composer_tests::open_gate", mutates_args=())
def open_gate(x: Tensor, y: Tensor) -> Tensor:
    """The same, and Inductor sees the kernel in it."""
    x, y = x.contiguous(), y.contiguous()
    out = torch.empty_like(x)
    wrap_triton(gate_kernel)[grid(x.numel())](x, y, out, x.numel(), BLOCK=BLOCK)
    return out


def program(x: Tensor, y: Tensor) -> Tensor:
    """Something before the gate and something behind it, for the engines."""
    return torch.nn.functional.silu(x + 1) * y + x


def bringing_in(operator: str) -> PatternPass:
    """The pass that puts one of the operators where the graph says ``silu(x) * y``."""
    found = getattr(torch.ops.composer_tests, operator).default
    return PatternPass(
        pattern=lambda x, y: aten.mul.Tensor(aten.silu.default(x), y),
        replacement=lambda x, y: found(x, y),
        name=f"bring_in_{operator}",
    )
