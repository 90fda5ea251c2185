"""The benches and the example run as a user runs them, on the smallest inputs they have."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.slow


def run(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_example_embeds_measures_and_reports() -> None:
    """Sentences find the one most like them; both chains run on the engine asked for."""
    output = run("examples/embeddings.py", "--rounds", "1")
    assert "Someone performs music" in output
    assert "served by: inductor 1, onnxrt 1" in output
    assert "tensorrt   unavailable   no_device" in output


def test_the_model_bench_writes_what_it_measured(tmp_path: Path) -> None:
    """Every variant of a model, with the machine beside it."""
    figures = tmp_path / "models.json"
    run(
        *("bench/models.py", "--models", "bert", "--tiny", "--rounds", "1"),
        *("--json", str(figures)),
    )
    record = json.loads(figures.read_text())
    assert record["machine"]["packages"]["torch"]
    text = figures.read_text()
    for variant in ("eager", "inductor", "composer", "composer[onnxrt]"):
        assert variant in text


def test_the_overhead_bench_writes_what_it_measured(tmp_path: Path) -> None:
    """A row an engine, and one for each kind of candidate that does not serve."""
    figures = tmp_path / "overhead.json"
    run("bench/overhead.py", "--rounds", "1", "--calls", "10", "--json", str(figures))
    record = json.loads(figures.read_text())
    assert set(record["calls"]) == {"eager", "aot_eager", "inductor", "onnxrt"}
    assert record["compiles"]["unavailable"]["status"] == "unavailable"
    assert record["compiles"]["failing"]["status"] == "failed"
