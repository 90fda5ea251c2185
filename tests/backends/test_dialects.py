"""The dialect of an engine's graph: torch functions or ATen, whatever the shared passes did."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from common import compiled, last
from engines import honest
from rewrites import at
from torch.utils.checkpoint import checkpoint

from composer.errors import BackendCheckError
from composer.testing import check_backend

pytestmark = pytest.mark.slow

aten = torch.ops.aten
X = torch.linspace(-1, 1, 8)


def program(x: torch.Tensor) -> torch.Tensor:
    """The pass ``remove_no_ops`` has something to do here."""
    return torch.relu(x.sin() * 1).cos()


class Clamps:
    """An engine for torch functions, as the page on engines has one; ``seen`` are its targets."""

    __name__ = "clamps"
    dialect: Any = "torch"

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        self.seen = [node.target for node in gm.graph.nodes if node.op == "call_function"]
        for node in gm.graph.find_nodes(op="call_function", target=torch.relu):
            node.target, node.args = torch.clamp_min, (node.args[0], 0)
        gm.recompile()
        return gm.forward


class ClampsInATen(Clamps):
    """The same for a graph of ATen."""

    dialect: Any = "aten"

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        self.seen = [node.target for node in gm.graph.nodes if node.op == "call_function"]
        for node in gm.graph.find_nodes(op="call_function", target=aten.relu.default):
            node.target, node.args = aten.clamp_min.default, (node.args[0], 0)
        gm.recompile()
        return gm.forward


class Either(ClampsInATen):
    """An engine that takes both, and so gets the graph as the passes left it."""

    dialect = "any"


def test_an_engine_for_torch_functions_serves_where_passes_keep_numbers() -> None:
    """It gets the graph from before these passes, which computes the same; the record says so."""
    engine = Clamps()
    torch.testing.assert_close(compiled(program, engine, passes=["remove_no_ops"])(X), program(X))
    (record,) = last().passes
    assert record.changed
    assert last().chosen == "clamps"
    assert torch.relu in engine.seen
    assert last().attempts[0].engine["dialect"] == "torch, without the passes of the stage aten"


def test_a_function_that_says_nothing_gets_torch_functions_where_it_can() -> None:
    """And where it cannot, ATen: most functions hand their graph to AOTAutograd, which takes it."""
    for passes, expected in ((["remove_no_ops"], torch.relu), ([at("aten")], aten.relu.default)):
        seen: list[Any] = []

        def silent(gm: torch.fx.GraphModule, inputs: list[Any], seen: list[Any] = seen) -> Any:
            seen += [node.target for node in gm.graph.nodes]
            return honest(gm, inputs)

        compiled(program, silent, passes=passes)(X)
        assert last().chosen == "silent"
        assert expected in seen


def test_it_gets_what_the_passes_of_its_own_stage_left() -> None:
    """A pass of the stage ``torch`` leaves torch functions."""
    engine = Clamps()
    run = compiled(lambda x: torch.cos(torch.relu(x)), engine, passes=[at("torch")])
    torch.testing.assert_close(run(X), torch.relu(X).sin())
    assert (last().chosen, last().passes[0].changed) == ("clamps", True)
    assert torch.relu in engine.seen


@pytest.mark.parametrize("stage", ["aten", "joint", "post_grad"])
def test_it_declines_a_graph_that_is_to_be_had_in_aten_alone(stage: str) -> None:
    """The pass is a part of the program, so it is not left out. Eager runs it."""
    engine = Clamps()
    run = compiled(lambda x: torch.relu(x).cos(), engine, passes=[at(stage)])
    torch.testing.assert_close(run(X), torch.relu(X).sin())
    (attempt,) = last().attempts
    assert (attempt.status, attempt.reason) == ("declined", "unsupported_op")
    assert "its dialect is torch functions, and the policy's passes (" in attempt.message
    assert at(stage).name in attempt.message
    assert engine.seen == []


def test_it_declines_a_graph_that_the_policy_makes_bfloat16() -> None:
    """Composer writes the casts in ATen."""
    compiled(lambda x: torch.relu(x @ x), Clamps(), precision="bf16")(torch.ones(8, 8))
    (attempt,) = last().attempts
    assert attempt.reason == "unsupported_op"
    assert "the policy's precision made a graph of ATen" in attempt.message


def test_torchscript_serves_beside_a_shared_pass() -> None:
    """It reads torch functions; torch's other backends take both."""
    torch.testing.assert_close(compiled(program, "ts", passes=["remove_no_ops"])(X), program(X))
    assert last().chosen == "ts", last().attempts[0].message


@pytest.mark.parametrize("isolate", [False, True])
@pytest.mark.parametrize("passes", [[], ["remove_no_ops"]])
def test_an_engine_for_aten_gets_aten(passes: list[str], isolate: bool) -> None:
    """Traced for it, or as a pass left it."""
    engine = ClampsInATen()
    run = compiled(program, engine, passes=passes, isolate=isolate)
    torch.testing.assert_close(run(X), program(X))
    assert last().chosen == "clamps", last().attempts[0].message
    assert all(isinstance(each, torch._ops.OpOverload) for each in engine.seen)
    assert (aten.mul.Tensor in engine.seen) == (not passes)


def test_an_engine_for_aten_declines_what_aten_cannot_say() -> None:
    """Such as a checkpoint of the program."""

    def program(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda x: torch.relu(x).cos(), x, use_reentrant=False)

    compiled(program, ClampsInATen())(X.clone().requires_grad_())
    (attempt,) = last().attempts
    assert (attempt.status, attempt.reason) == ("declined", "unsupported_op")
    assert attempt.message.startswith("its dialect is ATen, and the graph calls ")


@pytest.mark.parametrize(("passes", "expected"), [([], torch.relu), (["remove_no_ops"], "aten")])
def test_an_engine_that_takes_both_gets_what_the_passes_left(passes: Any, expected: Any) -> None:
    """With no pass that is the captured graph."""
    engine = Either()
    compiled(program, engine, "aot_eager", passes=passes)(X)
    wanted = aten.relu.default if expected == "aten" else expected
    assert wanted in engine.seen


def test_the_check_of_engines_tries_both() -> None:
    """One that says it takes both, and fails on a graph of ATen, breaks a rule."""
    assert "its dialect is torch functions" in "".join(
        check_backend(Clamps(), program, (X,)).declined
    )

    def both(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        if gm.graph.find_nodes(op="call_function", target=aten.relu.default):
            raise RuntimeError("aten.relu is unknown to me")
        return Clamps()(gm, example_inputs)

    both.dialect = "any"  # type: ignore[attr-defined]  # as an author says it
    with pytest.raises(BackendCheckError) as caught:
        check_backend(both, program, (X,))
    assert list(caught.value.rules) == ["dialect"]
    assert "aten.relu is unknown to me, with a graph of ATen" in caught.value.rules["dialect"]


def test_an_unknown_dialect_is_named() -> None:
    """Else a misspelt one would get the graph as the shared passes left it."""
    engine = Clamps()
    engine.dialect = "ATen"
    compiled(program, engine)(X)
    (attempt,) = last().attempts
    assert (attempt.status, attempt.reason) == ("failed", "build_failed")
    assert attempt.message == "its dialect is 'ATen', not one of 'torch', 'aten', 'any'"
