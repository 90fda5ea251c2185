"""What torch's own tests ask of custom passes, under every engine; Inductor's hooks and caches."""

from __future__ import annotations

import operator
from collections import defaultdict
from pathlib import Path

import pytest
import torch
import torch._inductor.config as inductor_config
from common import ROOT, compiled, last, needs_torch
from rewrites import CosineToSine, Raises, Scale, at, aten
from torch._dynamo.utils import counters
from torch._inductor.custom_graph_pass import (
    CustomGraphModulePass,
    CustomGraphPass,
    CustomPartitionerFn,
)
from torch._inductor.pattern_matcher import (
    Arg,
    CallFunction,
    PatternMatcherPass,
    register_graph_pattern,
)

from composer._torch.inductor import CustomInferenceAwareGraphPass
from composer.passes import FunctionPass, GraphPass

ENGINES = ("inductor", "onnxrt", "aot_eager")
engines = pytest.mark.parametrize("engine", ENGINES)


def to_sine(nodes) -> None:
    for node in nodes:
        if node.target is aten.cos.default:
            node.target = aten.sin.default


class OnGraph(CustomGraphPass):
    def __call__(self, graph):
        to_sine(graph.nodes)

    def uuid(self):
        return "cosine to sine, 1"


class OnModule(CustomGraphModulePass):
    def __call__(self, gm):
        to_sine(gm.graph.nodes)

    def uuid(self):
        return "cosine to sine in a module, 1"


class InInference(CustomInferenceAwareGraphPass):
    def __call__(self, graph, is_inference):
        if is_inference:
            to_sine(graph.nodes)

    def uuid(self):
        return "cosine to sine in inference, 1"


class WithoutUuid(OnGraph):
    def uuid(self):
        return None


class SavesEverything(CustomPartitionerFn):
    """Torch's plain partitioner, told from the default by what it saw."""

    def __init__(self):
        self.seen = []

    def __call__(self, gm, joint_inputs, **kwargs):
        from torch._functorch.partitioners import default_partition

        self.seen.append(gm)
        kwargs.pop("compiler", None)  # Inductor names itself
        return default_partition(gm, joint_inputs, **kwargs)

    def uuid(self):
        return "saves everything, 1"


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    counters.clear()
    with inductor_config.patch(fx_graph_cache=True, fx_graph_remote_cache=False):
        yield tmp_path


def program(x):
    return torch.cos(x) + 1


@engines
@pytest.mark.parametrize(
    "custom",
    [
        FunctionPass(OnGraph(), stage="joint"),
        FunctionPass(OnGraph(), stage="joint", runs_last=True),
        OnGraph(),
        FunctionPass(OnGraph(), runs_last=True),
        OnModule(),
        InInference(),
    ],
    ids=["joint-pre", "joint-post", "post-grad-pre", "post-grad-post", "module", "inference"],
)
def test_inductors_own_kinds_of_pass_run_everywhere(engine: str, custom) -> None:
    """A cosine becomes a sine, whichever slot the pass was written for."""
    x = torch.randn(8)
    result = compiled(program, engine, passes=[custom], on_pass_error="raise", strict=True)(x)
    torch.testing.assert_close(result, torch.sin(x) + 1)


@needs_torch("2.12", "Inductor has no such kind of pass")
@engines
def test_an_inference_aware_pass_is_told_of_training(engine: str) -> None:
    """Then this one leaves the graph alone."""
    x = torch.randn(8, requires_grad=True)
    result = compiled(program, engine, passes=[InInference()], strict=True)(x)
    torch.testing.assert_close(result, torch.cos(x) + 1)


@engines
@pytest.mark.parametrize("stage", ["joint", "post_grad"])
def test_a_pattern_matcher_pass_of_inductors_runs_everywhere(engine: str, stage: str) -> None:
    """Convolution and ReLU become a call of the fused operator of oneDNN."""
    patterns = PatternMatcherPass()
    convolution = CallFunction(aten.convolution.default, *[Arg() for _ in range(9)], _users=1)

    @register_graph_pattern(CallFunction(aten.relu.default, convolution), pass_dict=patterns)
    def fuse(match, *args):
        x, w, bias, stride, padding, dilation, _, _, groups = args
        with match.graph.inserting_before(match.output_node()):
            fused = match.graph.call_function(
                torch.ops.mkldnn._convolution_pointwise.default,
                (x, w, bias, padding, stride, dilation, groups, "relu", [], ""),
            )
            fused.meta.update(match.output_node().meta)
            match.output_node().replace_all_uses_with(fused)
            match.erase_nodes()

    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU()).eval()
    x = torch.randn(1, 3, 8, 8)
    passes = [FunctionPass(patterns, stage=stage)]
    with torch.no_grad():
        options = {"passes": passes, "on_pass_error": "raise", "min_coverage": 0.0}
        result = compiled(model, engine, **options)(x)
        torch.testing.assert_close(result, model(x), rtol=1e-4, atol=1e-4)
    assert (last().passes[0].matches, last().passes[0].changed) == (1, True)


def merge_products(graph: torch.fx.Graph) -> None:
    """One product for all that share their right-hand side: mm(cat(xs), w).split()."""
    by_weight = defaultdict(list)
    for node in graph.find_nodes(op="call_function", target=torch.mm):
        by_weight[node.args[1]].append(node)
    for weight, products in by_weight.items():
        rows = [node.args[0] for node in products]
        with graph.inserting_before(products[0]):
            stacked = graph.call_function(torch.cat, (rows, 0))
            product = graph.call_function(torch.mm, (stacked, weight))
            sizes = [row.meta["example_value"].shape[0] for row in rows]
            parts = graph.call_function(torch.split, (product, sizes))
        for index, node in enumerate(products):
            node.target, node.args = operator.getitem, (parts, index)


@engines
def test_products_of_a_list_are_merged_in_the_captured_graph(engine: str) -> None:
    """The pass sees torch.mm, as the function that takes a list wrote it."""

    def multiply(rows, w):
        return [torch.mm(row, w) for row in rows]

    rows, w = [torch.randn(n, 4) for n in (2, 3, 5)], torch.randn(4, 6)
    merged = FunctionPass(merge_products, stage="torch")
    result = compiled(multiply, engine, passes=[merged], on_pass_error="raise")(rows, w)
    torch.testing.assert_close(result, multiply(rows, w))
    assert last().passes[0].changed


@engines
def test_a_partitioner_is_called_with_the_joint_graph(engine: str, own_cache) -> None:
    """In the same list as the passes; gradients are right."""
    partitioner = SavesEverything()
    x = torch.randn(8, requires_grad=True)
    compiled(program, engine, passes=[partitioner], strict=True)(x).sum().backward()
    torch.testing.assert_close(x.grad, -torch.sin(x.detach()))
    (joint,) = partitioner.seen
    names = [node.name for node in joint.graph.find_nodes(op="placeholder")]
    assert [name.rstrip("_0123456789") for name in names] == ["primals", "tangents"]
    assert (last().passes[0].stage, last().passes[0].changed) == ("partitioner", True)


@engines
def test_a_failing_partitioner_gives_way_to_the_usual_one(engine: str, own_cache) -> None:
    """Recorded, like a failing pass."""

    class Fails(SavesEverything):
        def __call__(self, gm, joint_inputs, **kwargs):
            gm.graph.erase_node(next(iter(gm.graph.find_nodes(op="output"))))
            raise ValueError("no cut")

    x = torch.randn(8, requires_grad=True)
    compiled(program, engine, passes=[Fails()], strict=True)(x).sum().backward()
    torch.testing.assert_close(x.grad, -torch.sin(x.detach()))
    assert "no cut" in last().passes[0].error


def test_a_partitioner_of_inductors_config_is_not_replaced() -> None:
    """Inductor declines: there is one cut, and two who want to make it."""
    x = torch.randn(8, requires_grad=True)
    with inductor_config.patch(custom_partitioner_fn=SavesEverything()):
        compiled(program, "inductor", passes=[SavesEverything()])(x)
    assert (last().attempts[0].status, last().attempts[0].reason) == ("declined", "policy")


def test_the_users_own_hooks_keep_running_and_stay() -> None:
    """Ours are added behind them, and are gone after the compile."""
    order = []

    def users(graph):
        order.append("user")

    def ours(gm):
        order.append("ours")

    x = torch.randn(8)
    with inductor_config.patch(post_grad_custom_pre_pass=users):
        compiled(program, "inductor", passes=[FunctionPass(ours, stage="post_grad")])(x)
        assert inductor_config.post_grad_custom_pre_pass is users
    assert order == ["user", "ours"]


def test_hooks_among_the_candidates_options_keep_running() -> None:
    """As in Inductor's config."""
    options = {"post_grad_custom_pre_pass": OnGraph()}
    chain = {"backend": "inductor", "options": options}
    x = torch.randn(8)
    result = compiled(program, chain, passes=[at("post_grad", Scale)], strict=True)(x)
    torch.testing.assert_close(result, torch.sin(x) + 1)
    assert last().passes[0].matches == 0


def cache_counts() -> dict[str, int]:
    names = ("fxgraph_cache_hit", "fxgraph_cache_miss", "fxgraph_cache_bypass")
    return {name.removeprefix("fxgraph_cache_"): counters["inductor"][name] for name in names}


@pytest.mark.parametrize("custom", [WithoutUuid(), lambda graph: to_sine(graph.nodes)])
def test_a_pass_without_uuid_bypasses_inductors_cache(own_cache, custom) -> None:
    """Nothing could tell when it changes."""
    custom = FunctionPass(custom, stage="post_grad")
    compiled(program, "inductor", passes=[custom], strict=True)(torch.randn(8))
    assert cache_counts() == {"hit": 0, "miss": 0, "bypass": 1}


def scaled(factor: float) -> str:
    """Whether Inductor had the graph in its cache."""
    x = torch.ones(8)
    torch.compiler.reset()
    counters.clear()
    result = compiled(program, "inductor", passes=[Scale(factor)], strict=True)(x)
    torch.testing.assert_close(result, factor * torch.cos(x) + 1)
    (record,) = last().passes
    assert (record.changed, record.matches, record.error) == (True, 1, ""), record
    seen = counters["aot_autograd"]["autograd_cache_hit"], cache_counts()["hit"]
    return "hit" if any(seen) else "miss"


class ScaleByHand(GraphPass):
    """As ``Scale``, but no dataclass: its parameter is kept by a constructor of its own."""

    stage = "post_grad"

    def __init__(self, factor):
        self.factor = factor

    def run(self, gm):
        return Scale(self.factor).run(gm)


def test_inductors_cache_knows_parameters_that_are_no_fields(own_cache) -> None:
    """Two passes of one class that differ in what their constructor kept are two passes."""
    x, keys = torch.ones(8), set()
    for factor in (2.0, 3.0):
        torch.compiler.reset()
        result = compiled(program, "inductor", passes=[ScaleByHand(factor)], strict=True)(x)
        torch.testing.assert_close(result, factor * torch.cos(x) + 1)
        keys.add(last().graph_key)
    assert len(keys) == 2


def made_with(factor: float) -> GraphPass:
    """Of a class that is another one each time, with the same source."""

    class Made(GraphPass):
        stage = "post_grad"

        def run(self, gm):
            return Scale(factor).run(gm)

    return Made()


class ScaleOfItsClass(GraphPass):
    """Its parameter is an attribute of the class, which the program may change."""

    stage = "post_grad"
    factor = 1.0

    def run(self, gm):
        return Scale(self.factor).run(gm)


def set_to(factor: float) -> GraphPass:
    ScaleOfItsClass.factor = factor
    return ScaleOfItsClass()


@pytest.mark.parametrize("make", [made_with, set_to])
def test_inductors_cache_knows_what_a_class_holds(make, own_cache) -> None:
    """What its functions close over, and the values of its attributes."""
    x = torch.ones(8)
    for factor in (2.0, 3.0):
        torch.compiler.reset()
        result = compiled(program, "inductor", passes=[make(factor)], strict=True)(x)
        torch.testing.assert_close(result, factor * torch.cos(x) + 1)


def test_inductors_cache_knows_a_passs_parameters(run_python, own_cache) -> None:
    """Another process hits with the same parameter; another parameter misses."""
    code = "import sys; sys.path[:0] = sys.argv[1:]; import test_inductor_passes as tests\n"
    folders = [str(Path(__file__).parent), str(ROOT / "tests" / "shared")]
    found = []
    for factors in ("0.3", "0.3, 0.7"):
        done = run_python(f"{code}print(*map(tests.scaled, [{factors}]))", *folders)
        assert done.returncode == 0, done.stderr
        found.append(done.stdout.split())
    assert found == [["miss"], ["hit", "miss"]]


def test_a_cached_graph_has_its_passes_in_the_record(own_cache) -> None:
    """They did not run this time, and are in the graph all the same."""
    for _ in range(2):
        torch.compiler.reset()
        compiled(program, "inductor", passes=[at("joint")], strict=True)(torch.ones(8))
        (record,) = last().passes
        assert (record.name, record.stage, record.matches) == ("cosine_to_sine", "joint", 1)
    assert "cache" in last().attempts[0].engine["passes"]


def test_a_cached_graph_has_its_partitioner_in_the_record(own_cache) -> None:
    """By itself in the list, too; where there is nothing to cut, nothing is said of the cache."""
    x = torch.ones(8, requires_grad=True)
    for _ in range(2):
        torch.compiler.reset()
        compiled(program, "inductor", passes=[SavesEverything()], strict=True)(x)
        (record,) = last().passes
        assert (record.stage, record.changed) == ("partitioner", True)
    assert "cache" in last().attempts[0].engine["passes"]
    with torch.no_grad():
        compiled(program, "inductor", passes=[SavesEverything()], strict=True)(x)
    assert (last().passes, "passes" in last().attempts[0].engine) == ((), False)


@pytest.mark.parametrize("stage", ["joint", "post_grad"])
def test_a_pass_that_failed_raises_although_the_graph_is_cached(stage: str, own_cache) -> None:
    """Inductor's cache holds the graph without it, for those who want it skipped only."""
    passes = [at(stage, Raises)]
    compiled(program, "inductor", passes=passes)(torch.ones(8))
    torch.compiler.reset()
    with pytest.raises(Exception, match="broke the rule 'raises'"):
        compiled(program, "inductor", passes=passes, on_pass_error="raise")(torch.ones(8))


def test_without_passes_nobody_pays_for_an_aot_step() -> None:
    """A backend is given the captured graph, as if composer had no passes."""
    seen = []

    def keeps(gm, example_inputs):
        seen.append([str(node.target) for node in gm.graph.nodes if node.op == "call_function"])
        return lambda *args: gm.forward(*args)[:]

    compiled(torch.nn.functional.silu, keeps)(torch.ones(2))
    torch.compiler.reset()
    compiled(torch.nn.functional.silu, keeps, passes=[at("joint", CosineToSine)])(torch.ones(2))
    captured, functional = seen
    assert all("aten" not in target for target in captured)
    assert all("aten" in target for target in functional)
