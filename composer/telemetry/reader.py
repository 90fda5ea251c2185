"""Reads files of records back: those of the sink ``jsonl``, and a user's own."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import TypeAdapter, ValidationError

from composer.errors import RecordError
from composer.records import CompileReport
from composer.telemetry import linefile
from composer.telemetry.recording import Process, Recording
from composer.telemetry.report import Report

UNKNOWN = Process(host="", pid=0, rank=None, started="")
"""The process of lines that do not say it: somebody's own sink wrote just the records."""

_NAMED = 20
_LONGEST = 200
_PROCESS: TypeAdapter[Process] = TypeAdapter(Process)


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that holds no record, and why; lines count from 1."""

    file: str
    line: int
    why: str


@dataclass(frozen=True, slots=True)
class Readout:
    """What files of records hold.

    ``recordings`` are ordered by their process's start, ``left_out`` counts the lines that hold no
    record, and ``faults`` are the first 20 of these.
    """

    recordings: tuple[Recording, ...]
    left_out: int
    faults: tuple[BadLine, ...]


def read(path: str | Path | Sequence[str | Path]) -> Readout:
    """Read every record, the last one of each graph.

    Nothing in a file is an error: lines that were torn, that are blank, somebody else's or of
    another schema version are counted and left out.

    Args:
        path: A file, or several. The older files that it was rotated to (``.1`` to ``.3``) are
            read before it.

    Raises:
        OSError: a file is not there, or cannot be read.
    """
    paths = [path] if isinstance(path, str | Path) else path
    found = _Found()
    for each in _newest_of_each(map(Path, paths)):
        for name, line, text in _lines(each):
            found.take(name, line, text)
    return found.readout()


def _newest_of_each(paths: Iterable[Path]) -> list[Path]:
    """The files, each once, without those that are older files of another: its own read them."""
    given = {path.resolve(): path for path in paths}
    older = {name for path in given for name in linefile.rotated(path)[1:]}
    return [path for resolved, path in given.items() if resolved not in older]


@dataclass(slots=True)
class _Found:
    """What was read so far: graphs by process and number."""

    graphs: dict[Process, dict[object, CompileReport]] = field(default_factory=dict)
    left_out: int = 0
    faults: list[BadLine] = field(default_factory=list)

    def take(self, name: str, number: int, text: bytes) -> None:
        try:
            process, graph = _parsed(text)
        except RecordError as error:
            self.left_out += 1
            if len(self.faults) < _NAMED:
                self.faults.append(BadLine(name, number, str(error)[:_LONGEST]))
            return
        # Lines that do not say who wrote them may be of several processes, which number alike.
        key = (name, number) if process == UNKNOWN else graph.number
        self.graphs.setdefault(process, {})[key] = graph

    def readout(self) -> Readout:
        recordings = (
            Recording(process, Report(tuple(sorted(graphs.values(), key=lambda each: each.time))))
            for process, graphs in self.graphs.items()
        )
        ordered = sorted(
            recordings, key=lambda each: (each.process.started, each.process.rank or 0)
        )
        return Readout(tuple(ordered), self.left_out, tuple(self.faults))


def _parsed(text: bytes) -> tuple[Process, CompileReport]:
    """Who wrote a line, and the record in it."""
    text = text.strip()
    if not text:
        raise RecordError("a blank line")
    try:
        line = json.loads(text, parse_constant=str)  # NaN, which is no JSON, becomes "NaN"
    except (ValueError, RecursionError) as error:
        raise RecordError(f"torn, or no JSON: {error}") from None
    if not isinstance(line, Mapping):
        raise RecordError("JSON, but no object")
    process = _process(line["process"]) if line.get("process") is not None else UNKNOWN
    return process, CompileReport.from_dict(line)


def _process(said: Any) -> Process:
    try:
        return _PROCESS.validate_python(said)
    except ValidationError as error:
        raise RecordError(f"a process that cannot be read: {error.errors()[0]['msg']}") from None


def _lines(path: Path) -> Iterator[tuple[str, int, bytes]]:
    """File, number and text of each line, the oldest file first."""
    with ExitStack() as stack:
        for file in reversed(_opened(path, stack)):
            for number, text in enumerate(file, 1):
                yield file.name, number, text


def _opened(path: Path, stack: ExitStack) -> list[BinaryIO]:
    """The file and its older ones, newest first.

    In this order none is missed when a writer rotates them meanwhile; one met twice is read once.
    """
    files: dict[tuple[int, int], BinaryIO] = {}
    for name in linefile.rotated(path):
        with suppress(FileNotFoundError):
            file = stack.enter_context(name.open("rb"))
            status = os.fstat(file.fileno())
            files.setdefault((status.st_dev, status.st_ino), file)
    if not files:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    return list(files.values())
