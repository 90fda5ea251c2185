"""Reads files of records: those of the sink ``jsonl``, and files that a user's own sink wrote."""

from __future__ import annotations

import errno
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import TypeAdapter, ValidationError

from composer.errors import RecordError
from composer.records import CompileReport
from composer.telemetry import linefile
from composer.telemetry.recording import Process, Recording
from composer.telemetry.report import Report

UNKNOWN = Process(host="", pid=0, rank=None, started="")
"""The process of lines without the key ``process``, for example from a user's own sink."""

_NAMED = 20
_LONGEST = 200
_PROCESS: TypeAdapter[Process] = TypeAdapter(Process)


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line without a valid record, and why. ``line`` counts from 1."""

    file: str
    line: int
    why: str


@dataclass(frozen=True, slots=True)
class Readout:
    """The contents of files of records.

    Attributes:
        recordings: The records of each process, ordered by the start of the process.
        left_out: The number of lines without a valid record.
        faults: The first 20 of these lines.
    """

    recordings: tuple[Recording, ...]
    left_out: int
    faults: tuple[BadLine, ...]


def read(path: str | Path | Sequence[str | Path]) -> Readout:
    """Read the last record of each graph.

    The content of a file never raises an error. Lines that are incomplete, blank, from another
    program or of another schema version are counted and left out.

    Args:
        path: A file, or several. Its older files after rotation (``.1`` to ``.3``) are read as
            well.

    Raises:
        OSError: A file does not exist, or cannot be read.
    """
    paths = [path] if isinstance(path, str | Path) else path
    graphs: defaultdict[Process, dict[object, CompileReport]] = defaultdict(dict)
    written: defaultdict[Process, str] = defaultdict(str)
    left_out, faults = 0, []
    for name, number, text in _lines(_newest_of_each(map(Path, paths))):
        try:
            process, graph, when = _parsed(text)
        except RecordError as error:
            left_out += 1
            if left_out <= _NAMED:
                faults.append(BadLine(name, number, str(error)[:_LONGEST]))
            continue
        # Lines without a process may come from several processes that use the same numbers.
        key = (name, number) if process == UNKNOWN else graph.number
        graphs[process][key] = graph
        written[process] = max(written[process], when)
    return Readout(tuple(_recordings(graphs, written)), left_out, tuple(faults))


def _newest_of_each(paths: Iterable[Path]) -> list[Path]:
    """Return each file once, without rotated files of another one; they are read with that one."""
    files = {path.resolve(): path for path in paths}
    for file in tuple(files):
        for older in linefile.rotated(file)[1:]:
            files.pop(older, None)
    return list(files.values())


def _recordings(
    graphs: Mapping[Process, Mapping[Any, CompileReport]], written: Mapping[Process, str]
) -> Iterator[Recording]:
    for process in sorted(graphs, key=lambda each: (each.started, each.rank or 0)):
        oldest_first = sorted(graphs[process].values(), key=lambda each: each.time)
        yield Recording(process, Report(tuple(oldest_first)), written[process])


def _parsed(text: bytes) -> tuple[Process, CompileReport, str]:
    """Return the process that wrote a line, the record in it, and when it was written."""
    text = text.strip()
    if not text:
        raise RecordError("a blank line")
    try:
        line = json.loads(text, parse_constant=str)  # NaN, which is not valid JSON, becomes "NaN"
    except (ValueError, RecursionError) as error:
        raise RecordError(f"torn, or no JSON: {error}") from None
    if not isinstance(line, Mapping):
        raise RecordError("JSON, but no object")
    process, written = _process(line.get("process")), str(line.get("written", ""))
    return process, CompileReport.from_dict(line), written


def _process(value: Any) -> Process:
    if value is None:
        return UNKNOWN
    try:
        return _PROCESS.validate_python(value)
    except ValidationError as error:
        raise RecordError(f"a process that cannot be read: {error.errors()[0]['msg']}") from None


def _lines(paths: Iterable[Path]) -> Iterator[tuple[str, int, bytes]]:
    """Yield file, number and text of each line; of rotated files, the oldest comes first."""
    for path in paths:
        with ExitStack() as stack:
            for file in reversed(_opened(path, stack)):
                for number, text in enumerate(file, 1):
                    yield file.name, number, text


def _opened(path: Path, stack: ExitStack) -> list[BinaryIO]:
    """Open the file and its older ones, newest first.

    In this order no file is missed if a writer rotates them at the same time. A file that is found
    under two names is read once.
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
