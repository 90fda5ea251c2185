"""The command ``composer``: a script's report, files of records, engines, passes, policies."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

from composer.cli import bench, cache, doctor, lock, passes, policy, reasons, report, run, tune

app = typer.Typer(
    help="One torch.compile backend over several engines.",
    no_args_is_help=True,
    add_completion=False,
)

app.command(context_settings=run.ARGUMENTS)(run.run)
app.command(context_settings=run.ARGUMENTS)(run.explain)
app.command(context_settings=run.ARGUMENTS)(lock.lock)
app.command("assert", context_settings=run.ARGUMENTS)(lock.compare)
app.command()(report.report)
app.command()(reasons.reasons)
app.command()(doctor.doctor)
app.command()(bench.bench)
app.command()(tune.tune)
app.add_typer(cache.app, name="cache")
app.add_typer(passes.app, name="passes")
app.add_typer(policy.app, name="policy")


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
