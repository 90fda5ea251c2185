"""``composer cache``: what is kept on disk between processes, and the end of it."""

from __future__ import annotations

import json
import warnings
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from composer.backends.tensorrt import cache as tensorrt
from composer.cli.fail import fail
from composer.cli.options import Json
from composer.errors import CacheWarning
from composer.lowering import keeping
from composer.registry import did_you_mean
from composer.store import failures, verdicts
from composer.store.disk import Entry, Shelf, cache_dir
from composer.store.ledger import Ledger

app = typer.Typer(help="What is kept on disk between processes.", no_args_is_help=True)


def _shelves() -> dict[str, Shelf | Ledger]:
    """Every kind of thing that is kept, by its name."""
    shelves = failures.shelf(), tensorrt.plans(), tensorrt.timings(), keeping.shelf()
    return {each.name: each for each in (*shelves, verdicts.ledger())}


@app.command("list")
def list_entries(as_json: Json = False) -> None:
    """Say what is kept, where, since when, and how large it is."""
    shelves = _shelves()
    with warnings.catch_warnings(action="ignore", category=CacheWarning):  # said below, once
        rows = [_row(name, entry) for name, shelf in shelves.items() for entry in shelf.entries()]
    if trouble := next((shelf.trouble for shelf in shelves.values() if shelf.trouble), ""):
        typer.echo(f"composer: {trouble}", err=True)
    if as_json:
        typer.echo(json.dumps({"path": str(cache_dir()), "entries": rows}, indent=2))
        return
    typer.echo(f"{cache_dir()}: {_number(len(rows))}")
    if not rows:
        return
    table = Table("kind", "key", "written, UTC", "KiB")
    table.add_column("what", overflow="fold")
    for row in rows:
        size = f"{row['bytes'] / 1024:.0f}"
        written = row["written"][:16].replace("T", " ")
        table.add_row(row["kind"], row["key"][:12], written, size, escape(row["what"]))
    Console().print(table)


@app.command()
def clear(
    kind: Annotated[str, typer.Argument(help="Such as failures; by default everything.")] = "",
) -> None:
    """Keep nothing of it any longer."""
    shelves = _shelves()
    if kind and kind not in shelves:
        guess = did_you_mean(kind, shelves)
        fail(f"nothing kept is called {kind!r}{guess}")
    gone = 0
    for name, shelf in shelves.items():
        if kind in ("", name):
            gone += shelf.clear()
            if shelf.trouble:
                fail(shelf.trouble)
    typer.echo(f"{_number(gone)} removed from {cache_dir()}")


_LOWERED = {
    "model": "ONNX model of a graph, {nodes} nodes",
    "graph": "which ONNX model a captured graph becomes",
    "vocabulary": "what the exporter can translate",
}
"""What the lowering keeps, by kind."""


def _number(entries: int) -> str:
    return f"{entries} {'entry' if entries == 1 else 'entries'}"


def _row(kind: str, entry: Entry) -> dict[str, Any]:
    written = datetime.fromtimestamp(entry.written, UTC).isoformat(timespec="seconds")
    return {
        "kind": kind,
        "key": entry.key,
        "written": written,
        "bytes": entry.size,
        "what": _what(entry.facts),
        "facts": entry.facts,
    }


def _what(facts: dict[str, Any]) -> str:
    """One line for a person: the engine, the model, and what became of it."""
    if "candidates" in facts:
        return verdicts.sentence(facts)
    if "library" in facts:
        return "  ".join([*map(str, facts["library"]), f"for {facts['target']['gpu']}"])
    if facts.get("kind") in _LOWERED:
        return _LOWERED[facts["kind"]].format(**facts)
    named = (facts["backend"], facts["model"], facts["device"])
    return "  ".join((*named, f"{facts['status']} ({facts['reason']})", facts["message"]))
