"""``composer repro``: a folder by which others can see what an engine does wrong."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from composer.cli.usage import USAGE, Json, fail, fail_on
from composer.errors import ReproError, UnknownNameError
from composer.records import CompileReport
from composer.telemetry import reader
from composer.tools.repro import Reproduction, failed_engine, make, source_of

Source = Annotated[
    Path, typer.Argument(help="A file of COMPOSER_TELEMETRY, or a folder that composer wrote.")
]
Graph = Annotated[
    int | None, typer.Option(help="The graph's number; by default the last that went wrong.")
]
Engine = Annotated[
    str, typer.Option(help="The engine; by default the first that went wrong on the graph.")
]
To = Annotated[Path | None, typer.Option("--to", help="The folder to make.")]
WithData = Annotated[
    bool, typer.Option("--with-data", help="Put the values of weights and inputs into the folder.")
]
Seconds = Annotated[
    float | None, typer.Option(min=1.0, help="The time after which an engine counts as hanging.")
]


def repro(
    source: Source,
    graph: Graph = None,
    engine: Engine = "",
    to: To = None,
    with_data: WithData = False,
    seconds: Seconds = None,
    as_json: Json = False,
) -> None:
    """Make a folder that shows others what an engine does wrong on a graph, and run it."""
    with fail_on(UnknownNameError), fail_on(ReproError, code=1):
        kept = source
        if not source.is_dir():
            report = _report(source, graph)
            engine = engine or failed_engine(report)
            kept = source_of(report, engine)
        folder = to or Path(f"repro-{kept.name}")
        made = make(kept, folder, engine, with_data, seconds)
    typer.echo(_json(made) if as_json else f"{made.said.rstrip()}\n{made}")


def _json(made: Reproduction) -> str:
    return json.dumps({**dataclasses.asdict(made), "folder": str(made.folder)})


def _report(source: Path, number: int | None) -> CompileReport:
    """Return a graph of a file of records: the last with this number, or that went wrong."""
    try:
        readout = reader.read([source])
    except OSError as error:
        fail(f"{str(error.filename)!r} cannot be read: {error.strerror}", USAGE)
    found = None
    for recording in readout.recordings:
        for each in recording.report.graphs:
            is_wanted = each.number == number
            if number is None:
                is_wanted = bool(failed_engine(each))
            if is_wanted:
                found = each
    if found is None:
        which = "on which an engine went wrong" if number is None else number
        raise ReproError(f"{str(source)!r} has no graph {which}")
    return found
