"""``composer doctor``: it tries the engines, and says what works here."""

from __future__ import annotations

import importlib.util
import json
import sys
from importlib.metadata import version
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from composer._torch import names
from composer.backends import BACKENDS
from composer.backends.base import Backend, Build, BuildRequest
from composer.cli import app
from composer.errors import refuse
from composer.records import GraphRequest, Reason, Status
from composer.system import distribution

runner = CliRunner()


def doctor(*arguments: str, **env: str) -> Result:
    return runner.invoke(app, ["doctor", *arguments], env={"COLUMNS": "200", **env})


def rows(*arguments: str, **env: str) -> dict[str, Any]:
    """What it says of each engine, by name."""
    said = json.loads(doctor("--json", *arguments, **env).output)
    return {each["engine"]: each for each in said["engines"]}


@pytest.mark.slow
def test_doctor_tries_every_engine() -> None:
    """Forward and backward, each compared with eager; the chain in force stands below."""
    result = doctor("--json")
    said = json.loads(result.output)
    assert said["chain"] == ["tensorrt", "inductor", "onnxrt"]
    engines = {each["engine"]: each for each in said["engines"]}
    assert list(engines) == list(BACKENDS.names())
    for name, trains in (("inductor", True), ("onnxrt", True), ("openvino", False)):
        row = engines[name]
        serves = ["inference", "training"] if trains else ["inference"]
        assert (row["works"], row["serves"], row["devices"]) == (True, serves, ["cpu"]), row
    for package in ("onnxruntime", "onnx", "onnxscript"):
        assert engines["onnxrt"]["versions"][package] == version(package)
    assert engines["inductor"]["versions"]["torch"] == torch.__version__
    assert engines["tensorrt"]["reason"] == "no_device"
    assert result.exit_code == 0  # nobody asked for tensorrt by name


def test_doctor_tries_one_engine() -> None:
    """The one that is named; a name that nobody knows is a mistake."""
    result = doctor("eager")
    assert result.exit_code == 0
    assert "eager" in result.output
    assert "onnxrt" not in result.output.partition("The chain in force")[0]
    assert doctor("onnxtr").exit_code == 2


def test_doctor_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that is not here comes with the command that brings it."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "onnxscript" else find(name)
    )
    monkeypatch.delitem(sys.modules, "onnxscript", raising=False)
    row = rows("onnxrt")["onnxrt"]
    assert (row["works"], row["reason"], row["devices"]) == (False, "not_installed", [])
    assert row["install"] == "pip install 'torch-compile-composer[onnxrt]'"
    result = doctor("onnxrt")
    assert row["install"] in result.output
    assert result.exit_code == 1


@pytest.mark.parametrize(
    ("chain", "status"), [("", 0), ("onnxrt", 0), ("tensorrt,onnxrt", 1), ("inductor,onnxrt", 1)]
)
def test_doctor_fails_where_an_engine_of_the_chain_does_not_work(
    chain: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be here counts only in a chain that the user wrote."""
    inductor = "build_failed" if chain else ""
    reasons = {"tensorrt": "no_device", "inductor": inductor}

    def attempts(name: str, request: GraphRequest) -> Any:
        reason = reasons.get(name, "")
        attempt = {"status": "failed" if reason else "succeeded", "reason": reason, "message": ""}
        return {"inference": attempt, "training": attempt}

    monkeypatch.setattr("composer.cli.doctor._attempts", attempts)
    assert doctor(COMPOSER_CHAIN=chain).exit_code == status


def float32_only(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    """An engine that serves the graph for training alone: the other has bools and integers."""
    dtypes = {each.dtype for each in inputs if isinstance(each, torch.Tensor)}
    if dtypes != {torch.float32}:
        refuse(Status.DECLINED, Reason.UNSUPPORTED_DTYPE, "takes float32 alone")
    return torch._dynamo.lookup_backend("aot_eager")(gm, inputs)


def convolutions_only(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    refuse(Status.DECLINED, Reason.UNSUPPORTED_OP, "takes convolutions alone")


@pytest.mark.parametrize(
    ("engine", "serves", "shown", "why"),
    [
        (float32_only, ["training"], "training", "takes float32 alone"),
        (convolutions_only, [], "neither graph", "takes convolutions alone"),
    ],
)
def test_doctor_says_which_graphs_an_engine_serves(
    engine: Any, serves: list[str], shown: str, why: str
) -> None:
    """An engine that declines a graph is not broken: it may serve other graphs."""
    name = f"{__name__}:{engine.__name__}"
    row = rows(name)[name]
    assert (row["serves"], row["declines"], row["message"]) == (serves, True, why)
    result = doctor(name)
    assert shown in result.output
    assert result.exit_code == 0


def test_doctor_shows_the_version_of_the_package_that_brings_an_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is not torch's."""

    class Package:
        name, version = "my-package", "1.2"

    class Entry:
        name, dist = "eager", Package

    monkeypatch.setattr("composer.cli.doctor.entry_points", lambda group: [Entry])
    assert rows("eager")["eager"]["versions"] == {"my-package": "1.2"}


class Breaking(Backend):
    """An engine of another package whose probe has a fault."""

    def probe(self, request: GraphRequest) -> None:
        raise RuntimeError("no such card")

    def build(self, request: BuildRequest) -> Build:
        raise AssertionError("it is not built")


def test_doctor_says_what_is_wrong_with_engines_of_other_packages(monkeypatch) -> None:
    """A name that two packages claim, and a probe that raises, have rows like all others."""
    clash = "entry point 'b:c' registers the backend 'clashing', which stands for 'a:b' already"
    table, clashes = BACKENDS._discovered
    monkeypatch.setitem(table, "clashing", "a:b")
    monkeypatch.setitem(clashes, "clashing", clash)
    monkeypatch.setitem(table, "breaking", f"{__name__}:Breaking")
    monkeypatch.setattr(type(BACKENDS), "names", lambda _: ("clashing", "breaking", "eager"))
    said = rows(COMPOSER_CHAIN="eager")
    assert (said["clashing"]["works"], said["clashing"]["message"]) == (False, clash)
    assert (said["breaking"]["works"], said["breaking"]["message"]) == (False, "no such card")
    assert said["eager"]["works"]


def test_doctor_names_a_missing_compiler() -> None:
    """Inductor lacks it, so what brings it is not a package of Python's."""
    row = rows("inductor", CXX="no-such-compiler", PATH="/nowhere")["inductor"]
    assert not row["works"]
    assert "compiler" in row["message"]
    assert row["install"] == "install a C++ compiler, such as g++"


def test_doctor_names_versions_outside_what_was_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may well work; who looks for a fault should know."""
    monkeypatch.setitem(distribution.VERIFIED, "torch", ("1.0", "1.1"))
    assert "is not among the verified versions, 1.0 to 1.1" in doctor("eager").output


def test_doctor_names_what_is_off_without_a_private_name_of_torch(monkeypatch) -> None:
    """Torch may drop one in any release."""
    counters = "torch._dynamo.utils:counters"
    feature = next(each for each in names.FEATURES if counters in each.names)
    monkeypatch.setitem(vars(feature), "missing", (counters,))
    said = " ".join(doctor("eager").output.split())
    assert f"{feature.what} is off: torch {torch.__version__} has no {counters}" in said
