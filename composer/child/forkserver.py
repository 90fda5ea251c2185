"""The caller's side of the server that forks its children.

There is one server in a process that asks. It is started by the first request, ends by itself when
it is asked for nothing, and is made anew where the environment is no longer what its imports read.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import spawn
from pathlib import Path
from typing import IO, Any

from composer import forks
from composer.child.serving import NUMBER, SIZE

NOT_INHERITED = {
    *("COMPOSER_DUMP", "COMPOSER_SINKS", "COMPOSER_TELEMETRY"),
    *("TORCH_TRACE", "TORCH_COMPILE_DEBUG"),
}
"""Variables by which a child would write to the caller's own records."""

_READ_LATE = {"ORT_DISABLE_TELEMETRY", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"}
"""Variables that engines set while they work, and read no sooner; as composer reads its own."""

IDLE_SECONDS = 120.0
"""How long a server that nobody asks is kept: it holds some 300 MiB."""

_END_SECONDS = 1.0


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
        self._server = server
        self._status = status
        self._ends = ends
        self._said = b""
        self.orphaned = False
        self._over = False

    def poll(self) -> int | None:
        """Its exit code, the negative number of a signal that killed it; ``None`` while it runs.

        That of the server, where it is orphaned.
        """
        self._listen(socket.MSG_DONTWAIT)
        numbers = [number for (number,) in NUMBER.iter_unpack(self._said[: self._whole])]
        if numbers:
            self.pid = numbers[0]
        if len(numbers) > 1:
            return int(numbers[1])
        if not self._over:
            return None
        self.orphaned = True
        return self._server.wait()

    def end(self) -> None:
        """Have the server kill it and what it started; wait until it has."""
        if self._over:
            return
        if self.poll() is None and self.pid is None:  # it is importing still, perhaps for good
            self._server.kill()
        with contextlib.suppress(OSError):  # the server is gone
            self._status.shutdown(socket.SHUT_WR)
        while not self._over:
            self._listen(0)

    def close(self) -> None:
        """Close its pipes."""
        self._status.close()
        self._ends.close()

    @property
    def _whole(self) -> int:
        return len(self._said) // NUMBER.size * NUMBER.size

    def _listen(self, flags: int) -> None:
        try:
            some = self._status.recv(64, flags)
        except BlockingIOError:
            return
        except ConnectionError:
            some = b""
        self._said += some
        self._over = not some


class _Ends:
    """Three pipes: what the caller keeps of them, and what the child gets."""

    def __init__(self) -> None:
        pairs = [os.pipe() for _ in range(3)]
        (theirs_in, mine_in), *outs = pairs
        self.theirs = [theirs_in, *(write for _, write in outs)]
        self.mine: tuple[IO[bytes], IO[bytes], IO[bytes]] = (
            os.fdopen(mine_in, "wb"),
            *(os.fdopen(read, "rb") for read, _ in outs),  # type: ignore[assignment]
        )

    @contextlib.contextmanager
    def handed_over(self) -> Iterator[None]:
        """Afterwards only the child has its ends."""
        try:
            yield
        finally:
            for each in self.theirs:
                os.close(each)

    def close(self) -> None:
        """Close the caller's."""
        for stream in self.mine:
            with contextlib.suppress(BrokenPipeError):  # of what the child had not read
                stream.close()


@dataclass(slots=True)
class _Server:
    """A server that was started, and what it was started in."""

    process: subprocess.Popen[bytes]
    control: socket.socket
    place: tuple[Any, ...]


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
            if server is not None and server.place == place:
                with contextlib.suppress(ConnectionError):  # it was idle, and has ended
                    socket.send_fds(server.control, [b"."], descriptors)
                    return server.process
            self.end()
            server = self._server = _start(work, place, errors=descriptors[-1])
            with contextlib.suppress(ConnectionError):  # it has ended already
                socket.send_fds(server.control, [b"."], descriptors)
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
            with contextlib.suppress(subprocess.TimeoutExpired):
                each.wait(timeout=_END_SECONDS)

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
    place = {"folder": _folder(), "path": _import_path(), "environment": _environment()}
    head = json.dumps({"work": work, "place": place}).encode()
    status, theirs = socket.socketpair()
    ends = _Ends()
    with theirs, ends.handed_over():
        try:
            server = _servers.request(work, [theirs.fileno(), *ends.theirs])
        except BaseException:
            status.close()
            ends.close()
            raise
    return Process(server, status, ends), SIZE.pack(len(head)) + head


def _start(work: str, place: tuple[Any, ...], errors: int) -> _Server:
    """A server that imports what this process can import, in a session of its own."""
    mine, theirs = socket.socketpair()
    code = f"import sys; sys.path[:] = {_import_path()!r}; from composer.child import serving"
    code = f"{code}; serving.serve({work!r}, {os.getpid()}, {IDLE_SECONDS})"
    with theirs:
        process = subprocess.Popen(
            [os.fsdecode(spawn.get_executable()), "-X", "faulthandler", "-c", code],
            stdin=theirs.fileno(),
            stdout=errors,
            stderr=errors,
            env=_environment(),
            start_new_session=True,
        )
    return _Server(process, mine, place)


def _place() -> tuple[Any, ...]:
    """What a server has for good from its start."""
    read = {
        name: text
        for name, text in _environment().items()
        if name not in _READ_LATE and not name.startswith("COMPOSER_")
    }
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    return spawn.get_executable(), read, cores


def _environment() -> dict[str, str]:
    return {name: text for name, text in os.environ.items() if name not in NOT_INHERITED}


def _import_path() -> list[str]:
    return [each for each in sys.path if isinstance(each, str)]  # imports pass over all else


def _folder() -> str | None:
    with contextlib.suppress(OSError):  # it was removed
        return str(Path.cwd())
    return None
