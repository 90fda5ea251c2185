"""The caller's side of a sandbox: what it is given, how long it may take, what it answers.

A sandbox is a child process. It is given bytes, and answers with lines of JSON. It is killed when
it is done, when it goes beyond a limit, and when its caller dies.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from composer.errors import SandboxRefusal, refuse
from composer.records import Reason, Status
from composer.system.subprocesses.servers import Server, servers
from composer.system.subprocesses.serving import kill

START_SECONDS = 120.0
_PATIENCE = {False: 1, True: 5}
"""A sandbox may take ``START_SECONDS`` until its work begins, and five times that if it stands
back."""

END_SECONDS = 5.0
"""How long a server may take to tell that its killed sandbox has ended."""

_STEP_SECONDS = 0.02
_MIB = 1 << 20
_FROM_OUTSIDE = (signal.SIGTERM, signal.SIGINT)
"""Signals by which people and schedulers end a process. No engine ends itself by one of them."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a build.

    Attributes:
        isolate: True if the graph is built in a sandbox first.
        timeout: Seconds; ``None`` for no limit.
        memory: MiB that the sandbox may take; ``None`` for no limit.
    """

    isolate: bool = False
    timeout: float | None = None
    memory: int | None = None


class Unwanted(Exception):
    """The answer of a sandbox is not wanted any more."""


NONE = Limits()
"""No limits: a build in this process."""


def ask(
    work: str,
    payload: bytes,
    limits: Limits,
    began: Callable[[float], object] = lambda seconds: None,
    *,
    heard: Callable[..., Limits | None] = lambda *values: None,
    is_wanted: Callable[[], bool] = lambda: True,
    stands_back: bool = False,
) -> dict[str, Any]:
    """Have a sandbox do some work.

    Args:
        work: ``module:function``. The function is given the payload, and a function to call when it
            is ready to begin; the limit of time counts from then on. It may call that function
            again, with values, at each further step. It returns what JSON can hold.
        payload: Any bytes.
        limits: The limits of the work. The start of the sandbox does not count.
        began: Called with the seconds that the start took.
        heard: Called with the values of a further step. It returns the limits of that step;
            ``None`` if they stay what they are, and the time goes on.
        is_wanted: Asked again and again; when it says False, the sandbox is ended.
        stands_back: True if the sandbox yields to others of the machine.

    Returns:
        What the function returned.

    Raises:
        Refusal: ``crashed``, ``timed_out``, ``failed`` with ``out_of_memory``; ``declined`` with
            ``not_isolatable`` if there is no way to start a sandbox.
        Unwanted: ``is_wanted`` said False.
    """
    if os.name != "posix" or not sys.executable or getattr(sys, "frozen", False):
        what = "there is no way to start, and to end, an interpreter here"
        refuse(Status.DECLINED, Reason.NOT_ISOLATABLE, what)
    server = servers.take(work, stands_back=stands_back)
    sandbox = _Sandbox(server)
    try:
        server.begin(work, payload)
        return sandbox.answer(limits, began, heard, is_wanted)
    finally:
        sandbox.end()


class _Sandbox:
    """What this process knows of a sandbox.

    If the server could not fork, the server is the sandbox, and ``_pid`` is the server's.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._pid: int | None = None
        self._code: int | None = None
        self._is_servers_end = False

    def answer(
        self,
        limits: Limits,
        began: Callable[[float], object],
        heard: Callable[..., Limits | None],
        is_wanted: Callable[[], bool],
    ) -> dict[str, Any]:
        """Wait for the work, and return what it returned; the arguments are those of :func:`ask`.

        Raises:
            Refusal: the sandbox ended without an answer, or went beyond a limit.
            Unwanted: the answer is not wanted any more.
        """
        since, seconds = time.perf_counter(), START_SECONDS * _PATIENCE[self._server.stands_back]
        has_imported = has_begun = False
        while True:
            for kind, *values in self._listen():
                if kind == "answer":
                    return dict(values[0])
                if kind == "here":
                    has_imported = True
                if kind == "ready":
                    began(time.perf_counter() - since)
                    has_begun = True
                step = heard(*values) if kind == "step" else None
                if kind == "ready" or step is not None:
                    limits = step or limits
                    since = time.perf_counter()
                    seconds = math.inf if limits.timeout is None else limits.timeout
            if not is_wanted():
                raise Unwanted
            if self._code is not None:
                self._refuse_crashed(self._code, has_imported=has_imported)
            if limits.memory is not None:
                self._check_memory(limits.memory)
            if time.perf_counter() - since > seconds:
                self._refuse_late(seconds, has_begun=has_begun)

    def end(self) -> None:
        """Kill the sandbox and what it started. Keep the server if it reports the sandbox's end."""
        self._kill()
        if self._code is None or self._is_servers_end:
            self._server.end()
        else:
            servers.keep(self._server)

    def _kill(self) -> None:
        if self._pid is None or (self._code is not None and not self._is_servers_end):
            return
        kill(self._pid)
        deadline = time.monotonic() + END_SECONDS
        while self._code is None and time.monotonic() < deadline:
            self._listen()

    def _listen(self) -> list[list[Any]]:
        """The messages that came within a moment; the end of the sandbox is noted here."""
        code = self._server.exit_code()  # asked first: it may have said something before its end
        messages = self._server.exchange(_STEP_SECONDS)
        for kind, *values in messages:
            if kind == "pid":
                self._pid = values[0]
            if kind == "ended":
                self._code = values[0]
        if self._code is None and code is not None:
            self._code, self._is_servers_end = code, True
        return messages

    def _check_memory(self, limit: int) -> None:
        taken = _resident_bytes(self._pid)
        if taken <= limit * _MIB:
            return
        what = f"took {taken // _MIB} MiB in a child process, and memory_limit is {limit} MiB"
        self._refuse(Status.FAILED, Reason.OUT_OF_MEMORY, what)

    def _refuse_crashed(self, code: int, *, has_imported: bool) -> NoReturn:
        what = _how_it_ended(code)
        if not has_imported:
            what = f"{what} before it had imported composer"
        is_orphaned = self._is_servers_end and self._pid != self._server.pid
        by_others = not has_imported or is_orphaned or -code in _FROM_OUTSIDE
        self._refuse(Status.CRASHED, Reason.CRASHED, what, by_others=by_others)

    def _refuse_late(self, seconds: float, *, has_begun: bool) -> NoReturn:
        what = f"stopped after {seconds:g} s in a child process"
        if not has_begun:
            what = f"{what}, which had not started its work by then"
        self._refuse(Status.TIMED_OUT, Reason.TIMEOUT, what, by_others=not has_begun)

    def _refuse(
        self, status: Status, reason: Reason, what: str, *, by_others: bool = False
    ) -> NoReturn:
        self._kill()
        output = self._server.printed.decode(errors="replace").strip()
        raise SandboxRefusal(status, reason, what, traceback=output, by_others=by_others)


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"a child process exited with status {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"a child process was killed by {name}"


def _resident_bytes(pid: int | None) -> int:
    """The physical memory of a process in bytes.

    It is read from ``/proc`` on Linux. The result is 0 elsewhere, and before there is a process. A
    limit on address space (``RLIMIT_AS``) would not do: torch and CUDA reserve far more than they
    use.
    """
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
