"""A child process from the caller's side: what it is given, how long it may take, what it says.

It is given bytes through a pipe, answers with lines of JSON, and is killed when it is done, when it
goes beyond a limit, and when its caller dies.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

from composer.child import forkserver
from composer.child.serving import SIZE
from composer.errors import ChildRefusal, refuse
from composer.records import Reason, Status

START_SECONDS = 120.0
_STEP_SECONDS = 0.02
_KEPT_OUTPUT = 4096
_MIB = 1 << 20
_FROM_OUTSIDE = (signal.SIGTERM, signal.SIGINT)
"""Signals by which people and schedulers end a process; no engine ends itself so."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a build may take: seconds, MiB in the child, and whether there is to be a child."""

    isolate: bool = False
    timeout: float | None = None
    memory: int | None = None


NONE = Limits()
"""A build that takes what it takes, in this process."""


def ask(
    work: str,
    payload: bytes,
    limits: Limits,
    began: Callable[[float], object] = lambda seconds: None,
) -> dict[str, Any]:
    """Have a child process do some work.

    Args:
        work: ``module:function``. It is given the payload and a function to call when it is ready
            to begin, from when on the limit of time counts, and returns what JSON can hold.
        payload: Any bytes.
        limits: Of the work; the start of the child is not counted.
        began: Told how many seconds that start took.

    Raises:
        Refusal: ``crashed``, ``timed_out``, ``failed`` with ``out_of_memory``; ``declined`` with
            ``not_isolatable`` where there is no way to start a child.
    """
    if os.name != "posix" or not sys.executable or getattr(sys, "frozen", False):
        what = "there is no way to start, and to end, an interpreter here"
        refuse(Status.DECLINED, Reason.NOT_ISOLATABLE, what)
    with _started(work, payload) as child:
        return child.answer(limits, began)


class _Child:
    """The process, what it answers, and the end of what it prints.

    Its threads do not hold it: where an exception comes at any line, nothing does, and the process
    ends with its socket.
    """

    def __init__(self, process: forkserver.Process, sent: Sequence[bytes]) -> None:
        self._process = process
        self._answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._printed = bytearray()
        self._threads = {
            threading.Thread(target=each, args=(stream, given), daemon=True): stream
            for each, stream, given in (
                (_read_answers, process.stdout, self._answers),
                (_read_output, process.stderr, self._printed),
                (_send, process.stdin, sent),
            )
        }
        for thread in self._threads:
            thread.start()

    def answer(self, limits: Limits, began: Callable[[float], object]) -> dict[str, Any]:
        """What the work returned.

        Raises:
            Refusal: the child ended without one, or went beyond a limit.
        """
        since, seconds = time.perf_counter(), START_SECONDS
        here = started = False
        while True:
            ended = self._process.poll()
            if ended is not None:
                self._read_the_rest()
            said = self._next()
            if said is not None and "here" in said:
                here = True
            elif said is not None and "ready" not in said:
                return said
            elif said is not None:
                began(time.perf_counter() - since)
                since, seconds, started = time.perf_counter(), limits.timeout or math.inf, True
            elif ended is not None:
                what = _how_it_ended(ended)
                what = what if here else f"{what} before it had imported composer"
                by_others = not here or self._process.orphaned or -ended in _FROM_OUTSIDE
                self._refuse(Status.CRASHED, Reason.CRASHED, what, by_others=by_others)
            if limits.memory is not None:
                self._check_memory(limits.memory)
            if time.perf_counter() - since > seconds:
                what = f"stopped after {seconds:g} s in a child process"
                what = what if started else f"{what}, which had not started its work by then"
                self._refuse(Status.TIMED_OUT, Reason.TIMEOUT, what, by_others=not started)

    def end(self) -> None:
        """Kill the child and what it started; wait until its pipes are read."""
        self._process.end()
        self._read_the_rest()

    def close(self) -> None:
        """Free what is left. A pipe that is still read or written would be waited for."""
        self._process.close()
        for thread, stream in self._threads.items():
            if not thread.is_alive():
                with contextlib.suppress(BrokenPipeError):  # of what the child had not read
                    stream.close()

    def _next(self) -> dict[str, Any] | None:
        try:
            return self._answers.get(timeout=_STEP_SECONDS)
        except queue.Empty:
            return None

    def _read_the_rest(self) -> None:
        """What the child started may hold its pipes open; that is not waited for."""
        for thread in self._threads:
            thread.join(timeout=1)

    def _check_memory(self, limit: int) -> None:
        taken = _resident_bytes(self._process.pid)
        if taken <= limit * _MIB:
            return
        what = f"took {taken // _MIB} MiB in a child process, and memory_limit is {limit} MiB"
        self._refuse(Status.FAILED, Reason.OUT_OF_MEMORY, what)

    def _refuse(
        self, status: Status, reason: Reason, what: str, *, by_others: bool = False
    ) -> NoReturn:
        self.end()
        output = self._printed.decode(errors="replace").strip()
        raise ChildRefusal(status, reason, what, output=output, by_others=by_others)


def _read_answers(stream: IO[bytes], answers: queue.SimpleQueue[dict[str, Any]]) -> None:
    for line in stream:
        with contextlib.suppress(ValueError):  # the line it was writing when it ended
            answers.put(json.loads(line))


def _read_output(stream: IO[bytes], printed: bytearray) -> None:
    while some := os.read(stream.fileno(), 65536):
        printed += some
        del printed[:-_KEPT_OUTPUT]


def _send(stream: IO[bytes], sent: Sequence[bytes]) -> None:
    """The pipe stays open: its end tells the child that the caller is gone."""
    with contextlib.suppress(BrokenPipeError):
        stream.writelines(sent)
        stream.flush()


@contextlib.contextmanager
def _started(work: str, payload: bytes) -> Iterator[_Child]:
    process, head = forkserver.start(work)
    child = _Child(process, (head, SIZE.pack(len(payload)), payload))
    try:
        yield child
    finally:
        child.end()
        child.close()


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"a child process exited with status {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"a child process was killed by {name}"


def _resident_bytes(pid: int | None) -> int:
    """Physical memory of a process: by /proc on Linux, 0 elsewhere and where there is none yet.

    A limit on address space (``RLIMIT_AS``) would not do: torch and CUDA reserve far more than
    they use.
    """
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
