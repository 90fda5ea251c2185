"""What tests call: composer with a chain, the newest report, marks, and the project's folder."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import composer
from composer.system import distribution

ROOT = Path(__file__).parents[2]
"""The project's folder."""


upstream = pytest.mark.thorough
"""Marks a test of what is wrong in a library. It fails when a workaround may go."""


def thorough(*cases: Any) -> list[Any]:
    """Cases of a list that the others nearly stand for, and that take long; see ``pyproject.toml``.

    Such as Inductor where other engines would tell: its C++ compiler takes seconds for each graph.
    """
    given = (each if isinstance(each, tuple) else (each,) for each in cases)
    return [pytest.param(*each, marks=pytest.mark.thorough) for each in given]


def needs_torch(version: str, why: str) -> pytest.MarkDecorator:
    """Skip with a torch of the range that composer supports, but before ``version``."""
    numbers = tuple(map(int, version.split(".")))
    ours = tuple(map(int, torch.__version__.split(".")[:2]))
    return pytest.mark.skipif(ours < numbers, reason=f"torch < {version}: {why}")


@contextlib.contextmanager
def fault_of(package: str, *, before: str | None = None) -> Iterator[None]:
    """Within, a test asserts what is wrong upstream. It passes where that is so just as it is said.

    Args:
        package: The distribution that has the fault.
        before: The first release without the fault; ``None`` as long as no release has mended it.
    """
    here = distribution.version_of(package)
    is_there = before is None or _release(here) < _release(before)
    try:
        yield
    except (AssertionError, pytest.fail.Exception):
        if is_there:
            raise
    else:
        assert is_there, f"{package} {here} has the fault, which {before} is said to have mended"


def _release(version: str) -> list[int]:
    return [int(each) for each in re.findall(r"\d+", version)[:2]]


def compiled(function: Any, *chain: Any, dynamic: bool | None = None, **options: Any) -> Any:
    """``torch.compile`` through composer with this chain, or the default one if none is given.

    A choice by measurement starts no sandboxes; tests/chain/sandbox has the tests of those.
    """
    if chain:
        options["chain"] = list(chain)
    if "select" in options:
        options.setdefault("isolate", False)
    return torch.compile(function, backend="composer", options=options or None, dynamic=dynamic)


def in_child(do: Callable[[], object]) -> int:
    """The exit code of a forked child that does this: 1 after an error, a signal's if it hangs."""
    child = os.fork()
    if not child:
        signal.alarm(30)
        try:
            do()
            os._exit(0)
        finally:
            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def in_threads(work: Callable[[Any], object], arguments: Iterable[Any]) -> None:
    """Call ``work`` with each of the arguments, in threads that all run at once, until they end."""
    threads = [threading.Thread(target=work, args=(each,)) for each in arguments]
    for each in threads:
        each.start()
    for each in threads:
        each.join()


def last() -> composer.CompileReport:
    """The newest report."""
    return composer.reports()[-1]
