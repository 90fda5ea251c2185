"""The caller's side of the server that forks its children.

There is one server in a process that asks. It is started by the first request, ends by itself when
it is asked for nothing, and is made anew where what it has for good from its start has changed: the
environment that its imports read, the user, limits and signals.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing import spawn
from pathlib import Path
from typing import IO, Any

from composer import forks
from composer.child.serving import NUMBER, SIZE

NOT_INHERITED = {
    *("COMPOSER_DUMP", "COMPOSER_SINKS", "COMPOSER_TELEMETRY"),
    *("TORCH_TRACE", "TORCH_COMPILE_DEBUG"),
    "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR",
}
"""Variables by which a child would write to the caller's own records, and one by which Inductor
tells its kernels of an address in this process."""

_READ_LATE = {
    *("ORT_DISABLE_TELEMETRY", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"),
    "PYTEST_CURRENT_TEST",
}
"""Variables that engines, or pytest, set while they work, and that are read no sooner than used; as
composer reads its own."""

IDLE_SECONDS = 60.0
"""How long a server that nobody asks is kept: it holds some 300 MiB."""

_END_SECONDS = 5.0
"""How long a server may take to kill a child; importing is the longest that it does at a time."""

_LAST_SECONDS = 0.5
_LOST = 1
"""The code of a request that a living server could not take."""

_NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)


class Process:
    """A child of the server's.

    Attributes:
        stdin: Its pipes, as of ``subprocess.Popen``.
        stdout: Likewise.
        stderr: Likewise.
        pid: Its process number; ``None`` while the server imports.
        orphaned: Whether the server ended, which takes its children along.
    """

    def __init__(self, server: subprocess.Popen[bytes], status: socket.socket, ends: _Ends) -> None:
        self.stdin, self.stdout, self.stderr = ends.mine
        self.pid: int | None = None
        self._code: int | None = None
        self._server = server
        self._status = status
        self._said = b""
        self._over = self._killed = False
        self.orphaned = False

    def poll(self) -> int | None:
        """Its exit code, the negative number of a signal that killed it; ``None`` while it runs.

        That of the server, where it is orphaned.
        """
        has_ended = self._server.poll() is not None  # asked first: it may say something before
        while self._listen(0):
            pass
        if self._code is None and (self._over or has_ended):
            self.orphaned = True
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._code = self._server.wait(timeout=_LAST_SECONDS)
            self._code = _LOST if self._code is None else self._code
        return self._code

    def end(self) -> None:
        """Have it be killed, with what it started, and wait until it has ended; not for ever."""
        if self._killed:
            return
        with contextlib.suppress(OSError):  # the server is gone
            self._status.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + _END_SECONDS
        while self.poll() is None and time.monotonic() < deadline:
            self._listen(_LAST_SECONDS)
        is_stuck = self.poll() is None
        if is_stuck or self.orphaned:
            _kill(self.pid)
        if is_stuck or self._server.poll() is not None:
            _kill(self._server.pid)  # and what its imports started
            self._server.wait()
        self._killed = True

    def close(self) -> None:
        """Free what it took, but for its pipes."""
        self._status.close()

    def _listen(self, seconds: float) -> bool:
        """Whether the server said something within this time."""
        if self._over:
            return False
        self._status.settimeout(seconds)
        try:
            some = self._status.recv(64)
        except (BlockingIOError, TimeoutError):
            return False
        except ConnectionError:
            some = b""
        self._said += some
        self._over = not some
        numbers = NUMBER.iter_unpack(self._said[: len(self._said) // NUMBER.size * NUMBER.size])
        known = (*(number for (number,) in numbers), None, None)
        self.pid, self._code = known[0] or None, known[1]
        return not self._over


class _Ends:
    """Three pipes: what the caller keeps of them, and what the child gets.

    Raises:
        OSError: No more may be opened; none is left open then.
    """

    def __init__(self) -> None:
        with ExitStack() as opened:
            pairs = []
            for _ in range(3):
                read, write = os.pipe()
                pairs.append((os.fdopen(read, "rb"), os.fdopen(write, "wb")))
                opened.callback(_close, pairs[-1])
            (stdin, mine_in), (mine_out, stdout), (mine_err, stderr) = pairs
            self.theirs = stdin, stdout, stderr
            self.mine = mine_in, mine_out, mine_err
            opened.pop_all()

    def hand_over(self) -> None:
        """From now on only the child has its own."""
        _close(self.theirs)

    def close(self) -> None:
        """Close the caller's."""
        _close(self.mine)


def _close(streams: Iterable[IO[bytes]]) -> None:
    for stream in streams:
        stream.close()


@dataclass(slots=True)
class _Server:
    """A server that was started, and what it was started in."""

    process: subprocess.Popen[bytes]
    control: socket.socket
    place: tuple[Any, ...]

    def send(self, descriptors: list[int]) -> None:
        """Send a request; ``send_fds`` takes no flags, and the program may die of ``SIGPIPE``."""
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
        self.control.sendmsg([b"."], [rights], _NO_SIGNAL)


class _Servers:
    """The server of this process; a forked child has none, whoever forked it."""

    def __init__(self) -> None:
        self._lock = forks.lock()
        self._server: _Server | None = None
        self._ending: list[subprocess.Popen[bytes]] = []

    def request(self, work: str, descriptors: list[int]) -> subprocess.Popen[bytes]:
        """Have the server fork: one that is there, or a new one."""
        with self._lock:
            place = _place()
            server = self._server
            if server and server.place == place and server.process.poll() is None:
                with contextlib.suppress(ConnectionError):  # it was idle, and has ended
                    server.send(descriptors)
                    return server.process
            self.end()
            server = self._server = _start(work, place, errors=descriptors[-1])
            with contextlib.suppress(ConnectionError):  # it has ended already
                server.send(descriptors)
            return server.process

    def end(self) -> None:
        """Ask for no more; a server ends when it has no child left."""
        if self._server is not None:
            self._server.control.close()
            self._ending.append(self._server.process)
        self._server = None
        self._ending = [each for each in self._ending if each.poll() is None]

    def end_all(self) -> None:
        """End with the program."""
        self.end()
        for each in self._ending:
            try:
                each.wait(timeout=_LAST_SECONDS)
            except subprocess.TimeoutExpired:  # another thread's child is at work
                _kill(each.pid)

    def disown(self) -> None:
        """In a forked child: what there is is the parent's, and not waited for."""
        self.end()
        for each in self._ending:
            each.returncode = 0
        self._ending = []


_servers = _Servers()
atexit.register(_servers.end_all)


@forks.in_child
def _disown() -> None:
    _servers.disown()


def start(work: str) -> tuple[Process, bytes]:
    """Start a child for this work, and what is to be sent to it before the payload.

    Args:
        work: ``module:function``.

    Raises:
        OSError: There is no more of what a process is made of.
    """
    told = {"work": work, "path": _import_path(), "environment": _environment()}
    head = json.dumps(told).encode()
    with ExitStack() as unless_started, ExitStack() as always:
        status, theirs = socket.socketpair()
        unless_started.callback(status.close)
        always.callback(theirs.close)
        ends = _Ends()
        unless_started.callback(ends.close)
        always.callback(ends.hand_over)
        folder = _here()
        always.callback(os.close, folder)
        streams = (each.fileno() for each in ends.theirs)
        server = _servers.request(work, [theirs.fileno(), folder, *streams])
        unless_started.pop_all()
    return Process(server, status, ends), SIZE.pack(len(head)) + head


def _start(work: str, place: tuple[Any, ...], errors: int) -> _Server:
    """A server that imports what this process can import, in a session of its own."""
    mine, theirs = socket.socketpair()
    asked = f"{work!r}, {theirs.fileno()}, {os.getpid()}, {IDLE_SECONDS}"
    code = f"import sys; sys.path[:] = {_import_path()!r}; from composer.child import serving"
    with theirs:
        process = subprocess.Popen(
            [
                os.fsdecode(spawn.get_executable()),
                *("-X", "faulthandler", "-c", f"{code}; serving.serve({asked})"),
            ],
            stdin=subprocess.DEVNULL,
            stdout=errors,
            stderr=errors,
            pass_fds=[theirs.fileno()],
            env=_environment(),
            start_new_session=True,
        )
    return _Server(process, mine, place)


def _kill(group: int | None) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if group is not None:
            os.killpg(group, signal.SIGKILL)


def _place() -> tuple[Any, ...]:
    """What a server has for good from its start, and hands on to its children."""
    import resource  # which Windows has not

    read = {
        name: text
        for name, text in _environment().items()
        if name not in _READ_LATE and not name.startswith("COMPOSER_")
    }
    user = os.getuid(), os.geteuid(), os.getgid(), os.getegid(), os.getgroups()
    kinds = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
    limits = [resource.getrlimit(each) for each in sorted({*kinds})]
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    ignored = {s for s in signal.valid_signals() if signal.getsignal(s) is signal.SIG_IGN}
    signals = ignored, signal.pthread_sigmask(signal.SIG_BLOCK, ())
    manners = os.getpriority(os.PRIO_PROCESS, 0), _umask()
    return spawn.get_executable(), read, user, limits, cores, signals, manners


def _umask() -> str:
    """As Linux tells it; to ask for it otherwise is to change it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("Umask:"):
                return line
    return ""


def _environment() -> dict[str, str]:
    return {name: text for name, text in os.environ.items() if name not in NOT_INHERITED}


def _import_path() -> list[str]:
    return [each for each in sys.path if isinstance(each, str)]  # imports pass over all else


def _here() -> int:
    """A descriptor of the folder, which need not have a path; of none where it is not ours."""
    try:
        return os.open(".", getattr(os, "O_PATH", os.O_RDONLY))
    except OSError:
        return os.open(os.devnull, os.O_RDONLY)
