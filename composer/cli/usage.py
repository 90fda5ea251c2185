"""The options that several commands have, and the end of a command that was used wrongly."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def fail_on(*errors: type[Exception], code: int = USAGE) -> Iterator[None]:
    """End the command if one of these errors is raised, with its message."""
    try:
        yield
    except errors as error:
        fail(str(error), code)


@contextmanager
def fail_if_not(done: str, file: Path, code: int = 1) -> Iterator[None]:
    """End the command if a file cannot be ``done``, such as ``"read"`` or ``"written"``."""
    try:
        yield
    except OSError as error:
        fail(f"{str(file)!r} cannot be {done}: {error.strerror}", code)


def refuse_folder(file: Path) -> None:
    """End the command if a file to be written is a folder, or its folder does not exist."""
    if file.is_dir():
        fail(f"{str(file)!r} is a folder", USAGE)
    if not file.parent.is_dir():
        fail(f"there is no folder {str(file.parent)!r}", USAGE)
