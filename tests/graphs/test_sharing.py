"""Inputs that a graph writes to and that share memory: torch is not asked, eager answers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from common import compiled, last, upstream
from rewrites import Scale, at

pytestmark = pytest.mark.filterwarnings("ignore::composer.errors.FallbackWarning")


def adds_and_returns_a_view(x: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    x.add_(100)
    return part.view(-1)


def doubles_and_adds(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.mul_(2)
    return x + y


@pytest.mark.parametrize("engine", ["aot_eager", "onnxrt"])
@pytest.mark.parametrize("function", [adds_and_returns_a_view, doubles_and_adds])
def test_a_written_input_that_shares_memory_is_eagers(function: Any, engine: str) -> None:
    """In the first call torch is not asked: it may fail when the input is written to already."""
    run = compiled(function, engine)
    mine, eagers = (torch.arange(24.0).view(4, 6) for _ in range(2))
    with torch.no_grad():
        found, expected = run(mine[:3], mine[1:]), function(eagers[:3], eagers[1:])
    assert torch.equal(found, expected)
    assert torch.equal(mine, eagers)
    (attempt,) = last().attempts
    assert (attempt.status, attempt.reason) == ("declined", "mutated_inputs")
    assert last().chosen == "eager"


@pytest.mark.parametrize("engine", ["aot_eager", "onnxrt"])
def test_a_call_whose_written_input_shares_memory_is_eagers(engine: str) -> None:
    """No guard of torch's sees it; the engine goes on serving the other calls."""
    run = compiled(doubles_and_adds, engine)
    parts = (slice(4, 8), slice(2, 6), slice(4, 8), slice(3, 7))
    for part in parts:
        mine, eagers = torch.ones(8), torch.ones(8)
        found = run(mine[:4], mine[part])
        assert torch.equal(found, doubles_and_adds(eagers[:4], eagers[part]))
        assert torch.equal(mine, eagers)
    assert last().chosen == engine
    assert (last().runtime.calls, last().runtime.fallbacks) == (4, 2)
    assert "shares memory" in last().runtime.last_error


def test_memory_of_numpys_is_seen_to_be_shared() -> None:
    """Each tensor over it has a storage of its own."""
    run = compiled(doubles_and_adds, "aot_eager")
    run(torch.ones(4), torch.ones(4))
    mine = torch.ones(4)
    assert torch.equal(run(mine, torch.from_numpy(mine.numpy())), torch.full((4,), 4.0))


@pytest.mark.parametrize("engine", ["aot_eager", "onnxrt"])
def test_an_input_that_is_a_view_of_a_weight_is_eagers(engine: str) -> None:
    """The engine may have the weight by its address, or a copy of it."""

    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.far = torch.nn.Parameter(torch.ones(4))
            self.register_buffer("scale", torch.ones(4))

        def forward(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
            counts.add_(1)
            return x * self.scale * self.far

    model, x = Scaled(), torch.ones(4)
    run = compiled(model, engine)
    with torch.no_grad():
        assert torch.equal(run(x, torch.zeros(4)), x)
        assert torch.equal(run(x, model.scale.view(4)), 2 * x)
        assert torch.equal(run(x, torch.zeros(4)), 2 * x)
    assert (last().chosen, last().runtime.fallbacks) == (engine, 1)


@pytest.mark.parametrize("first", ["apart", "shared"])
def test_memory_read_as_another_dtype_is_seen_to_be_shared(first: str) -> None:
    """Torch counts its elements, which are of another size."""

    def zeroes(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        b.zero_()
        return a * 2

    run = compiled(zeroes, "aot_eager")
    base = torch.ones(8)
    if first == "apart":
        run(torch.ones(8)[4:8], torch.ones(8).view(torch.uint8)[16:32])
    assert torch.equal(run(base[4:8], base.view(torch.uint8)[16:32]), torch.zeros(4))


def test_columns_side_by_side_share_nothing() -> None:
    """Their addresses alternate, and no element is of both."""
    run = compiled(doubles_and_adds, "aot_eager")
    for _ in range(2):
        both = torch.ones(3, 8)
        run(both[:, :4], both[:, 4:])
    assert (last().chosen, last().runtime.fallbacks) == ("aot_eager", 0)


def test_shared_memory_is_eagers_under_late_passes_too() -> None:
    """Which the fallback runs by AOTAutograd's step: it does not where that would be wrong."""
    run = compiled(doubles_and_adds, "aot_eager", passes=[at("post_grad", Scale)])
    for part in (slice(4, 8), slice(2, 6)):
        mine, eagers = torch.ones(8), torch.ones(8)
        found = run(mine[:4], mine[part])
    assert torch.equal(found, doubles_and_adds(eagers[:4], eagers[part]))
    assert torch.equal(mine, eagers)


@upstream
def test_torch_serves_inputs_that_share_memory_wrongly() -> None:
    """When it does not any more, ``composer.graphs.sharing`` can go (torch 2.11 to 2.15)."""
    run = torch.compile(doubles_and_adds, backend="aot_eager")
    run(torch.ones(4), torch.ones(4))
    mine, eagers = torch.ones(8), torch.ones(8)
    found = run(mine[:4], mine[2:6])
    assert not torch.equal(found, doubles_and_adds(eagers[:4], eagers[2:6]))
    run, x = torch.compile(adds_and_returns_a_view, backend="aot_eager"), torch.zeros(4, 6)
    with torch.no_grad(), pytest.raises(AssertionError, match="incorrect out shape"):
        run(x[:3], x[1:])
