"""The public models as they are measured: a call without gradients, or a step of training.

A step is the loss, the mean square of what the model gives, its backward and AdamW's update. The
module stays in eval mode, since the numbers that dropout draws could not be compared. Each
variant trains a copy of its own; what is compared is the first step's loss, and all gradients as
one vector: some are zero but for rounding.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import zoo
from compiles import Outputs, flat
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

RATE = 1e-5
BATCH = 4

Compile = Callable[[nn.Module], Callable[..., Any]]


@dataclass(frozen=True, slots=True)
class Deviation:
    """The largest error against eager: ``absolute`` is max|d|, ``relative`` max|d| / max|eager|.

    The worst of all outputs, for each of the two numbers by itself.
    """

    absolute: float
    relative: float


@dataclass(frozen=True, slots=True)
class Ready:
    """What is called over and over, and what of its result, or of what it left, is compared."""

    call: Callable[[], Any]
    found: Callable[[Any], Outputs]

    def first(self) -> Outputs:
        """Call it once."""
        return self.found(self.call())


@dataclass(frozen=True, slots=True)
class Subject:
    """A model, the arguments of a call, what eager gives in float32, and the work in a call.

    ``graphs`` is how many Dynamo makes, ``flops`` the operations of eager's call.
    """

    name: str
    module: nn.Module
    inputs: zoo.Inputs
    training: bool
    reference: Outputs
    graphs: int
    flops: int

    def ready(self, compile_it: Compile, precision: str) -> Ready:
        """What a variant calls over and over; nothing has run yet.

        Args:
            compile_it: What the variant makes of a module.
            precision: ``"bf16"`` computes in it: by weights in bfloat16, so that none is cast at
                each call, or in training by autocast, since bfloat16 weights would lose what small
                steps add to them. Inputs and outputs stay float32.
        """
        if self.training:
            return _step(self.module, compile_it, self.inputs, low=precision == "bf16")
        inner = InBfloat16(self.module) if precision == "bf16" else self.module
        called = compile_it(_apart(inner))
        return Ready(lambda: called(**self.inputs), flat)


class InBfloat16(nn.Module):
    """A model with weights in bfloat16 that takes and gives float32."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = copy.deepcopy(module).bfloat16()

    def forward(self, **inputs: Tensor) -> Outputs:
        """Call it with the model's own keyword arguments."""
        low = {n: t.bfloat16() if t.is_floating_point() else t for n, t in inputs.items()}
        return tuple(each.float() for each in flat(self.module(**low)))


class Loss(nn.Module):
    """The mean square of all outputs of a model."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, **inputs: Tensor) -> Tensor:
        """Call it with the model's own keyword arguments."""
        squares = [each.float().square().mean() for each in flat(self.module(**inputs))]
        return torch.stack(squares).sum()


def subject(model: str, *, tiny: bool, training: bool) -> Subject:
    """Build a model, run it once in eager mode, count its graphs and its operations.

    Raises:
        Exception: whatever building or running it raises.
    """
    module, inputs = zoo.build(model, tiny)
    if training:
        inputs = batched(inputs)
    bare = Subject(model, module, inputs, training, (), 0, 0)
    eager = bare.ready(lambda each: each, "fp32")
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        eager.call()  # with attention as products: fused, it is not counted
    reference = bare.ready(lambda each: each, "fp32").first()
    flops = int(counter.get_total_flops())
    graphs = graph_count(module, inputs)
    return Subject(model, module, inputs, training, reference, graphs, flops)


def batched(inputs: zoo.Inputs) -> zoo.Inputs:
    """A batch of requests that differ: each is the one before, moved on by one place."""
    rolls = range(BATCH)
    return {
        name: torch.cat([each.roll(step if "mask" not in name else 0, -1) for step in rolls])
        for name, each in inputs.items()
    }


def graph_count(module: nn.Module, inputs: zoo.Inputs) -> int:
    """How many graphs Dynamo captures in one call; leaves nothing compiled."""
    graphs = 0

    def count(gm: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        nonlocal graphs
        graphs += 1
        return gm.forward

    torch.compile(module, backend=count)(**inputs)
    torch.compiler.reset()
    return graphs


def deviation(reference: Outputs, outputs: Outputs) -> Deviation:
    """The largest errors of ``outputs``, computed in float64.

    Raises:
        ValueError: an output is missing, has another shape or dtype, or is not finite.
    """
    absolute = relative = 0.0
    for index, (expected, actual) in enumerate(zip(reference, outputs, strict=True)):
        if (expected.shape, expected.dtype) != (actual.shape, actual.dtype):
            raise ValueError(f"output {index} is {kind(actual)}, eager's is {kind(expected)}")
        if not actual.isfinite().all():
            raise ValueError(f"output {index} is not finite")
        largest = (actual.double() - expected.double()).abs().max().item()
        absolute = max(absolute, largest)
        relative = max(relative, largest / expected.double().abs().max().item())
    return Deviation(absolute, relative)


def kind(tensor: Tensor) -> str:
    """Dtype and shape of a tensor, in words."""
    return f"{tensor.dtype} {tuple(tensor.shape)}"


def _apart(module: nn.Module) -> nn.Module:
    """The same module under a code object of its own.

    Dynamo keeps what it compiled by code object, looks through it entry by entry at every call, and
    gives up after eight.
    """

    def forward(self: nn.Module, **inputs: Tensor) -> Any:
        return self.module(**inputs)

    code = forward.__code__.replace()
    own = types.FunctionType(code, forward.__globals__, "forward")
    kind_of_its_own = type("Apart", (nn.Module,), {"forward": own})
    made: nn.Module = kind_of_its_own()
    made.module = module
    return made.eval()


def _step(module: nn.Module, compile_it: Compile, inputs: zoo.Inputs, *, low: bool) -> Ready:
    """A step of training on a copy of the module."""
    own = copy.deepcopy(module)
    loss_of = compile_it(_apart(Loss(own)))
    optimizer = torch.optim.AdamW(own.parameters(), lr=RATE)
    weights = list(own.parameters())

    def step() -> Tensor:
        optimizer.zero_grad()
        with torch.enable_grad():
            with torch.autocast("cpu", torch.bfloat16, enabled=low):
                loss = loss_of(**inputs)
            loss.backward()
        optimizer.step()
        return loss.detach()

    def found(loss: Tensor) -> Outputs:
        grads = [each.grad.flatten() for each in weights if each.grad is not None]
        return loss, torch.cat(grads)

    return Ready(step, found)
