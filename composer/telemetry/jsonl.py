"""The sink ``jsonl``: each record is a line of JSON in the file that COMPOSER_TELEMETRY names."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from composer.errors import OptionError
from composer.records import CompileReport, Runtime, plain
from composer.system import forks
from composer.telemetry.base import Sink
from composer.telemetry.linefile import LineFile
from composer.telemetry.recording import Process

PATH = "COMPOSER_TELEMETRY"
LIMIT = "COMPOSER_TELEMETRY_MAX_BYTES"
DEFAULT_LIMIT = 64 * 2**20
PATIENCE = 10.0
"""Seconds to wait for another process's line; not again after it was in vain."""
_FOLLOWED = 1_000


@dataclass(slots=True)
class _Graph:
    """A graph whose counters are written once more at the end.

    Attributes:
        runtime: The counters, live.
        file: Where its last record went, or is about to go.
        record: Its last record; empty until there is one.
        written: The counters that are in the file.
    """

    runtime: Runtime
    file: LineFile
    record: dict[str, Any] = field(default_factory=dict)
    written: object = None


class JsonLinesSink(Sink):
    """Appends to the file; the counters of the newest 1,000 graphs once more at the end.

    They are those that were compiled since the sink was there.

    A line is the record and one key more: ``process`` says who wrote it. A further record of a
    graph has its number again.
    """

    @classmethod
    def wanted(cls, name: str, named: frozenset[str]) -> bool:
        """Whether there is a file to write.

        Raises:
            OptionError: the sink is asked for by name, and no file is.
        """
        if name in named and not os.environ.get(PATH):
            raise OptionError(f"COMPOSER_SINKS names {name!r}, and {PATH} no file for it")
        return bool(os.environ.get(PATH))

    def __init__(self) -> None:
        self._asked = os.environ.get(PATH, "")
        self._limit = DEFAULT_LIMIT
        self._patience = PATIENCE
        self._start(Path(self._asked).resolve())
        forks.with_each_child(self, JsonLinesSink._restart)

    def _restart(self) -> None:
        """In a forked child: its parent's graphs are its parent's to write."""
        self._start(self._file.path)

    def _start(self, path: Path) -> None:
        self._file = LineFile(path)  # filelock refuses a lock that was made before a fork
        self._process = dataclasses.asdict(Process.here())
        self._lock = forks.lock()
        self._graphs: dict[int, _Graph] = {}

    def follow(self, report: CompileReport) -> None:
        """Remember whose counters to write at the end."""
        with self._lock:
            self._graphs[report.number] = _Graph(report.runtime, self._file)
            if len(self._graphs) > _FOLLOWED:
                del self._graphs[next(iter(self._graphs))]

    def emit(self, record: dict[str, Any]) -> None:
        """Append the record.

        Raises:
            OptionError: the environment's limit is no number of bytes.
            TimeoutError: another process does not let go of the file's lock.
            OSError: the file cannot be written.
        """
        with self._lock:
            self._look_around()
            file, graph = self._file, self._graphs.get(record["number"])
            if graph is not None:
                graph.file, graph.record = file, record
        self._write(file, record)
        if graph is not None:
            graph.written = record["runtime"]

    def close(self) -> None:
        """Append a further record of each graph whose counters moved, and what failed before."""
        self._patience = PATIENCE
        with self._lock:
            graphs = tuple(self._graphs.values())
        for graph in graphs:
            if not graph.record:
                continue
            now, gone = plain(graph.runtime), not graph.file.path.parent.exists()
            if graph.written and gone:
                continue  # who removed the folder wants no new one with the last counters alone
            if graph.written != now:
                self._write(graph.file, {**graph.record, "runtime": now})
                graph.written = now

    def _look_around(self) -> None:
        """What the environment says now; a relative path is where it was when first met."""
        self._limit = _limit(os.environ.get(LIMIT, ""))
        asked = os.environ.get(PATH, "")
        if asked and asked != self._asked:
            self._asked, self._file = asked, LineFile(Path(asked).resolve())

    def _write(self, file: LineFile, record: dict[str, Any]) -> None:
        line = _line({**record, "process": self._process})
        try:
            file.append(line, self._limit, self._patience)
        except TimeoutError:
            self._patience = 0.0
            raise
        self._patience = PATIENCE


def _limit(text: str) -> int:
    if not text:
        return DEFAULT_LIMIT
    if not re.fullmatch("[1-9][0-9]{0,17}", text):
        raise OptionError(f"{LIMIT} is {text!r} (a positive whole number of bytes)")
    return int(text)


def _line(record: dict[str, Any]) -> bytes:
    """JSON that every reader takes: text is UTF-8."""
    text = json.dumps(record, allow_nan=False, ensure_ascii=False)
    return text.encode("utf-8", "replace") + b"\n"
