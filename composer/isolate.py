"""A probe in a child process: what crashes, hangs or eats memory there does not do so here.

The child (:mod:`composer.isolated`) builds the candidate, runs it once, and ends; only then does
the caller build. It is a fresh interpreter, never a fork: torch's threads do not survive one.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

from composer import collectives, parcel
from composer.backends.base import note
from composer.errors import ChildRefusal, refuse
from composer.passes import late
from composer.passes.resolve import SharedPasses
from composer.policy import Candidate
from composer.records import GraphRequest, Reason, Status

START_SECONDS = 120.0
_STEP_SECONDS = 0.02
_KEPT_OUTPUT = 4096
_MIB = 1 << 20

# What would go to the caller's own records is not the child's to write.
_NOT_INHERITED = ("COMPOSER_DUMP", "COMPOSER_TELEMETRY", "TORCH_TRACE", "TORCH_COMPILE_DEBUG")


@dataclass(frozen=True, slots=True)
class Limits:
    """What a build may take: seconds, MiB in the child, and whether there is to be a child."""

    isolate: bool = False
    timeout: float | None = None
    memory: int | None = None


NONE = Limits()
"""A build that takes what it takes, in this process."""


def probe(request: GraphRequest, candidate: Candidate, limits: Limits, min_coverage: float) -> None:
    """Build the candidate in a child process, and run it once there.

    Args:
        request: The graph; neither it nor its tensors are changed.
        candidate: What to build.
        limits: For the build and the run; the start of the child is not counted.
        min_coverage: Share of the graph that the engine has to take.

    Raises:
        Refusal: ``crashed``, ``timed_out``, ``failed`` with ``out_of_memory``, ``declined`` with
            ``not_isolatable``; or what the child's own attempt came to.
    """
    if os.name != "posix" or not sys.executable:
        what = "there is no way to start, and to end, an interpreter here"
        refuse(Status.DECLINED, Reason.NOT_ISOLATABLE, what)
    if collectives.meets_other_ranks(request.gm):
        what = "the graph has collectives, and a child process is no rank"
        refuse(Status.DECLINED, Reason.NOT_ISOLATABLE, what)
    started = time.perf_counter()
    shared = late.in_force().shared
    contents = {
        f"the backend {candidate.name!r}": candidate.backend,
        "its options": candidate.options,
        "the shared passes": shared if shared.late else SharedPasses(),
        "the graph": (request.gm, parcel.inputs_to_send(request.example_inputs)),
        "its surroundings": {
            "torch": parcel.surroundings(),
            "mode": request.mode,
            "min_coverage": min_coverage,
        },
    }
    with _started(parcel.pack(contents)) as child:
        attempt = child.answer(limits)
    _judge(attempt)
    note(isolated={"seconds": round(time.perf_counter() - started, 3)})


def _judge(attempt: dict[str, Any]) -> None:
    """End the caller's attempt as the child's ended."""
    if attempt["status"] == Status.SUCCEEDED:
        return
    status, reason = Status(attempt["status"]), Reason(attempt["reason"])
    message = attempt["message"]
    if reason is Reason.NOT_REGISTERED:  # here it is: the caller's own probe found it
        status, reason = Status.DECLINED, Reason.NOT_ISOLATABLE
        message = f"in a child process {message}"
    raise ChildRefusal(status, reason, message, attempt["error_type"], attempt["traceback"])


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

    def answer(self, limits: Limits) -> dict[str, Any]:
        """The record of the child's attempt.

        Raises:
            Refusal: the child ended without one, or went beyond a limit.
        """
        since, seconds = time.perf_counter(), START_SECONDS
        while True:
            ended = self._process.poll()
            if ended is not None:
                self._read_the_rest()
            said = self._next()
            if said is not None and "ready" not in said:
                return said
            if said is not None:
                since, seconds = time.perf_counter(), limits.timeout or math.inf
            elif ended is not None:
                self._refuse(Status.CRASHED, Reason.CRASHED, _how_it_ended(ended))
            if limits.memory is not None:
                self._check_memory(limits.memory)
            if time.perf_counter() - since > seconds:
                what = f"stopped after {seconds:g} s in a child process"
                self._refuse(Status.TIMED_OUT, Reason.TIMEOUT, what)

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

    def _refuse(self, status: Status, reason: Reason, what: str) -> NoReturn:
        self.end()
        output = self._printed.decode(errors="replace").strip()
        raise ChildRefusal(status, reason, what, output=output)

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
def _started(payload: bytes) -> Iterator[_Child]:
    """A child that imports what this process can import, in a group of its own."""
    serve = "__import__('composer.isolated').isolated.serve()"
    code = f"import sys; sys.path[:] = {sys.path!r}; {serve}"
    process = subprocess.Popen(
        [sys.executable, "-X", "faulthandler", "-c", code, str(os.getpid())],
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
