"""``composer replay``: what an upgrade changed for the graphs of a lock."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from composer.cli.process import refuse_switches
from composer.cli.usage import USAGE, Json, fail_if_not, fail_on
from composer.errors import Refusal, ReproError
from composer.records import printable
from composer.telemetry.report import counted
from composer.tools.replay import Replayed
from composer.tools.replay import replay as run

Source = Annotated[Path, typer.Argument(help="The folder of composer lock --graphs.")]
Engines = Annotated[
    list[str] | None, typer.Option("--engine", help="Only this engine; may be given several times.")
]
Seconds = Annotated[
    float, typer.Option(min=1.0, help="The time after which an engine counts as hanging.")
]
Keep = Annotated[
    bool, typer.Option("--keep", help="Later replays are compared with these results.")
]


def replay(
    folder: Source = Path("composer.graphs"),
    engines: Engines = None,
    seconds: Seconds = 300.0,
    keep: Keep = False,
    as_json: Json = False,
) -> None:
    """Compile the graphs of a lock with what is installed now, and say what changed."""
    refuse_switches("would decide for the engines")
    tell = functools.partial(typer.echo, err=True)
    with (
        fail_on(ReproError, code=USAGE),
        fail_on(Refusal, code=1),
        fail_if_not("read or written", folder),
    ):
        replayed = run(folder, engines=engines or (), seconds=seconds, keep=keep, said=tell)
    worse = sum(each.is_worse for each in replayed)
    if as_json:
        rows = [{**dataclasses.asdict(each), "is_worse": each.is_worse} for each in replayed]
        typer.echo(json.dumps({"folder": str(folder), "worse": worse, "results": rows}))
    else:
        _print(replayed, worse)
    raise typer.Exit(int(worse > 0))


def _print(replayed: Sequence[Replayed], worse: int) -> None:
    """Print the versions that changed, a table, and what is not as it was."""
    console = Console(highlight=False)
    for line in _upgrades(replayed):
        console.print(escape(line))
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("graph", "engine", "now"):
        table.add_column(heading, overflow="fold")
    table.add_column("error / eager's", justify="right")
    table.add_column("times eager's speed", justify="right")
    for each in replayed:
        now = each.now
        errors = " / ".join(map("{:.0e}".format, now.errors))
        table.add_row(*map(escape, (each.graph, each.engine, now.outcome, errors, now.speed)))
    console.print(table)
    for line in _lines(replayed):
        console.print(escape(printable(line)))
    first = sum(each.then is None for each in replayed)
    if first:
        console.print(f"{counted(first, 'result')} kept: later replays are compared with them")
    console.print(f"{worse} of {counted(len(replayed), 'result')} worse")


def _upgrades(replayed: Sequence[Replayed]) -> Iterator[str]:
    """Yield the versions that are not those of the earlier results, each once."""
    pairs = [(each.then, each.now) for each in replayed if each.then is not None]
    changed = {
        (name, then.versions.get(name, "none"), version)
        for then, now in pairs
        for name, version in now.versions.items()
    }
    yield from sorted(f"{name} {old} -> {new}" for name, old, new in changed if old != new)


def _lines(replayed: Sequence[Replayed]) -> Iterator[str]:
    """Yield what changed, and without an earlier result what goes wrong."""
    for each in replayed:
        for change in each.changes:
            mark = "worse: " if change.is_worse else ""
            yield f"{each.graph} by {each.engine}: {mark}{change.text}"
