"""``composer lock``: which engine serves which graph, kept in a file and compared with it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Annotated, TextIO

import typer

from composer.chain.lock import difference
from composer.chain.lock.difference import Difference
from composer.chain.lock.hold import lock_path
from composer.chain.lock.observed import Served, lock_of, observing
from composer.chain.lock.recorded import recorded
from composer.cli import run
from composer.cli.process import refuse_switches
from composer.cli.usage import USAGE, PolicyFile, fail, fail_if_not, fail_on
from composer.errors import LockError, RecordError, ReproError
from composer.knowledge import lock_file
from composer.knowledge.lock_file import LOCK_FILE, Lock
from composer.telemetry.recording import Process
from composer.telemetry.report import counted
from composer.tools.replay import kept

Script = Annotated[str | None, typer.Argument(help="A script's path; with -m a module's name.")]
Records = Annotated[
    list[Path] | None,
    typer.Option("--from", help="Run nothing; read files of COMPOSER_TELEMETRY."),
]
LockFile = Annotated[Path, typer.Option("--lock", help="The file.")]
Check = Annotated[
    bool, typer.Option("--check", help="Say what is not as the file has it; exit with 1 then.")
]
Graphs = Annotated[
    bool, typer.Option("--graphs", help="Keep the graphs beside the file, for composer replay.")
]


def lock(
    script: Script = None,
    args: run.Arguments = None,
    module: run.AsModule = False,
    policy: PolicyFile = None,
    records: Records = None,
    path: LockFile = Path(LOCK_FILE),
    check: Check = False,
    graphs: Graphs = False,
    as_json: run.Json = False,
) -> None:
    """Run a script and write down which engine serves each graph; --check compares with that."""
    source: Callable[[Lock | None], _Program]
    if graphs and check:
        fail("--graphs writes, and --check compares: leave out one of them", USAGE)
    if records:
        if script is not None or module or policy is not None:
            fail("--from reads records and runs nothing: leave out SCRIPT, -m and --policy", USAGE)
        source = partial(_recorded, records)
        command = [word for file in records for word in ("--from", str(file))]
    else:
        if script is None:
            fail("give a SCRIPT to run, or --from FILE", USAGE)
        if not check:
            refuse_switches("would stand in the lock in place of the policy")
        run.prepare(script, module, policy)
        source = partial(_run, script, args or [], module)
        command = [*(["-m"] if module else []), script, *(args or [])]
    if check:
        _compare(source, path.absolute(), as_json)
        return
    folder = path.absolute().with_suffix(".graphs") if graphs else None
    with _dumping() if graphs else contextlib.nullcontext():
        _write(source, command, path.absolute(), folder, as_json)


@contextlib.contextmanager
def _dumping() -> Iterator[None]:
    """Have graphs written to a folder that is removed, unless the user has named one."""
    if "COMPOSER_DUMP" in os.environ:
        yield
        return
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.environ["COMPOSER_DUMP"] = folder
        try:
            yield
        finally:
            del os.environ["COMPOSER_DUMP"]


@dataclass(frozen=True, slots=True)
class _Program:
    """What a program compiled.

    Attributes:
        served: Its graphs, each once.
        stdout: Where the command prints to.
        code: The exit status of the script.
    """

    served: list[Served]
    stdout: TextIO
    code: int = 0

    @property
    def ended_by(self) -> str:
        """The signal that ended the script, if that is how it is usually ended; else empty."""
        return _ENDED_BY.get(self.code, "")


_ENDED_BY = {128 + signal.SIGINT: "Ctrl-C", 128 + signal.SIGTERM: "SIGTERM"}
"""The signals by which a program without an end of its own is stopped, by exit status."""


def _run(script: str, args: list[str], module: bool, expected: Lock | None) -> _Program:
    """Run a script to its end, or until it gets a signal."""
    with observing(expected) as observed, _sigterm_as_exit():
        code, stdout = run.finish(script, args, module)
    return _Program(observed.served(), stdout, code)


@contextlib.contextmanager
def _sigterm_as_exit() -> Iterator[None]:
    """Let SIGTERM end the program by ``SystemExit``, as Ctrl-C does by ``KeyboardInterrupt``."""
    here = os.getpid()

    def end(number: int, _: FrameType | None) -> None:
        if os.getpid() != here:  # forked children inherit this, and are to end as ever
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _recorded(files: Sequence[Path], expected: Lock | None) -> _Program:
    """Read who served the graphs of programs that ran elsewhere."""
    try:
        found = recorded(files)
    except OSError as error:
        fail(f"{error.filename!r} cannot be read: {error.strerror}", USAGE)
    except RecordError as error:
        fail(str(error))
    for each in found.left_out:
        typer.echo(f"composer: {each}", err=True)
    return _Program(found.served, sys.stdout)


def _write(
    source: Callable[[Lock | None], _Program],
    command: Sequence[str],
    path: Path,
    folder: Path | None,
    as_json: bool,
) -> None:
    """Write the lock of a program, and exit with its status if a signal ended it.

    Its graphs go into ``folder``, unless that is ``None``.
    """
    _check_place(path.resolve())
    if folder is not None and kept.is_foreign(folder):
        fail(f"{str(folder)!r} was not written by composer; remove it, or move it", USAGE)
    asked_for = lock_path()
    program = source(None)
    if program.code and not program.ended_by:
        fail(f"the script ended with exit code {program.code}; {path.name} is as it was")
    if Process.here().rank:  # if several ranks run the script, only rank 0 writes
        raise typer.Exit(program.code)
    content = lock_of(program.served)
    for each in program.served:
        locked = f"{path.name} says {each.chosen.sentence()}"
        for _, text in each.apart:
            typer.echo(f"composer: {each.chosen.title}: {text}; {locked}", err=True)
    _check_content(content, program.code or 1)
    with fail_if_not("written", path):
        lock_file.write(path, content, command)
    if folder is not None:
        with fail_if_not("written", folder), fail_on(ReproError):
            for line in kept.write(folder, program.served):
                typer.echo(f"composer: {line}", err=True)
    if program.ended_by:
        so_far = f"{path.name} holds what it had compiled by then"
        typer.echo(f"composer: {program.ended_by} ended the script; {so_far}", err=True)
    if as_json:
        print(json.dumps({"file": str(path), **content.model_dump()}), file=program.stdout)
    else:
        print(f"{path}: {_summary(content)}", file=program.stdout)
        if path != asked_for:
            print(f"(a locked policy would look for {asked_for})", file=program.stdout)
    raise typer.Exit(program.code)


def _compare(source: Callable[[Lock | None], _Program], path: Path, as_json: bool) -> None:
    """Print the differences of a program from the lock; exit with 1 if there are any."""
    with fail_on(LockError):
        expected = lock_file.read(path)
    program = source(expected)
    differences = difference.compare(expected, program.served)
    if as_json:
        plain = [asdict(each) for each in differences]
        result = {"file": str(path), "same": not differences, "differences": plain}
        print(json.dumps(result), file=program.stdout)
    else:
        print(*_lines(path, expected, differences), sep="\n", file=program.stdout)
    if program.code and not program.ended_by:
        fail(f"the script ended with exit code {program.code}")
    raise typer.Exit(int(bool(differences)) or program.code)


def _check_place(path: Path) -> None:
    """Check, before anything runs, that the lock can and may be written to its place."""
    if not path.parent.is_dir():
        fail(f"there is no folder {str(path.parent)!r}", USAGE)
    with fail_if_not("read", path, USAGE):
        is_foreign = lock_file.is_foreign(path)
    if is_foreign:
        fail(f"{str(path)!r} was not written by composer; remove it, or give another --lock", USAGE)


def _check_content(content: Lock, code: int) -> None:
    """Refuse to write a lock that could not be followed, and exit with ``code``."""
    if not content.graphs:
        fail("nothing was compiled through composer, so there is nothing to lock", code)
    for each in content.graphs:
        if not each.engine:
            fail(f"{each.title} is served by nobody: its compile ended in an error", code)


def _summary(content: Lock) -> str:
    engines = Counter(each.engine for each in content.graphs).most_common()
    served = ", ".join(f"{name} {count}" for name, count in engines)
    return f"{counted(len(content.graphs), 'graph')}, served by: {served}"


def _lines(path: Path, content: Lock, differences: Sequence[Difference]) -> Sequence[str]:
    if not differences:
        return [f"{path}: {_summary(content)}; all as it says"]
    heading = f"{path}: {counted(len(differences), 'difference')}"
    return [heading, *(f"  {each}" for each in differences)]
