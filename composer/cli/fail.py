"""How a command ends that cannot do what it was asked for."""

from __future__ import annotations

from typing import NoReturn

import typer

USAGE = 2
"""The exit code of a command that was used in a wrong way, as typer's own."""


def fail(what: str, code: int = 1) -> NoReturn:
    """Say on stderr what is wrong, and end."""
    typer.echo(f"composer: {what}", err=True)
    raise typer.Exit(code)
