"""Work in a child process: what crashes, hangs or eats memory there does not do so here.

The child is a fresh interpreter, never a fork: torch's threads do not survive one. It is given
bytes through a pipe, answers with lines of JSON, and is killed when it is done, when it goes beyond
a limit, and when its caller dies.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import pkgutil
import queue
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import spawn
from pathlib import Path
from typing import IO, Any, NoReturn

from composer.errors import ChildRefusal, refuse
from composer.records import Reason, Status

START_SECONDS = 120.0
_STEP_SECONDS = 0.02
_KEPT_OUTPUT = 4096
_MIB = 1 << 20
_PR_SET_PDEATHSIG = 1
_FROM_OUTSIDE = (signal.SIGTERM, signal.SIGINT)
"""Signals by which people and schedulers end a process; no engine ends itself so."""

# What would go to the caller's own records is not the child's to write.
_NOT_INHERITED = {
    *("COMPOSER_DUMP", "COMPOSER_SINKS", "COMPOSER_TELEMETRY"),
    *("TORCH_TRACE", "TORCH_COMPILE_DEBUG"),
}


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


def serve() -> None:
    """Be the child. Whatever is printed goes to stderr: stdout is for answers."""
    parent, work = sys.argv[1:]
    _die_with_parent(int(parent))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    (size,) = struct.unpack("<Q", sys.stdin.buffer.read(8))
    payload = sys.stdin.buffer.read(size)
    threading.Thread(target=_end_with_stdin, daemon=True).start()

    def say(answer: dict[str, Any]) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    function: Callable[..., dict[str, Any]] = pkgutil.resolve_name(work)
    say({"here": True})
    say(function(payload, lambda: say({"ready": True})))


def _die_with_parent(parent: int) -> None:
    """Linux kills this process with the thread that started it, also while the engine is stuck."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was gone before
        os._exit(1)


def _end_with_stdin() -> None:
    """Elsewhere the end of its pipe tells that the parent is gone."""
    os.read(0, 1)  # a buffered read would hold a lock that a process that exits wants
    os._exit(1)


class _Child:
    """The process, what it answers, and the end of what it prints."""

    def __init__(self, process: subprocess.Popen[bytes], payload: bytes) -> None:
        self._process = process
        self._answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._printed = b""
        self._threads = [
            threading.Thread(target=each, args=args, daemon=True)
            for each, args in (
                (self._read_answers, (process.stdout,)),
                (self._read_output, (process.stderr,)),
                (self._send, (process.stdin, payload)),
            )
        ]
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
                by_others = not here or -ended in _FROM_OUTSIDE
                self._refuse(Status.CRASHED, Reason.CRASHED, what, by_others=by_others)
            if limits.memory is not None:
                self._check_memory(limits.memory)
            if time.perf_counter() - since > seconds:
                what = f"stopped after {seconds:g} s in a child process"
                what = what if started else f"{what}, which had not started its work by then"
                self._refuse(Status.TIMED_OUT, Reason.TIMEOUT, what, by_others=not started)

    def end(self) -> None:
        """Kill the child and what it started; wait until its pipes are read."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._read_the_rest()

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

    def _read_answers(self, stream: IO[bytes]) -> None:
        for line in stream:
            with contextlib.suppress(ValueError):  # the line it was writing when it ended
                self._answers.put(json.loads(line))

    def _read_output(self, stream: IO[bytes]) -> None:
        while some := os.read(stream.fileno(), 65536):
            self._printed = (self._printed + some)[-_KEPT_OUTPUT:]

    def _send(self, stream: IO[bytes], payload: bytes) -> None:
        """The pipe stays open: its end tells the child that the caller is gone."""
        with contextlib.suppress(BrokenPipeError):
            stream.write(struct.pack("<Q", len(payload)))
            stream.write(payload)
            stream.flush()


@contextlib.contextmanager
def _started(work: str, payload: bytes) -> Iterator[_Child]:
    """A child that imports what this process can import, in a group of its own."""
    path = [each for each in sys.path if isinstance(each, str)]  # imports pass over all else
    code = f"import sys; sys.path[:] = {path!r}; from composer import child; child.serve()"
    process = subprocess.Popen(
        [
            os.fsdecode(spawn.get_executable()),
            "-X",
            "faulthandler",
            "-c",
            code,
            str(os.getpid()),
            work,
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={name: text for name, text in os.environ.items() if name not in _NOT_INHERITED},
        start_new_session=True,
    )
    child = _Child(process, payload)
    try:
        yield child
    finally:
        child.end()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):  # of what it had not read
                    stream.close()


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"a child process exited with status {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"a child process was killed by {name}"


def _resident_bytes(pid: int) -> int:
    """Physical memory of a process: by /proc on Linux, 0 elsewhere.

    A limit on address space (``RLIMIT_AS``) would not do: torch and CUDA reserve far more than
    they use.
    """
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
