"""OpenVINO's own telemetry, which composer does not let speak."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from composer.backends.openvino import library

pytest.importorskip("openvino", reason="the engine itself")

AUTOMATIC = ("CI", "TF_BUILD", "JENKINS_URL")
"""Variables by which OpenVINO knows that no user is there, and sends nothing."""

SILENT = """
from concurrent.futures import ThreadPoolExecutor
ThreadPoolExecutor.submit = lambda *_, **__: print("sends an event")
"""
"""By which it would send."""

COMPILED = """
import sys, torch
f = torch.compile(
    torch.sin, backend="composer", options={"chain": ["openvino"], "strict": True}
)
with torch.no_grad():
    f(torch.ones(2))
assert "openvino" in sys.modules
import openvino_telemetry
"""


@pytest.fixture
def done(
    run_python: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], subprocess.CompletedProcess[str]]:
    """What code did, in a home directory of its own."""
    for name in AUTOMATIC:
        monkeypatch.delenv(name, raising=False)

    def do(code: str) -> subprocess.CompletedProcess[str]:
        ran: subprocess.CompletedProcess[str] = run_python(code, env={"HOME": str(tmp_path)})
        assert ran.returncode == 0, ran.stderr
        return ran

    return do


def test_import_by_composer_sends_nothing_and_leaves_no_identity(
    done: Callable[[str], Any], tmp_path: Path
) -> None:
    """The package that sends can be imported as before."""
    assert done(SILENT + COMPILED).stdout == ""
    assert not (tmp_path / "intel").exists()


def test_library_by_itself_sends_an_event(done: Callable[[str], Any], tmp_path: Path) -> None:
    """Were this to fail, composer would have nothing to switch off."""
    assert "sends an event" in done(f"{SILENT}import openvino").stdout
    assert [*(tmp_path / "intel").iterdir()]


def test_package_that_the_program_imported_is_taken_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has sent what it sends."""
    before = library.openvino()
    library.openvino.cache_clear()
    telemetry = object()
    monkeypatch.setitem(sys.modules, "openvino_telemetry", telemetry)
    assert library.openvino() is before
    assert sys.modules["openvino_telemetry"] is telemetry
