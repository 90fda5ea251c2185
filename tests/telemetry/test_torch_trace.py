"""The sink ``torch_trace``: what the real ``tlparse`` shows of it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from jsonschema import validate

from composer.telemetry import schema

TLPARSE = shutil.which("tlparse", path=str(Path(sys.executable).parent)) or shutil.which("tlparse")

PROGRAM = """
import torch
from torch._dynamo import lookup_backend
from composer import session, reports
def broken(gm, example_inputs):
    raise RuntimeError("no such kernel")
def honest(gm, example_inputs):
    return lookup_backend("aot_eager")(gm, example_inputs)
options = {"chain": [broken, honest]}
net = torch.compile(torch.nn.Linear(3, 3), backend="composer", options=options)
net(torch.ones(2, 3)).sum().backward()
def broken_up(x):
    x = x.sin()
    torch._dynamo.graph_break()
    return x.cos()
torch.compile(broken_up, backend="composer", options=options)(torch.ones(2))
def later(x):
    return x.tan()
torch.compile(later, backend="composer", options=options)(torch.ones(2))
session.current().sinks.emit(reports()[-1], first=False)
gm = torch.fx.symbolic_trace(torch.nn.Linear(3, 3))
lookup_backend("composer")(gm, [torch.ones(2, 3)], options={"chain": ["aot_eager"]})
"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory, fresh_python: Any) -> Path:
    """Run the program with torch's trace on, then ``tlparse``; the folder of its pages."""
    if TLPARSE is None:
        pytest.skip("tlparse is not installed")
    folder = tmp_path_factory.mktemp("traced")
    cache, trace, pages = folder / "cache", folder / "trace", folder / "pages"
    env = {"TORCH_TRACE": str(trace), "COMPOSER_CACHE_DIR": str(cache)}
    done = fresh_python(PROGRAM, env=env)
    assert done.returncode == 0, done.stderr
    (log,) = trace.iterdir()
    command = [TLPARSE, str(log), "-o", str(pages), "--no-browser", "--strict"]
    subprocess.run(command, check=True, capture_output=True)
    return pages


def linked(pages: Path, section: str) -> list[str]:
    """The pages that the index links in the section of a compile."""
    index = (pages / "index.html").read_text()
    text = index.split(f'<a id="[{section}]">')[1].split('<a id="[')[0]
    return re.findall(r'<a href="([^"]+)">', text)


def test_tlparse_shows_the_attempts_of_each_compile(pages: Path) -> None:
    """Linked under Dynamo's compile id, beside the graphs of AOTAutograd; both graphs of a break.

    Dynamo captures the first of them at its second try, which is the ``_1``.
    """
    for section, graph_id in {"0/0": "0/0", "1/0_1": "1/0", "2/0": "2/0"}.items():
        (page,) = [each for each in linked(pages, section) if "composer_attempts" in each]
        record = json.loads((pages / page).read_text())
        validate(record, schema.committed())
        assert record["graph_id"] == graph_id
        assert [each["status"] for each in record["attempts"]] == ["failed", "succeeded"]
    training = [Path(each).name for each in linked(pages, "0/0")]
    assert any(name.startswith("aot_backward_graph") for name in training)


def test_tlparse_shows_the_report_for_a_person(pages: Path) -> None:
    """The same table as ``composer.report``."""
    (page,) = [each for each in linked(pages, "0/0") if "composer_report" in each]
    text = (pages / page).read_text()
    assert text.startswith("composer: 1 graph in ")
    assert "broken    failed      build_failed" in text


def test_tlparse_shows_a_later_record_under_the_same_compile(pages: Path) -> None:
    """No compile is under way when an engine fails at run time."""
    found = [each for each in linked(pages, "3/0") if "composer_attempts" in each]
    calls = [json.loads((pages / page).read_text())["runtime"]["calls"] for page in found]
    assert sorted(calls) == [0, 1]


def test_tlparse_shows_a_graph_compiled_without_dynamo(pages: Path) -> None:
    """It has no compile id, and stands with what belongs to none."""
    (page,) = pages.glob("-_-_-_-/composer_attempts*")
    assert json.loads(page.read_text())["graph_id"] == "direct"


def test_torch_trace_is_off_without_a_trace(run_python: Any) -> None:
    """No sink is made, nor by a direct call that comes before Dynamo's first event."""
    code = """
import torch
from torch._dynamo import lookup_backend
from composer.telemetry.torch_trace import TorchTraceSink
def made(self):
    print("made")
TorchTraceSink.__init__ = made
gm = torch.fx.symbolic_trace(torch.nn.Linear(3, 3))
lookup_backend("composer")(gm, [torch.ones(2, 3)], options={"chain": ["aot_eager"]})
print("compiled")
"""
    assert run_python(code).stdout.split() == ["compiled"]
    assert run_python(code, env={"COMPOSER_SINKS": "torch_trace"}).stdout.split()[0] == "made"
