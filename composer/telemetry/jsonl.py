"""The sink ``jsonl``: writes each record as a line of JSON to the file in COMPOSER_TELEMETRY."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import threading
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from composer.errors import OptionError, TelemetryWarning, class_and_text
from composer.records import CompileReport, Runtime, plain
from composer.system import forks
from composer.system.warned import warn_once
from composer.telemetry.base import Sink
from composer.telemetry.linefile import LineFile
from composer.telemetry.recording import Process

PATH = "COMPOSER_TELEMETRY"
LIMIT = "COMPOSER_TELEMETRY_MAX_BYTES"
DEFAULT_LIMIT = 64 * 2**20
PATIENCE = 10.0
"""Seconds to wait for the lock of the file. After a timeout the next record does not wait."""
EVERY = 60.0
"""Seconds between two looks at the counters. A process that is killed loses no more than these."""
_FOLLOWED = 1_000


@dataclass(slots=True)
class _Graph:
    """A graph whose counters are written again once a minute, and when the sink is closed.

    ``runtime`` are the live counters, and ``written`` those in ``file``, the file of its last
    record. ``record`` is empty before the first record.
    """

    runtime: Runtime
    file: LineFile
    record: dict[str, Any] = field(default_factory=dict)
    written: object = None


class JsonLinesSink(Sink):
    """Appends each record to the file.

    Once a minute, and when the sink is closed, it writes the newest 1,000 graphs again if their
    counters changed. Only graphs that were compiled after the sink was made are written again.

    A line is the record with two more keys: ``process`` says which process wrote it, and
    ``written`` when. A later record of a graph has the same number as the first.
    """

    @classmethod
    def wanted(cls, name: str, named: frozenset[str]) -> bool:
        """Return true if ``COMPOSER_TELEMETRY`` names a file.

        Raises:
            OptionError: ``COMPOSER_SINKS`` names the sink, but ``COMPOSER_TELEMETRY`` is not set.
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
        """Start again in a forked child. The graphs of the parent are left to the parent."""
        self._start(self._file.path)

    def _start(self, path: Path) -> None:
        self._file = LineFile(path)  # a new one, since filelock refuses a lock from before a fork
        self._process = dataclasses.asdict(Process.here())
        self._lock = forks.lock()
        self._graphs: dict[int, _Graph] = {}
        self._closed: threading.Event | None = None  # no thread writes counters yet

    def follow(self, report: CompileReport) -> None:
        """Remember a graph; its counters are written again until the sink is closed."""
        with self._lock:
            if self._closed is None:
                self._closed = threading.Event()
                ticking = threading.Thread(target=self._write_on, args=(self._closed,), daemon=True)
                ticking.start()
            self._graphs[report.number] = _Graph(report.runtime, self._file)
            if len(self._graphs) > _FOLLOWED:
                del self._graphs[next(iter(self._graphs))]

    def emit(self, record: dict[str, Any]) -> None:
        """Append the record.

        Raises:
            OptionError: ``COMPOSER_TELEMETRY_MAX_BYTES`` is not a number of bytes.
            TimeoutError: Another process does not release the file's lock.
            OSError: The file cannot be written.
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
        """Write the counters a last time."""
        with self._lock:
            if self._closed is not None:
                self._closed.set()
                self._closed = None
        self._write_counters()

    def _write_on(self, closed: threading.Event) -> None:
        """Write the counters once a minute, since nothing is written after SIGTERM or SIGKILL."""
        while not closed.wait(EVERY):
            try:
                self._write_counters()
            except OSError as error:  # TimeoutError is one
                text = f"the sink 'jsonl' failed: {class_and_text(error)}"
                warn_once(TelemetryWarning(text), about="jsonl", cause=error)

    def _write_counters(self) -> None:
        """Append a record of each graph whose counters changed or whose last write failed.

        Raises:
            OSError: one cannot be written. The others are written all the same.
        """
        self._patience = PATIENCE
        failed: OSError | None = None
        with self._lock:
            graphs = tuple(self._graphs.values())
        for graph in graphs:
            if not graph.record:
                continue
            now, gone = plain(graph.runtime), not graph.file.path.parent.exists()
            if graph.written and gone:
                continue  # the user removed the folder; do not make it again only for counters
            if graph.written != now:
                try:
                    self._write(graph.file, {**graph.record, "runtime": now})
                    graph.written = now
                except OSError as error:
                    failed = failed or error
        if failed is not None:
            raise failed

    def _look_around(self) -> None:
        """Read limit and path from the environment. A relative path is resolved only once."""
        self._limit = _limit(os.environ.get(LIMIT, ""))
        asked = os.environ.get(PATH, "")
        if asked and asked != self._asked:
            self._asked, self._file = asked, LineFile(Path(asked).resolve())

    def _write(self, file: LineFile, record: dict[str, Any]) -> None:
        written = datetime.now(UTC).isoformat(timespec="seconds")
        line = _line({**record, "process": self._process, "written": written})
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
    """Return a record as one line of strict JSON, in UTF-8."""
    text = json.dumps(record, allow_nan=False, ensure_ascii=False)
    return text.encode("utf-8", "replace") + b"\n"
