"""``composer policy``: is a file right, what does it say of a model, and what may stand in it."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import PydanticOmit
from rich.console import Console
from rich.table import Table

from composer.chain.candidates import ONLY_TABLES
from composer.cli.notes import notes
from composer.cli.toml_lines import line_of, line_of_error
from composer.cli.usage import Json, fail, fail_on
from composer.errors import ComposerError
from composer.knowledge.chosen import readable
from composer.policy import (
    AUTO,
    Cache,
    Distributed,
    Facts,
    Policy,
    PolicyBook,
    found,
    sources,
)
from composer.policy.mistakes import mistakes
from composer.policy.resolution import resolve
from composer.policy.wording import Location
from composer.records import EAGER
from composer.telemetry.report import counted
from composer.tools.bench.workload import working_directory_first

app = typer.Typer(help="Policies of models, in a file.", no_args_is_help=True)

_TO_BE_NAMED = "in force only where COMPOSER_CONFIG or composer.configure names it"


@app.command()
def check(file: Path) -> None:
    """Find what is wrong with a policy file: keys, values, names of engines and passes.

    Each mistake is a line, file:line: what.
    """
    working_directory_first()
    wrong = list(_mistakes(file))
    for line, message in sorted(wrong):
        typer.echo(f"{file}:{line}: {message}")
    if wrong:
        raise typer.Exit(1)
    book = sources.read(file)
    typer.echo(f"{file}: defaults and {counted(len(book.models), 'rule')}, nothing wrong")
    for each in found.for_the_user_to_say(book, file.absolute().parent):
        typer.echo(f"{file}: {_TO_BE_NAMED}, since it would {each}")
    for each in notes(book):
        typer.echo(f"{file}: {each}")


def _mistakes(file: Path) -> Iterator[tuple[int, str]]:
    """Yield each mistake of a file, with its line."""
    try:
        text = file.read_text(encoding="utf-8-sig")
        content = tomllib.loads(text)
        table = sources.table_in(file, content)
    except tomllib.TOMLDecodeError as error:
        yield line_of_error(error, text), f"this is not TOML: {error}"
        return
    except (OSError, UnicodeDecodeError) as error:
        fail(f"policy file {str(file)!r} cannot be read: {error}")
    except ComposerError as error:
        yield 1, str(error)
        return
    above = ("tool", "composer") if file.name == sources.PROJECT_FILE else ()
    book, wrong = sources.validated(table)
    for location, message in wrong:
        yield line_of(text, (*above, *location)), message
    if book is None:
        for location, _ in wrong:  # so that the rest can be checked
            _remove(table, location)
        book, _ = sources.validated(table)
    for location, mistake in mistakes(book or PolicyBook(), imports=True):
        yield line_of(text, (*above, *location)), str(mistake)


def _remove(part: Any, location: Location) -> bool:
    """Remove the smallest part that holds a mistake; return False if it is gone already."""
    key, *inner = location
    is_list = isinstance(part, list)
    if not is_list and not (isinstance(part, dict) and key in part):
        return False
    if inner and _remove(part[key], tuple(inner)):
        return True
    if is_list:
        part[int(key)] = EAGER  # in place of a candidate
    else:
        del part[key]
    return True


@app.command()
def show(
    model: Annotated[str, typer.Option(help="Class or function, or the name given to it.")] = "",
    device: Annotated[str, typer.Option(help="Such as cpu or cuda:0.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="The most common floating dtype.")] = "float32",
    training: Annotated[bool, typer.Option("--training", help="Grad mode is on.")] = False,
    dynamic: Annotated[bool, typer.Option("--dynamic", help="Some size is a symbol.")] = False,
    file: Annotated[Path | None, typer.Option(help="By default the one in force here.")] = None,
    as_json: Json = False,
) -> None:
    """Say which policy holds for a model, and where each field comes from."""
    graph = Facts(model, device, dtype, training, dynamic)
    if file is not None:
        os.environ["COMPOSER_CONFIG"] = str(file.absolute())  # which goes before all others
    with fail_on(ComposerError, code=1):
        resolved = resolve(graph, ONLY_TABLES)
    rows = []
    for name in Policy.model_fields:
        value = _text(getattr(resolved.policy, name))
        rows.append((name, value, resolved.origins.get(name, "composer")))
    rows += _of_process(resolved.cache, "cache") + _of_process(resolved.distributed, "distributed")
    if as_json:
        names = ("field", "value", "from")
        typer.echo(json.dumps([dict(zip(names, row, strict=True)) for row in rows], indent=2))
        return
    in_force = sources.file_in_force(None)
    nowhere = "no policy file: COMPOSER_CONFIG names none, and none lies in this folder"
    typer.echo(f"policy file: {in_force}" if in_force else nowhere)
    table = Table("field", "value", "from")
    for name, value, origin in rows:
        text = value if isinstance(value, str) else json.dumps(value)
        table.add_row(name, text, origin)
    Console().print(table)


def _of_process(table: Cache | Distributed, name: str) -> list[tuple[str, Any, str]]:
    """Return the rows of the settings that hold for the whole process."""
    return [
        (f"{name}.{key}", value, name if key in table.model_fields_set else "composer")
        for key, value in table.model_dump().items()
    ]


def _text(value: Any) -> Any:
    """Return a value as a policy file spells it; a value that only code can give is named."""
    return None if value is None else readable(value)


@app.command()
def schema() -> None:
    """Print the JSON schema of a policy file, by which editors complete it."""
    made = PolicyBook.model_json_schema(schema_generator=_OfFile)
    typer.echo(json.dumps({"$schema": _OfFile.schema_dialect, "$id": _ID, **made}, indent=2))


_ID = "urn:torch-compile-composer:policy-1.json"
"""The name of the schema, with the version of the file's format."""


class _OfFile(GenerateJsonSchema):
    """The schema of a file: it has no callables, and a name may stand in place of a table."""

    def callable_schema(self, schema: Any) -> Any:
        raise PydanticOmit

    def tuple_schema(self, schema: Any) -> Any:
        made = super().tuple_schema(schema)
        if "Candidate" in str(made.get("items", {}).get("$ref", "")):
            made["items"] = {"anyOf": [{"type": "string"}, made["items"]]}
            return {"anyOf": [made, {"const": AUTO}]}
        return made
