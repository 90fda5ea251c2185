"""``composer lock``: which engine serves which graph, kept in a file and compared with it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, TextIO

import typer

from composer.chain.lock import difference
from composer.chain.lock.difference import Difference
from composer.chain.lock.hold import lock_path
from composer.chain.lock.observed import watching
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
    program = Program(script, args or [], module)
    if not check:
        refuse_switches("would stand in the lock in place of the policy")
    run.prepare(script, module, policy)
    if check:
        _compare(program, path.absolute(), as_json)
    else:
        _write(program, path.absolute(), as_json)


@dataclass(frozen=True, slots=True)
class Program:
    """The user's script, or a module if ``module`` is True, and its arguments."""

    script: str
    args: list[str]
    module: bool

    def run(self) -> tuple[int, TextIO]:
        """Run it to its end; return its exit code, and the stream that stdout was before."""
        return run.finish(self.script, self.args, self.module)

    @property
    def command(self) -> list[str]:
        """Return the arguments of ``python`` that run it."""
        script = ["-m", self.script] if self.module else [self.script]
        return script + self.args


def _write(program: Program, path: Path, as_json: bool) -> None:
    """Run the program and write the lock."""
    _check_place(path.resolve())
    asked_for = lock_path()
    with watching() as witness:
        code, stdout = program.run()
    if code:
        fail(f"the script ended with exit code {code}; {path.name} is as it was")
    if Process.here().rank:  # if several ranks run the script, only rank 0 writes
        return
    content = witness.locks()
    for each in witness.served():
        locked = f"{path.name} says {difference.called(each.graph)}"
        for _, text in each.minority():
            typer.echo(f"composer: {each.graph.title}: {text}; {locked}", err=True)
    _check_content(content)
    with fail_if_not("written", path):
        lock_file.write(path, content, program.command)
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
    with watching(expected) as witness:
        code, stdout = program.run()
    differences = difference.compare(expected, witness.served())
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
