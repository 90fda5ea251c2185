"""The options that several commands have, and the end of a command that was used wrongly."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NoReturn

import typer

Json = Annotated[bool, typer.Option("--json", help="For a program to read.")]
Remember = Annotated[
    bool, typer.Option("--remember/--no-remember", help="Keep verdicts for later processes.")
]
PolicyFile = Annotated[Path | None, typer.Option("--policy", help="Sets COMPOSER_CONFIG.")]

USAGE = 2
"""The exit code of a command that was used in a wrong way; typer uses the same."""


def fail(what: str, code: int = 1) -> NoReturn:
    """Print on stderr what is wrong, and exit."""
    typer.echo(f"composer: {what}", err=True)
    raise typer.Exit(code)


def refuse_folder(file: Path) -> None:
    """End the command if a file to be written is a folder, or its folder does not exist."""
    if file.is_dir():
        fail(f"{str(file)!r} is a folder", USAGE)
    if not file.parent.is_dir():
        fail(f"there is no folder {str(file.parent)!r}", USAGE)
