"""To see and to debug passes: dumps, the bisection, the check of the contract."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from common import compiled, last, thorough
from forked import Interpreter
from rewrites import MISTAKES, CosineToSine, Scale, at, aten, cosines, reroute

import composer
from composer.errors import BisectError, OptionError, PassCheckError, UnknownNameError
from composer.passes import FunctionPass, GraphPass, bisect, check

Runs = Callable[[Path], str]


@pytest.fixture
def dumps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COMPOSER_DUMP", str(tmp_path / "dumps"))
    return tmp_path / "dumps"


def files(dumps: Path) -> list[Path]:
    return sorted(each for each in dumps.glob("*/*") if each.is_file())


@pytest.fixture
def runs(interpreter: Interpreter) -> Runs:
    """What a dump prints, run as a script."""

    def run(path: Path) -> str:
        done = interpreter.run([str(path)])
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


class Keep(GraphPass):
    """Change nothing."""

    def run(self, gm):
        return 0


class ThirdToSine(GraphPass):
    """The sine for the third cosine; for all others the same cosine anew."""

    def run(self, gm):
        places = list(enumerate(self.chosen(cosines(gm))))
        for index, node in places:
            with gm.graph.inserting_after(node):
                target = aten.sin.default if index == 2 else aten.cos.default
                new = gm.graph.call_function(target, node.args)
            node.replace_all_uses_with(new)
        return len(places)


class Harmless(GraphPass):
    """Take every cosine, and leave it."""

    name = "third_to_sine"

    def run(self, gm):
        return len(list(self.chosen(cosines(gm))))


def five_cosines(x):
    for _ in range(5):
        x = torch.cos(x)
    return x


def test_dumps_are_named_by_order_graph_candidate_stage_and_pass(dumps: Path) -> None:
    """Before, after and the difference, for each pass that changed the graph."""
    passes = [Keep(), CosineToSine(), at("post_grad", Scale), at("joint", Keep)]
    compiled(lambda x: torch.cos(x) + torch.sin(x).cos(), "aot_eager", passes=passes)(torch.ones(3))
    stem = "0001-0_0-aten-cosine_to_sine"
    assert [path.name for path in files(dumps)] == [
        *(f"{stem}-1-before.py", f"{stem}-2-after.py", f"{stem}-3.diff"),
    ]
    assert [record.changed for record in last().passes] == [False, True, False, False]


@pytest.mark.parametrize("stage", ["torch", "joint", *thorough("aten", "post_grad")])
def test_dumps_run_by_themselves(dumps: Path, runs: Runs, stage: str) -> None:
    """At every stage, in training, with dynamic sizes; symbols have the first call's values."""
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    function = compiled(
        lambda x: torch.cos(net(x)).view(x.shape[0] * 2, -1)[1:],
        *("aot_eager",),
        passes=[at(stage)],
        dynamic=True,
    )
    function(torch.randn(6, 4)).sum().backward()
    before, after, difference = files(dumps)[-3:]
    assert ("-aot_eager-" in before.name) == (stage in ("joint", "post_grad"))
    assert "torch.float32 (11, 2)" in runs(before)
    assert "torch.float32 (11, 2)" in runs(after)
    assert '+        cos: "f32[s77, 4]" = torch.ops.aten.sin.default(' in difference.read_text()


def test_dumps_of_a_module_hold_shapes_and_no_weights(dumps: Path, runs: Runs) -> None:
    """Attributes, layers and nested graphs of a module that did not come from Dynamo."""
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh())
    net.scale = torch.nn.Parameter(torch.full((3,), 1234.5))

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, x):
            return torch.cos(self.net(x) * self.net.scale)

    backend = torch._dynamo.lookup_backend("composer")
    options = {"chain": ["eager"], "passes": [at("torch")]}
    backend(torch.fx.symbolic_trace(Net()), [torch.randn(2, 3)], options=options)
    before = files(dumps)[0]
    text = before.read_text()
    assert before.name.startswith("0001-direct-torch")
    assert "hold(self, 'net.0', torch.nn.Linear(in_features=3, out_features=3, bias=True))" in text
    assert "hold(self, 'net.scale', tensor((3,), (1,), torch.float32, 'cpu'))" in text
    assert "1234" not in text
    assert "output 0: torch.float32 (2, 3)" in runs(before)


def test_dumps_of_nested_graphs_run(dumps: Path) -> None:
    """The body of a checkpoint is a class of its own; nothing but torch has to be imported."""
    from torch.utils.checkpoint import checkpoint

    def program(x):
        return torch.cos(checkpoint(lambda a: torch.sin(a).relu(), x, use_reentrant=False))

    x = torch.randn(3, requires_grad=True)
    compiled(program, "aot_eager", passes=[at("torch")])(x)
    before = files(dumps)[0]
    assert "class Graph_wrap_body_0(torch.nn.Module):" in before.read_text()
    alone = subprocess.run([sys.executable, before], capture_output=True, text=True, check=True)
    assert "output 0: torch.float32 (3,)" in alone.stdout


def test_dumps_are_tables_on_request(dumps: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row a node, with its fake value."""
    monkeypatch.setenv("COMPOSER_DUMP_FORMAT", "tabular")
    compiled(torch.cos, "eager", passes=[CosineToSine()])(torch.ones(3))
    before, after, difference = files(dumps)
    assert (before.suffix, after.suffix) == (".txt", ".txt")
    row = r"^cos +call_function +aten.sin.default .* torch.float32 \[3\] on cpu, strides \(1,\)$"
    assert re.search(row, after.read_text(), re.MULTILINE)
    assert re.search(r"^\+cos +call_function +aten.sin", difference.read_text(), re.MULTILINE)


def test_dumps_of_two_processes_stand_side_by_side(dumps: Path, run_python) -> None:
    """Each process, and each rank, has a folder of its own."""
    code = (
        "import sys; sys.path.insert(0, 'tests/shared')\n"
        "import torch, composer; from rewrites import CosineToSine\n"
        "options = {'chain': ['eager'], 'passes': [CosineToSine()]}\n"
        "torch.compile(torch.cos, backend='composer', options=options)(torch.ones(3))\n"
    )
    for rank in ("0", "1"):
        assert run_python(code, env={"RANK": rank}).returncode == 0
    assert [path.name[:13] for path in sorted(dumps.iterdir())] == [
        "rank0-process",
        "rank1-process",
    ]
    assert len(files(dumps)) == 6


def test_a_folder_that_is_there_is_left_alone(dumps: Path) -> None:
    """Another run had the same process id, or another machine has it."""
    import os

    taken = dumps / f"process{os.getpid()}"
    taken.mkdir(parents=True)
    compiled(torch.cos, "eager", passes=[CosineToSine()])(torch.ones(3))
    assert list(taken.iterdir()) == []
    assert len(list((dumps / f"{taken.name}-2").glob("*.*"))) == 3


def test_a_dump_that_cannot_be_written_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And the call is answered."""
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("COMPOSER_DUMP", str(tmp_path / "file" / "folder"))
    with caplog.at_level(logging.WARNING, "composer"):
        for size in (2, 3):
            torch.compiler.reset()
            x = torch.randn(size)
            function = compiled(torch.cos, "eager", passes=[CosineToSine()])
            torch.testing.assert_close(function(x), torch.sin(x))
    (line,) = [each for each in caplog.messages if "COMPOSER_DUMP" in each]
    assert "NotADirectoryError" in line
    assert last().passes[0].error == ""


def test_an_unknown_dump_format_is_logged(
    dumps: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With those that are known."""
    monkeypatch.setenv("COMPOSER_DUMP_FORMAT", "dot")
    with caplog.at_level(logging.WARNING, "composer"):
        compiled(torch.cos, "eager", passes=[CosineToSine()])(torch.ones(3))
    assert "COMPOSER_DUMP_FORMAT is 'dot', not one of python, tabular" in caplog.text


@pytest.mark.parametrize("stage", ["torch", "aten", "joint", "post_grad"])
def test_bisect_finds_the_pass_and_the_match(stage: str) -> None:
    """Among passes of all stages, in the order in which they run."""
    passes = [at("post_grad", Keep), Keep(), at(stage, ThirdToSine), Scale(3.0), at("torch", Keep)]
    culprit = bisect(five_cosines, (torch.randn(3),), passes=passes)
    assert (culprit.name, culprit.stage) == ("third_to_sine", stage)
    assert (culprit.match, culprit.matches) == (2, 5)
    assert 0.01 < culprit.absolute < 1
    says = (
        f"pass 'third_to_sine' (stage {stage}) changes the numbers, from match 2 of 5 on: output 0"
    )
    assert str(culprit).startswith(says)


def test_bisect_leaves_no_history_in_a_buffer() -> None:
    """Autograd would follow it at the program's next backward."""

    class Sums(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)
            self.register_buffer("sums", torch.zeros(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.sums.add_(self.linear(x).tanh().sum(0))
            return x * self.sums

    model = Sums()
    assert bisect(model, (torch.randn(2, 4),), passes=["remove_no_ops"]) is None
    assert not model.sums.requires_grad


def test_bisect_wants_a_list() -> None:
    """A name alone is no list of names of one letter."""
    with pytest.raises(OptionError, match=r"passes is a list, such as \['remove_no_ops'\]"):
        bisect(five_cosines, (torch.randn(3),), passes="remove_no_ops")


def test_bisect_takes_no_graph_from_inductors_caches() -> None:
    """The uuid of a pass is the same, however many of its matches are let through."""
    options = {"chain": ["inductor"], "strict": True}
    passes = [at("post_grad", ThirdToSine)]
    culprit = bisect(five_cosines, (torch.randn(3),), passes=passes, options=options)
    assert (culprit.match, culprit.matches) == (2, 5)


def test_bisect_counts_the_matches_of_the_culprit_alone() -> None:
    """Not those of a pass of the same name before it."""
    culprit = bisect(five_cosines, (torch.randn(3),), passes=[Harmless(), ThirdToSine()])
    assert (culprit.name, culprit.match, culprit.matches) == ("third_to_sine", 2, 5)


def test_bisect_takes_a_tolerance() -> None:
    """In place of the one that torch.testing has for the dtype."""
    tolerance = {"atol": 100.0}
    args = (torch.randn(3),)
    assert bisect(five_cosines, args, passes=[ThirdToSine()], tolerance=tolerance) is None


def test_bisect_names_the_pass_alone_where_it_does_not_iterate_over_chosen() -> None:
    """The pass, and no match."""
    culprit = bisect(torch.cos, (torch.ones(3),), passes=[Keep(), CosineToSine()])
    assert (culprit.name, culprit.match, culprit.matches) == ("cosine_to_sine", None, None)


def test_bisect_compares_gradients() -> None:
    """Where an input requires grad; outputs and the rest agree here."""

    def doubles_the_sine(gm):
        for node in gm.graph.find_nodes(op="call_function", target=aten.sin.default):
            with gm.graph.inserting_after(node):
                twice = gm.graph.call_function(aten.mul.Tensor, (node, 2.0))
            reroute(node, twice)

    wrong = FunctionPass(doubles_the_sine, stage="joint", name="doubles")
    x = torch.randn(3, requires_grad=True)
    culprit = bisect(torch.cos, (x,), passes=[wrong])
    assert culprit.message.startswith("gradient of input 0")
    assert bisect(torch.cos, (x.detach(),), passes=[wrong]) is None
    assert x.grad is None


def test_bisect_disturbs_neither_inputs_nor_state_nor_random_numbers() -> None:
    """Programs that write to them are run from the same start every time."""
    net = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Dropout())
    counted = net[0].num_batches_tracked.clone()

    def writes(x):
        return torch.cos(x.add_(1))

    x, before = torch.ones(2, 3), torch.get_rng_state()
    assert bisect(net, (x,), passes=[Keep()]) is None
    assert bisect(writes, (x,), passes=[CosineToSine()]).message.startswith("output 0")
    assert torch.equal(x, torch.ones(2, 3))
    assert torch.equal(net[0].num_batches_tracked, counted)
    assert torch.equal(torch.get_rng_state(), before)


def test_bisect_takes_a_number_that_is_none_for_itself() -> None:
    """A function may return NaN beside its tensors."""
    nan = float("nan")
    assert bisect(lambda x: (torch.cos(x), nan), (torch.ones(2),), passes=[Keep()]) is None


def test_bisect_needs_a_function_that_agrees_with_itself() -> None:
    """In eager, and in the chain without any pass."""
    calls = iter(range(100))
    with pytest.raises(BisectError, match="two runs in eager do not agree: output 0"):
        bisect(lambda x: x + next(calls), (torch.ones(2),), passes=[Keep()])

    def liar(gm, example_inputs):
        return lambda *args: [each + 1 for each in gm.forward(*args)]

    with pytest.raises(BisectError, match="without any pass, under chain"):
        bisect(torch.cos, (torch.ones(2),), passes=[Keep()], options={"chain": [liar]})
    with pytest.raises(UnknownNameError):
        bisect(torch.cos, (torch.ones(2),), passes=["nobody_registered_this"])


def test_check_reports_matches_and_advice() -> None:
    """What is no error and could be better."""
    seen = check(Scale(3.0), torch.cos, (torch.randn(3),), changes_numbers=True)
    assert (seen.name, seen.stage) == ("scale", "post_grad")
    assert seen.matches >= 1
    assert "pass 'scale' (stage post_grad) breaks no rule" in str(seen)
    for advice in ("second run changes the graph", "no meta['val']", "self.chosen(...)"):
        assert advice in str(seen)


def test_check_has_advice_for_a_pass_that_was_typed() -> None:
    """Its uuid is made of bytecode."""
    scope = {"GraphPass": GraphPass}
    exec("class Typed(GraphPass):\n    def run(self, gm): return 0", scope)
    seen = check(scope["Typed"](), torch.cos, (torch.randn(3),))
    assert "its source is not found" in str(seen)


def test_check_has_no_advice_for_a_pass_without_fault() -> None:
    """Its own programs are enough for it."""

    class NoMultiplicationByOne(GraphPass):
        """Leave out what multiplies by one."""

        def run(self, gm):
            calls = gm.graph.find_nodes(op="call_function", target=aten.mul.Tensor)
            found = list(self.chosen(n for n in calls if n.args[1] == 1))
            for node in found:
                node.replace_all_uses_with(node.args[0])
                gm.graph.erase_node(node)
            return len(found)

    seen = check(NoMultiplicationByOne())
    assert seen.advice == ()
    assert seen.matches >= 2


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda cls: cls.name)
def test_check_names_the_rule_that_is_broken(mistake: type[GraphPass]) -> None:
    """By the error of the pipeline."""

    def two(x, w):
        return torch.cos(x @ w), x + w

    inputs = torch.randn(4, 4), torch.randn(4, 4)
    with pytest.raises(PassCheckError) as caught:
        check(mistake, two, inputs, changes_numbers=True)
    first = caught.value.exceptions[0]
    assert (first.name, first.rule) == (mistake.name, MISTAKES[mistake])
    assert f"broke the rule {MISTAKES[mistake]!r}" in str(caught.value)
    assert "on test_check_names" in str(caught.value)


def test_check_compares_with_eager_unless_told_not_to() -> None:
    """The rule is ``numbers``."""
    with pytest.raises(AssertionError, match="'numbers': output 0 is off by") as caught:
        check(CosineToSine(), torch.cos, (torch.randn(3),))
    assert isinstance(caught.value, ExceptionGroup)
    assert check(CosineToSine(), torch.cos, (torch.randn(3),), changes_numbers=True).matches


def test_check_sees_a_parameter_that_the_uuid_forgets() -> None:
    """Each field is changed in turn."""

    @dataclass(frozen=True)
    class Forgets(GraphPass):
        factor: float = 2.0
        steps: int = 1
        table: object = None

        def run(self, gm):
            return 0

        def uuid(self):
            return f"forgets {self.steps}"

    with pytest.raises(PassCheckError, match=r"it is the same for factor = 3\.0"):
        check(Forgets, torch.cos, (torch.ones(2),))


def test_check_sees_fields_without_a_dataclass() -> None:
    """They would be in no uuid."""

    class Plain(GraphPass):
        factor: float = 2.0

        def run(self, gm):
            return 0

    with pytest.raises(PassCheckError, match="annotates factor and is not decorated"):
        check(Plain(), torch.cos, (torch.ones(2),))


def test_check_takes_a_pass_with_a_constructor_of_its_own() -> None:
    """Its uuid covers what that keeps; an equal pass is a copy of it."""

    class ByHand(GraphPass):
        def __init__(self, factor):
            self.factor = factor

        def run(self, gm):
            return 0

    assert check(ByHand(2.0), torch.cos, (torch.ones(2),))


def test_check_sees_weights_that_a_pass_writes_to() -> None:
    """Those that the captured graph holds itself."""

    class Halves(GraphPass):
        stage = "torch"

        def run(self, gm):
            with torch.no_grad():
                for each in gm.parameters():
                    each.mul_(0.5)

    with pytest.raises(PassCheckError, match=r"'weights': 0\.weight is off by"):
        check(Halves(), torch.nn.Sequential(torch.nn.Linear(2, 2)), (torch.ones(1, 2),))


def test_check_advises_on_functions() -> None:
    """They have no uuid, and may match nothing."""
    seen = check(lambda gm: None, torch.cos, (torch.ones(2),))
    assert any("Inductor's caches are bypassed" in each for each in seen.advice)
    assert any("it changed no graph here" in each for each in seen.advice)


def test_the_tools_are_exported() -> None:
    """From the package; the modules' names are the functions'."""
    assert callable(composer.passes.bisect)
    assert callable(composer.passes.check)
