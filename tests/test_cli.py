"""The command line, as a user types it."""

from __future__ import annotations

import importlib.util
import json
import sys
from importlib.metadata import version

import pytest
from typer.testing import CliRunner

from composer.backends import BACKENDS
from composer.cli import app

runner = CliRunner()


def test_doctor_lists_every_engine() -> None:
    """With what is missing where something is."""
    result = runner.invoke(app, ["doctor"])
    assert result.exit_code == 0
    for name in BACKENDS.names():
        assert name in result.output


def test_doctor_speaks_json() -> None:
    """One row an engine, for a program."""
    rows = json.loads(runner.invoke(app, ["doctor", "--json"]).output)
    assert [row["backend"] for row in rows] == list(BACKENDS.names())
    by_name = {row["backend"]: row for row in rows}
    assert by_name["inductor"]["available"]
    assert by_name["onnxrt"]["version"] == version("onnxruntime")


def test_doctor_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that is not here comes with the command that brings it."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "onnxscript" else find(name)
    )
    monkeypatch.delitem(sys.modules, "onnxscript", raising=False)
    rows = json.loads(runner.invoke(app, ["doctor", "--json"]).output)
    row = next(row for row in rows if row["backend"] == "onnxrt")
    assert (row["available"], row["reason"]) == (False, "not_installed")
    assert "pip install 'torch-composer[onnxrt]'" in row["message"]


def test_version() -> None:
    """The distribution's own."""
    assert version("torch-composer") in runner.invoke(app, ["--version"]).output
