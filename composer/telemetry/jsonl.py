"""The sink ``jsonl``: each record is a line of JSON in the file that COMPOSER_TELEMETRY names."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from composer import forks
from composer.errors import OptionError
from composer.records import CompileReport, Runtime, plain
from composer.telemetry.base import Sink
from composer.telemetry.linefile import LineFile
from composer.telemetry.recording import Process

PATH = "COMPOSER_TELEMETRY"
LIMIT = "COMPOSER_TELEMETRY_MAX_BYTES"
DEFAULT_LIMIT = 64 * 2**20
PATIENCE = 10.0
"""Seconds to wait for another process's line; not again after it was in vain."""
_FOLLOWED, _REMEMBERED = 1_000, 100_000

_serials: dict[Path, int] = {}
"""The next serial in each file: a sink of this process may have written there before."""


Name = tuple[str, str, str]
"""Of a graph: its id, the time of its compile, its key."""


@dataclass(slots=True)
class _Graph:
    """A graph that is in the file, or about to be."""

    serial: int
    name: Name
    runtime: Runtime | None
    """Its counters, to be written once more at the end; ``None`` where they are not followed."""
    file: LineFile
    record: dict[str, Any] = field(default_factory=dict)
    """Its last record, on its way to ``file``; empty until there is one."""
    written: object = None
    """The counters that are in the file."""


class JsonLinesSink(Sink):
    """Appends to the file; the counters of the newest 1,000 graphs once more at the end.

    They are those that were compiled since the sink was there.

    A line is the record and two keys more: ``process`` says who wrote it, ``serial`` which graph of
    that process it is. A further record of a graph has its serial again.
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
        path = self._file.path
        _serials.pop(path, None)
        self._start(path)

    def _start(self, path: Path) -> None:
        self._file = LineFile(path)  # filelock refuses a lock that was made before a fork
        self._process = dataclasses.asdict(Process.here())
        self._lock = forks.lock()
        self._graphs: deque[_Graph] = deque()
        self._others: OrderedDict[Name, _Graph] = OrderedDict()

    def follow(self, report: CompileReport) -> None:
        """Remember whose counters to write at the end."""
        name = report.graph_id, report.time, report.graph_key
        with self._lock:
            self._graphs.append(self._new(name, report.runtime))
            if len(self._graphs) > _FOLLOWED:
                self._let_go(self._graphs.popleft())

    def emit(self, record: dict[str, Any]) -> None:
        """Append the record.

        Raises:
            OptionError: the environment's limit is no number of bytes.
            TimeoutError: another process does not let go of the file's lock.
            OSError: the file cannot be written.
        """
        with self._lock:
            self._look_around()
            graph = self._graph(record)
            if graph.file.path != self._file.path:
                graph.serial = self._next_serial()
            graph.file = self._file
            if graph.runtime is not None:
                graph.record = record
        self._write(graph, record)

    def close(self) -> None:
        """Append a further record of each graph whose counters moved, and what failed before."""
        self._patience = PATIENCE
        for graph in tuple(self._graphs):
            runtime, record = graph.runtime, graph.record
            if runtime is None or not record:  # let go of meanwhile
                continue
            now, gone = plain(runtime), not graph.file.path.parent.exists()
            if graph.written and gone:
                continue  # who removed the folder wants no new one with the last counters alone
            if graph.written != now:
                graph.record = {**record, "runtime": now}
                self._write(graph, graph.record)

    def _look_around(self) -> None:
        """What the environment says now; a relative path is where it was when first met."""
        self._limit = _limit(os.environ.get(LIMIT, ""))
        asked = os.environ.get(PATH, "")
        if asked and asked != self._asked:
            self._asked, self._file = asked, LineFile(Path(asked).resolve())

    def _graph(self, record: dict[str, Any]) -> _Graph:
        """Whose record it is: the first that waits for one, or the one that had it before."""
        name = record["graph_id"], record["time"], record["graph_key"]
        same = [graph for graph in self._graphs if graph.name == name]
        if not same:
            return self._others.get(name) or self._let_go(self._new(name, None))
        return next((graph for graph in same if not graph.record), same[-1])

    def _new(self, name: Name, runtime: Runtime | None) -> _Graph:
        return _Graph(self._next_serial(), name, runtime, self._file)

    def _let_go(self, graph: _Graph) -> _Graph:
        """Remember the serial of a graph, and nothing else."""
        graph.runtime, graph.record = None, {}
        self._others[graph.name] = graph
        if len(self._others) > _REMEMBERED:
            self._others.popitem(last=False)
        return graph

    def _next_serial(self) -> int:
        serial = _serials.get(self._file.path, 0)
        _serials[self._file.path] = serial + 1
        return serial

    def _write(self, graph: _Graph, record: dict[str, Any]) -> None:
        line = _line({**record, "process": self._process, "serial": graph.serial})
        try:
            graph.file.append(line, self._limit, self._patience)
        except TimeoutError:
            self._patience = 0.0
            raise
        self._patience = PATIENCE
        graph.written = record["runtime"]


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
