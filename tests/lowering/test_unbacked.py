"""Sizes of inputs that are marked as unbacked: one build serves every number of rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from common import compiled, last, needs_torch, upstream
from torch._dynamo.decorators import mark_unbacked
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.nn import functional

import composer
from composer import _torch
from composer.lowering.operators import fused

pytestmark = pytest.mark.slow

ENGINES = ["onnxrt", "openvino"]
ALONE = {"onnxrt": "onnxrt", "openvino": "composer_openvino"}
"""What Dynamo knows them by."""


class Model(torch.nn.Module):
    """Products, attention, a fused GELU, a norm, and sums over the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.norm = torch.nn.Linear(8, 24), torch.nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = (
            each.reshape(x.shape[0], 4, 2, 4).transpose(1, 2) for each in self.qkv(x).chunk(3, -1)
        )
        rows = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        rows = self.norm(functional.gelu(rows + x))
        return rows, rows.sum(0).softmax(-1)


def of_rows(rows: int, *sizes: int, grad: bool = False) -> torch.Tensor:
    """Numbers in so many rows, the count of which is marked as unbacked."""
    x = torch.randn(rows, *sizes, requires_grad=grad)
    mark_unbacked(x, 0)
    return x


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    if request.param == "openvino":
        pytest.importorskip("openvino", reason="the engine itself")
    return str(request.param)


@torch.no_grad()
@pytest.mark.parametrize("first", [5, 1, 0])
def test_one_build_serves_any_number_of_rows(engine: str, first: int) -> None:
    """None and one included, in the first call as well."""
    model = Model()
    run = compiled(model, engine)
    for rows in (first, 0, 1, 7, 1000):
        x = of_rows(rows, 4, 8)
        torch.testing.assert_close(run(x), model(x))
    (report,) = composer.reports()
    (attempt,) = report.attempts
    assert (report.chosen, attempt.coverage) == (engine, 1.0), attempt.message
    assert (report.runtime.calls, report.runtime.fallbacks) == (5, 0)


def test_one_build_trains_on_any_number_of_rows() -> None:
    """Gradients of the input and of the weights."""
    model = Model()
    run = compiled(model, "onnxrt")
    for rows in (5, 0, 1, 7, 1000):
        x = of_rows(rows, 4, 8, grad=True)
        found, expected = (
            torch.autograd.grad(each(x)[0].sin().sum(), [x, *model.parameters()])
            for each in (run, model)
        )
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    (report,) = composer.reports()
    assert (report.chosen, report.attempts[0].coverage) == ("onnxrt", 1.0)


@torch.no_grad()
def test_an_engine_by_its_own_name_serves_any_number_of_rows(engine: str) -> None:
    """Without composer around it, no rows are torch's as well."""
    run = torch.compile(lambda x: x.square().sum(0), backend=ALONE[engine])
    for rows in (5, 0, 1, 7):
        x = of_rows(rows, 8)
        torch.testing.assert_close(run(x), x.square().sum(0))


@torch.no_grad()
def test_what_an_input_without_rows_does_not_reach_is_computed(engine: str) -> None:
    """Torch has kernels for the fused operators, too."""

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.gelu(x * 2) + y.sum(0)

    run = compiled(function, engine)
    for rows in (5, 0):
        x, y = torch.randn(3, 8), of_rows(rows, 8)
        torch.testing.assert_close(run(x, y), function(x, y))
    assert last().chosen == engine


@torch.no_grad()
def test_what_may_be_empty_where_inputs_are_not_is_torchs(engine: str) -> None:
    """All rows but the first, of one row."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).sum() + x[1:].square().sum()

    run = compiled(function, engine, min_coverage=0.1)
    for rows in (5, 1, 0, 2):
        x = of_rows(rows, 8)
        torch.testing.assert_close(run(x), function(x))
    (attempt,) = last().attempts
    assert 0 < attempt.coverage < 1
    assert last().chosen == engine


@torch.no_grad()
def test_only_what_depends_on_data_stays_torchs(engine: str) -> None:
    """``nonzero`` of marked rows, and what is computed with the rows it found."""

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.square().softmax(-1).sqrt()
        return y.exp()[torch.nonzero(y[:, 0] > 0.3).squeeze(-1)].sum(0)

    run = compiled(function, engine, min_coverage=0.1)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for rows in (5, 0, 1, 7):
            x = of_rows(rows, 8)
            torch.testing.assert_close(run(x), function(x))
    (report,) = composer.reports()
    (attempt,) = report.attempts
    left = {line.partition(" ")[0] for line in attempt.engine["left_to_torch"]}
    assert "aten.nonzero.default" in left
    assert not {"aten._softmax.default", "aten.sqrt.default", "aten.exp.default"} & left


@torch.no_grad()
@needs_torch("2.14", "no dynamic_shapes")
def test_dynamic_shapes_of_torch_compile_serve_any_size(engine: str) -> None:
    """A number that the program passes is such a size, too."""
    from torch.fx.experimental import dynamic_spec

    sizes = dynamic_spec.TensorSpec([dynamic_spec.ShapeVar("rows"), None])
    shapes = dynamic_spec.ParamsSpec({"x": sizes, "n": dynamic_spec.IntVar("n")})
    function = lambda x, n: torch.relu(x) * n + n  # noqa: E731
    options: Any = {"chain": [engine]}
    run = torch.compile(function, backend="composer", options=options, dynamic_shapes=shapes)  # type: ignore[call-arg]  # from torch 2.14 on
    for rows in (5, 0, 1, 7):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(run(x, rows), function(x, rows))
    (report,) = composer.reports()
    assert report.chosen == engine


def test_marked_sizes_are_told_from_those_that_depend_on_data() -> None:
    """A marked size has a value at the call, and for strides a usual one; no guard is set."""
    seen: list[Any] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        _torch.symbols.learn_sizes(gm, example_inputs)
        (x,) = (each for each in gm.graph.nodes if each.name == "l_x_")
        rows = x.meta["example_value"].shape[0]
        seen.extend((rows, rows + 1, rows - 1, _torch.symbols.guards_on([rows])))
        return gm.forward

    torch.compile(lambda x: x * 2, backend=backend)(of_rows(1, 3))
    *sizes, guards = seen
    assert [*map(_torch.symbols.is_unbacked, sizes)] == [True] * 3
    assert [*map(_torch.symbols.depends_on_data, sizes)] == [False] * 3
    assert [*map(_torch.symbols.hint, sizes)] == [1, 2, 0]
    assert [*map(_torch.symbols.value_for_strides, sizes)] == [8192, 8193, 8191]
    mode = _torch.fakes.FakeTensorMode(shape_env=sizes[0].node.shape_env)
    with mode:
        tensors = [torch.empty(each, 3) for each in sizes]
        assert [*map(_torch.symbols.may_be_empty, tensors)] == [False, False, True]
        assert [_torch.tensors.is_row_major(each) for each in (tensors[0], tensors[0].t())] == [
            True,
            False,
        ]
    assert _torch.symbols.guards_on(sizes) == guards


def test_composers_own_operators_give_torchs_numbers() -> None:
    """They stand for ONNX Runtime's in a graph, which torch may have to run."""
    x = torch.randn(2, 5, 12)
    assert torch.equal(fused.gelu(x), functional.gelu(x))
    q, k, v = (torch.randn(2, length, 12) for length in (3, 5, 5))
    apart = [each.unflatten(-1, (3, 4)).transpose(1, 2) for each in (q, k, v)]
    expected = functional.scaled_dot_product_attention(*apart, scale=0.3)
    found = fused.attention(q, k, v, 3, 0.3)
    torch.testing.assert_close(found, expected.transpose(1, 2).flatten(2))
    assert fused.attention(*(each.to("meta") for each in (q, k, v)), 3, 0.3).shape == (2, 3, 12)


@upstream
def test_torch_asks_logsumexp_for_a_size() -> None:
    """When it does not, ``log_sum_exp`` in ``operators/attention.py`` can go (torch 2.15)."""

    def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        fake = next(node.meta["example_value"] for node in gm.graph.nodes if node.name == "l_x_")
        with fake.fake_mode, pytest.raises(GuardOnDataDependentSymNode):
            torch.logsumexp(fake, -1)
        return gm.forward

    torch.compile(lambda x: x * 2, backend=backend)(of_rows(3, 3))
