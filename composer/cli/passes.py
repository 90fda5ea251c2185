"""``composer passes``: which shared passes a policy can name here, and what each one is."""

from __future__ import annotations

import dataclasses
import inspect
import json
from importlib.metadata import packages_distributions
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from composer.cli.usage import Json, fail_on
from composer.errors import ComposerError, OptionError, class_and_text, first_line
from composer.passes.base import GraphPass
from composer.passes.digests import fields_of
from composer.passes.resolve import PASSES, check_class, look_up
from composer.tools.bench.workload import working_directory_first

app = typer.Typer(help="The shared passes that a policy can name.", no_args_is_help=True)


@app.command("list")
def list_passes(as_json: Json = False) -> None:
    """Say which passes there are, and from which package."""
    rows = [_row(name) for name in PASSES.names()]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    table = Table(Column("name", no_wrap=True), "stage", "what it does", "package")
    for row in rows:
        table.add_row(*map(escape, row.values()))
    Console().print(table)


@app.command()
def show(name: str, as_json: Json = False) -> None:
    """Say all about one pass, by its name or as module:Class."""
    working_directory_first()
    with fail_on(ComposerError, code=1), fail_on(OptionError):
        check_class(look_up(name))
        facts = _facts(name)
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    fields = facts.pop("fields")
    typer.echo(f"{facts.pop('name')}\n\n{facts.pop('doc')}\n")
    for key, value in facts.items():
        typer.echo(f"{key + ':':<9} {value}")
    for each in fields:
        default = f" = {each['default']}" if "default" in each else ""
        typer.echo(f"field:    {each['name']}: {each['type']}{default}")


def _row(name: str) -> dict[str, str]:
    """Return a pass's row; for a pass that cannot be imported, the row says why."""
    try:
        graph_pass = PASSES.get(name)
    except Exception as error:  # noqa: BLE001  # another package's module may raise anything
        problem = f"cannot be imported: {class_and_text(error)}"
        return {"name": name, "stage": "", "doc": problem, "package": ""}
    stage, doc = str(getattr(graph_pass, "stage", "")), first_line(_doc(graph_pass))
    return {"name": name, "stage": stage, "doc": doc, "package": _package(graph_pass)}


def _facts(name: str) -> dict[str, Any]:
    graph_pass = look_up(name)
    fields = []
    if isinstance(graph_pass, type) and issubclass(graph_pass, GraphPass):
        fields = [_field(each) for each in fields_of(graph_pass)]
    return {
        "name": name,
        "doc": _doc(graph_pass),
        "stage": str(getattr(graph_pass, "stage", "")),
        "package": _package(graph_pass),
        "uuid": _uuid(graph_pass),
        "source": _source(graph_pass),
        "fields": fields,
    }


def _field(each: dataclasses.Field[Any]) -> dict[str, str]:
    kind = each.type if isinstance(each.type, str) else inspect.formatannotation(each.type)
    described = {"name": each.name, "type": kind}
    default = each.default
    if each.default_factory is not dataclasses.MISSING:
        default = each.default_factory()
    if default is not dataclasses.MISSING:
        described["default"] = repr(default)
    return described


def _doc(graph_pass: Any) -> str:
    """Return the pass's own docstring, not that of a base class."""
    own = graph_pass.__dict__.get("__doc__") if isinstance(graph_pass, type) else graph_pass.__doc__
    return inspect.cleandoc(own or "")


def _package(graph_pass: Any) -> str:
    """Return the distribution of a pass; if there is none, its top-level module."""
    top = str(getattr(graph_pass, "__module__", "")).partition(".")[0]
    return ", ".join(sorted(set(packages_distributions().get(top, [top]))))


def _uuid(graph_pass: Any) -> str:
    """Return the uuid with default parameters; empty if a parameter has no default."""
    try:
        return graph_pass().uuid() or ""
    except Exception:  # noqa: BLE001  # it takes parameters, or is no class
        return ""


def _source(graph_pass: Any) -> str:
    try:
        return inspect.getsourcefile(graph_pass) or ""
    except TypeError:
        return ""
