"""How a command ends that cannot do what it was asked for."""

from __future__ import annotations

from typing import NoReturn

import typer

from composer import book
from composer.errors import OptionError

USAGE = 2
"""The exit code of a command that was used in a wrong way, as typer's own."""


def fail(what: str, code: int = 1) -> NoReturn:
    """Say on stderr what is wrong, and end."""
    typer.echo(f"composer: {what}", err=True)
    raise typer.Exit(code)


def refuse_switches(why: str) -> None:
    """End where the environment says which engines are tried, whatever the policy says."""
    try:
        switch = book.switch_on_call()
    except OptionError as mistake:
        fail(str(mistake), USAGE)
    if switch:
        fail(f"{switch} is set, and {why}; unset it", USAGE)
