"""``composer run --override``: a program that names another backend runs through composer."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch

from composer import _torch
from composer.cli.usage import fail

VARIABLE = "TORCH_COMPILE_OVERRIDE_BACKENDS"
"""torch's own debugging switch. Child processes of the program inherit it."""

EVERY_GRAPH = ">=0:composer"
"""The switch's value that gives every graph to composer."""


def override() -> dict[str, None]:
    """Give every graph of this process, and of its child processes, to composer.

    Returns:
        The names of the backends that the program asks :func:`torch.compile` for, in the order of
        their first use. The program fills it while it runs.

    Raises:
        typer.Exit: this torch has no such switch; a message on stderr says so.
    """
    if not _torch.dynamo.override_backend(EVERY_GRAPH):
        fail(f"--override needs {VARIABLE}, which torch {torch.__version__} does not have")
    os.environ[VARIABLE] = EVERY_GRAPH
    asked: dict[str, None] = {}
    compile_of_torch = torch.compile

    @functools.wraps(compile_of_torch)
    def noting(*args: Any, backend: Any = "inductor", **kwargs: Any) -> Any:
        asked[backend if isinstance(backend, str) else str(backend)] = None
        return compile_of_torch(*args, backend=backend, **kwargs)

    torch.compile = noting
    return asked


def summary(asked: dict[str, None]) -> str:
    """The line of the report that says which backends the program had asked for."""
    others = [name for name in asked if name != "composer"]
    if not others:
        return "the program itself asked for no other backend than composer\n"
    return f"the program asked for {', '.join(others)}; --override gave its graphs to composer\n"
