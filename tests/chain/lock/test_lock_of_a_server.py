"""``composer lock`` of a script that a signal ends: what it compiled until then is written."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
from forked import Interpreter
from locks import LOCK, program

from composer.knowledge import lock_file

STOPS = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a shell's background
def stop(number):
    os.kill(os.getpid(), number)
    time.sleep(60)
"""

SERVES = f"compiled(torch.ones(4)){STOPS}"


@pytest.fixture
def composer(interpreter: Interpreter) -> Any:
    """Runs the command in a process of its own."""

    def run(*args: str) -> subprocess.CompletedProcess[str]:
        return interpreter.run(["-m", "composer", *args])

    return run


@pytest.mark.parametrize(
    ("signal", "status", "name"), [("SIGINT", 130, "Ctrl-C"), ("SIGTERM", 143, "SIGTERM")]
)
def test_script_that_is_stopped_is_locked(
    composer: Any, signal: str, status: int, name: str
) -> None:
    """Its exit handlers run; the command says so and has the signal's exit status."""
    stopped = f"try: stop(signal.{signal})\nfinally: print('closed')"
    program(f"{SERVES}{stopped}", chain=["eager"])
    done = composer("lock", "script.py")
    assert done.returncode == status, done.stderr
    assert done.stdout.startswith("closed\n")
    assert f"{LOCK.absolute()}: 1 graph, served by: eager 1" in done.stdout
    assert f"{name} ended the script; composer.lock holds what it had compiled by then" in (
        done.stderr
    )
    assert len(lock_file.read(LOCK).graphs) == 1
    done = composer("lock", "--check", "script.py")
    assert done.returncode == status
    assert "all as it says" in done.stdout
    program(f"compiled(torch.ones(5))\n{SERVES}{stopped}", chain=["eager"])
    done = composer("lock", "--check", "script.py")
    assert done.returncode == 1
    assert "2 differences" in done.stdout


def test_script_that_is_stopped_before_it_compiles_writes_nothing(composer: Any) -> None:
    """The exit status is that of the signal."""
    program(f"{STOPS}stop(signal.SIGTERM)", chain=["eager"])
    done = composer("lock", "script.py")
    assert (done.returncode, LOCK.exists()) == (143, False)
    assert "nothing was compiled through composer" in done.stderr


def test_script_may_handle_the_signal_itself(composer: Any) -> None:
    """As most servers do; it ends as it does without composer."""
    handles = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))"
    program(f"{SERVES}{handles}\nstop(signal.SIGTERM)", chain=["eager"])
    done = composer("lock", "script.py")
    assert done.returncode == 0, done.stderr
    assert len(lock_file.read(LOCK).graphs) == 1
    assert done.stderr == ""


def test_forked_child_of_the_script_ends_by_the_signal_as_ever(composer: Any) -> None:
    """A pool of processes stops its workers so."""
    child = (
        "import multiprocessing\n"
        "fork = multiprocessing.get_context('fork')\n"
        "ready = fork.Event()\n"
        "def work():\n"
        "    ready.set()\n"
        "    time.sleep(60)\n"
        "child = fork.Process(target=work)\n"
        "child.start()\n"
        "assert ready.wait(60)\n"
        "child.terminate()\n"
        "child.join()\n"
        "assert child.exitcode == -signal.SIGTERM, child.exitcode\n"
    )
    program(f"{SERVES}{child}", chain=["eager"])
    done = composer("lock", "script.py")
    assert done.returncode == 0, done.stderr
