"""The command ``composer``: which engines and passes are here, what policies and records say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from composer import capture
from composer.backends import BACKENDS, find_backend
from composer.cli import passes, policy
from composer.cli.report import report
from composer.errors import Refusal

app = typer.Typer(
    help="One torch.compile backend over several engines.",
    no_args_is_help=True,
    add_completion=False,
)

app.add_typer(passes.app, name="passes")
app.add_typer(policy.app, name="policy")
app.command()(report)

_PACKAGES = {"tensorrt": "torch-tensorrt", "onnxrt": "onnxruntime"}
"""The distribution whose version says most about an engine; torch itself for the others."""


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"torch-composer {version('torch-composer')}")
        raise typer.Exit


@app.callback()
def main(
    show_version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Take the options that come before a command."""


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="For a program to read.")] = False,
) -> None:
    """Say which engines can run graphs here, and what the others lack."""
    rows = list(_examine())
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    table = Table("backend", "here", "version", "what is missing")
    for row in rows:
        mark = "yes" if row["available"] else "no"
        table.add_row(str(row["backend"]), mark, str(row["version"]), str(row["message"]))
    Console().print(table)


def _examine() -> Iterator[dict[str, str | bool]]:
    """Probe every engine with a graph of one operation on this machine's first device."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    graph = torch.fx.Graph()
    graph.output((graph.call_function(torch.relu, (graph.placeholder("x"),)),))
    gm = torch.fx.GraphModule(torch.nn.Module(), graph)
    request = capture.read_request(gm, [torch.ones(1, device=device)])
    for name in BACKENDS.names():
        row = {"backend": name, "version": _version(name)}
        try:
            find_backend(name).probe(request)
        except Refusal as refusal:
            yield {**row, "available": False, "reason": refusal.reason, "message": str(refusal)}
        else:
            yield {**row, "available": True, "reason": "", "message": ""}


def _version(backend: str) -> str:
    try:
        return version(_PACKAGES.get(backend, "torch"))
    except PackageNotFoundError:
        return ""
