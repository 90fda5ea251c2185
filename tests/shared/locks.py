"""Locks to test with: scripts that are locked, the commands, and a locked function."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from click.testing import Result
from common import compiled
from torch._dynamo.exc import BackendCompilerFailed
from typer.testing import CliRunner

import composer
from composer.chain.lock.observed import lock_of, observing
from composer.cli import app
from composer.errors import LockError
from composer.knowledge import lock_file

LOCK = Path("composer.lock")

TITLE = f"{__name__}.cosine"
"""The model of the locked function."""


def program(*lines: str, **options: Any) -> None:
    """Write ``script.py``: ``f`` is a cosine, compiled with these options."""
    head = f"""
import torch
from composer.testing import FakeBackend

def f(x):
    return torch.cos(x) + 1

compiled = torch.compile(f, backend="composer", options={options or None})
"""
    Path("script.py").write_text(head + "\n".join(lines or ["compiled(torch.ones(4))"]) + "\n")


def run(*args: Any) -> Result:
    """A command, with a Dynamo that has compiled nothing."""
    torch.compiler.reset()
    composer.reset()
    return CliRunner().invoke(app, [str(each) for each in args])


def lock(*args: Any) -> dict[str, Any]:
    done = run("lock", *args, "script.py")
    assert done.exit_code == 0, done.output
    return tomllib.loads(LOCK.read_text())


def differences(*args: Any) -> list[str]:
    """What ``composer lock --check`` says, and that its exit code goes with it."""
    done = run("lock", "--check", *args, "script.py")
    first, *told = done.stdout.splitlines()
    assert done.exit_code == (1 if told else 0), done.output
    assert first.startswith(str(LOCK.absolute()))
    return [each.strip() for each in told]


def edit(change: Callable[[dict[str, Any]], None]) -> None:
    """Change the lock file, as a text editor would."""
    table = tomllib.loads(LOCK.read_text())
    change(table)
    LOCK.write_text(f"# composer lock\n{tomli_w.dumps(table)}")


def cosine(x: torch.Tensor) -> torch.Tensor:
    return torch.cos(x) + 1


def locked_for(**options: Any) -> None:
    """Write the lock of ``cosine`` with these options."""
    with observing() as observed:
        compiled(cosine, **options)(torch.ones(4))
    lock_file.write(LOCK, lock_of(observed.served()), ["by", "hand"])
    torch.compiler.reset()


def refused(x: torch.Tensor | None = None, **options: Any) -> LockError:
    """The error of a locked compile."""
    with pytest.raises(BackendCompilerFailed) as caught:
        compiled(cosine, **{"locked": True} | options)(torch.ones(4) if x is None else x)
    torch.compiler.reset()
    error = caught.value.inner_exception
    assert isinstance(error, LockError)
    assert error.path == LOCK.absolute()
    assert "`composer lock` writes it anew" in str(error)
    return error
