"""torch's minifier sees what fails, and its scripts run by themselves."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from common import compiled, last
from pages import FENCE, sections
from rewrites import Scale

import composer
from composer import _torch
from composer.chain import minifier
from composer.errors import refuse
from composer.records import Reason, Status
from composer.testing import FakeBackend

pytestmark = pytest.mark.filterwarnings("ignore::composer.errors.FallbackWarning")


def looks(level: int) -> Any:
    """The minifier looks, at this level, and writes its scripts below the working directory."""
    patch = torch._dynamo.config.patch
    return patch(repro_after="dynamo", repro_level=level, debug_dir_root=str(Path.cwd()))


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def double(x: torch.Tensor) -> torch.Tensor:
    return x.sin() * 2


def declines(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
    refuse(Status.DECLINED, Reason.UNSUPPORTED_OP, "not this one")


def written(tmp_path: Path) -> str:
    """The script that torch has written; empty if it has written none."""
    return "".join(each.read_text() for each in tmp_path.rglob("minifier_launcher.py"))


@pytest.mark.parametrize("level", [2, 3])
@pytest.mark.parametrize("at", [None, 1])
def test_what_raises_is_seen(level: int, at: int | None, tmp_path: Path) -> None:
    """While it compiles, and at a call; nobody answers for it."""
    run = compiled(double, FakeBackend("raises", at=at))
    with looks(level), pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="made to"):
        run(torch.ones(2))
    assert "backend='composer'" in written(tmp_path)


def test_what_is_wrong_is_seen(tmp_path: Path) -> None:
    """At level 4 by torch's comparison, which composer's own does not forestall."""
    run = compiled(double, FakeBackend("wrong_value"), verify="compile")
    with looks(4), pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="Bad accuracy"):
        run(torch.ones(2))
    assert "accuracy=True" in written(tmp_path)


def test_what_is_well_is_served(tmp_path: Path) -> None:
    """A candidate that declines is no failure, and torch finds none in what serves."""
    for level in (2, 4):
        torch.compiler.reset()
        with looks(level):
            run = compiled(double, declines, "aot_eager")
            torch.testing.assert_close(run(torch.ones(2)), double(torch.ones(2)))
        assert last().chosen == "aot_eager"
    assert not written(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["onnxrt", "composer_openvino"])
def test_engines_by_their_own_names_are_seen(engine: str, tmp_path: Path) -> None:
    """One that serves is found to be well, with gradients too; one that refuses is written down."""
    if engine == "composer_openvino":
        pytest.importorskip("openvino", reason="the engine itself")
    for grad in (False, True)[: 1 + (engine == "onnxrt")]:
        for level in (2, 4):
            torch.compiler.reset()
            with looks(level), torch.set_grad_enabled(grad):
                torch.compile(torch.nn.Linear(2, 2), backend=engine)(torch.ones(3, 2))
    assert not written(tmp_path)
    with looks(2), torch.no_grad(), pytest.raises(torch._dynamo.exc.BackendCompilerFailed):
        torch.compile(torch.special.bessel_j0, backend=engine)(torch.ones(2))
    assert f"backend='{engine}'" in written(tmp_path)


def test_report_names_the_minifier_among_the_layers() -> None:
    """It overrides what the program asks for."""
    with looks(4):
        compiled(double, "aot_eager", verify="compile")(torch.ones(2))
    assert last().policy[-2:] == ("options", "minifier")


def test_scripts_hold_the_policy_in_force() -> None:
    """Of ``options``, ``using`` and ``configure``; objects by the names they are imported by."""
    gm = torch.fx.symbolic_trace(double)
    chain = [composer.Candidate(backend=honest, options={"a": 1}, timeout=3), "onnxrt"]
    options = {"chain": chain, "passes": [Scale(factor=3.0), "fold_batch_norm"]}
    with composer.using(verify={"when": "compile", "rtol": 0.1}):
        lines = minifier.preamble(gm, [torch.ones(2)], {"options": options}).splitlines()
    told: dict[str, Any] = {}
    (call,) = (line for line in lines if line.startswith("composer.configure("))
    exec(call.replace("composer.configure", "told.update"), {"told": told})
    assert told["defaults"] == {
        "chain": [
            {"backend": f"{__name__}:honest", "options": {"a": 1}, "timeout": 3.0},
            {"backend": "onnxrt", "options": {}},
        ],
        "passes": [{"pass": "rewrites:Scale", "factor": 3.0}, "fold_batch_norm"],
        "verify": {"when": "compile", "rtol": 0.1},
    }
    composer.configure(told)  # it is a policy
    composer.configure(None)


def honest(gm: torch.fx.GraphModule, example_inputs: Any, options: Any = None) -> Any:
    return lambda *args: gm.forward(*args)


def test_nothing_is_seen_while_the_minifier_does_not_look(tmp_path: Path) -> None:
    """Composer answers, as ever."""
    run = compiled(double, FakeBackend("raises"))
    torch.testing.assert_close(run(torch.ones(2)), double(torch.ones(2)))
    assert _torch.minifier.minifier_looks_for() == ""
    for level, sought in ((2, "errors"), (4, "wrong numbers")):
        with looks(level):
            assert _torch.minifier.minifier_looks_for() == sought


def test_what_aotautograd_gives_says_that_it_takes_a_list() -> None:
    """It takes separate ones; when it says so, ``for_minifier`` has less to do (torch 2.15)."""

    def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        given = torch._dynamo.lookup_backend("aot_eager")(gm, example_inputs)
        assert given._boxed_call  # type: ignore[attr-defined]  # what this test is about
        assert len(given(*example_inputs)) == 1
        return given

    torch.compile(double, backend=backend)(torch.ones(2))


@pytest.mark.docs
def test_example_of_the_docs_ends_with_the_operator_that_fails(tmp_path: Path) -> None:
    """The program, torch's launcher and the graph it ends with, each in a process of its own."""
    text = sections("how-to/report-upstream.md")["2. Let torch make a small example"]
    blocks = [block[2] for block in FENCE.finditer(text)]
    for code in blocks[:2]:
        (tmp_path / re.match(r"# (\S+)\n", code)[1]).write_text(code)  # type: ignore[index]  # its first line names the file
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    surroundings = {"PATH": path, "HOME": str(tmp_path), "TORCH_LOGS": "-all"}
    program, launcher, repeated = (
        subprocess.run(
            ["bash", "-c", line], cwd=tmp_path, env=surroundings, capture_output=True, text=True
        )
        for line in blocks[2].splitlines()
    )
    assert program.returncode
    assert "no kernel for tanh" in program.stderr
    assert launcher.returncode == 0, launcher.stderr
    assert repeated.returncode
    assert "no kernel for tanh" in repeated.stderr
    found = (tmp_path / "repro.py").read_text().partition("def forward")[2]
    assert "tanh" in found
    assert "relu" not in found
