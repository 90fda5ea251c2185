"""``composer lock``: which engine serves which graph, kept in a file and compared with it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, TextIO

import typer

from composer.chain.lock import difference
from composer.chain.lock.difference import Difference
from composer.chain.lock.hold import lock_path
from composer.chain.lock.observed import observing
from composer.cli import run
from composer.cli.process import refuse_switches
from composer.cli.usage import USAGE, PolicyFile, fail, fail_if_not, fail_on
from composer.errors import LockError
from composer.knowledge import lock_file
from composer.knowledge.lock_file import LOCK_FILE, Lock
from composer.telemetry.recording import Process
from composer.telemetry.report import counted

LockFile = Annotated[Path, typer.Option("--lock", help="The file.")]
Check = Annotated[
    bool, typer.Option("--check", help="Say what is not as the file has it; exit with 1 then.")
]


def lock(
    script: run.Script,
    args: run.Arguments = None,
    module: run.AsModule = False,
    policy: PolicyFile = None,
    path: LockFile = Path(LOCK_FILE),
    check: Check = False,
    as_json: run.Json = False,
) -> None:
    """Run a script and write down which engine serves each graph; --check compares with that."""
    if not check:
        refuse_switches("would stand in the lock in place of the policy")
    run.prepare(script, module, policy)
    program = partial(run.finish, script, args or [], module)
    if check:
        _compare(program, path.absolute(), as_json)
    else:
        command = [*(["-m"] if module else []), script, *(args or [])]
        _write(program, command, path.absolute(), as_json)


Program = Callable[[], tuple[int, TextIO]]
"""Runs the script; returns its exit code, and the stream that stdout was before."""


def _write(program: Program, command: Sequence[str], path: Path, as_json: bool) -> None:
    """Run the program and write the lock."""
    _check_place(path.resolve())
    asked_for = lock_path()
    with observing() as observed:
        code, stdout = program()
    if code:
        fail(f"the script ended with exit code {code}; {path.name} is as it was")
    if Process.here().rank:  # if several ranks run the script, only rank 0 writes
        return
    content = observed.export()
    for each in observed.served():
        locked = f"{path.name} says {each.chosen.sentence()}"
        for _, text in each.apart:
            typer.echo(f"composer: {each.chosen.title}: {text}; {locked}", err=True)
    _check_content(content)
    with fail_if_not("written", path):
        lock_file.write(path, content, command)
    if as_json:
        print(json.dumps({"file": str(path), **content.model_dump()}), file=stdout)
        return
    print(f"{path}: {_summary(content)}", file=stdout)
    if path != asked_for:
        print(f"(a policy with locked = true would look for {asked_for})", file=stdout)


def _compare(program: Program, path: Path, as_json: bool) -> None:
    """Run the program and print its differences from the lock; exit with 1 if there are any."""
    with fail_on(LockError):
        expected = lock_file.read(path)
    with observing(expected) as observed:
        code, stdout = program()
    differences = difference.compare(expected, observed.served())
    if as_json:
        plain = [asdict(each) for each in differences]
        result = {"file": str(path), "same": not differences, "differences": plain}
        print(json.dumps(result), file=stdout)
    else:
        print(*_lines(path, expected, differences), sep="\n", file=stdout)
    if code:
        fail(f"the script ended with exit code {code}")
    raise typer.Exit(int(bool(differences)))


def _check_place(path: Path) -> None:
    """Check, before anything runs, that the lock can and may be written to its place."""
    if not path.parent.is_dir():
        fail(f"there is no folder {str(path.parent)!r}", USAGE)
    with fail_if_not("read", path, USAGE):
        is_foreign = lock_file.is_foreign(path)
    if is_foreign:
        fail(f"{str(path)!r} was not written by composer; remove it, or give another --lock", USAGE)


def _check_content(content: Lock) -> None:
    """Refuse to write a lock that could not be followed."""
    if not content.graphs:
        fail("nothing was compiled through composer, so there is nothing to lock")
    for each in content.graphs:
        if not each.engine:
            fail(f"{each.title} is served by nobody: its compile ended in an error")


def _summary(held: Lock) -> str:
    engines = Counter(each.engine for each in held.graphs).most_common()
    served = ", ".join(f"{name} {count}" for name, count in engines)
    return f"{counted(len(held.graphs), 'graph')}, served by: {served}"


def _lines(path: Path, held: Lock, differences: Sequence[Difference]) -> Sequence[str]:
    if not differences:
        return [f"{path}: {_summary(held)}; all as it says"]
    heading = f"{path}: {counted(len(differences), 'difference')}"
    return [heading, *(f"  {each}" for each in differences)]
