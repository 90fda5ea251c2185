"""The smallest program that shows a fault is found, kept at each step, and shown."""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import selective
import torch
from common import ROOT
from facts import FACTS
from typer.testing import CliRunner

from composer.chain import repro as folders
from composer.cli import app
from composer.errors import ReproError
from composer.graphs import check
from composer.graphs.case import Case
from composer.testing import Fault
from composer.tools import minify as minifier
from composer.tools import trial
from composer.tools.minify import programs, search
from composer.tools.minify.programs import Program

F = torch.nn.functional
GRAPH_FAULTS = ("raises", "out_of_memory", "exits", "returns_none", "mutates_graph")
GRAPH_FAULTS += ("nan", "wrong_value", "wrong_shape", "wrong_dtype")


def program(x: torch.Tensor, y: torch.Tensor) -> Any:
    """Nine operators; those at fault are in the middle."""
    product = torch.relu(x @ y)
    middle = F.gelu(product + 1)
    waves = middle.sin()
    return middle.sum(-1) * 2, waves.cos(), x.exp()


def captured(function: Callable[..., Any], *inputs: Any) -> Program:
    """Return a program as Dynamo captures it."""
    found = []

    def backend(gm: torch.fx.GraphModule, given: list[Any]) -> Any:
        found.append(Program.of(gm, [*given]))
        return gm.forward

    torch.compile(function, backend=backend, fullgraph=True, dynamic=False)(*inputs)
    return found[0]


def names(found: Program) -> list[str]:
    """Return the names of a program's operators."""
    return [getattr(node.target, "__name__", str(node.target)) for node in found.calls]


def outcome(engine: selective.Engine, gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> str:
    """Return how an engine differs from eager mode."""
    expected = gm(*inputs)
    try:
        got = engine(Program.of(gm, ()).gm, [*inputs])(*inputs)
        torch.testing.assert_close([*got], [*expected])
    except AssertionError as error:
        return "NaN" if any(each.isnan().any() for each in got) else str(error).split()[0]
    except BaseException as error:  # noqa: BLE001  # an engine may exit as well
        return type(error).__name__
    return ""


@pytest.mark.parametrize("fault", GRAPH_FAULTS)
@torch.no_grad()
def test_a_fault_of_two_operators_is_found(fault: str) -> None:
    """Of nine operators those two are left, on inputs of one element."""
    engine = selective.engine_with(Fault(fault))
    whole = captured(program, torch.randn(4, 6), torch.randn(6, 8))
    kind = outcome(engine, whole.gm, whole.inputs)

    def shows(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> bool:
        return outcome(engine, gm, inputs) == kind

    assert kind
    found = minifier.smallest(whole.gm, whole.inputs, shows)
    assert names(found.program) == ["gelu", "sum"]
    assert [each.numel() for each in found.program.inputs] == [1]
    assert (found.is_complete, len(whole.calls)) == (True, 9)


class Off(torch.fx.Interpreter):
    """Runs a graph, but gelu is off by one percent."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().call_function(target, args, kwargs)
        return value * 1.01 if "gelu" in str(target) else value


def is_off(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> bool:
    pairs = zip(gm(*inputs), Off(gm).run(*inputs), strict=True)
    return not all(torch.allclose(*pair) for pair in pairs)


@torch.no_grad()
def test_the_first_operator_that_is_wrong_is_found() -> None:
    """Behind others that are right, and before others that only read a wrong number."""
    whole = captured(program, torch.randn(4, 6), torch.randn(6, 8))
    found = search.first_wrong(whole, is_off)
    assert found is not None
    assert "gelu" in str(found.target)
    assert search.first_wrong(captured(torch.sin, torch.ones(3)), is_off) is None


@pytest.mark.slow
@torch.no_grad()
def test_one_wrong_operator_of_bert_is_found() -> None:
    """Of two layers with weights."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 128}
    net = transformers.BertModel(transformers.BertConfig(num_hidden_layers=2, **sizes)).eval()
    whole = captured(net, torch.randint(100, (2, 16)))
    found = minifier.smallest(whole.gm, whole.inputs, is_off)
    assert names(found.program) == ["gelu"]
    assert found.tries < 50


@torch.no_grad()
def test_programs_that_fail_in_eager_are_not_tried() -> None:
    """So each that is tried runs; a graph that fails from the start is an error."""
    whole = captured(lambda x: F.layer_norm(x.view(2, 12), (12,)).sin(), torch.randn(4, 6))
    tried = []

    def shows(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> bool:
        gm(*inputs)
        tried.append(names(Program(gm, inputs)))
        return "layer_norm" in tried[-1]

    found = minifier.smallest(whole.gm, whole.inputs, shows)
    assert names(found.program) == ["layer_norm"]
    assert found.program.inputs[0].shape == (1, 1)
    assert found.tries == len(tried)
    with pytest.raises(ReproError, match="does not show the fault"):
        minifier.smallest(whole.gm, whole.inputs, lambda gm, inputs: False)
    with pytest.raises(ReproError, match="fails in eager mode: RuntimeError"):
        minifier.smallest(whole.gm, [torch.randn(5, 5)], shows)


def test_weights_become_smaller_with_what_they_multiply() -> None:
    """And stay parameters, with gradients."""
    layer = torch.nn.Linear(48, 32)
    whole = captured(lambda x: layer(x).relu(), torch.randn(8, 48, requires_grad=True))

    def shows(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> bool:
        return "linear" in names(Program(gm, inputs)) and max(inputs[0].shape) >= 8

    found = minifier.smallest(whole.gm, whole.inputs, shows).program
    weights = [each for each in found.inputs if isinstance(each, torch.nn.Parameter)]
    assert {each.shape for each in weights} == {(1, 12), (1,)} or len(weights) == 2
    assert all(each.requires_grad for each in found.inputs)
    assert sum(each.numel() for each in found.inputs) < 8 * 48


@torch.no_grad()
def test_values_that_no_input_can_have_are_inputs_of_their_parts() -> None:
    """The results of split are inputs one by one, and a size is a number in the graph."""

    def function(x: torch.Tensor) -> Any:
        first, second = x.sin().split(2)
        return (first.reshape(second.shape[0] * 3) + 1,)

    whole = captured(function, torch.randn(4, 3))
    last = len(whole.calls)
    assert names(whole)[-1] == "add"
    assert names(programs.without_calls(whole, 0, last - 1)) == ["add"]
    is_split = [each == "split" for each in names(whole)].index(True)
    without = programs.without_calls(whole, 0, is_split + 1)
    assert "getitem" in names(without)
    torch.testing.assert_close(without.gm(*without.inputs), whole.gm(*whole.inputs))
    with pytest.raises(programs.Uncuttable, match="nothing is left"):
        programs.without_calls(whole, 0, last)


@torch.no_grad()
def test_modes_are_turned_on_and_off_together() -> None:
    """A part of a graph leaves the modes of this process as they were."""

    def function(x: torch.Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            product = x @ x
        with torch.enable_grad():
            return (product.sin(),)

    whole = captured(function, torch.randn(4, 4))
    for at in range(len(whole.calls)):
        left = programs.without_calls(whole, at, at + 1)
        left.values()
        targets = " ".join(names(left))
        assert ("_enter_autocast" in targets) == ("_exit_autocast" in targets)
        assert not torch.is_autocast_enabled("cpu")
        assert not torch.is_grad_enabled()


@torch.no_grad()
def test_calls_that_write_run_on_values_from_before() -> None:
    """The input that stands for a call has the value that it returned."""

    def function(x: torch.Tensor) -> Any:
        wave = x.sin()
        twice = wave * 2
        return (wave.add_(1), twice)

    whole = captured(function, torch.ones(3))
    before = [each.clone() for each in whole.inputs]
    without = programs.without_calls(whole, 0, 1)
    torch.testing.assert_close(without.inputs[-1], torch.ones(3).sin())
    torch.testing.assert_close(whole.inputs, before)


# Folders. The child processes are replaced, but for the last tests.


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return written(tmp_path / "case", "selective:wrong_value")


def written(folder: Path, engine: str, **facts: Any) -> Path:
    inputs = [torch.randn(4, 6), torch.randn(6, 8)]
    case = Case.of(torch.fx.symbolic_trace(program), inputs, (), {**FACTS, **facts})
    folders.write(case, folder, {"backend": engine, "options": {}})
    return folder


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Folders that were tried; one with gelu and sum shows a fault."""
    asked = []

    def tried(folder: Path, seconds: float, *, factor: float | None) -> trial.Trial:
        asked.append(folder)
        text = (folder / "graph.py").read_text()
        shows = "gelu(" in text and ".sum(" in text
        return trial.Trial({"crash": "it ended"} if shows else {})

    monkeypatch.setattr(minifier, "tried", tried)
    return asked


def test_a_search_goes_on_where_it_ended(source: Path, tmp_path: Path, asked: list[Path]) -> None:
    """After Ctrl-C, after the time limit, and not after its end."""

    def interrupt(line: str) -> None:
        if "operators" in line:
            raise KeyboardInterrupt

    folder = tmp_path / "made"
    with pytest.raises(KeyboardInterrupt):
        minifier.minify(source, folder, said=interrupt)
    assert [each.name for each in folder.iterdir()] == ["step-1"]
    some = minifier.minify(source, folder, seconds=0)
    assert (some.is_minimal, some.folder) == (False, folder / "step-1")
    assert folder / "step-1" in asked
    lines: list[str] = []
    found = minifier.minify(source, folder, said=lines.append)
    assert (found.is_minimal, found.fault, found.what) == (True, "crash", "it ended")
    assert found.calls == 2
    assert [each.name for each in folder.iterdir()] == [found.folder.name]
    assert lines[0] == "crash: it ended"
    assert lines[1].split(";")[0].endswith("inputs")
    asked.clear()
    assert minifier.minify(source, folder) == found
    assert asked == [found.folder]


def test_a_search_does_not_go_on_for_another_graph(
    source: Path, tmp_path: Path, asked: list[Path]
) -> None:
    """Its folder has the programs of the one before."""
    minifier.minify(source, tmp_path / "made", seconds=60.0)
    other = tmp_path / "other"
    inputs = [torch.randn(2, 6), torch.randn(6, 8)]
    case = Case.of(torch.fx.symbolic_trace(program), inputs, (), FACTS)
    folders.write(case, other, {"backend": "selective:wrong_value", "options": {}})
    with pytest.raises(ReproError, match="has the search for another graph"):
        minifier.minify(other, tmp_path / "made", seconds=60.0)


@pytest.mark.parametrize("name", ["bug-2", "bug", "step-2-of-mine"])
def test_the_source_stays_beside_the_steps(tmp_path: Path, asked: list[Path], name: str) -> None:
    """Also where the results go into the folder that it lies in."""
    begin = written(tmp_path / name, "selective:wrong_value")
    found = minifier.minify(begin, tmp_path)
    assert {each.name for each in tmp_path.iterdir()} == {name, found.folder.name}


def test_a_smallest_program_has_no_file_of_values(source: Path, asked: list[Path]) -> None:
    """If it shows the fault with those that it draws."""
    found = minifier.minify(source, source.with_name("made"))
    assert sorted(each.name for each in found.folder.iterdir()) == [
        *("about.json", "check.py", "comparison.py", "graph.py", "policy.toml", "run.py")
    ]
    assert found.program.startswith("class Graph(")
    assert "gelu_1.sum(-1)" in found.program
    assert "def main" not in found.program


def test_the_graph_of_a_folder_with_a_model_is_taken(source: Path, asked: list[Path]) -> None:
    """Since the model is that of a part, and does not change with the graph."""
    outer = source.with_name("outer")
    outer.mkdir()
    with pytest.raises(ReproError, match=r"has no run\.py"):
        minifier.minify(outer, source.with_name("made"))
    source.rename(outer / "whole-graph")
    assert minifier.minify(outer, source.with_name("made")).calls == 2
    assert asked[0] == outer / "whole-graph"


def test_the_command_tells_what_it_found(source: Path, asked: list[Path]) -> None:
    """The program, the fault and the folder; faults of the command have their exit statuses."""
    runner = CliRunner()
    done = runner.invoke(app, ["minify", str(source), "--seconds", "0"])
    assert (done.exit_code, "the time was up" in done.stdout) == (0, True)
    done = runner.invoke(app, ["minify", str(source)])
    assert (done.exit_code, "class Graph" in done.stdout) == (0, True)
    assert "crash: it ended" in done.stdout
    assert "2 operators, 1 inputs" in done.stderr
    told = json.loads(runner.invoke(app, ["minify", "--json", str(source)]).stdout)
    assert (told["calls"], told["fault"], told["is_minimal"]) == (2, "crash", True)
    assert runner.invoke(app, ["minify", str(source / "nowhere")]).exit_code == 2
    other = written(source.with_name("other"), "eager")
    text = (other / "graph.py").read_text()
    (other / "graph.py").write_text(text.replace("gelu", "relu"))
    done = runner.invoke(app, ["minify", str(other)])
    assert (done.exit_code, "does not show a fault" in done.stderr) == (1, True)


def test_ctrl_c_ends_the_command(
    source: Path, asked: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says how to go on."""

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(minifier, "tried", interrupt)
    done = CliRunner().invoke(app, ["minify", str(source)])
    assert (done.exit_code, "goes on from" in done.stderr) == (130, True)


def judged(
    folder: Path, monkeypatch: pytest.MonkeyPatch, factor: float | None = None
) -> dict[str, Any]:
    """Run what a child runs, in this process."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("check", "graph"):
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.delitem(sys.modules, name)
    request = {"folder": str(folder), "factor": factor, "timed": False}
    found = trial.judged(json.dumps(request).encode(), lambda *_: None)
    sys.modules.pop("graph")
    return dict(trial.Trial(**found).faults)


KINDS = {
    "raises": "raises RuntimeError",
    "exits": "raises SystemExit",
    "nan": trial.NON_FINITE,
    "wrong_value": trial.NUMBERS,
    "wrong_shape": trial.STRUCTURE,
    "wrong_dtype": trial.STRUCTURE,
    "mutates_inputs": trial.NUMBERS,
}


@pytest.mark.parametrize("fault", KINDS)
def test_the_kind_of_a_fault_is_told(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the exception, or by how the engine's values differ from eager's."""
    folder = written(tmp_path / "case", f"selective:{fault}")
    assert next(iter(judged(folder, monkeypatch))) == KINDS[fault]


def test_both_values_are_told(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the engine and of eager mode, where they differ most."""
    (what,) = judged(source, monkeypatch).values()
    assert "; element [" in what
    assert what.count("eager's is") == 1


def test_an_engine_that_is_slower_is_at_fault_by_a_factor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only if the user gives one. A clock of the test's own goes on in the engine alone."""
    clock = itertools.count(0.0, 1e-3)
    monkeypatch.setattr(trial.time, "perf_counter", lambda: next(clock))
    folder = written(tmp_path / "case", "aot_eager")
    assert judged(folder, monkeypatch) == {}
    assert judged(folder, monkeypatch, factor=2.0) == {}
    (what,) = judged(folder, monkeypatch, factor=0.5).items()
    assert what == (trial.SLOWER, "a call takes 1 times as long as eager's")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "kind", "timeout"),
    [
        ("os_exits", trial.CRASH, 60.0),
        ("hangs", trial.HANG, 3.0),
        ("wrong_value", trial.NUMBERS, 60.0),
    ],
)
def test_a_fault_in_a_child_process_is_minified(
    fault: str, kind: str, timeout: float, tmp_path: Path
) -> None:
    """What is left shows the fault in a fresh process, in which there is no composer."""
    folder = written(tmp_path / "case", f"selective:{fault}")
    found = minifier.minify(folder, tmp_path / "made", seconds=math.inf, timeout=timeout)
    assert (found.fault, found.calls, found.is_minimal) == (kind, 2, True)
    assert ("sum: output 0 is off" in found.first_wrong) == (kind == trial.NUMBERS)
    text = (found.folder / "run.py").read_text()
    assert "composer" not in text
    if kind == trial.NUMBERS:
        environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'tests' / 'shared'}{os.pathsep}{ROOT}"}
        command = [sys.executable, str(found.folder / "run.py")]
        done = subprocess.run(command, check=False, env=environment)
        assert done.returncode == check.WRONG
