"""Ends a command that cannot do what the user asked for."""

from __future__ import annotations

from typing import NoReturn

import typer

USAGE = 2
"""The exit code of a command that was used in a wrong way; typer uses the same."""


def fail(what: str, code: int = 1) -> NoReturn:
    """Print on stderr what is wrong, and exit."""
    typer.echo(f"composer: {what}", err=True)
    raise typer.Exit(code)
