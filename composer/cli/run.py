"""``composer run``: runs a user's script, then prints composer's report."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, TextIO

import torch
import typer

from composer import _torch, session
from composer.cli.script import run_script
from composer.cli.usage import USAGE, PolicyFile, fail, fail_on
from composer.errors import ComposerError
from composer.policy import sources
from composer.telemetry.report import Report, untried
from composer.tools.explain import collecting
from composer.tools.progress import shown

_VARIABLE = "TORCH_COMPILE_OVERRIDE_BACKENDS"
"""torch's own debugging switch. Child processes of the program inherit it."""

_EVERY_GRAPH = ">=0:composer"
"""The switch's value that gives every graph to composer."""

Script = Annotated[str, typer.Argument(help="A script's path; with -m a module's name.")]
Arguments = Annotated[list[str] | None, typer.Argument(help="For the script.")]
AsModule = Annotated[bool, typer.Option("-m", help="Run a module, as python -m does.")]
RecordFile = Annotated[Path | None, typer.Option("--telemetry", help="Sets COMPOSER_TELEMETRY.")]
Breaks = Annotated[
    bool, typer.Option("--breaks", help="Print graph breaks and what was left to torch as well.")
]
Override = Annotated[
    bool, typer.Option("--override", help="Compile with composer, whatever backend it names.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one line of JSON at the end.")]


def run(
    script: Script,
    args: Arguments = None,
    module: AsModule = False,
    policy: PolicyFile = None,
    telemetry: RecordFile = None,
    breaks: Breaks = False,
    override: Override = False,
    as_json: Json = False,
) -> None:
    """Run a script and print composer's report; the exit code is the script's."""
    prepare(script, module, policy, telemetry)
    asked = _override() if override else None
    collector = collecting() if breaks else contextlib.nullcontext()
    with collector as collected:
        code, stdout = finish(script, args or [], module)
        # The engines that were not tried are named by _hints.
        report: Report = dataclasses.replace(session.report(), untried=())
        if collected is not None:
            report = collected.explanation
    if as_json:
        print(report.to_json(), file=stdout)
        raise typer.Exit(code)
    print(report, file=stdout)
    print(*_hints(report, script), sep="\n", end="", file=stdout)
    if asked is not None:
        print(_line_on_override(asked), end="", file=stdout)
    raise typer.Exit(code)


def prepare(script: str, module: bool, policy: Path | None, telemetry: Path | None = None) -> None:
    """Find mistakes before anything runs, and set environment variables for child processes."""
    if not module and not Path(script).exists():
        fail(f"there is no script {script!r}", USAGE)
    if policy is not None:
        with fail_on(ComposerError):
            sources.read(policy)
        os.environ["COMPOSER_CONFIG"] = str(policy.absolute())
    if telemetry is not None:
        os.environ["COMPOSER_TELEMETRY"] = str(telemetry.absolute())


def finish(script: str, args: list[str], module: bool) -> tuple[int, TextIO]:
    """Run the script to its end; return its exit code, and the stream that stdout was before.

    If the script has closed that stream, a message on stderr says so, and output to it is dropped.
    """
    stdout = sys.stdout
    try:
        with shown():
            code = run_script(script, args, as_module=module)
    except ImportError as error:
        fail(f"there is nothing to run: {error}", USAGE)
    if sys.stdout is not stdout:  # the script's own, which may be anything, or closed
        with contextlib.suppress(Exception):
            sys.stdout.flush()
    if _is_open(stdout):
        return code, stdout
    typer.echo("composer: the script closed stdout, where the report was to come", err=True)
    return code, io.StringIO()


def _is_open(stream: TextIO) -> bool:
    """Return True if a stream can still be written to, as far as known before a write."""
    if stream.closed:
        return False
    try:
        file = stream.fileno()
    except (AttributeError, io.UnsupportedOperation):  # no file is behind it
        return True
    try:
        os.fstat(file)
    except OSError:
        return False
    return True


def _hints(report: Report, script: str) -> Iterator[str]:
    """Yield hints for somebody who reads the report for the first time."""
    if not report.graphs and _torch.dynamo.captured_graphs():
        yield 'torch.compile was used, and not with backend="composer"\n'
    if engines := session.current().untried():
        asked = f"COMPOSER_CHAIN=auto COMPOSER_SELECT=fastest composer run {script}"
        yield f"{untried(engines, asked)}\n"


def _override() -> dict[str, None]:
    """Give every graph of this process, and of its child processes, to composer.

    The result is filled while the program runs: the backends that it asks :func:`torch.compile`
    for, in the order of their first use.
    """
    if not _torch.dynamo.override_backend(_EVERY_GRAPH):
        fail(f"--override needs {_VARIABLE}, which torch {torch.__version__} does not have")
    os.environ[_VARIABLE] = _EVERY_GRAPH
    asked: dict[str, None] = {}
    compile_of_torch = torch.compile

    @functools.wraps(compile_of_torch)
    def noting(*args: Any, backend: Any = "inductor", **kwargs: Any) -> Any:
        asked[str(backend)] = None
        return compile_of_torch(*args, backend=backend, **kwargs)

    torch.compile = noting
    return asked


def _line_on_override(asked: dict[str, None]) -> str:
    """Return the line that says which backends the program had asked for."""
    others = [name for name in asked if name != "composer"]
    if not others:
        return "the program itself asked for no other backend than composer\n"
    return f"the program asked for {', '.join(others)}; --override gave its graphs to composer\n"
