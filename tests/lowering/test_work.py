"""Coverage counts work: a product weighs what it computes, and every other call its elements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from common import compiled, last
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F  # noqa: N812  # as torch's own users write it
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from composer import _torch
from composer.graphs.nodes import calls_of
from composer.lowering.partition.regions import is_compute
from composer.lowering.partition.work import work_of

pytestmark = pytest.mark.slow

aten = torch.ops.aten


def works(function: Callable[..., Any], *args: Any, tracing: str = "fake") -> dict[str, int]:
    """The work of each compute node of a function's graph, by the name of its operator."""
    gm = make_fx(function, tracing_mode=tracing)(*args)
    return {str(node.target): work_of(node) for node in filter(is_compute, calls_of(gm))}


def gradients(x: torch.Tensor, w: torch.Tensor) -> Any:
    mask = [True, True, False]
    forward = aten.convolution(x, w, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    return aten.convolution_backward(
        forward, x, w, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, mask
    )


PRODUCTS = {
    "mm": (torch.mm, torch.ones(3, 4), torch.ones(4, 5)),
    "addmm": (torch.addmm, torch.ones(5), torch.ones(3, 4), torch.ones(4, 5)),
    "bmm": (torch.bmm, torch.ones(2, 3, 4), torch.ones(2, 4, 5)),
    "convolution and its gradients": (gradients, torch.ones(2, 3, 8, 8), torch.ones(4, 3, 3, 3)),
}


@pytest.mark.parametrize("case", PRODUCTS.values(), ids=PRODUCTS)
def test_products_have_the_operations_that_torch_counts(case: tuple[Any, ...]) -> None:
    """They are those of torch's own counter."""
    function, *args = case
    counter = FlopCounterMode(display=False)
    with counter:
        function(*args)
    assert sum(works(function, *args).values()) == counter.get_total_flops()


def test_attention_on_the_cpu_has_the_operations_of_its_two_products() -> None:
    """Torch has no formula for this kernel, and has one for its kin."""
    q = torch.ones(2, 3, 5, 7, requires_grad=True)
    target = aten._scaled_dot_product_flash_attention_for_cpu
    assert target not in flop_registry, "composer's own entry can go"

    def step(q: torch.Tensor) -> Any:
        return torch.autograd.grad(F.scaled_dot_product_attention(q, q, q).sum(), q)

    found = works(step, q)
    two = 2 * 2 * (2 * 3) * 5 * 5 * 7
    assert found["aten._scaled_dot_product_flash_attention_for_cpu.default"] == two
    assert found["aten._scaled_dot_product_flash_attention_for_cpu_backward.default"] == two * 5 / 2


OTHERS = {
    "a sum reads all": (torch.sum, 12, torch.ones(3, 4)),
    "a lookup reads what it returns": (aten.embedding, 6, torch.ones(100, 3), torch.tensor([1, 2])),
    "so do positions": (lambda x, i: x[i], 2, torch.ones(100), torch.tensor([1, 3])),
    "elementwise": (torch.sin, 12, torch.ones(3, 4)),
    "broadcast": (torch.add, 12, torch.ones(3, 1), torch.ones(4)),
    "nothing": (torch.sin, 1, torch.ones(0)),
}


@pytest.mark.parametrize("case", OTHERS.values(), ids=OTHERS)
def test_other_calls_have_an_operation_for_each_element(case: tuple[Any, ...]) -> None:
    """Of the largest tensor that they touch, and one at least."""
    function, wanted, *args = case
    (found,) = works(function, *args).values()
    assert found == wanted


def test_sizes_are_those_of_the_first_call_and_set_no_guard() -> None:
    """A formula compares sizes with one another, which a symbol would answer with a guard."""
    x, w = torch.ones(3, 4), torch.ones(4, 5)
    gm = make_fx(torch.mm, tracing_mode="symbolic")(x, w)
    (product,) = calls_of(gm)
    values = [node.meta["val"] for node in gm.graph.nodes if node.op == "placeholder"]
    before = _torch.symbols.guards_on(values)
    assert work_of(product) == 2 * 3 * 4 * 5
    assert _torch.symbols.guards_on(values) == before


def test_a_size_that_only_the_data_tell_counts_as_one() -> None:
    """Nothing is known of it while the graph is compiled."""
    with torch.fx.experimental._config.patch(translation_validation=False):
        found = works(lambda x: x.nonzero() + 1, torch.ones(3), tracing="symbolic")
    assert found["aten.add.Tensor"] == 1


def test_arguments_may_be_given_by_name() -> None:
    """As a pass may write a call."""
    gm = make_fx(torch.mm, tracing_mode="fake")(torch.ones(3, 4), torch.ones(4, 5))
    (product,) = calls_of(gm)
    left, right = product.args
    product.args, product.kwargs = (left,), {"mat2": right}
    assert work_of(product) == 2 * 3 * 4 * 5


def test_a_formula_of_the_programs_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """It registers one for its operator, with torch's ``register_flop_formula``."""
    monkeypatch.setitem(flop_registry, aten.sin, lambda x, *, out_val: 1000)
    assert works(torch.sin, torch.ones(3)) == {"aten.sin.default": 1000}


def step(run: Callable[..., torch.Tensor]) -> None:
    """A train step whose loss is computed in float32."""
    run(torch.randn(32, 64)).float().square().mean().backward()


def network() -> torch.nn.Module:
    layers = (
        torch.nn.Linear(64, 64),
        torch.nn.GELU(),
        torch.nn.LayerNorm(64),
        torch.nn.Linear(64, 8),
    )
    return torch.nn.Sequential(*layers)


def test_an_engine_that_leaves_every_product_to_torch_is_declined(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Under autocast most nodes of a train step have a kernel in ONNX Runtime, no product has."""
    monkeypatch.setattr(_torch.processor, "multiplies_bf16", lambda: True)
    with torch.autocast("cpu", torch.bfloat16):
        step(compiled(network(), "onnxrt", "aot_eager"))
    declined, chosen = last().attempts
    assert (declined.status, declined.reason) == ("declined", "low_coverage")
    assert declined.coverage is not None
    assert declined.coverage < 0.2
    assert "% of the graph's work, not aten." in declined.message
    assert chosen.backend == "aot_eager"


def test_the_same_train_step_in_float32_is_taken() -> None:
    """Its products are the engine's, and so is nearly all of its work."""
    step(compiled(network(), "onnxrt"))
    assert last().chosen == "onnxrt"
    assert (last().attempts[0].coverage or 0) > 0.95


def test_a_call_of_graphs_has_their_work() -> None:
    """Torch runs a branch with its products, and an engine the little that is around it."""

    def branched(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x @ x, lambda x: x @ x @ x, (x,)) + 1

    with torch.no_grad():
        compiled(branched, "onnxrt", min_coverage=0.0)(torch.ones(32, 32))
    (attempt,) = last().attempts
    assert attempt.status == "succeeded"
    assert attempt.coverage is not None
    assert attempt.coverage < 0.05
