"""Shared passes: every stage under every engine, the contract, the records."""

from __future__ import annotations

import functools
import importlib
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint

import pytest
import torch
from common import compiled, last
from rewrites import (
    MISTAKES,
    CallsWhatCannotBe,
    ChangesAShape,
    CosineToSine,
    KeepsATensor,
    MakesTheGraphAnew,
    Raises,
    ReadsAnErasedNode,
    Scale,
    at,
    aten,
    cosines,
    nested,
)
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn
from torch.fx.passes.infra.pass_base import PassBase
from torch.fx.passes.infra.pass_base import PassResult as TorchsResult

import composer
from composer import registry
from composer.errors import FallbackWarning, OptionError, PassError, UnknownNameError
from composer.passes import (
    FunctionPass,
    GraphPass,
    InterpreterPass,
    PassResult,
    Stage,
    resolve,
)
from composer.passes.snapshot import Snapshot
from composer.registry import OpenRegistry

ENGINES = ("inductor", "onnxrt", "aot_eager", "eager")
STAGES = ("torch", "aten", "joint", "post_grad")


def program(x, w):
    return torch.cos(x @ w).relu() + 1


def rewritten(x, w):
    return torch.sin(x @ w).relu() + 1


def inputs(grad=False):
    return torch.randn(4, 4, requires_grad=grad), torch.randn(4, 4, requires_grad=grad)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_pass_reaches_every_engine_at_every_stage(engine: str, stage: str) -> None:
    """The numbers are those of the rewritten program, and the record says what was done."""
    args = inputs()
    result = compiled(program, engine, passes=[at(stage)], strict=True)(*args)
    torch.testing.assert_close(result, rewritten(*args))
    (record,) = last().passes
    assert (record.name, record.stage) == ("cosine_to_sine", stage)
    assert (record.changed, record.matches, record.error) == (True, 1, "")
    assert (record.nodes_before, record.nodes_after) == (7, 7)
    assert last().chosen == engine


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_pass_reaches_every_engine_in_training(engine: str, stage: str) -> None:
    """Before autograd the gradient is the rewritten program's; after it, the same everywhere."""
    x, w = inputs(grad=True)
    result = compiled(program, engine, passes=[at(stage)], strict=True)(x, w)
    torch.testing.assert_close(result, rewritten(x, w))
    (got,) = torch.autograd.grad(result.sum(), (x,))
    early = stage in ("torch", "aten")
    # A joint graph holds cosine's own derivative, which has no cosine in it.
    wanted = rewritten(x, w) if early else program_with_gate(x, w)
    torch.testing.assert_close(got, torch.autograd.grad(wanted.sum(), (x,))[0])


def program_with_gate(x, w):
    """The gradient of the cosine, where the sine is positive."""
    product = x @ w
    return torch.cos(product) * (torch.sin(product) > 0)


def test_the_floor_runs_the_passes_too() -> None:
    """A user's pass is part of the program, whoever answers."""
    args = inputs()
    for stage in STAGES:
        torch.compiler.reset()
        result = compiled(program, "nobody_has_this", passes=[at(stage)])(*args)
        torch.testing.assert_close(result, rewritten(*args))
        assert last().chosen == "eager"
        assert last().passes[0].matches == 1


def test_a_pass_that_changes_nothing_leaves_the_captured_graph() -> None:
    """The eager fallback is then bit for bit eager, in-place operations and all."""
    seen = []

    def keeps(gm, example_inputs):
        seen.append([node.op for node in gm.graph.nodes])
        return gm.forward

    compiled(torch.sin, keeps, passes=[at("torch"), at("aten")])(torch.ones(2))
    captured = seen.pop()
    torch.compiler.reset()
    compiled(torch.sin, keeps)(torch.ones(2))
    assert seen == [captured]
    assert [record.changed for record in composer.reports()[0].passes] == [False, False]


def test_passes_run_in_the_order_given() -> None:
    """The second sees what the first left."""
    args = inputs()
    passes = [at("aten", Scale), CosineToSine()]
    result = compiled(lambda x, w: torch.cos(x @ w), "aot_eager", passes=passes)(*args)
    torch.testing.assert_close(result, 2 * torch.sin(args[0] @ args[1]))
    assert [record.name for record in last().passes] == ["scale", "cosine_to_sine"]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda cls: cls.name)
def test_a_mistake_is_rolled_back_and_recorded(mistake: type[GraphPass], stage: str) -> None:
    """With the pass, the rule and the node; the passes around it count."""

    def two(x, w):
        return torch.cos(x @ w), x + w

    args = inputs()
    broken = at(stage, mistake)
    result = compiled(two, "aot_eager", passes=[broken, at(stage)], strict=True)(*args)
    torch.testing.assert_close(result, (torch.sin(args[0] @ args[1]), args[0] + args[1]))
    failed, after = last().passes
    assert f"pass {mistake.name!r} broke the rule {MISTAKES[mistake]!r}" in failed.error
    assert (failed.changed, after.changed) == (False, True)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_pass_may_put_another_graph_in_place(engine: str, stage: str) -> None:
    """What Dynamo says of its inputs is known of the new one's, which engines insist on."""
    args = inputs()
    result = compiled(program, engine, passes=[at(stage, MakesTheGraphAnew)], strict=True)(*args)
    torch.testing.assert_close(result, rewritten(*args))
    assert last().passes[0].matches == 1


@pytest.mark.parametrize("stage", ["torch", "aten", "post_grad"])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_tensor_that_a_pass_keeps_reaches_every_engine(engine: str, stage: str) -> None:
    """As an attribute of the module, which need not be a buffer."""
    x, w = inputs()
    result = compiled(program, engine, passes=[at(stage, KeepsATensor)], strict=True)(x, w)
    torch.testing.assert_close(result, (torch.cos(x @ w) + 1).relu() + 1)


def branches(x):
    return torch.cond(x.sum() > 0, torch.cos, torch.exp, (x,)) + torch.cos(x)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_pass_may_rewrite_nested_graphs(engine: str, stage: str) -> None:
    """Such as the branches of a condition; the record says so, whatever stands around them."""
    x = torch.ones(3)
    candidate = {"backend": engine, "min_coverage": 0.0}
    result = compiled(branches, candidate, passes=[nested(stage)], strict=True)(x)
    torch.testing.assert_close(result, torch.sin(x) + torch.cos(x))
    (record,) = last().passes
    assert (record.changed, record.matches, record.error) == (True, 1, "")


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    "mistake", [Raises, ReadsAnErasedNode, CallsWhatCannotBe, ChangesAShape], ids=lambda c: c.name
)
def test_a_mistake_in_a_nested_graph_is_rolled_back(mistake: type[GraphPass], stage: str) -> None:
    """The passes around it count."""
    x = torch.ones(3)
    passes = [nested(stage, mistake), at(stage)]
    result = compiled(branches, "aot_eager", passes=passes, strict=True)(x)
    torch.testing.assert_close(result, torch.cos(x) + torch.sin(x))
    failed, after = last().passes
    assert f"pass 'nested_{mistake.name}' broke the rule" in failed.error
    assert (failed.changed, after.changed) == (False, True)


@torch.compiler.allow_in_graph
def push(cache, x):
    cache.copy_(x)
    return cache


def pushes(x, cache):
    push(cache, x)
    return torch.cos(x)


def write_within(x):
    y = torch.sin(x)
    y.mul_(2)
    return y


UNREAD = {
    "levels of torch.func": (lambda x, c: torch.cos(torch.func.vmap(torch.exp)(x)), torch.exp),
    "a function that nobody looks into": (pushes, lambda x: x),
    "a write in a branch": (
        lambda x, c: torch.cos(torch.cond(x.sum() > 0, write_within, torch.exp, (x,))),
        lambda x: 2 * torch.sin(x),
    ),
}


@pytest.mark.parametrize("case", UNREAD)
def test_what_changes_something_stays_though_nobody_reads_it(case: str) -> None:
    """When what a pass left unread is dropped."""
    function, within = UNREAD[case]
    x, cache = torch.ones(3), torch.zeros(3)
    result = compiled(function, "eager", passes=[at("torch")], strict=True)(x, cache)
    assert last().passes[0].changed
    torch.testing.assert_close(result, torch.sin(within(x)))
    assert torch.equal(cache, x if function is pushes else torch.zeros(3))


@pytest.mark.parametrize("engine", ["inductor", "onnxrt", "aot_eager"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_mistake_raises_where_the_policy_says_so(engine: str, stage: str) -> None:
    """It is never taken for the engine's."""
    passes = [at(stage), at(stage, Scale), at(stage, list(MISTAKES)[1])]
    fails = compiled(program, engine, passes=passes, on_pass_error="raise")
    with pytest.raises(Exception, match="drops_an_output") as caught:
        fails(*inputs())
    error = caught.value
    while not isinstance(error, PassError):
        error = getattr(error, "inner_exception", None) or error.__cause__
    assert (error.name, error.rule, error.node) == ("drops_an_output", "outputs", "output")
    assert error.before == ("cosine_to_sine",)


def test_metadata_of_new_nodes_is_computed() -> None:
    """A pass that gives none, and makes the nodes behind it other ones, breaks no rule."""
    seen = []

    class Halves(GraphPass):
        stage = "joint"

        def run(self, gm):
            for node in cosines(gm):
                with gm.graph.inserting_before(node):
                    half = gm.graph.call_function(aten.to.dtype, (node.args[0], torch.bfloat16))
                with gm.graph.inserting_after(node):
                    back = gm.graph.call_function(aten.to.dtype, (node, torch.float32))
                node.replace_all_uses_with(
                    back, delete_user_cb=lambda user, back=back: user is not back
                )
                node.args = (half,)

    class Looks(GraphPass):
        stage = "joint"

        def run(self, gm):
            seen.extend(node.meta["val"].dtype for node in cosines(gm))

    compiled(program, "aot_eager", passes=[Halves(), Looks()], strict=True)(*inputs())
    assert seen == [torch.bfloat16]
    assert [record.error for record in last().passes] == ["", ""]


def test_nodes_out_of_order_are_sorted() -> None:
    """As Inductor does for its passes; only a cycle has no order."""

    class Unsorted(GraphPass):
        def run(self, gm):
            node = cosines(gm)[0]
            with gm.graph.inserting_before(next(iter(gm.graph.nodes))):
                early = gm.graph.call_function(aten.sin.default, node.args)
            node.replace_all_uses_with(early)

    args = inputs()
    result = compiled(program, "aot_eager", passes=[Unsorted()], on_pass_error="raise")(*args)
    torch.testing.assert_close(result, rewritten(*args))


@pytest.mark.parametrize("engine", ["inductor", "onnxrt", "aot_eager"])
def test_passes_hold_with_dynamic_sizes(engine: str) -> None:
    """One graph serves two sizes, with the symbols of the capture."""
    function = compiled(program, engine, passes=[at("aten"), at("joint", Scale)], dynamic=True)
    for rows in (3, 5):
        x, w = torch.randn(rows, 4), torch.randn(4, 4)
        torch.testing.assert_close(function(x, w), rewritten(x, w))
    assert len(composer.reports()) == 1
    assert last().dynamic


def test_the_graph_key_covers_passes_and_their_parameters() -> None:
    """A changed parameter is another key, an equal one the same."""
    keys = []
    for passes in ([], [Scale()], [Scale(2.0)], [Scale(3.0)], [Scale(), CosineToSine()]):
        torch.compiler.reset()
        compiled(program, "aot_eager", passes=passes)(*inputs())
        keys.append(last().graph_key)
    assert keys[1] == keys[2]
    assert len(set(keys)) == 4


def scaled(gm, factor):
    return Scale(factor).run(gm)


def recursive():
    def run(gm, left=3):
        return run(gm, left - 1) if left else 0

    return run


def test_a_pass_behind_inductors_own_is_another_one() -> None:
    """Also of Inductor's kinds, which have a uuid of their own."""

    class Own(CustomGraphPass):
        def __call__(self, graph): ...

        def uuid(self):
            return "own"

    last_one, first_one = FunctionPass(Own(), runs_last=True), FunctionPass(Own())
    assert last_one.uuid() != first_one.uuid()


def test_the_graph_key_covers_functions_by_what_is_known_of_them() -> None:
    """What is remembered of an engine was seen on the graph that another function left."""
    twice, thrice = functools.partial(scaled, factor=2), functools.partial(scaled, factor=3)
    late = FunctionPass(thrice, stage="joint")
    keys = []
    for each in (twice, functools.partial(scaled, factor=2), thrice, late, recursive()):
        torch.compiler.reset()
        compiled(program, "aot_eager", passes=[each], on_pass_error="raise")(*inputs())
        keys.append(last().graph_key)
    assert keys[0] == keys[1]
    assert len(set(keys)) == 4


class Breaks(GraphPass):
    """Cannot be made."""

    def __init__(self) -> None:
        raise RuntimeError("no")

    def run(self, gm):
        return 0


class CutsApart(GraphPass):
    """Stands where torch wants a partitioner of its own kind."""

    stage = "partitioner"

    def run(self, gm):
        return 0


class Misplaced(CustomGraphPass):
    stage = "nonsense"

    def __call__(self, graph: torch.fx.Graph) -> None:
        return

    def uuid(self) -> str:
        return "misplaced"


class CutsElsewhere(CustomPartitionerFn):
    stage = "joint"

    def __call__(self, gm, joint_inputs, **kwargs):
        raise AssertionError

    def uuid(self) -> str:
        return "cuts-elsewhere"


@pytest.mark.parametrize("stage", ["aten", "joint"])
def test_a_foreign_pass_runs_at_the_stage_that_it_names(stage: str) -> None:
    """One of torch's kinds, its class and a function; ``runs_last`` is its own as well."""

    class OfTorch(CustomGraphPass):
        runs_last = True

        def __call__(self, graph: torch.fx.Graph) -> None: ...

        def uuid(self) -> str:
            return "of torch"

    def function(gm: torch.fx.GraphModule) -> None: ...

    OfTorch.stage = function.stage = stage
    OfTorch.keeps_numbers = True
    shared = resolve.shared_passes([OfTorch(), OfTorch, function])
    assert [(each.stage, each.runs_last) for each in shared.passes] == [
        (stage, True),
        (stage, True),
        (stage, False),
    ]
    assert [each.keeps_numbers for each in shared.passes] == [True, True, False]
    assert FunctionPass(function, stage="torch").stage == "torch"


@pytest.mark.parametrize(
    ("listed", "said"),
    [
        (["cosine_to_sin"], "unknown pass 'cosine_to_sin'; did you mean 'cosine_to_sine'?"),
        (["nowhere_at_all:Fuse"], "cannot be imported"),
        ([{"pass": "scale", "facto": 3}], "unknown parameter 'facto'; did you mean 'factor'?"),
        ([{"pass": "scale", "factor": "much"}], "parameter 'factor' is 'much': Input should be"),
        ([{"pass": "scale", 3: 3}], "unknown parameter 3 "),
        ([{"factor": 3}], "names its pass"),
        ([42], "is no pass"),
        ([torch.nn.Linear], "is no class of passes"),
        (["rewrites:NeedsAName"], "pass 'rewrites.NeedsAName': "),
        (["broken_module:Fuse"], "pass 'broken_module:Fuse' cannot be imported: RuntimeError: no"),
        ([{"pass": "broken_module:Fuse", "by": 1}], "pass 'broken_module:Fuse' cannot be imported"),
        ([Breaks], "pass 'breaks': RuntimeError: no"),
        ([CutsApart], "pass 'cuts_apart': no pass runs at stage 'partitioner'"),
        ([CutsApart()], "pass 'cuts_apart': no pass runs at stage 'partitioner'"),
        ([Misplaced()], "pass 'test_passes.Misplaced': unknown stage 'nonsense'"),
        ([Misplaced], "pass 'test_passes.Misplaced': unknown stage 'nonsense'"),
        ([CutsElsewhere()], "a CustomPartitionerFn runs at stage 'partitioner', not at 'joint'"),
        ("scale", "passes is a list"),
    ],
)
def test_a_slip_in_the_list_is_the_users_error(listed, said: str, tmp_path, monkeypatch) -> None:
    """It is named at once, with what is nearest."""
    (tmp_path / "broken_module.py").write_text("raise RuntimeError('no')")
    monkeypatch.syspath_prepend(tmp_path)
    composer.passes.register(CosineToSine)
    composer.passes.register(Scale)
    with pytest.raises(Exception, match=said.replace("?", r"\?")) as caught:
        compiled(program, "eager", passes=listed)(*inputs())
    inner = getattr(caught.value, "inner_exception", caught.value)
    assert isinstance(inner, OptionError | UnknownNameError)


def test_registered_passes_are_found_by_name_and_path() -> None:
    """As a name, a table with parameters, and ``module:Class``."""
    composer.passes.register(Scale)
    listed = ["scale", {"pass": "scale", "factor": 5.0}, "rewrites:CosineToSine", CosineToSine]
    compiled(program, "aot_eager", passes=listed)(*inputs())
    assert [each.name for each in last().passes] == [
        *("cosine_to_sine", "cosine_to_sine"),
        *("scale", "scale"),
    ]


def test_a_table_gives_a_pass_what_its_fields_are_annotated_as() -> None:
    """A file has lists and text; what pydantic does not know, and a class for itself, stays."""
    table = {"sizes": [1, 2], "stage_of": "joint", "dtype": "float32", "like": torch.ones(1)}
    (made,) = resolve.shared_passes([{"pass": Particular, **table}]).passes
    assert (made.sizes, made.stage_of, made.dtype) == ((1, 2), Stage.JOINT, "float32")
    assert made.like is table["like"]
    with pytest.raises(OptionError, match=r"'sizes' is \['a'\].*; .*'stage_of' is 'after'"):
        resolve.shared_passes([{"pass": Particular, "sizes": ["a"], "stage_of": "after"}])


def test_a_partitioner_that_is_a_pass_too_is_taken_for_a_partitioner() -> None:
    """Its stage is the one where partitioners stand."""

    class Both(CutsApart, CustomPartitionerFn):
        name, stage = "both", "partitioner"

        def __call__(self, gm, joint_inputs, **kwargs):
            raise NotImplementedError

        def uuid(self):
            return "both"

    found = resolve.shared_passes([both := Both()])
    assert (found.partitioner, found.passes) == (both, ())


def test_annotations_that_do_not_resolve_are_left_to_the_class() -> None:
    """Names that are imported for type checkers alone, and attributes that are not there."""
    for annotation in ("NowhereToBeFound", "torch.nowhere_to_be_found"):
        fields = {"__annotations__": {"size": annotation}, "size": 0}
        cls = dataclass(frozen=True)(type("Unresolved", (CosineToSine,), fields))
        (made,) = resolve.shared_passes([{"pass": cls, "size": "any"}]).passes
        assert made.size == "any"


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_dataclass_need_not_be_frozen(engine: str, stage: str) -> None:
    """Nor be one at all, to have options."""

    @dataclass
    class Thawed(CosineToSine):
        times: int = 1

        def run(self, gm):
            assert self.times == 5
            return super().run(gm)

    class Plain(GraphPass):
        def __init__(self, times: int) -> None:
            self.times = times

        def run(self, gm):
            assert self.times == 5
            return 0

    for each in (Thawed, Plain):
        each.stage = stage
    args = inputs()
    tables = [{"pass": Thawed, "times": 5}, {"pass": Plain, "times": 5}]
    result = compiled(program, engine, passes=tables, on_pass_error="raise", strict=True)(*args)
    torch.testing.assert_close(result, rewritten(*args))
    assert [(each.name, each.matches) for each in last().passes] == [("thawed", 1), ("plain", 0)]
    assert Thawed().uuid() != Thawed(2).uuid()


@pytest.mark.parametrize("thing", [int, CosineToSine(), "a_pass"])
def test_what_is_no_class_of_passes_is_not_registered(thing: object) -> None:
    """The error names it."""
    with pytest.raises(OptionError, match="register is for subclasses of GraphPass, not"):
        composer.passes.register(thing)


@dataclass(frozen=True)
class Particular(CosineToSine):
    sizes: tuple[int, ...] = ()
    stage_of: Stage = Stage.ATEN
    dtype: torch.dtype = torch.float16
    like: torch.Tensor | None = None


def test_a_pass_that_says_only_whether_it_changed_something_counts_nothing() -> None:
    """A record's matches are a number of places, or none."""

    class Says(CosineToSine):
        def run(self, gm):
            return bool(super().run(gm))

    compiled(program, "aot_eager", passes=[Says()])(*inputs())
    (record,) = last().passes
    assert (record.changed, record.matches, record.error) == (True, None, "")


class ToInteger(GraphPass):
    """The power of a float is that of the integer of the same value."""

    def run(self, gm):
        for node in gm.graph.find_nodes(op="call_function", target=aten.pow.Scalar):
            node.args = (int(node.args[0]), node.args[1])


class ToIntegerByWalking(InterpreterPass):
    def call_operator(self, op, args, kwargs, meta):
        given = (int(args[0]), args[1]) if op is aten.pow.Scalar else args
        return super().call_operator(op, given, kwargs, meta)


@pytest.mark.parametrize("cls", [ToInteger, ToIntegerByWalking])
def test_another_constant_of_equal_value_is_a_change(cls: type[GraphPass]) -> None:
    """Two to an integer's power is an integer, 2.0 to it is none; Python takes 2 for 2.0."""

    def powers(x):
        return (2.0**x).to(torch.float64)

    seen = []

    def looks(gm):
        seen.extend(n.meta["val"].dtype for n in gm.graph.nodes if n.target is aten.pow.Scalar)

    x = torch.arange(3)
    result = compiled(powers, "aot_eager", passes=[cls(), looks], on_pass_error="raise")(x)
    torch.testing.assert_close(result, powers(x))
    assert (last().passes[0].changed, seen) == (True, [torch.int64])


def test_functions_are_passes() -> None:
    """Given the module, or its graph where they ask for that; named by their qualified name."""

    def on_module(gm):
        for node in cosines(gm):
            node.target = aten.sin.default
        return 1

    def on_graph(graph: torch.fx.Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=aten.sin.default):
            node.target = aten.tan.default

    args = inputs()
    passes = [on_module, FunctionPass(on_graph, stage="joint", name="tangents")]
    result = compiled(program, "onnxrt", passes=passes, on_pass_error="raise")(*args)
    torch.testing.assert_close(result, torch.tan(args[0] @ args[1]).relu() + 1)
    first, second = last().passes
    assert first.name.endswith("test_functions_are_passes.<locals>.on_module")
    assert (first.matches, second.name, second.stage) == (1, "tangents", Stage.JOINT)


def exchanged(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A module that is not the one that was given."""
    made = torch.fx.GraphModule(module, module.graph.__class__())
    made.graph.output(made.graph.graph_copy(module.graph, {}))
    CosineToSine().run(made)
    return made


class OfTorchs(PassBase):
    """One that follows torch's contract, which lets it return another module."""

    def __init__(self, edits):
        self.edits = edits

    def call(self, graph_module):
        CosineToSine().run(graph_module)
        return TorchsResult(self.edits(graph_module), True)


@pytest.mark.parametrize(
    "function",
    [exchanged, lambda module: exchanged(module).graph, OfTorchs(exchanged)],
    ids=["a module", "a graph", "torch's result"],
)
def test_another_graph_that_a_function_returns_breaks_the_rule(function) -> None:
    """It would be lost in silence: a pass edits the graph that it is given."""
    args = inputs()
    result = compiled(program, "aot_eager", passes=[function])(*args)
    torch.testing.assert_close(result, program(*args))
    assert "broke the rule 'raises': TypeError: it returned another graph" in last().passes[0].error


@pytest.mark.parametrize(
    ("function", "matches"),
    [
        (lambda gm: PassResult(bool(CosineToSine().run(gm)), 7), 7),
        (lambda gm: bool(CosineToSine().run(gm)), None),
        (lambda gm: CosineToSine().run(gm) and gm, None),
        (OfTorchs(lambda gm: gm), None),
        (lambda gm: torch.fx.replace_pattern(gm, *COSINE_AND_SINE), None),
    ],
    ids=["a result", "whether", "the module", "torch's result", "what was replaced"],
)
def test_a_function_returns_what_a_pass_returns(function, matches: int | None) -> None:
    """Or the very module that it was given, or what counts nothing."""
    args = inputs()
    result = compiled(program, "aot_eager", passes=[function], on_pass_error="raise")(*args)
    torch.testing.assert_close(result, rewritten(*args))
    assert (last().passes[0].changed, last().passes[0].matches) == (True, matches)


COSINE_AND_SINE = (lambda x: aten.cos.default(x), lambda x: aten.sin.default(x))


def test_a_floor_without_an_aot_step_is_the_captured_graph(monkeypatch) -> None:
    """The passes of the later stages are recorded as not run, and the call is answered."""

    def fails(*args):
        raise RuntimeError("no functional form")

    monkeypatch.setattr("composer.chain.eager_fallback.compile_each", fails)
    args = inputs()
    result = compiled(program, "nobody_has_this", passes=[at("joint")])(*args)
    torch.testing.assert_close(result, program(*args))
    (record,) = last().passes
    assert "broke the rule 'stage': RuntimeError: no functional form" in record.error


def test_an_inner_compile_keeps_symbols() -> None:
    """A backend that runs AOTAutograd again on composer's functional graph specialises nothing."""

    def padded(x, n):
        return torch.cos(x).new_zeros(x.shape[0] + n, 2)

    function = compiled(padded, "aot_eager", passes=[at("joint")], dynamic=True)
    for rows, n in ((3, 4), (5, 7)):
        assert function(torch.randn(rows, 2), n).shape == (rows + n, 2)
    assert len(composer.reports()) == 1


def test_a_rolled_back_pass_is_warned_of_once() -> None:
    """The user counts on it, and the numbers are other ones without it."""
    function = compiled(program, "eager", passes=[at("torch", Raises)], dynamic=False)
    with pytest.warns(FallbackWarning, match="broke the rule 'raises'.*runs without it"):
        function(*inputs())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        function(torch.randn(5, 4), torch.randn(4, 5))
    assert len(composer.reports()) == 2


@pytest.mark.parametrize("engine", ["inductor", "onnxrt", "aot_eager"])
def test_tensors_made_while_tracing_reach_every_engine(engine: str) -> None:
    """AOTAutograd wants to know where a buffer comes from that Dynamo has never seen."""

    def adds(x):
        return torch.cos(x) + torch.tensor([1.0, 2.0])

    result = compiled(adds, engine, passes=[CosineToSine()], strict=True)(torch.ones(2))
    torch.testing.assert_close(result, torch.sin(torch.ones(2)) + torch.tensor([1.0, 2.0]))
    assert last().chosen == engine


def test_the_stage_is_traced_within_regions_of_autocast() -> None:
    """Its fake values have the region's dtypes, so that what needs equal ones can be traced."""
    seen = []

    class Looks(GraphPass):
        def run(self, gm):
            calls = gm.graph.find_nodes(op="call_function", target=aten.matmul.default)
            seen.extend(node.meta["val"].dtype for node in calls)

    def region(x):
        with torch.autocast("cpu", torch.bfloat16):
            product = x @ x
            weighted = torch.cos(product).float().to(product.dtype) @ product
        return weighted, x @ x

    x = torch.rand(2, 2)
    passes = [Looks(), CosineToSine()]
    got = compiled(region, "aot_eager", passes=passes, on_pass_error="raise")(x)
    assert seen == [torch.bfloat16, torch.bfloat16, torch.float32]
    assert [each.dtype for each in got] == [torch.bfloat16, torch.float32]
    assert not torch.is_autocast_enabled("cpu")


def test_a_uuid_covers_the_file_that_the_class_stands_in(tmp_path, monkeypatch) -> None:
    """A function beside the class decides what it does; a missing module is the author's slip."""
    monkeypatch.syspath_prepend(str(tmp_path))
    code = "from composer.passes import GraphPass\nclass P(GraphPass):\n    def run(self, gm):\n"
    uuids = []
    for name, helper in (("one_pass", "1"), ("other_pass", "2")):
        text = f"{code}        return help()\ndef help(): return {helper}\n"
        (tmp_path / f"{name}.py").write_text(text)
        uuids.append(importlib.import_module(name).P().uuid())
    assert uuids[0] != uuids[1]
    lost = type("Lost", (CosineToSine,), {"depends_on": ("no.such",)})
    with pytest.raises(OptionError, match=r"depends_on names 'no\.such'"):
        lost().uuid()


@dataclass(frozen=True)
class Swap(GraphPass):
    """Its parameter is a function."""

    stage = "post_grad"
    to: Callable = None

    def run(self, gm):
        for node in gm.graph.find_nodes(op="call_function", target=aten.cos.default):
            with gm.graph.inserting_before(node):
                node.replace_all_uses_with(self.to(gm.graph, node.args[0]))


@torch.no_grad()
def test_two_lambdas_of_one_line_are_two_parameters() -> None:
    """Inductor's cache gave what was compiled for the first to the second."""
    # fmt: off
    sin, tan = (lambda g, x: g.call_function(aten.sin.default, (x,))), (lambda g, x: g.call_function(aten.tan.default, (x,)))  # noqa: E501
    # fmt: on
    x = torch.rand(4)
    for to, wanted in ((sin, x.sin()), (tan, x.tan())):
        torch.compiler.reset()
        run = compiled(torch.cos, "inductor", passes=[Swap(to)], verify="off")
        torch.testing.assert_close(run(x), wanted)


def test_a_uuid_covers_the_file_that_a_parameter_stands_in(tmp_path, monkeypatch) -> None:
    """A function calls what stands beside it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    uuids = []
    for name, helper in (("one_function", "1"), ("other_function", "2")):
        text = f"def calls(): return help()\ndef help(): return {helper}\n"
        (tmp_path / f"{name}.py").write_text(text)
        uuids.append(Swap(importlib.import_module(name).calls).uuid())
    assert uuids[0] != uuids[1]


def test_a_uuid_tells_methods_of_two_objects_apart() -> None:
    """Methods of Python's own objects have a name and no source."""
    found = [Swap({"cos": name}.get).uuid() for name in ("sin", "sin", "tan")]
    assert found[0] == found[1] != found[2]


def test_a_uuid_covers_a_module_that_was_loaded_again(tmp_path, monkeypatch) -> None:
    """What was edited since does not run before, and is not covered."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    file = tmp_path / "reloaded_pass.py"
    code = (
        "from composer.passes import GraphPass\nclass P(GraphPass):\n    depends_on = (__name__,)\n"
    )
    file.write_text(f"{code}    def run(self, gm): return help()\ndef help(): return 1\n")
    module = importlib.import_module("reloaded_pass")
    first = module.P().uuid()
    file.write_text(f"{code}    def run(self, gm): return help()\ndef help(): return 23\n")
    assert module.P().uuid() == first
    assert importlib.reload(module).P().uuid() != first


HELD = {
    "a closure": lambda n: type("Held", (CosineToSine,), {"of": lambda self: n}),
    "a static method's": lambda n: type("Held", (CosineToSine,), {"of": staticmethod(lambda: n)}),
    "a property's": lambda n: type("Held", (CosineToSine,), {"of": property(lambda self: n)}),
    "a cached property's": lambda n: type(
        "Held", (CosineToSine,), {"of": functools.cached_property(lambda self: n)}
    ),
    "an attribute": lambda n: type("Held", (CosineToSine,), {"of": [n]}),
    "a base's": lambda n: type("Held", (type("Base", (CosineToSine,), {"of": n}),), {}),
    "an operator": lambda n: type("Held", (CosineToSine,), {"of": [aten.cos, aten.sin][n - 1]}),
}


@pytest.mark.parametrize("case", HELD)
def test_a_uuid_covers_what_the_class_holds(case: str) -> None:
    """A class made by a function has the same source each time."""
    first, again, other = (HELD[case](n)().uuid() for n in (1, 1, 2))
    assert first == again != other
    assert first


def test_a_class_that_holds_what_has_no_text_has_no_uuid() -> None:
    """Nothing could tell when it changes; a field of each instance's own is another matter."""
    assert type("Held", (CosineToSine,), {"of": object()})().uuid() is None
    fields = {"__annotations__": {"of": "object"}, "of": object()}
    cls = dataclass(frozen=True)(type("Held", (CosineToSine,), fields))
    assert cls().uuid() is None
    assert cls(1).uuid() == cls(1).uuid() != cls(2).uuid()


TYPED_PASS = """
from composer.passes import GraphPass
{beside}
class Typed(GraphPass):
    size = {size}
    @property
    def half(self): return {half}
    def run(self, gm): return [help(each) for each in (self.size, self.half)]
print(Typed().uuid())
"""
BESIDE = "def help(n): return {0}"


def test_a_uuid_covers_what_was_typed_beside_a_class(run_python) -> None:
    """Into a shell or a notebook: there is no file to have it all."""
    plain = {"beside": BESIDE.format(1), "size": 1, "half": 1}
    others = [{}, {}, {"beside": BESIDE.format(2)}, {"size": 2}, {"half": 2}]
    said = [run_python(TYPED_PASS.format(**{**plain, **other})).stdout for other in others]
    assert said[0] == said[1] != ""
    assert "None" not in said[0]
    assert len(set(said)) == 4


TYPED = """
from composer.passes.function import FunctionPass
from composer.passes.resolve import SharedPasses
scope = {}
exec("f = lambda graph: graph in {'a', 'b', 'c', 'd', 'e', 'f', 'g', 'h'}", scope)
print(SharedPasses((FunctionPass(scope["f"]),)).key)
"""


def test_a_key_is_the_same_whatever_order_sets_have(run_python, fresh_python) -> None:
    """A set of texts is among the constants of a function that has no source."""
    seeded = fresh_python(TYPED, env={"PYTHONHASHSEED": "2"})
    assert run_python(TYPED).stdout == seeded.stdout != ""


class Counted(GraphPass):
    """Its parameter is one of a constructor of its own."""

    def __init__(self, count=1):
        self.count = count

    def run(self, gm):
        return self.count


def test_a_uuid_covers_parameters_that_are_no_fields() -> None:
    """Whatever a constructor of its own kept."""
    assert Counted(2).uuid() == Counted(2).uuid() != Counted(3).uuid()


def test_a_table_gives_parameters_of_a_pass_that_is_no_dataclass() -> None:
    """By the names that its constructor has; others are the user's own mistake."""
    spelled = f"{__name__}:Counted"
    compiled(torch.sin, "eager", passes=[{"pass": spelled, "count": 5}])(torch.ones(2))
    assert last().passes[0].matches == 5
    torch.compiler.reset()
    with pytest.raises(Exception, match=r"unknown parameter 'coutn'; did you mean 'count'"):
        compiled(torch.sin, "eager", passes=[{"pass": spelled, "coutn": 5}])(torch.ones(2))


@pytest.mark.parametrize(("stage", "breaks"), [("aten", True), ("post_grad", False)])
def test_nodes_are_not_sorted_across_a_write(stage: str, breaks: bool) -> None:
    """Before autograd it makes a difference; functional graphs write nothing."""

    class Behind(GraphPass):
        def run(self, gm):
            node = cosines(gm)[0]
            (output,) = gm.graph.find_nodes(op="output")
            with gm.graph.inserting_before(output):
                late = gm.graph.call_function(aten.sin.default, node.args)
            node.replace_all_uses_with(late)

    def writes(x):
        y = torch.cos(x) * 2
        x.add_(1)
        return y

    result = compiled(writes, "aot_eager", passes=[at(stage, Behind)])(torch.zeros(2))
    assert ("moves across a write" in last().passes[0].error) is breaks
    torch.testing.assert_close(result, 2 * (torch.cos if breaks else torch.sin)(torch.zeros(2)))


def test_a_pass_of_another_package_is_found_by_its_entry_point(monkeypatch) -> None:
    """One whose module is broken is named, rather than its error raised bare."""
    found = [
        EntryPoint("theirs", "rewrites:CosineToSine", "composer.passes"),
        EntryPoint("broken", "no_such_module:Pass", "composer.passes"),
    ]
    monkeypatch.setattr(registry, "entry_points", lambda group: found)
    monkeypatch.setattr(resolve, "PASSES", OpenRegistry("pass", {}, group="composer.passes"))
    args = inputs()
    result = compiled(program, "aot_eager", passes=["theirs"])(*args)
    torch.testing.assert_close(result, rewritten(*args))
    with pytest.raises(Exception, match="pass 'broken' cannot be imported"):
        compiled(program, "aot_eager", passes=["broken"])(*args)


@pytest.mark.parametrize("second", ["b", "a"])
def test_buffers_that_are_registered_again_differ_only_where_they_are_others(second: str) -> None:
    """The order in which a module holds its buffers says nothing."""
    gm = torch.fx.GraphModule(torch.nn.Module(), torch.fx.Graph())
    gm.graph.output(())
    buffers = {name: torch.zeros(1) for name in "ab"}
    for name, buffer in buffers.items():
        gm.register_buffer(name, buffer)
    before = Snapshot.of(gm)
    del gm.a
    gm.register_buffer("a", buffers[second])
    assert before.differs(gm) == (second == "b")
