"""A process that stands back behind others of the machine, for a while."""

from __future__ import annotations

from pathlib import Path

import pytest

SESSION = Path("/proc/self/autogroup")

STANDS_BACK = """
import os
from pathlib import Path
from composer.system import hardware
os.setsid()
for stands_back in (True, False):
    hardware.stand_back(stands_back)
    nice = Path("/proc/self/autogroup").read_text().split()[-1:]  # empty without a group
    print(os.sched_getscheduler(0), *nice)
"""


@pytest.mark.skipif(not SESSION.exists(), reason="the kernel does not group by sessions")
def test_process_stands_back_and_takes_it_back(run_python) -> None:
    """Without any privilege: the nice value of a session of its own, and the scheduler's class."""
    done = run_python(STANDS_BACK)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["3 7", "0 0"]


@pytest.mark.skipif(not SESSION.exists(), reason="the kernel does not group by sessions")
def test_processes_of_one_session_stay_as_they_are(run_python) -> None:
    """The program's own session is not told to stand back."""
    before = SESSION.read_text()
    done = run_python(STANDS_BACK.replace("os.setsid()", ""))
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["3", "0"]
    assert SESSION.read_text() == before
