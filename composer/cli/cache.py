"""``composer cache``: what is kept on disk between processes, and the end of it."""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from composer.backends.tensorrt import cache as tensorrt
from composer.cli.usage import USAGE, Json, fail
from composer.errors import CacheWarning
from composer.knowledge.facts import Fact
from composer.knowledge.failure import Failure
from composer.knowledge.part import Part
from composer.knowledge.self_test import SelfTest
from composer.knowledge.verdict import Verdict
from composer.lowering.export import artefacts
from composer.registry import did_you_mean
from composer.system.disk import DiskCache, cache_dir

_KINDS: dict[str, type[Fact]] = {each.kind: each for each in (Failure, Part, SelfTest, Verdict)}
"""The kinds of facts that are kept on disk, by name."""

app = typer.Typer(help="What is kept on disk between processes.", no_args_is_help=True)


def _caches_of(kind: str) -> dict[str, DiskCache]:
    """Return the caches of a kind, or of every kind if it is empty, by name."""
    ours = [each.cache() for each in _KINDS.values()]
    others = artefacts.cache(), tensorrt.plans(), tensorrt.timings()
    known = {each.name: each for each in (*ours, *others)}
    if kind and kind not in known:
        fail(f"nothing kept is called {kind!r}{did_you_mean(kind, known)}", USAGE)
    return {kind: known[kind]} if kind else known


Kind = Annotated[str, typer.Argument(help="Such as failures; by default everything.")]

_SHOWN = 10
"""How many of the newest entries of each kind are listed, unless one kind is asked for."""


@app.command("list")
def list_entries(kind: Kind = "", as_json: Json = False) -> None:
    """Say what is kept, where, since when, and how large it is: all of a kind, or the newest."""
    caches = _caches_of(kind)
    with warnings.catch_warnings(action="ignore", category=CacheWarning):  # said below, once
        kept = {name: _rows(name, cache) for name, cache in caches.items()}
    troubles = [cache.trouble for cache in caches.values() if cache.trouble]
    if troubles:
        typer.echo(f"composer: {troubles[0]}", err=True)
    rows = list(itertools.chain.from_iterable(kept.values()))
    if as_json:
        typer.echo(json.dumps({"path": str(cache_dir()), "entries": rows}, indent=2))
        return
    typer.echo(f"{cache_dir()}: {_number(len(rows))}")
    if not rows:
        return
    if kind:
        Console().print(_table(rows))
        return
    newest = [each[:_SHOWN] for each in kept.values()]
    Console().print(_table(itertools.chain.from_iterable(newest)))
    for name, each in kept.items():
        if len(each) > _SHOWN:
            size = sum(row["bytes"] for row in each) / 2**20
            rest = f"`composer cache list {name}` lists them all"
            typer.echo(f"{name}: {_number(len(each))}, {size:.1f} MiB; {rest}")


def _table(rows: Iterable[dict[str, Any]]) -> Table:
    table = Table("kind", "key", "written, UTC", "KiB")
    table.add_column("what", overflow="fold")
    for row in rows:
        size = f"{row['bytes'] / 1024:.0f}"
        written = row["written"][:16].replace("T", " ")
        table.add_row(row["kind"], row["key"][:12], written, size, escape(row["what"]))
    return table


Kinds = Annotated[
    list[str] | None, typer.Argument(help="Such as failures verdicts; by default everything.")
]


@app.command()
def clear(kinds: Kinds = None) -> None:
    """Keep nothing of it any longer."""
    caches: dict[str, DiskCache] = {}
    for kind in kinds or [""]:
        caches |= _caches_of(kind)
    gone = 0
    for cache in caches.values():
        gone += cache.clear()
        if cache.trouble:
            fail(cache.trouble)
    typer.echo(f"{_number(gone)} removed from {cache_dir()}")


_LOWERED = {
    "model": "ONNX model of a graph, {nodes} nodes",
    "graph": "what a captured graph becomes",
    "vocabulary": "what the exporter can translate",
}
"""The text for an entry of the lowering's cache, by kind."""


def _number(entries: int) -> str:
    return "1 entry" if entries == 1 else f"{entries} entries"


def _rows(kind: str, cache: DiskCache) -> list[dict[str, Any]]:
    return [
        {
            "kind": kind,
            "key": entry.key,
            "written": datetime.fromtimestamp(entry.written, UTC).isoformat(timespec="seconds"),
            "bytes": entry.size,
            "what": _what(kind, entry.facts),
            "facts": entry.facts,
        }
        for entry in cache.entries()
    ]


def _what(kind: str, facts: dict[str, Any]) -> str:
    """Return an entry as one line: the engine, the model, and the result."""
    if "library" in facts:
        name, version = facts["library"]
        return f"{name}  {version}  for {facts['target']['gpu']}"
    if facts.get("kind") in _LOWERED:
        return _LOWERED[facts["kind"]].format(**facts)
    try:
        return _KINDS[kind].model_validate_json(json.dumps(facts)).sentence()
    except ValidationError:
        return f"no {_KINDS[kind].noun}"
