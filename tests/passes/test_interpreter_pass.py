"""Passes that walk through the graph: what they are given, what they may emit, what stays."""

from __future__ import annotations

import operator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # as torch's own users write it
from common import compiled, last, thorough
from rewrites import COSINES, at, aten

from composer.passes import GraphPass, InterpreterPass, Value
from composer.passes.base import MatchLimit

ENGINES = ("inductor", "onnxrt", "aot_eager")
STAGES = ("torch", "aten", "joint", "post_grad")


class CosineToShiftedSine(InterpreterPass):
    """The cosine as the sine of a shifted argument: two operators in place of one."""

    def call_operator(self, op, args, kwargs, meta):
        if op not in COSINES:
            return super().call_operator(op, args, kwargs, meta)
        shifted = super().call_operator(aten.add.Tensor, (args[0], torch.pi / 2), {}, meta)
        return super().call_operator(aten.sin.default, (shifted,), {}, meta)


class CosineToTangent(InterpreterPass):
    def call_operator(self, op, args, kwargs, meta):
        return super().call_operator(aten.tan.default if op in COSINES else op, args, kwargs, meta)


def program(x, w):
    return torch.cos(torch.cos(x @ w)).relu() + 1


def inputs(grad=False):
    return torch.randn(4, 4, requires_grad=grad), torch.randn(4, 4, requires_grad=grad)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("engine", ENGINES)
def test_an_override_emits_other_operators_at_every_stage(engine: str, stage: str) -> None:
    """Each place counts as a match, and the numbers are those of what was emitted."""
    args = inputs()
    passes = [at(stage, CosineToShiftedSine), at(stage, CosineToTangent)]
    result = compiled(program, engine, passes=passes, strict=True)(*args)
    torch.testing.assert_close(result, program(*args))
    first, second = last().passes
    assert (first.matches, first.error, first.changed) == (2, "", True)
    assert first.nodes_after == first.nodes_before + 2
    assert (second.matches, second.changed) == (0, False)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_walk_keeps_training_exact(engine: str, stage: str) -> None:
    """Forward and backward of an equivalent program, at every stage."""
    x, w = inputs(grad=True)
    result = compiled(program, engine, passes=[at(stage, CosineToShiftedSine)], strict=True)(x, w)
    got = torch.autograd.grad(result.sum(), (x, w))
    torch.testing.assert_close(result, program(x, w))
    torch.testing.assert_close(got, torch.autograd.grad(program(x, w).sum(), (x, w)))


@pytest.mark.parametrize("engine", [*thorough("inductor"), "onnxrt", "aot_eager"])
def test_a_convolution_is_written_as_a_product(engine: str) -> None:
    """An override that looks at shapes, and emits views and a product in place of one operator."""

    class PointwiseToLinear(InterpreterPass):
        def call_operator(self, op, args, kwargs, meta):
            if op is not aten.conv2d.default or args[1].value.shape[2:] != (1, 1):
                return super().call_operator(op, args, kwargs, meta)
            x, w, b = args[:3]
            last_ = self.call_operator(aten.permute.default, (x, [0, 2, 3, 1]), {}, meta)
            flat = self.call_operator(aten.view.default, (w, list(w.value.shape[:2])), {}, meta)
            y = self.call_operator(aten.linear.default, (last_, flat, b), {}, meta)
            y = self.call_operator(aten.permute.default, (y, [0, 3, 1, 2]), {}, meta)
            return self.call_operator(aten.contiguous.default, (y,), {}, meta)

    x, big, small, b = (torch.randn(s) for s in ((2, 3, 8, 8), (3, 3, 3, 3), (4, 3, 1, 1), (4,)))

    def convolutions(x, big, small, b):
        return F.conv2d(F.conv2d(x, big).relu(), small, b)

    passes = [PointwiseToLinear()]
    result = compiled(convolutions, engine, passes=passes, strict=True)(x, big, small, b)
    torch.testing.assert_close(result, convolutions(x, big, small, b), rtol=1e-4, atol=1e-4)
    assert last().passes[0].matches == 1


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("stage", STAGES)
def test_a_walk_holds_with_dynamic_sizes(engine: str, stage: str) -> None:
    """Symbols stay symbols: one graph serves two sizes."""

    def sized(x, w):
        return torch.cos(x @ w).reshape(-1) * (x.shape[0] + 1)

    passes = [at(stage, CosineToShiftedSine)]
    function = compiled(sized, engine, passes=passes, dynamic=True, strict=True)
    for rows in (3, 5):
        x, w = torch.randn(rows, 4), torch.randn(4, 4)
        torch.testing.assert_close(function(x, w), sized(x, w))
    assert last().passes[0].matches == 1
    assert last().dynamic


def symbolic_graph(function, *args, stage="aten", dynamic=False):
    """The graph that a pass of that stage is given, kept aside."""
    seen = []

    class Keeps(GraphPass):
        def run(self, gm):
            seen.append(gm)

    passes = [at(stage, Keeps)]
    compiled(function, "aot_eager", passes=passes, dynamic=dynamic, strict=True)(*args)
    return seen[0]


@pytest.mark.parametrize("stage", STAGES)
def test_a_pass_that_overrides_nothing_changes_nothing(stage: str) -> None:
    """Every node stays the same object with the same fake value, and nothing counts as a match."""

    def rich(x, w):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            low = (x @ w).float()
        values, _ = torch.max(x, 0)
        return low[:, 1:].sum(), values.nonzero(), torch.cat([x, w]).view(x.shape[0], -1)

    gm = symbolic_graph(rich, *inputs(), stage=stage, dynamic=True)
    before = [(node, node.target, node.args, dict(node.meta)) for node in gm.graph.nodes]
    assert at(stage, InterpreterPass).run(gm) == 0
    after = [(node, node.target, node.args, dict(node.meta)) for node in gm.graph.nodes]
    assert [each[:3] for each in after] == [each[:3] for each in before]
    key = "example_value" if stage == "torch" else "val"
    assert all(a[3].get(key) is b[3].get(key) for a, b in zip(after, before, strict=True))


def test_sizes_are_offered_as_symbolic_arithmetic() -> None:
    """``call_sym`` gets what computes with sizes only; an override may emit other arithmetic."""

    class AddsOneMore(InterpreterPass):
        def call_sym(self, op, args, meta):
            more = super().call_sym(op, args, meta)
            assert isinstance(more.value, torch.SymInt)
            return super().call_sym(operator.add, (more, 1), meta)

    function = compiled(
        lambda x: x * (x.shape[0] * 2), "aot_eager", passes=[AddsOneMore()], dynamic=True
    )
    x = torch.randn(3)
    torch.testing.assert_close(function(x), x * 7)
    assert last().passes[0].matches == 1


@pytest.mark.parametrize("engine", [*thorough("inductor"), "onnxrt", "aot_eager"])
def test_a_tuple_may_stand_for_an_operator_with_several_results(engine: str) -> None:
    """What reads one of them is given it directly."""

    class SplitToSlices(InterpreterPass):
        def call_operator(self, op, args, kwargs, meta):
            if op is not aten.split.Tensor:
                return super().call_operator(op, args, kwargs, meta)
            x, size = args
            ends = range(0, x.value.shape[0], size)
            cut = [(x, 0, start, start + size) for start in ends]
            return tuple(self.call_operator(aten.slice.Tensor, each, {}, meta) for each in cut)

    def halves(x):
        a, b = x.split(2)
        return a - b

    x = torch.randn(4, 3)
    result = compiled(halves, engine, passes=[SplitToSlices()], strict=True)(x)
    torch.testing.assert_close(result, x[:2] - x[2:])
    assert last().passes[0].error == ""


def test_inputs_and_outputs_may_be_wrapped() -> None:
    """What is returned for an input stands for it; the input itself stays."""

    class InBfloat16(InterpreterPass):
        def placeholder(self, name, value, meta):
            return self.call_operator(aten.to.dtype, (value, torch.bfloat16), {}, meta)

        def output(self, results, meta):
            return [
                self.call_operator(aten.to.dtype, (each, torch.float32), {}, meta)
                for each in results
            ]

    x, w = inputs()
    result = compiled(torch.mm, "aot_eager", passes=[InBfloat16()], on_pass_error="raise")(x, w)
    torch.testing.assert_close(result, (x.bfloat16() @ w.bfloat16()).float())
    assert last().passes[0].matches == 3


def test_methods_of_the_captured_graph_are_offered() -> None:
    """At stage torch ``x.relu()`` is a method, and a function may stand for it."""

    class ReluToSigmoid(InterpreterPass):
        stage = "torch"

        def call_method(self, name, args, kwargs, meta):
            if name != "relu":
                return super().call_method(name, args, kwargs, meta)
            return self.call_operator(torch.sigmoid, args, kwargs, meta)

    x = torch.randn(3)
    result = compiled(lambda x: x.exp().relu(), "aot_eager", passes=[ReluToSigmoid()])(x)
    torch.testing.assert_close(result, x.exp().sigmoid())


def test_new_nodes_carry_values_and_the_users_line() -> None:
    """Metadata is complete after the walk, without the pipeline's help."""
    gm = symbolic_graph(program, *inputs())
    assert CosineToShiftedSine().run(gm) == 2
    for node in gm.graph.find_nodes(op="call_function", target=aten.sin.default):
        assert node.meta["val"].shape == (4, 4)
        assert "in program" in node.meta["stack_trace"]


def test_what_follows_a_change_has_new_values() -> None:
    """A changed dtype is seen by every later override, and only by what depends on it."""
    seen = []

    class Doubles(InterpreterPass):
        def call_operator(self, op, args, kwargs, meta):
            if op in COSINES:
                args = (self.call_operator(aten.to.dtype, (args[0], torch.float64), {}, meta),)
            result = super().call_operator(op, args, kwargs, meta)
            seen.append((op, result.value.dtype))
            return result

    gm = symbolic_graph(lambda x, w: ((x @ w).cos().relu(), x + w), *inputs())
    Doubles().run(gm)
    wide = {op for op, dtype in seen if dtype == torch.float64}
    assert wide == {aten.to.dtype, aten.cos.default, aten.relu.default}


def test_a_match_limit_holds_in_a_walk() -> None:
    """What is over the limit is emitted as it was, on the same node."""
    gm = symbolic_graph(program, *inputs())
    _, second = gm.graph.find_nodes(op="call_function", target=aten.cos.default)
    assert CosineToShiftedSine().limited(MatchLimit(1)).run(gm) == 1
    assert gm.graph.find_nodes(op="call_function", target=aten.cos.default) == [second]
    gm.graph.lint()


def test_one_pass_walks_through_several_graphs_at_once() -> None:
    """A run keeps what it knows to itself."""
    graphs = []
    for _ in range(4):
        torch.compiler.reset()
        graphs.append(symbolic_graph(program, *inputs()))
    rewrite = CosineToShiftedSine()
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(rewrite.run, graphs)) == [2] * 4
    for gm in graphs:
        gm.graph.lint()
        assert len(gm.graph.find_nodes(op="call_function", target=aten.sin.default)) == 2


class ReturnsNothing(InterpreterPass):
    def call_operator(self, op, args, kwargs, meta):
        result = super().call_operator(op, args, kwargs, meta)
        return None if op in COSINES else result


class UsesASymbol(InterpreterPass):
    def call_operator(self, op, args, kwargs, meta):
        if op in COSINES:
            args = (
                self.call_operator(aten.mul.Tensor, (args[0], args[0].value.shape[0]), {}, meta),
            )
        return super().call_operator(op, args, kwargs, meta)


class UsesAFake(InterpreterPass):
    def call_operator(self, op, args, kwargs, meta):
        return super().call_operator(op, tuple(each.value for each in args), kwargs, meta)


class CannotRun(InterpreterPass):
    def call_operator(self, op, args, kwargs, meta):
        return super().call_operator(aten.conv2d.default, args[:1] * 2, {}, meta)


class DropsTheMeta(InterpreterPass):
    def call_operator(self, op, args, kwargs, meta):
        return super().call_operator(op, args, kwargs, {})


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        (DropsTheMeta, "is emitted without the meta that the method was given"),
        (ReturnsNothing, "nothing was returned for cos, which cos_1 reads"),
        (UsesASymbol, "emit aten.sym_size.int"),
        (UsesAFake, "give the Value"),
        (CannotRun, "aten.conv2d.default cannot be run on its inputs"),
    ],
)
def test_a_mistake_in_an_override_is_named(mistake: type[InterpreterPass], said: str) -> None:
    """The pass is rolled back, and says what it did."""
    args = inputs()
    function = compiled(program, "aot_eager", passes=[mistake()], dynamic=True)
    torch.testing.assert_close(function(*args), program(*args))
    (record,) = last().passes
    assert said in record.error
    assert not record.changed


def test_options_are_fields_and_part_of_the_uuid() -> None:
    """As for every pass."""

    @dataclass(frozen=True)
    class Scaled(InterpreterPass):
        factor: float = 2.0
        stage: ClassVar[str] = "post_grad"

        def call_operator(self, op, args, kwargs, meta):
            result = super().call_operator(op, args, kwargs, meta)
            assert isinstance(result, Value)
            if op not in COSINES:
                return result
            return self.call_operator(aten.mul.Tensor, (result, self.factor), {}, meta)

    assert Scaled().uuid() == Scaled(2.0).uuid() != Scaled(3.0).uuid()
    x = torch.randn(3)
    result = compiled(torch.cos, "inductor", passes=[Scaled(3.0)], strict=True)(x)
    torch.testing.assert_close(result, 3 * x.cos())


def test_other_arguments_are_written_to_as_those_before() -> None:
    """The node stays; what returns its argument goes on sharing memory with it."""

    class Wider(InterpreterPass):
        def call_operator(self, op, args, kwargs, meta):
            given = (args[0], -2.0, 2.0) if op is aten.hardtanh.default else args
            return super().call_operator(op, given, kwargs, meta)

    def writes(x):
        a = F.hardtanh(x)
        a.type_as(x).add_(1)
        return a * 2, F.hardtanh(x) * 3

    x = torch.randn(8)
    passes = [Wider(), "eliminate_common_subexpressions"]
    result = compiled(writes, "aot_eager", passes=passes, on_pass_error="raise")(x)
    torch.testing.assert_close(result, ((x.clamp(-2, 2) + 1) * 2, x.clamp(-2, 2) * 3))
    assert [each.matches for each in last().passes] == [2, 0]
