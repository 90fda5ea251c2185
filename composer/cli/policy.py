"""``composer policy``: is a file right, what does it say of a model, and what may stand in it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import PydanticOmit
from rich.console import Console
from rich.table import Table

from composer import book
from composer.cli.fail import fail
from composer.cli.notes import notes
from composer.cli.options import Json
from composer.contenders import contenders_of
from composer.errors import ComposerError
from composer.models.workload import working_directory_first
from composer.passes.resolve import shared_passes
from composer.policy import Candidate, Facts, Objective, Policy, Tolerance
from composer.records import plain
from composer.telemetry.report import counted

app = typer.Typer(help="Policies of models, in a file.", no_args_is_help=True)


_TO_BE_NAMED = "in force only where COMPOSER_CONFIG or composer.configure names it"


@app.command()
def check(file: Path) -> None:
    """Find what is wrong with a policy file: keys, values, names of engines and passes."""
    working_directory_first()
    mistakes = list(_mistakes(file))
    for each in mistakes:
        typer.echo(f"composer: {each}", err=True)
    if mistakes:
        raise typer.Exit(1)
    found = book.read(file)
    typer.echo(f"{file}: defaults and {counted(len(found.models), 'rule')}, nothing wrong")
    for each in book.for_the_user_to_say(found, file.absolute().parent):
        typer.echo(f"{file}: {_TO_BE_NAMED}, since it would {each}")
    for each in notes(found):
        typer.echo(f"{file}: {each}")


def _mistakes(file: Path) -> Iterator[str]:
    try:
        found = book.read(file)
    except ComposerError as error:
        yield str(error)
        return
    tables = {"defaults": found.defaults}
    tables |= {f"models[{index}]": rule for index, rule in enumerate(found.models)}
    for name, options in found.backends.items():
        tables[f"backends.{name}"] = Policy(chain=(Candidate(backend=name, options=options),))
    for name, policy in tables.items():
        for step in (contenders_of, lambda p: shared_passes(p.passes, p.on_pass_error)):
            try:
                step(policy)
            except ComposerError as error:
                yield f"{file}: {name}: {error}"


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
    try:
        rules = book.resolve(graph)
    except ComposerError as error:
        fail(str(error))
    rows = [
        (name, _text(getattr(rules.policy, name)), rules.origins.get(name, "composer"))
        for name in Policy.model_fields
    ]
    if as_json:
        names = ("field", "value", "from")
        typer.echo(json.dumps([dict(zip(names, row, strict=True)) for row in rows], indent=2))
        return
    found = book.file_in_force(None)
    nowhere = "no policy file: COMPOSER_CONFIG names none, and none lies in this folder"
    typer.echo(f"policy file: {found}" if found else nowhere)
    table = Table("field", "value", "from")
    for row in rows:
        table.add_row(row[0], row[1] if isinstance(row[1], str) else json.dumps(row[1]), row[2])
    Console().print(table)


def _text(value: Any) -> Any:
    """As the file would say it; what code alone can give by its name."""
    if isinstance(value, tuple):
        return [_text(each) for each in value]
    if isinstance(value, Tolerance | Objective):
        return value.model_dump(exclude_none=True)
    if not isinstance(value, Candidate):
        return plain(value)
    options = {"options": plain(value.options)} if value.options else {}
    given = options | value.model_dump(exclude={"backend", "options"}, exclude_none=True)
    return {"backend": value.name, **given} if given else value.name


@app.command()
def schema() -> None:
    """Print the JSON schema of a policy file, by which editors complete it."""
    typer.echo(json.dumps(book.PolicyBook.model_json_schema(schema_generator=_OfFile), indent=2))


class _OfFile(GenerateJsonSchema):
    """What a file may hold: no callables, and names where a table may stand."""

    def callable_schema(self, schema: Any) -> Any:
        raise PydanticOmit

    def tuple_schema(self, schema: Any) -> Any:
        made = super().tuple_schema(schema)
        if "Candidate" in str(made.get("items", {}).get("$ref", "")):
            made["items"] = {"anyOf": [{"type": "string"}, made["items"]]}
        return made
