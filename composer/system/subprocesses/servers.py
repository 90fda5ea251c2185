"""The caller's side of the servers that fork sandboxes.

A server is started by the first request and kept for the next ones. A request that comes while all
servers are at work starts another. A server is replaced when something has changed that it has for
good from its start: the environment that its imports read, the folder, the user, limits, signals.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from multiprocessing import spawn
from pathlib import Path
from typing import Any

from composer.system import forks
from composer.system.subprocesses.serving import SIZE, wait

NOT_INHERITED = {
    *("COMPOSER_DUMP", "COMPOSER_SINKS", "COMPOSER_TELEMETRY"),
    *("TORCH_TRACE", "TORCH_COMPILE_DEBUG"),
    "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR",
}
"""Variables that a sandbox does not get. By most of them it would write to the caller's own
records. By the last one, Inductor tells its kernels an address in this process."""

_READ_LATE = {
    *("ORT_DISABLE_TELEMETRY", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"),
    "PYTEST_CURRENT_TEST",
}
"""Variables that engines, or pytest, set while they work. They are read only when they are used, so
a change needs no new server. The same holds for composer's own variables."""

IDLE_SECONDS = 60.0
"""How long an idle server is kept. It holds some 300 MiB."""

_GREETING_SECONDS = 1.0
"""How long a server that was kept may take to say that it listens."""

_KEPT_OUTPUT = 4096
_NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)


class Server:
    """A server that was started for some work.

    Attributes:
        pid: Its process number.
        stands_back: True if it and its sandboxes yield to others of the machine.
        printed: The end of what it and its sandbox have printed since :meth:`begin`.
    """

    def __init__(self, work: str, place: tuple[Any, ...], *, stands_back: bool) -> None:
        self.place = place
        self.stands_back = stands_back
        self.printed = bytearray()
        self._unsent = memoryview(b"")
        self._received = b""
        with contextlib.ExitStack() as unless_started:
            self._channel, theirs = socket.socketpair()
            unless_started.callback(self._channel.close)
            with theirs:
                self._process = _started(work, theirs, stands_back=stands_back)
            unless_started.pop_all()
        assert self._process.stdout is not None
        self._output = self._process.stdout
        self.pid = self._process.pid
        os.set_blocking(self._output.fileno(), False)
        self._channel.setblocking(False)

    def begin(self, work: str, payload: bytes) -> None:
        """Have the server start a sandbox for the work. :meth:`exchange` sends the request."""
        head = json.dumps({"work": work, "path": _import_path(), "environment": _environment()})
        self.printed.clear()
        self._send(head.encode(), payload)

    def exchange(self, seconds: float) -> list[list[Any]]:
        """Send and receive for ``seconds`` at most; return the messages that came, oldest first."""
        sends = selectors.EVENT_WRITE if self._unsent else 0
        wait(self._channel, selectors.EVENT_READ | sends, seconds)
        with contextlib.suppress(OSError):  # the server is full, or gone
            sent = self._channel.send(self._unsent, _NO_SIGNAL) if self._unsent else 0
            self._unsent = self._unsent[sent:]
        *lines, self._received = (self._received + self._read_channel()).split(b"\n")
        self._read_output()  # read last: it then holds all that was printed before the end
        messages = []
        for line in lines:
            with contextlib.suppress(ValueError):  # empty, or cut short when the sandbox was killed
                messages.append(json.loads(line))
        return messages

    def exit_code(self) -> int | None:
        """The server's exit code, the negative number of a signal; ``None`` while it runs."""
        return self._process.poll()

    def is_listening(self) -> bool:
        """True if the server answers an empty frame in time."""
        self._send(b"")
        until = time.monotonic() + _GREETING_SECONDS
        while self.exit_code() is None and time.monotonic() < until:
            if ["listening"] in self.exchange(until - time.monotonic()):
                return True
        return False

    def end(self) -> None:
        """Kill the server, and what its imports started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        self.close()

    def disown(self) -> None:
        """In a forked child, let go of the server. It is the parent's, so it is not waited for."""
        self._process.returncode = 0
        self.close()

    def close(self) -> None:
        """Close this process's ends of the channel and of the output."""
        self._channel.close()
        self._output.close()

    def _send(self, *frames: bytes) -> None:
        self._unsent = memoryview(b"".join(SIZE.pack(len(each)) + each for each in frames))

    def _read_channel(self) -> bytes:
        read = b""
        with contextlib.suppress(OSError):  # nothing there, or the server is gone
            while some := self._channel.recv(1 << 20):
                read += some
        return read

    def _read_output(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while some := os.read(self._output.fileno(), 1 << 16):
                self.printed += some
                del self.printed[:-_KEPT_OUTPUT]


def _started(work: str, channel: socket.socket, *, stands_back: bool) -> subprocess.Popen[bytes]:
    """A server that imports what this process can import, in a session of its own."""
    asked = f"{work!r}, {channel.fileno()}, {os.getpid()}, {IDLE_SECONDS}, {stands_back=}"
    path = f"import sys; sys.path[:] = {_import_path()!r}"
    code = f"{path}; from composer.system.subprocesses import serving"
    return subprocess.Popen(
        [
            os.fsdecode(spawn.get_executable()),
            *("-X", "faulthandler", "-c", f"{code}; serving.serve({asked})"),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=[channel.fileno()],
        env=_environment(),
        start_new_session=True,
    )


class Servers:
    """The servers of this process that wait for a request; a forked child has none."""

    def __init__(self) -> None:
        self._lock = forks.lock()
        self._idle: dict[bool, list[Server]] = {True: [], False: []}

    def take(self, work: str, *, stands_back: bool = False) -> Server:
        """A server to make a request to: one that was kept, or a new one.

        Args:
            work: The work, of which a new server imports the module.
            stands_back: True for one that yields to others of the machine.

        Raises:
            OSError: there is no process, memory or descriptor left for one.
        """
        place = _place()
        while (server := self._next_idle(self._idle[stands_back])) is not None:
            if server.place == place and server.is_listening():
                return server
            server.end()
        return Server(work, place, stands_back=stands_back)

    def _next_idle(self, idle: list[Server]) -> Server | None:
        with self._lock:
            return idle.pop() if idle else None

    def keep(self, server: Server) -> None:
        """Keep a server whose sandbox has ended for the next request."""
        with self._lock:
            self._idle[server.stands_back].append(server)

    def end_all(self) -> None:
        """End the servers that wait."""
        for idle in self._idle.values():
            while (server := self._next_idle(idle)) is not None:
                server.end()

    def disown(self) -> None:
        """In a forked child, let go of the servers that wait. They are the parent's."""
        for each in itertools.chain(*self._idle.values()):
            each.disown()
        self._idle = {True: [], False: []}


servers = forks.with_each_child(Servers(), Servers.disown)
atexit.register(servers.end_all)


def _place() -> tuple[Any, ...]:
    """What a server gets at its start, keeps, and hands on to its sandboxes."""
    import resource  # Windows does not have it

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
    return spawn.get_executable(), read, _folder(), user, limits, cores, signals, manners


def _folder() -> tuple[int, int] | None:
    """The folder that this process is in, which need not have a path."""
    try:
        found = Path().stat()
    except OSError:  # it is on a file system that is gone
        return None
    return found.st_dev, found.st_ino


def _umask() -> str:
    """The umask as Linux reports it; empty elsewhere. ``os.umask`` would have to change it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("Umask:"):
                return line
    return ""


def _environment() -> dict[str, str]:
    return {name: text for name, text in os.environ.items() if name not in NOT_INHERITED}


def _import_path() -> list[str]:
    return [each for each in sys.path if isinstance(each, str)]  # imports ignore other entries
