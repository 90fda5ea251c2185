"""Random programs: through composer they compute what eager computes, and write what it writes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from common import compiled
from hypothesis import HealthCheck, assume, given, note, settings
from programs import Program, programs

import composer
from composer.testing import FakeBackend

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::composer.errors.FallbackWarning"),
    # torch gives its own once in a process, so that a program would run or not by its turn.
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

EXAMPLES = int(os.environ.get("COMPOSER_TEST_EXAMPLES", "5"))
"""Of each chain; a search for faults takes thousands."""

CALLS = 3
Function = Callable[..., Sequence[torch.Tensor]]

CHAINS: dict[str, Callable[[], list[Any]]] = {
    "aot_eager": lambda: ["aot_eager"],
    "onnxrt": lambda: ["onnxrt"],
    "raises": lambda: [FakeBackend("raises", at=2), FakeBackend(name="second")],
}


@dataclass
class Seen:
    """What one call gave: its outputs, its inputs afterwards, gradients, and what lies where."""

    values: list[torch.Tensor] = field(default_factory=list)
    aliases: list[list[bool]] = field(default_factory=list)


def seen(function: Function, program: Program, seed: int) -> Seen:
    """Call once, and backward from every output that has a gradient."""
    inputs = program.fresh_inputs(seed)
    outputs = list(function(*inputs))
    homes = [_home(each) for each in (*inputs, *outputs)]
    found = Seen(aliases=[[a == b for b in homes] for a in map(_home, outputs)])
    roots = [each for each in outputs if each.requires_grad]
    if roots:
        sum(each.sum() for each in roots).backward()
    gradients = [each.grad for each in inputs if each.grad is not None]
    found.values = [each.detach().clone() for each in (*outputs, *inputs, *gradients)]
    return found


def _home(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() or id(tensor)


def held_against_eager(function: Function, program: Program) -> None:
    """Every call gives what eager gives."""
    for seed in range(CALLS):
        mine, eagers = seen(function, program, seed), seen(program.function(), program, seed)
        assert len(mine.values) == len(eagers.values)
        for a, b in zip(mine.values, eagers.values, strict=True):
            torch.testing.assert_close(a, b, equal_nan=True, rtol=1e-4, atol=1e-5)
        assert mine.aliases == eagers.aliases


def eager_runs(program: Program) -> bool:
    """Whether eager can, backward included."""
    try:
        for seed in range(CALLS):
            seen(program.function(), program, seed)
    except RuntimeError:
        return False
    return True


def torch_itself_differs(program: Program) -> bool:
    """Whether AOTAutograd without composer gives something else than eager: torch's own fault."""
    torch.compiler.reset()
    try:
        held_against_eager(
            torch.compile(program.function(), backend="aot_eager", dynamic=program.dynamic), program
        )
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize("verify", ["off", "compile"])
@pytest.mark.parametrize("chain", CHAINS)
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=EXAMPLES <= 5,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(program=programs())
def test_program_computes_what_eager_computes(program: Program, chain: str, verify: str) -> None:
    """Outputs, inputs afterwards, gradients, and which of them share memory."""
    assume(program.lines and eager_runs(program))
    note(program.source)
    torch.compiler.reset()
    composer.reset()
    function = compiled(
        program.function(), *CHAINS[chain](), verify=verify, dynamic=program.dynamic
    )
    try:
        held_against_eager(function, program)
    except AssertionError:
        assume(not torch_itself_differs(program))
        raise
