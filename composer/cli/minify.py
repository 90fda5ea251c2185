"""``composer minify``: the smallest program that still shows what an engine does wrong."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Annotated

import typer

from composer.cli.usage import USAGE, Json, fail, fail_on
from composer.errors import Refusal, ReproError
from composer.tools.minify import Result
from composer.tools.minify import minify as find

Source = Annotated[Path, typer.Argument(help="A folder that composer repro made.")]
To = Annotated[
    Path | None, typer.Option("--to", help="The folder for the results; a search goes on there.")
]
Seconds = Annotated[float, typer.Option(min=0.0, help="The time limit of the search.")]
Timeout = Annotated[
    float | None, typer.Option(min=0.1, help="The time after which an engine counts as hanging.")
]
Factor = Annotated[
    float | None,
    typer.Option(min=1.0, help="It is a fault to take so many times as long as eager mode."),
]

_INTERRUPTED = 130


def minify(
    source: Source,
    to: To = None,
    seconds: Seconds = 600.0,
    timeout: Timeout = None,
    factor: Factor = None,
    as_json: Json = False,
) -> None:
    """Find the smallest program on which an engine still does what a folder shows."""
    if not source.is_dir():
        fail(f"there is no folder {str(source)!r}", USAGE)
    folder = to or source.absolute().with_name(f"{source.absolute().name}-minified")
    tell = functools.partial(typer.echo, err=True)
    try:
        with fail_on(ReproError, Refusal, code=1):
            found = find(source, folder, seconds=seconds, timeout=timeout, factor=factor, said=tell)
    except KeyboardInterrupt:
        fail(f"interrupted; the same command goes on from {str(folder)!r}", _INTERRUPTED)
    typer.echo(_json(found) if as_json else _text(found))


def _json(found: Result) -> str:
    fields = dataclasses.asdict(found)
    return json.dumps({**fields, "folder": str(found.folder), "program": found.program})


def _text(found: Result) -> str:
    lines = [found.program, "", f"{found.fault}: {found.what}"]
    if found.first_wrong:
        lines.append(f"the first operator that is wrong: {found.first_wrong}")
    if not found.is_minimal:
        lines.append("the time was up; the same command goes on from here")
    lines.append(f"{found.folder}: {found.calls} operators; python run.py shows the fault")
    return "\n".join(lines)
