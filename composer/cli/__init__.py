"""The command ``composer``: a script's report, files of records, engines, passes, policies.

A command's module is imported when it is run, or asked for its help. Most of them take torch along,
which takes seconds.
"""

from __future__ import annotations

import importlib
from importlib.metadata import version
from typing import Annotated, Any, cast

import typer
from typer.core import TyperCommand, TyperGroup

from composer.system import distribution

COMMANDS = {
    "run": ("run:run", "Run a script and print composer's report; the exit code is the script's."),
    "lock": (
        "lock:lock",
        "Run a script and write down which engine serves each graph; --check compares with that.",
    ),
    "report": (
        "report:report",
        "Say which engine ran each graph of a run, from the files that its processes wrote.",
    ),
    "reasons": (
        "reasons:reasons",
        "Say what the reason codes of attempts mean, how to see more, and what to do.",
    ),
    "repro": (
        "repro:repro",
        "Make a folder that shows others what an engine does wrong on a graph, and run it.",
    ),
    "minify": (
        "minify:minify",
        "Find the smallest program on which an engine still does what a folder shows.",
    ),
    "replay": (
        "replay:replay",
        "Compile the graphs of a lock with what is installed now, and say what changed.",
    ),
    "doctor": (
        "doctor:doctor",
        "Try each engine on two small graphs, and say which it serves and what the others lack.",
    ),
    "bench": (
        "bench:bench",
        "Time eager, each engine and composer on a model, and say which policy follows.",
    ),
    "tune": (
        "tune:tune",
        "Measure the engines of the policy in force on models, and keep the verdicts.",
    ),
    "cache": ("cache:app", "What is kept on disk between processes."),
    "passes": ("passes:app", "The shared passes that a policy can name."),
    "policy": ("policy:app", "Policies of models, in a file."),
}
"""The place of each command, and its line in the list of commands."""

_RUN_SCRIPTS = ("run", "lock")


class _OnDemand(TyperCommand):
    """A command that is not imported yet."""

    def __init__(self, name: str, line: str) -> None:
        super().__init__(name, help=line)

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        return command(str(self.name)).make_context(info_name, args, parent, **extra)


class _Commands(TyperGroup):
    def __init__(self, *, commands: Any = None, **settings: Any) -> None:
        del commands  # the Typer itself has no commands
        on_demand: dict[str, Any] = {n: _OnDemand(n, line) for n, (_, line) in COMMANDS.items()}
        super().__init__(commands=on_demand, **settings)


def command(name: str) -> TyperCommand:
    """Import a command and return it."""
    module, attribute = COMMANDS[name][0].split(":")
    function = getattr(importlib.import_module(f"{__name__}.{module}"), attribute)
    alone = typer.Typer(callback=lambda: None, add_completion=False)
    if isinstance(function, typer.Typer):
        alone.add_typer(function, name=name)
    else:  # all arguments after a script are the script's own
        settings = {"allow_interspersed_args": False} if name in _RUN_SCRIPTS else None
        alone.command(name, context_settings=settings)(function)
    group = cast("TyperGroup", typer.main.get_command(alone))
    return cast("TyperCommand", group.commands[name])


app = typer.Typer(
    cls=_Commands,
    help="One torch.compile backend over several engines.",
    no_args_is_help=True,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"{distribution.NAME} {version(distribution.NAME)}")
        raise typer.Exit


@app.callback()
def main(
    show_version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Take the options that come before a command."""
