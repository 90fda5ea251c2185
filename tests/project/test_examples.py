"""The examples do what they say: the notebook's cells, the server, the training loop."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest
from common import ROOT

pytestmark = [pytest.mark.docs, pytest.mark.slow]

EXAMPLES = ROOT / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


def code_cells(notebook: Path) -> Iterator[str]:
    """The source of each code cell."""
    cells = json.loads(notebook.read_text())["cells"]
    return ("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")


def shown(code: str, name: str, namespace: dict[str, object]) -> object:
    """Run a cell; the value of its last expression, as a notebook shows it."""
    body = ast.parse(code).body
    last = body.pop() if isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), name, "exec"), namespace)
    if last is None:
        return None
    return eval(compile(ast.Expression(last.value), name, "eval"), namespace)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.name)
def test_cells_of_the_notebook_run(notebook: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other; a report and an explanation at the end of a cell are tables."""
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    cells = enumerate(code_cells(notebook))
    values = [shown(code, f"<code cell {i}>", main.__dict__) for i, code in cells]
    tables = [value._repr_html_() for value in values if hasattr(value, "_repr_html_")]
    assert len(tables) == 3
    assert all("<table" in table for table in tables)


def test_notebooks_are_committed_with_the_outputs_of_a_run() -> None:
    """A reader sees the tables without running anything. All cells ran, once and in order."""
    for notebook in NOTEBOOKS:
        cells = [c for c in json.loads(notebook.read_text())["cells"] if c["cell_type"] == "code"]
        assert [c["execution_count"] for c in cells] == [*range(1, len(cells) + 1)]
        outputs = [each for cell in cells for each in cell["outputs"]]
        tables = [each for each in outputs if "text/html" in each.get("data", {})]
        assert len(tables) == 3
        assert all("<table" in "".join(each["data"]["text/html"]) for each in tables)
        assert not any(each["output_type"] == "error" for each in outputs)


@pytest.fixture
def server() -> Iterator[tuple[str, str]]:
    """The address of the serving example, and what it printed before it served."""
    command = [sys.executable, str(EXAMPLES / "serving.py"), "--port", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            said = ""
            for line in process.stdout or ():
                said += line
                if found := re.match(r"serving on port (\d+)", line):
                    break
            else:
                pytest.fail(said)
            yield f"http://127.0.0.1:{found[1]}", said
        finally:
            process.terminate()


def test_server_answers_and_counts(server: tuple[str, str]) -> None:
    """A request of another size is answered; its call and three of the warm-up are counted."""
    address, said = server
    assert "served by: onnxrt 1" in said
    with urlopen(f"{address}/predict", json.dumps([[0.1, 0.2, 0.3, 0.4]] * 5).encode()) as answer:
        rows = json.load(answer)
    assert [len(row) for row in rows] == [2] * 5
    with urlopen(f"{address}/metrics") as answer:
        page = answer.read().decode()
    assert 'composer_runtime_calls_total{backend="onnxrt"} 4.0' in page


def test_training_lowers_the_loss_on_an_engine() -> None:
    """The first line has the loss before any step, the last one that after all."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "training.py"), "--steps", "60"],
        capture_output=True,
        text=True,
        check=True,
    )
    losses = [float(each) for each in re.findall(r"^step \d+: loss (\S+)$", done.stdout, re.M)]
    assert losses[-1] < losses[0] / 1.5
    assert "served by: inductor 1" in done.stdout
