"""Rewrites given as two functions: what they match, what they refuse and why, the numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from common import compiled, last, thorough

from composer.errors import OptionError
from composer.passes import GraphPass, NearMiss, PatternPass

aten = torch.ops.aten
ENGINES = ("inductor", "onnxrt", "aot_eager")
MOST = [*thorough("inductor"), "onnxrt", "aot_eager"]


class ConvReluToClamp(PatternPass):
    """Convolution + ReLU before autograd, as a convolution that is clamped."""

    @staticmethod
    def pattern(x, w, b):
        return aten.relu.default(aten.conv2d.default(x, w, b))

    @staticmethod
    def replacement(x, w, b):
        return aten.clamp_min.default(aten.conv2d.default(x, w, b), 0.25)


def convolution_relu(x, w, b, stride, padding, dilation, transposed, output_padding, groups):
    rest = (stride, padding, dilation, transposed, output_padding, groups)
    return aten.relu.default(aten.convolution.default(x, w, b, *rest))


def convolution_clamp(x, w, b, stride, padding, dilation, transposed, output_padding, groups):
    rest = (stride, padding, dilation, transposed, output_padding, groups)
    return aten.clamp_min.default(aten.convolution.default(x, w, b, *rest), 0.25)


def fused(stage: str) -> PatternPass:
    if stage == "aten":
        return ConvReluToClamp()
    return PatternPass(convolution_relu, convolution_clamp, stage=stage, name="conv_relu_to_clamp")


def two_convolutions(x, w, b):
    return F.relu(F.conv2d(F.relu(F.conv2d(x, w, b)), w, b)) + 1


def two_clamped(x, w, b):
    return F.conv2d(F.conv2d(x, w, b).clamp_min(0.25), w, b).clamp_min(0.25) + 1


def images(grad=False):
    x, w, b = torch.randn(2, 3, 8, 8), torch.randn(3, 3, 3, 3), torch.randn(3)
    return tuple(each.requires_grad_(grad) for each in (x, w, b))


@pytest.mark.parametrize("stage", ["aten", "joint", "post_grad"])
@pytest.mark.parametrize("engine", ENGINES)
def test_convolution_and_relu_are_fused_at_every_stage(engine: str, stage: str) -> None:
    """Twice, the second reading the first; the numbers are those of the replacement."""
    args = images()
    result = compiled(two_convolutions, engine, passes=[fused(stage)], strict=True)(*args)
    torch.testing.assert_close(result, two_clamped(*args), rtol=1e-4, atol=1e-4)
    (record,) = last().passes
    assert (record.name, record.matches, record.error) == ("conv_relu_to_clamp", 2, "")
    assert last().chosen == engine


@pytest.mark.parametrize("engine", MOST)
def test_a_pattern_before_autograd_changes_the_gradient(engine: str) -> None:
    """The backward is that of the replacement."""
    args = images(grad=True)
    result = compiled(two_convolutions, engine, passes=[fused("aten")], strict=True)(*args)
    got = torch.autograd.grad(result.square().sum(), args)
    wanted = torch.autograd.grad(two_clamped(*args).square().sum(), args)
    torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-2)
    assert last().passes[0].matches == 2


@pytest.mark.parametrize("engine", MOST)
def test_a_pattern_holds_in_the_backward(engine: str) -> None:
    """A rewrite of the joint graph reaches what autograd wrote into it."""

    def negated_sine(x, g):
        return aten.mul.Tensor(g, aten.neg.default(aten.sin.default(x)))

    def doubled(x, g):
        return aten.mul.Tensor(aten.mul.Tensor(g, aten.sin.default(x)), -2.0)

    x = torch.randn(5, requires_grad=True)
    rewrite = PatternPass(negated_sine, doubled, stage="joint")
    result = compiled(torch.cos, engine, passes=[rewrite], strict=True)(x)
    (got,) = torch.autograd.grad(result.sum(), x)
    torch.testing.assert_close(got, -2 * x.sin())
    assert last().passes[0].matches == 1


@pytest.mark.parametrize("engine", MOST)
def test_a_pattern_holds_with_dynamic_sizes(engine: str) -> None:
    """One graph, rewritten once, serves two sizes."""
    function = compiled(
        two_convolutions, engine, passes=[fused("aten"), fused("post_grad")], dynamic=True
    )
    for size in (8, 11):
        x, w, b = torch.randn(2, 3, size, size), *images()[1:]
        torch.testing.assert_close(function(x, w, b), two_clamped(x, w, b), rtol=1e-4, atol=1e-4)
    assert [record.matches for record in last().passes] == [2, 0]
    assert last().dynamic


@pytest.mark.parametrize("engine", MOST)
def test_plain_torch_is_a_pattern_of_the_captured_graph(engine: str) -> None:
    """At stage torch the functions call what the program calls."""

    def squared(x):
        return torch.tanh(torch.pow(x, 2))

    rewrite = PatternPass(squared, lambda x: torch.sigmoid(x * x), stage="torch")
    x = torch.randn(4)
    result = compiled(lambda x: squared(x) + 1, engine, passes=[rewrite], strict=True)(x)
    torch.testing.assert_close(result, torch.sigmoid(x * x) + 1)


@pytest.mark.parametrize("engine", MOST)
def test_plain_torch_is_traced_to_aten_on_example_inputs(engine: str) -> None:
    """Functions that decompose are written as the user writes them."""
    rewrite = PatternPass(
        lambda x, w: F.relu(F.linear(x, w)),
        lambda x, w: F.linear(x, w).clamp(min=-1.0),
        example_inputs=(torch.zeros(2, 3), torch.zeros(4, 3)),
    )
    x, w = torch.randn(5, 3), torch.randn(4, 3)
    program = compiled(lambda x, w: F.linear(x, w).relu(), engine, passes=[rewrite], strict=True)
    torch.testing.assert_close(program(x, w), F.linear(x, w).clamp(min=-1.0))
    assert last().passes[0].matches == 1


def traced(function):
    return torch.fx.symbolic_trace(function)


def test_arguments_match_however_they_are_written() -> None:
    """Positional, by keyword, and a default that is left out."""
    rewrite = PatternPass(
        lambda x, w: aten.relu.default(aten.conv2d.default(x, weight=w, stride=[1, 1])),
        lambda x, w: aten.conv2d.default(x, w),
    )
    gm = traced(lambda x, w: aten.relu.default(aten.conv2d.default(x, w, None, [1, 1], [0, 0])))
    assert rewrite.run(gm) == 1
    assert [node.target for node in gm.graph.nodes][2] is aten.conv2d.default


def test_functions_of_torch_match_however_they_are_written() -> None:
    """Where their signature is known to torch."""
    rewrite = PatternPass(
        lambda x: F.gelu(F.softmax(x, dim=-1)), lambda x: F.softmax(x, dim=-1), stage="torch"
    )
    assert rewrite.run(traced(lambda x: F.gelu(F.softmax(x, -1)))) == 1


def near(rewrite: PatternPass, function) -> tuple[NearMiss, ...]:
    gm = traced(function)
    before = gm.code
    found = rewrite.near_misses(gm)
    gm.recompile()
    assert gm.code == before
    assert rewrite.run(gm) == 0
    return found


RELU_OF_SUM = PatternPass(
    lambda x, y: aten.relu.default(aten.add.Tensor(x, y, alpha=2)),
    lambda x, y: aten.sub.Tensor(x, y),
)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda x, y: aten.relu.default(x), ("add_tensor", "x", "it is an input of the graph")),
        (
            lambda x, y: aten.relu.default(aten.mul.Tensor(x, y)),
            ("add_tensor", "mul_tensor", "it is aten.mul.Tensor, not aten.add.Tensor"),
        ),
        (
            lambda x, y: aten.relu.default(aten.add.Tensor(x, y)),
            ("add_tensor", "add_tensor", "its alpha is 1, not 2"),
        ),
        (
            lambda x, y: aten.relu.default(aten.add.Tensor(x, x, alpha=2)),
            ("y", "x", "it stands for x already"),
        ),
    ],
)
def test_a_near_miss_names_the_node_and_the_difference(function, said) -> None:
    """What stands where the pattern's node should, and in what the two differ."""
    (miss,) = near(RELU_OF_SUM, function)
    assert (miss.anchor, miss.pattern_node, miss.graph_node) == ("relu_default", *said[:2])
    assert miss.why.startswith(said[2])


def test_a_value_read_from_outside_is_a_near_miss() -> None:
    """The intermediate cannot go, so the pattern is not rewritten."""

    def both(x, y):
        total = aten.add.Tensor(x, y, alpha=2)
        return aten.relu.default(total), aten.neg.default(total)

    (miss,) = near(RELU_OF_SUM, both)
    assert miss == NearMiss(
        anchor="relu_default",
        pattern_node="add_tensor",
        graph_node="add_tensor",
        why="it is read by neg_default as well, outside of the pattern",
    )


def test_a_filter_refuses_a_match() -> None:
    """It is given the match, the graph and the pattern; its refusal is a near miss."""

    def has_two_users(match, graph, pattern):
        return len(match.returning_nodes[0].users) == 2

    rewrite = PatternPass(
        lambda x: aten.neg.default(aten.abs.default(x)), lambda x: x, filters=(has_two_users,)
    )

    def once(x):
        return aten.sin.default(aten.neg.default(aten.abs.default(x)))

    def twice(x):
        negated = aten.neg.default(aten.abs.default(x))
        return aten.mul.Tensor(negated, aten.sin.default(negated))

    (miss,) = near(rewrite, once)
    assert miss.why == "the filter has_two_users said no"
    assert rewrite.run(traced(twice)) == 1


def test_overlapping_matches_are_rewritten_once() -> None:
    """The first in the graph; the second is a near miss that names it."""
    rewrite = PatternPass(
        lambda x: aten.neg.default(aten.neg.default(x)), lambda x: aten.abs.default(x)
    )
    gm = traced(lambda x: aten.neg.default(aten.neg.default(aten.neg.default(x))))
    assert [miss.why for miss in rewrite.near_misses(gm) if "overlaps" in miss.why] == [
        "overlaps the match at neg_default_1"
    ]
    assert rewrite.run(gm) == 1
    assert [node.name for node in gm.graph.nodes] == ["x", "abs_default", "neg_default_2", "output"]


@pytest.mark.parametrize("engine", MOST)
def test_a_write_between_the_matched_operations_forbids_the_rewrite(engine: str) -> None:
    """The replacement would read what the program wrote later."""

    def writes(x):
        double = x * 2
        x.add_(1)
        return double.relu()

    rewrite = PatternPass(
        lambda x: aten.relu.default(aten.mul.Tensor(x, 2)), lambda x: aten.sin.default(x)
    )
    x = torch.randn(4)
    result = compiled(writes, engine, passes=[rewrite], strict=True)(x.clone())
    torch.testing.assert_close(result, (x * 2).relu())
    assert last().passes[0].matches == 0
    (miss,) = near(
        rewrite,
        lambda x: (y := aten.mul.Tensor(x, 2), aten.add_.Tensor(x, 1), aten.relu.default(y))[2],
    )
    assert "add__tensor stands between" in miss.why


def test_random_numbers_between_the_matched_operations_do_no_harm() -> None:
    """Unless the matched ones draw some themselves, whose order would change."""

    def draws(x):
        product = aten.mul.Tensor(x, 2)
        return aten.dropout.default(x, 0.5, True), aten.relu.default(product)

    rewrite = PatternPass(
        lambda x: aten.relu.default(aten.mul.Tensor(x, 2)), lambda x: aten.sin.default(x)
    )
    assert rewrite.run(traced(draws)) == 1
    random = PatternPass(lambda x: aten.relu.default(aten.dropout.default(x, 0.5, True)), sine)
    assert random.run(traced(lambda x: aten.relu.default(aten.dropout.default(x, 0.5, True)))) == 1
    assert random.run(traced(two_draws)) == 0


def sine(x):
    return aten.sin.default(x)


def two_draws(x):
    first = aten.dropout.default(x, 0.5, True)
    return aten.dropout.default(x, 0.25, True), aten.relu.default(first)


def test_several_values_are_replaced_by_as_many() -> None:
    """A pattern may return a tuple; an anchor missing in the graph is no match."""
    rewrite = PatternPass(
        lambda x, w, v: (aten.mm.default(x, w), aten.mm.default(x, v)),
        lambda x, w, v: (aten.mm.default(x, v), aten.mm.default(x, w)),
    )
    gm = traced(lambda x, w, v: aten.sub.Tensor(aten.mm.default(x, w), aten.mm.default(x, v)))
    x, w, v = torch.randn(3, 2, 2)
    assert rewrite.run(gm) == 1
    gm.recompile()
    torch.testing.assert_close(gm(x, w, v), x @ v - x @ w)
    assert rewrite.run(traced(lambda x, w: aten.mm.default(x, w))) == 0


def test_literals_are_wildcards_where_asked() -> None:
    """By default a literal of the pattern is matched exactly."""

    def scaled(x):
        return aten.relu.default(aten.mul.Tensor(x, 2.0))

    program = traced(lambda x: aten.relu.default(aten.mul.Tensor(x, 3.0)))
    assert PatternPass(scaled, lambda x: aten.neg.default(x)).run(program) == 0
    assert PatternPass(scaled, lambda x: aten.neg.default(x), ignore_literals=True).run(program)


def test_a_literal_reaches_the_replacement_through_a_parameter() -> None:
    """A parameter of the pattern stands for a number as well as for a tensor."""
    rewrite = PatternPass(
        lambda x, n: aten.relu.default(aten.mul.Tensor(x, n)), lambda x, n: aten.add.Tensor(x, n)
    )
    gm = traced(lambda x: aten.relu.default(aten.mul.Tensor(x, 3.0)))
    assert rewrite.run(gm) == 1
    assert list(gm.graph.nodes)[1].args[1] == 3.0


def test_new_nodes_name_the_users_line() -> None:
    """They carry the stack trace of what they replace, and not its value."""
    seen = []

    class Looks(GraphPass):
        def run(self, gm):
            seen.extend(gm.graph.find_nodes(op="call_function", target=aten.clamp_min.default))

    passes = [ConvReluToClamp(), Looks()]
    compiled(two_convolutions, "aot_eager", passes=passes, strict=True)(*images())
    assert len(seen) == 2
    assert all("in two_convolutions" in node.meta["stack_trace"] for node in seen)
    assert seen[0].meta["val"].shape == (2, 3, 6, 6)


def test_a_match_limit_holds() -> None:
    """Matches are taken through ``chosen``, so that a bisection can stop between them."""
    from composer.passes.base import MatchLimit

    rewrite = PatternPass(lambda x: aten.sin.default(aten.cos.default(x)), lambda x: x, name="mine")
    gm = traced(lambda x: aten.sin.default(aten.cos.default(aten.sin.default(aten.cos.default(x)))))
    assert rewrite.limited(MatchLimit(1)).run(gm) == 1
    assert rewrite.run(gm) == 1


def test_the_uuid_covers_both_functions_and_what_they_close_over() -> None:
    """An equal pass has an equal one; example inputs count by what they look like."""

    def made(number, **given):
        return PatternPass(lambda x: x + number, lambda x: x - number, name="mine", **given).uuid()

    assert made(1) == made(1) != made(2)
    zeros, ones = (torch.zeros(2),), (torch.ones(2),)
    assert made(1, example_inputs=zeros) == made(1, example_inputs=ones) != made(1)
    assert ConvReluToClamp().uuid() == ConvReluToClamp().uuid()


def test_the_uuid_covers_functions_that_have_no_source() -> None:
    """Those of a class that was typed into a shell are told apart by their bytecode."""

    def typed(pattern: str) -> str | None:
        scope = {"PatternPass": PatternPass}
        methods = f"pattern = staticmethod(lambda x: {pattern}); replacement = pattern"
        exec(f"class Typed(PatternPass): {methods}", scope)
        return scope["Typed"]().uuid()

    assert typed("x + 1") == typed("x + 1") != typed("x + 2")


def test_the_uuid_covers_what_functions_without_a_source_name() -> None:
    """A module, a class that was typed as well, Python's own, and functions within."""

    def typed(half: int) -> str | None:
        scope = {"PatternPass": PatternPass, "math": math}
        exec(f"class Half:\n    by = {half}", scope)
        inner = "lambda x: (lambda y: y * math.pi / Half.by + int(Half.by))(x)"
        methods = f"pattern = staticmethod({inner}); replacement = pattern"
        exec(f"class Typed(PatternPass): {methods}", scope)
        return scope["Typed"]().uuid()

    assert typed(2) == typed(2) != typed(3)


@pytest.mark.parametrize(
    ("pattern", "replacement", "said"),
    [
        (None, lambda x: x, "needs a pattern and a replacement"),
        (lambda x, y: x + 1, lambda x, y: x, "does not need its y"),
        (lambda x: x + 1, lambda x, y: x, "the pattern has 1 parameters, its replacement 2"),
        (lambda x: (x + 1, x + 2), lambda x: x, "has 2 returned values, its replacement 1"),
        (lambda x: x, lambda x: x + 1, "returns its own parameter"),
        (lambda x: x + 1, lambda x: 3, "returns what is no result of it"),
        (lambda x: x + 1 if x.sum() > 0 else x, lambda x: x, "pattern cannot be traced"),
        (lambda x: x + torch.ones(2), lambda x: x, "make it a parameter"),
    ],
)
def test_a_slip_of_the_author_is_named(pattern, replacement, said: str) -> None:
    """As an OptionError with the name of the pass."""
    with pytest.raises(OptionError, match=said):
        PatternPass(pattern, replacement).run(traced(lambda x: x))


@pytest.mark.parametrize(
    ("pattern", "what"),
    [
        (lambda x: torch.relu(x) * 2, "torch.relu"),
        (lambda x: x * 2 + 1, "operator.mul"),
        (lambda x: x.relu(), "the method relu"),
    ],
)
@pytest.mark.parametrize("stage", ["aten", "joint"])
def test_a_pattern_that_never_matches_is_a_slip(pattern: Any, what: str, stage: str) -> None:
    """A graph of operators has no functions and methods of torch."""
    rewrite = PatternPass(pattern, lambda x: aten.relu.default(x), stage=stage, name="mine")
    said = f"mine: the pattern calls {what}, which no graph at {stage} has"
    with pytest.raises(OptionError, match=said):
        rewrite.run(traced(lambda x: x))


def _sum(x: Any, y: Any) -> Any:
    return torch.add(x, y)


def _difference(x: Any, y: Any) -> Any:
    return torch.sub(x, torch.neg(y))


@pytest.mark.parametrize(
    "rewrite",
    [
        PatternPass(
            lambda x, y: aten.add.Tensor(x, y),
            lambda x, y: aten.sub.Tensor(x, aten.neg.default(y)),
        ),
        PatternPass(_sum, _difference, example_inputs=(torch.zeros(2), torch.zeros(2))),
        PatternPass(_sum, _difference, stage="torch"),
    ],
    ids=["aten", "plain", "torch"],
)
def test_a_match_with_a_literal_that_the_replacement_cannot_take_is_left_out(
    rewrite: PatternPass,
) -> None:
    """The other matches are rewritten."""

    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.add(torch.add(x, y), 1)

    x, y = torch.randn(2, 3), torch.randn(2, 3)
    run = compiled(program, "aot_eager", passes=[rewrite], on_pass_error="raise")
    torch.testing.assert_close(run(x, y), program(x, y))
    assert last().passes[0].matches == 1


@pytest.mark.parametrize("engine", MOST)
def test_a_replacement_is_written_to_as_what_it_replaced(engine: str) -> None:
    """Two of them stay two, where what returns its argument is written to in between."""

    def writes(x):
        a = torch.relu(x)
        a.type_as(x).add_(1)
        return a * 2, torch.relu(x) * 3

    bounded = PatternPass(
        lambda x: aten.relu.default(x), lambda x: aten.hardtanh.default(x, 0.0, 9.0), name="bounded"
    )
    passes = [bounded, "eliminate_common_subexpressions"]
    x = torch.randn(4)
    result = compiled(writes, engine, passes=passes, on_pass_error="raise")(x)
    torch.testing.assert_close(result, writes(x))
    assert [each.matches for each in last().passes] == [2, 0]


def test_a_subclass_with_an_empty_name_is_called_after_its_pattern() -> None:
    """An empty class attribute names nothing, and does not hide the default."""

    @dataclass(frozen=True)
    class Unnamed(ConvReluToClamp):
        name: ClassVar[str] = ""  # type: ignore[misc]

    assert Unnamed().name.endswith("pattern")
