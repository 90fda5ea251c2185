"""What ``make test`` leaves out of a test over several lists."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

from common import ROOT

CASES = """
import pytest
from common import thorough

@pytest.mark.parametrize("last", ["x", *thorough("y")])
@pytest.mark.parametrize(("a", "b"), [(1, 2), pytest.param(3, 4, id="named"), [5, 6]])
@pytest.mark.parametrize("engine", ["one", "two"])
def test_crossed(engine, a, b, last): pass

@pytest.mark.parametrize("engine", ["one", "two", *thorough("three")])
def test_listed(engine): pass

def test_plain(): pass
"""


def test_each_choice_of_each_list_is_left_in(
    tmp_path: Path, run_python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    """In as many cases as the longest list has; a list by itself is left as it is."""
    file = tmp_path / "test_cases.py"
    file.write_text(CASES)
    asked = ["--co", "-q", "-p", "conftest", "--rootdir", str(tmp_path), str(file)]
    code = f"import pytest; pytest.main({[*asked, '-m', 'not thorough']})"
    env = {"PYTHONPATH": f"{ROOT / 'tests'}:{ROOT / 'tests/shared'}", "PYTEST_ADDOPTS": ""}
    printed = run_python(code, env=env).stdout.splitlines()
    left = [line.partition("::")[2] for line in printed if "::" in line]
    assert left == [
        "test_crossed[one-1-2-x]",
        "test_crossed[one-5-6-x]",
        "test_crossed[two-named-x]",
        "test_listed[one]",
        "test_listed[two]",
        "test_plain",
    ]
