"""The soak of ``bench/soak.py``, shorter: threads, new shapes, new weights, failing engines."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from common import ROOT


@pytest.mark.slow
@pytest.mark.thorough
def test_every_answer_is_eagers_while_engines_fail_in_four_threads(tmp_path: Path) -> None:
    """Each failure is in the record, each call that it ended is counted, and memory is flat."""
    figures = tmp_path / "soak.json"
    asked = ("bench/soak.py", "--calls", "1000", "--graphs", "5", "--json", str(figures))
    done = subprocess.run(
        [sys.executable, *asked], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(figures.read_text())
    assert record["not_as_eager"] == {}
    assert record["engines_that_raised"] == record["recorded_as_raised"] > 0
