"""What goes wrong becomes a folder that shows it, without composer and without the user's data."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import faulty
import pytest
import torch
from common import ROOT, compiled, last
from facts import FACTS
from forked import Interpreter
from typer.testing import CliRunner

import composer
from composer.chain import repro as folders
from composer.cli import app
from composer.errors import ReproError
from composer.graphs import capture, check
from composer.graphs.case import Case
from composer.records import Reason, Status
from composer.tools import regions
from composer.tools.repro import run

pytestmark = pytest.mark.filterwarnings("ignore::composer.errors.FallbackWarning")

Runs = Callable[..., int]

SHARED = ROOT / "tests" / "shared"
AT_COMPILE = ("raises", "out_of_memory", "mutates_graph", "returns_none")
AT_CALLS = ("nan", "wrong_value", "wrong_shape", "wrong_dtype")


@pytest.fixture
def runs(interpreter: Interpreter, tmp_path: Path) -> Runs:
    """Run ``run.py`` of a folder in a process of its own; return its exit status."""
    (tmp_path / "without" / "composer").mkdir(parents=True)
    blocked = tmp_path / "without" / "composer" / "__init__.py"
    blocked.write_text("raise ImportError('composer is not here')")

    def run(folder: Path, *, alone: bool = False, child: bool = True) -> int:
        """Run it: ``alone`` where composer cannot be imported, ``child`` without another child."""
        path = tmp_path / "without" if alone else f"{SHARED}{os.pathsep}{ROOT}"
        environment = {**os.environ, "PYTHONPATH": str(path)}
        more = ["--in-child", str(tmp_path)] if child else []
        command = [str(folder / "run.py"), *more]
        if not alone:
            return interpreter.run(command, environment).returncode
        done = subprocess.run([sys.executable, *command], check=False, env=environment)
        return done.returncode

    return run


def case_of(program: Any, *inputs: Any) -> Case:
    return Case.of(torch.fx.symbolic_trace(program), inputs, (), FACTS)


def double(x: torch.Tensor) -> tuple[torch.Tensor]:
    return (x.sin() * 2,)


@pytest.mark.parametrize("fault", [*AT_COMPILE, *AT_CALLS])
def test_a_fault_shows_in_its_folder(fault: str, tmp_path: Path, runs: Runs) -> None:
    """In another process than the one that met it."""
    options = {"verify": "compile", "repro": str(tmp_path / "repro")}
    with torch.no_grad():
        compiled(lambda x: x.sin() * 2, f"faulty:{fault}", **options)(torch.ones(2, 3))
    folder = Path(last().attempts[0].engine["repro"])
    assert folder.parent == tmp_path / "repro"
    assert runs(folder) == check.WRONG
    assert "composer" not in (folder / "run.py").read_text()


def test_a_policy_file_beside_a_folder_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: Runs
) -> None:
    """An engine that only composer can call, where the file says what would hide it."""
    folder = tmp_path / "folder"
    monkeypatch.chdir(tmp_path)
    table = 'locked = true\nselect = { by = "fastest", background = true }\nverify = "compile"'
    Path("composer.toml").write_text(f"version = 1\n[defaults]\n{table}\n")
    folders.write(case_of(double, torch.ones(3)), folder, {"backend": "onnxrt", "options": {}})
    assert "composer" in (folder / "run.py").read_text()
    assert runs(folder) == check.RIGHT


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["exits", "os_exits", "segfaults", "hangs"])
def test_what_ends_or_holds_the_process_shows(fault: str, tmp_path: Path, runs: Runs) -> None:
    """Since the engine runs in a child process, which has a time limit."""
    folder = tmp_path / "folder"
    candidate = {"backend": f"faulty:{fault}", "options": {}, "timeout": 1.0}
    if fault != "hangs":
        candidate["timeout"] = 300.0
    folders.write(case_of(double, torch.ones(3)), folder, candidate)
    assert runs(folder, child=False) == check.WRONG


def test_no_fault_shows_where_there_is_none(tmp_path: Path, runs: Runs) -> None:
    """A Dynamo backend by its name."""
    folder = tmp_path / "folder"
    folders.write(case_of(double, torch.ones(3)), folder, {"backend": "aot_eager", "options": {}})
    assert runs(folder) == check.RIGHT


def test_nothing_is_said_of_an_engine_that_is_not_there(tmp_path: Path, runs: Runs) -> None:
    """Python's own exit status after an error is no sign of the fault."""
    folder = tmp_path / "folder"
    folders.write(case_of(double, torch.ones(3)), folder, {"backend": "aot_eager", "options": {}})
    text = (folder / "run.py").read_text()
    (folder / "run.py").write_text(
        text.replace("    return torch", "    import nowhere\n    return torch")
    )
    assert runs(folder) == check.UNKNOWN
    (folder / "run.py").write_text("import nowhere")
    code, _ = run(folder, {})
    assert code not in (check.RIGHT, check.WRONG, check.UNKNOWN)


def test_nothing_is_said_where_other_random_numbers_are_drawn(tmp_path: Path, runs: Runs) -> None:
    """The engine here is twice what eager draws."""
    folder = tmp_path / "folder"
    case = case_of(lambda x: (x + torch.rand_like(x),), torch.ones(3))
    folders.write(case, folder, {"backend": "faulty:wrong_value", "options": {}})
    assert runs(folder) == check.UNKNOWN


def test_policies_tell_words_and_no_names(tmp_path: Path, runs: Runs) -> None:
    """Neither the model that a candidate is for, nor texts that may be a file or a person."""
    path = tmp_path / "repro"
    candidate = {"backend": "faulty:raises", "when": {"model": "*"}}
    with torch.no_grad():
        options = {"repro": str(path), "chain": [candidate, "eager"], "model": "acme.secret"}
        torch.compile(double, backend="composer", options=options)(torch.ones(2))
    (folder,) = path.iterdir()
    told = "".join(each.read_text() for each in folder.iterdir())
    assert "when" not in (folder / "policy.toml").read_text()
    assert "acme" not in told


@pytest.mark.slow
def test_a_folder_of_inductor_needs_no_composer(tmp_path: Path, runs: Runs) -> None:
    """With the candidate's options and the mode of the program."""
    facts = {**FACTS, "mode": "reduce-overhead"}
    case = Case.of(torch.fx.symbolic_trace(double), [torch.ones(3)], (), facts)
    folder = tmp_path / "folder"
    folders.write(case, folder, {"backend": "inductor", "options": {"max_fusion_size": 2}})
    text = (folder / "run.py").read_text()
    assert "composer" not in text
    assert "list_mode_options('reduce-overhead')" in text
    assert runs(folder, alone=True) == check.RIGHT


@pytest.mark.slow
class Turned(torch.nn.Module):
    """One of its outputs is not row-major, so a model of ONNX gives it in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = torch.nn.Linear(4, 3), torch.nn.LayerNorm(3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.norm(self.layer(x))
        return y, y.t() + 1


@pytest.mark.parametrize("engine", ["onnxrt", "openvino"])
def test_a_folder_of_an_onnx_engine_needs_no_composer(
    engine: str, tmp_path: Path, runs: Runs
) -> None:
    """It has the model of a part of the graph, with weights as the program draws them."""
    pytest.importorskip("onnxruntime" if engine == "onnxrt" else engine)
    net = Turned().eval()
    found: list[Case] = []

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        request = capture.read_request(gm, inputs)
        found.append(Case.of(gm, inputs, request.weights, FACTS))
        return gm.forward

    with torch.no_grad():
        torch.compile(net, backend=backend)(torch.randn(5, 4))
    folders.write(found[0], tmp_path / "whole", {"backend": engine, "options": {}})
    assert "import composer" in (tmp_path / "whole" / "run.py").read_text()
    torch.compiler.reset()
    regions.write_regions(tmp_path / "whole", tmp_path / "regions")
    (folder,) = (tmp_path / "regions").iterdir()
    assert "composer" not in (folder / "run.py").read_text()
    assert runs(folder, alone=True) == check.RIGHT
    program = (folder / "graph.py").read_text()
    (folder / "graph.py").write_text(
        program.replace("aten.addmm.default(", "aten.addmm.default(2 * ")
    )
    assert runs(folder, alone=True) == check.WRONG


@pytest.mark.slow
def test_an_operator_that_onnx_runtime_computes_wrongly_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: Runs
) -> None:
    """From the record of the program to a folder that can be sent to ONNX Runtime's authors."""
    monkeypatch.setenv("COMPOSER_DUMP", str(tmp_path / "dumps"))
    monkeypatch.setenv("COMPOSER_TELEMETRY", str(tmp_path / "run.jsonl"))

    def program(x: torch.Tensor, y: torch.Tensor) -> Any:
        return x**11 + y, (x * 2).float().softmax(-1)

    x = torch.tensor([3_000_000_000, 3, -5, 2**40, -(2**40)] * 4)
    with torch.no_grad():
        compiled(program, "unguarded:Unguarded", verify="compile")(x, x.flip(0))
    assert last().attempts[0].reason is Reason.NUMERIC_MISMATCH
    command = ["repro", "--graph", "1", "--engine", "unguarded:Unguarded"]
    command += ["--to", str(tmp_path / "made"), str(tmp_path / "run.jsonl")]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert "the fault shows; it needs no composer" in done.output
    assert (tmp_path / "made" / "model.onnx").is_file()
    assert (
        json.loads((tmp_path / "made" / "about.json").read_text())["outcome"] == "the fault shows"
    )
    assert runs(tmp_path / "made", alone=True) == check.WRONG


@pytest.mark.parametrize(
    ("precision", "of"), [("bf16", "bf16"), ({"mode": "auto", "max_error": 0.02}, "fp32")]
)
def test_low_precision_shows_in_its_folder(precision: Any, of: str, tmp_path: Path) -> None:
    """Composer lowers it there too. For float32 the folder has the engine alone."""
    net = torch.nn.Linear(4, 4)
    options = {"precision": precision, "verify": "compile", "repro": str(tmp_path)}
    with torch.no_grad():
        compiled(net, "faulty:nan", **options)(torch.ones(2, 4))
    attempt = last().attempts[-1]
    assert attempt.precision == of
    text = (Path(attempt.engine["repro"]) / "run.py").read_text()
    assert ("'precision': 'bf16'" in text) == (of == "bf16")
    assert ("share=" in text) == (of == "bf16")


NUMBER, WHOLE = 1234.5678, 424243


def contents(folder: Path) -> bytes:
    return b"".join(each.read_bytes() for each in folder.rglob("*") if each.is_file())


def planted() -> list[bytes]:
    """The bytes and the texts of the values that the program has."""
    texts = [str(NUMBER), str(float(torch.tensor(NUMBER))), str(WHOLE), str(Path.cwd()), "a_secret"]
    bits = [struct.pack("<f", NUMBER), struct.pack("<d", NUMBER), struct.pack("<q", WHOLE)]
    return [*map(str.encode, texts), *bits]


class Secretive(torch.nn.Module):
    """Has values, names and a path that are nobody else's business."""

    def __init__(self) -> None:
        super().__init__()
        self.a_secret = torch.nn.Linear(3, 3)
        torch.nn.init.constant_(self.a_secret.weight, NUMBER)
        self.register_buffer("number", torch.tensor(NUMBER))

    def forward(self, x: torch.Tensor, at: torch.Tensor, factor: float) -> torch.Tensor:
        a_secret_sum = self.a_secret(x)[:, at % 3] * factor
        return a_secret_sum * self.number


def test_nothing_of_the_users_is_in_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither values nor names nor paths, in dumps and in folders of engines."""
    monkeypatch.setenv("COMPOSER_DUMP", str(tmp_path / "dumps"))
    net = Secretive()
    option = {"path": f"{Path.cwd()}/a_secret"}
    chain = [{"backend": takes_options, "options": option}, "faulty:raises"]
    at = torch.tensor([WHOLE, 1, 2])
    with torch.no_grad():
        run = compiled(net, *chain, repro=str(tmp_path / "repro"), dynamic=True)
        run(torch.full((2, 3), NUMBER), at, NUMBER)
    assert len(list((tmp_path / "repro").iterdir())) == 2
    for folder in (tmp_path / "repro", tmp_path / "dumps"):
        found = contents(folder)
        assert b"class Graph" in found
        assert [each for each in planted() if each in found] == []


def takes_options(gm: Any, inputs: Any, options: Any) -> Any:
    raise RuntimeError(f"failed with {options} on {inputs[0]}")


@pytest.mark.slow
def test_nothing_of_the_users_is_in_the_model_of_a_folder(tmp_path: Path) -> None:
    """Its weights are drawn as well; with data they are the user's."""
    for name, with_data in (("drawn", False), ("exact", True)):
        torch.compiler.reset()
        found: list[Case] = []

        def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
            request = capture.read_request(gm, inputs)
            found.append(Case.of(gm, inputs, request.weights, FACTS, with_data=with_data))  # noqa: B023
            return gm.forward

        with torch.no_grad():
            at = torch.tensor([WHOLE, 1, 2])
            torch.compile(Secretive(), backend=backend)(torch.full((2, 3), NUMBER), at, 1.0)
        folders.write(found[0], tmp_path / name / "whole", {"backend": "onnxrt", "options": {}})
        torch.compiler.reset()
        regions.write_regions(tmp_path / name / "whole", tmp_path / name / "regions")
        there = [each for each in planted() if each in contents(tmp_path / name)]
        assert bool(there) == with_data, there


def test_values_are_in_a_folder_only_if_they_were_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a live process: the error says how to have them kept, and then they are."""
    with torch.no_grad():
        compiled(torch.sin, "faulty:raises")(torch.full((3,), NUMBER))
        with pytest.raises(ReproError, match="set COMPOSER_DUMP=FOLDER or the policy's repro"):
            composer.repro(last(), "faulty:raises", tmp_path / "made")
        monkeypatch.setenv("COMPOSER_DUMP", str(tmp_path / "dumps"))
        for data in ("0", "1"):
            monkeypatch.setenv("COMPOSER_DUMP_DATA", data)
            torch.compiler.reset()
            compiled(torch.cos, "faulty:raises")(torch.full((3,), NUMBER))
            if data == "0":
                with pytest.raises(ReproError, match="set COMPOSER_DUMP_DATA=1"):
                    composer.repro(last(), "faulty:raises", tmp_path / "made", with_data=True)
    monkeypatch.setattr("composer.tools.repro.run", lambda *_: (check.WRONG, "said"))
    bare = composer.repro(last().number, "faulty:raises", tmp_path / "bare")
    made = composer.repro("0/0", "faulty:raises", tmp_path / "made", with_data=True)
    assert (bare.shows, made.shows) == (True, True)
    assert str(made) == f"{tmp_path / 'made'}: the fault shows; it needs no composer"
    assert not (bare.folder / "data.pt").exists()
    assert torch.load(made.folder / "data.pt")[0][0] == torch.tensor(NUMBER)
    with pytest.raises(ReproError, match="is there already"):
        composer.repro(last(), "aot_eager", tmp_path / "made")
    with pytest.raises(ReproError, match="no graph 7"):
        composer.repro(7, "aot_eager", tmp_path / "other")


def test_an_engine_of_a_graph_has_one_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever writes it first, in this process or another; and there are so many at most."""
    root = tmp_path / "repro"
    for _ in range(2):
        torch.compiler.reset()
        compiled(torch.sin, "faulty:raises", repro=str(root))(torch.ones(3))
        assert last().attempts[0].engine["repro"] == str(next(root.iterdir()))
    assert len(list(root.iterdir())) == 1
    monkeypatch.setattr(folders, "_MOST_FOLDERS", 1)
    compiled(torch.cos, "faulty:raises", repro=str(root))(torch.ones(3))
    assert last().attempts[0].engine["repro"] == "not written: there are 1 folders already"


def test_a_failure_at_a_call_has_a_folder(tmp_path: Path) -> None:
    """On the values of the compile; other attempts and statuses have none."""
    engine = composer.testing.FakeBackend("raises", at=2)
    run = compiled(torch.sin, engine, "aot_eager", repro=str(tmp_path / "repro"))
    for _ in range(3):
        run(torch.ones(3))
    first, second = last().attempts
    assert (first.status, second.status) == (Status.FAILED, Status.SUCCEEDED)
    folder = Path(first.engine["repro"])
    assert "repro" not in second.engine
    assert (
        "put the engine composer.testing.fake:fake_raises here" in (folder / "run.py").read_text()
    )


def test_what_cannot_be_written_is_recorded(tmp_path: Path) -> None:
    """And the call is answered."""
    (tmp_path / "file").write_text("in the way")
    x = torch.ones(3)
    run = compiled(torch.sin, "faulty:raises", repro=str(tmp_path / "file" / "folder"))
    torch.testing.assert_close(run(x), x.sin())
    assert last().attempts[0].engine["repro"].startswith("not written: NotADirectoryError")
    lazy = torch.ones(3, dtype=torch.complex64).conj()
    run = compiled(torch.cos, "faulty:raises", repro=str(tmp_path / "repro"))
    torch.testing.assert_close(run(lazy), lazy.cos())
    assert "which a program cannot draw" in last().attempts[0].engine["repro"]


def test_faults_of_the_command_are_told(tmp_path: Path) -> None:
    """Exit status 1 for what was not kept, 2 for a file that is not there."""
    record = tmp_path / "run.jsonl"
    runner = CliRunner()
    assert runner.invoke(app, ["repro", str(record)]).exit_code == 2
    record.write_text("")
    done = runner.invoke(app, ["repro", "--graph", "3", str(record)])
    assert (done.exit_code, "has no graph 3" in done.output) == (1, True)
    done = runner.invoke(app, ["repro", str(tmp_path)])
    assert (done.exit_code, "has no about.json" in done.output) == (1, True)


def test_engines_are_there_by_name() -> None:
    """A child process imports them so."""
    assert faulty.__dict__["raises"].__name__ == "raises"
