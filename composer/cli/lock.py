"""``composer lock`` and ``composer assert``: which engine serves which graph, kept in a file."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from composer.cli import run
from composer.cli.fail import USAGE, fail
from composer.cli.options import PolicyFile
from composer.cli.switches import refuse_switches
from composer.errors import LockError
from composer.lock import difference, file
from composer.lock.difference import Difference
from composer.lock.file import LOCK_FILE, Lock
from composer.lock.hold import lock_path
from composer.lock.witness import watching
from composer.telemetry.recording import Process
from composer.telemetry.report import counted

LockFile = Annotated[Path, typer.Option("--lock", help="The file.")]


def lock(
    script: run.Script,
    args: run.Arguments = None,
    module: run.AsModule = False,
    policy: PolicyFile = None,
    path: LockFile = Path(LOCK_FILE),
    as_json: run.Json = False,
) -> None:
    """Run a script and write down which engine serves each of its graphs."""
    refuse_switches("would stand in the lock in place of the policy")
    run.prepare(script, module, policy, None)
    path = path.absolute()
    _check_place(path.resolve())
    asked_for = lock_path()
    with watching() as witness:
        code, stdout = run.finish(script, args or [], module)
    if code:
        fail(f"the script ended with exit code {code}; {path.name} is as it was", code)
    if Process.here().rank:  # of several that run the same script the first writes
        return
    found = witness.locks()
    for each in witness.served():
        for _, told in each.minority():
            locked = difference.called(each.graph)
            typer.echo(f"composer: {each.graph.title}: {told}; {path.name} says {locked}", err=True)
    _check_content(found)
    command = [*(["-m"] if module else []), script, *(args or [])]
    try:
        file.write(path, found, command)
    except OSError as error:
        fail(f"{str(path)!r} cannot be written: {error.strerror}")
    if as_json:
        print(json.dumps({"file": str(path), **found.model_dump()}), file=stdout)
        return
    print(f"{path}: {_summary(found)}", file=stdout)
    if path != asked_for:
        print(f"(a policy with locked = true would look for {asked_for})", file=stdout)


def compare(
    script: run.Script,
    args: run.Arguments = None,
    module: run.AsModule = False,
    policy: PolicyFile = None,
    path: LockFile = Path(LOCK_FILE),
    as_json: run.Json = False,
) -> None:
    """Run a script and say what is not as the lock has it; the exit code is then 1."""
    run.prepare(script, module, policy, None)
    path = path.absolute()
    try:
        held = file.read(path)
    except LockError as error:
        fail(str(error), USAGE)
    with watching(held) as witness:
        code, stdout = run.finish(script, args or [], module)
    found = difference.compare(held, witness.served())
    if as_json:
        said = {"file": str(path), "same": not found, "differences": list(map(asdict, found))}
        print(json.dumps(said), file=stdout)
    else:
        print(*_lines(path, held, found), sep="\n", file=stdout)
    raise typer.Exit(code or int(bool(found)))


def _check_place(path: Path) -> None:
    """Find before anything runs that nothing can be written there, or nothing should."""
    if not path.parent.is_dir():
        fail(f"there is no folder {str(path.parent)!r}", USAGE)
    try:
        foreign = file.is_foreign(path)
    except OSError as error:
        fail(f"{str(path)!r} cannot be read: {error.strerror}", USAGE)
    if foreign:
        fail(f"{str(path)!r} was not written by composer; remove it, or give another --lock", USAGE)


def _check_content(found: Lock) -> None:
    """Write nothing that nobody could be held to."""
    if not found.graphs:
        fail("nothing was compiled through composer, so there is nothing to lock")
    for each in found.graphs:
        if not each.engine:
            fail(f"{each.title} is served by nobody: its compile ended in an error")


def _summary(held: Lock) -> str:
    engines = Counter(each.engine for each in held.graphs).most_common()
    served = ", ".join(f"{name} {count}" for name, count in engines)
    return f"{counted(len(held.graphs), 'graph')}, served by: {served}"


def _lines(path: Path, held: Lock, found: Sequence[Difference]) -> Sequence[str]:
    if not found:
        return [f"{path}: {_summary(held)}; all as it says"]
    return [f"{path}: {counted(len(found), 'difference')}", *(f"  {each}" for each in found)]
