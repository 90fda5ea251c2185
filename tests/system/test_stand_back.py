"""A process that stands back behind others of the machine."""

from __future__ import annotations

from pathlib import Path

import pytest

SESSION = Path("/proc/self/autogroup")

STANDS_BACK = """
import os
from pathlib import Path
from composer.system.subprocesses import serving
os.setsid()
before = os.nice(0)  # of whoever runs the tests
serving.stand_back()
nice = Path("/proc/self/autogroup").read_text().split()[-1:]  # empty without a group
print(os.nice(0) == min(before + 9, 19), *nice)
"""


@pytest.mark.skipif(not SESSION.exists(), reason="the kernel does not group by sessions")
def test_process_stands_back(run_python) -> None:
    """Without any privilege: by its own nice value, and by that of a session of its own."""
    done = run_python(STANDS_BACK)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0] == "True"
    assert done.stdout.split()[1:] in ([], ["9"])


@pytest.mark.skipif(not SESSION.exists(), reason="the kernel does not group by sessions")
def test_processes_of_one_session_stay_as_they_are(run_python) -> None:
    """The program's own session is not told to stand back."""
    before = SESSION.read_text()
    done = run_python(STANDS_BACK.replace("os.setsid()", ""))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0] == "True"
    assert SESSION.read_text() == before
