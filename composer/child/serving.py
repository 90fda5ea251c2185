"""What the server does, and each child that it forks.

The server is a fresh interpreter. It imports the work that it was started for, and from then on
only forks, reaps and kills. ``multiprocessing``'s would do that too, but its children run the
program's main module again, which is not for a script that compiles at its top level.

A request is one byte on the control socket with five descriptors: a socket of its own, the caller's
folder, and what is to be the child's stdin, stdout and stderr. On its own socket the server says
the child's number, then its exit code. It kills the child, and what that started, when the caller
shuts this socket down, or is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import pkgutil
import selectors
import signal
import socket
import struct
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

NUMBER = struct.Struct("<i")
SIZE = struct.Struct("<Q")
DESCRIPTORS = 5
_STEP_SECONDS = 0.02
_LOOK_SECONDS = 1.0
_PR_SET_PDEATHSIG = 1


def serve(work: str, control: int, caller: int, patience: float) -> None:
    """Be the server, until the caller is gone, asks no more, or has not asked for a while.

    Args:
        work: What the first child will be asked for; its module is imported first. What that prints
            goes where that child's output goes, and an error ends the server.
        control: Descriptor of the socket.
        caller: Its process number.
        patience: Seconds without a child until it has not been asked for a while.
    """
    os.set_inheritable(control, False)  # what the imports start may outlive the server
    _die_with(caller)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a caller that ignores it passes that on
    if sys.platform == "linux":  # elsewhere a fork of what has imported torch is not safe
        importlib.import_module(work.partition(":")[0])
    _outlive_the_thread_that_asked()
    gc.collect()
    gc.freeze()  # a child's collections would copy all that they look at
    fit = sys.platform == "linux" and threading.active_count() == 1
    request = _Server(socket.socket(fileno=control), caller, patience).run()
    if request is None:
        os.killpg(0, signal.SIGKILL)  # and what the imports started; nothing is to be put in order
        raise SystemExit
    _be_child(request, fit=fit)


@dataclass(slots=True)
class _Request:
    """In a child: the process number of its server, and its descriptors."""

    server: int
    folder: int
    streams: list[int]


@dataclass(slots=True)
class _Child:
    """A child of the server's. It is known until it has ended, and its caller wants it no more."""

    pid: int
    ended: bool = False
    wanted: bool = True

    def kill(self) -> None:
        """It and what it started; it may not have made its group yet."""
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(self.pid, signal.SIGKILL)


class _Server:
    def __init__(self, control: socket.socket, caller: int, patience: float) -> None:
        self._control = control
        self._caller = caller
        self._patience = patience
        self._pid = os.getpid()
        self._children: dict[socket.socket, _Child] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)
        self._listens = True

    def run(self) -> _Request | None:
        """Serve; what is returned in a forked child is its request."""
        idle = 0.0
        while self._listens or self._children:
            step = _STEP_SECONDS if self._children else _LOOK_SECONDS
            events = self._selector.select(step)
            idle = 0.0 if events or self._children else idle + step
            for key, _ in events:
                if key.fileobj is not self._control:
                    self._end(key.fileobj)  # type: ignore[arg-type]  # only sockets are in it
                elif (request := self._receive()) is not None:
                    return request
            self._reap()
            if os.getppid() != self._caller:
                for child in self._children.values():
                    child.kill()
                return None
            if idle >= self._patience and self._listens:
                self._control.shutdown(socket.SHUT_RD)  # what was sent before that is still read
        return None

    def _receive(self) -> _Request | None:
        """Fork for a request; what is returned in the child is what it needs of that."""
        asked, descriptors, _, _ = socket.recv_fds(self._control, 1, DESCRIPTORS)
        if not asked:
            self._selector.unregister(self._control)
            self._listens = False
            return None
        if len(descriptors) < DESCRIPTORS:  # there were no more for this process
            for each in descriptors:
                os.close(each)
            return None
        status, folder, *streams = descriptors
        if not self._fork(socket.socket(fileno=status), errors=streams[-1]):
            return _Request(self._pid, folder, streams)
        for each in (folder, *streams):
            os.close(each)
        return None

    def _fork(self, status: socket.socket, errors: int) -> bool:
        """Fork, if that is possible; whether this is the server still."""
        try:
            with warnings.catch_warnings():  # of threads: numpy's pool is idle, and sees to forks
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
        except OSError as error:  # of processes or memory there is no more
            with contextlib.suppress(OSError):  # nobody reads it any more
                os.write(errors, f"{error}\n".encode())
            status.close()
            return True
        if not pid:
            self._forget(status)
            return False
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for own in (1, 2):  # until now those of the first child
            os.dup2(nowhere, own)
        os.close(nowhere)
        self._children[status] = _Child(pid)
        self._selector.register(status, selectors.EVENT_READ)
        _say(status, pid)
        return True

    def _forget(self, status: socket.socket) -> None:
        """In a child: the sockets are the server's, whose end is told by their closing."""
        self._selector.close()
        for each in (self._control, status, *self._children):
            each.close()

    def _end(self, status: socket.socket) -> None:
        """The caller wants this child no more."""
        self._selector.unregister(status)
        self._children[status].wanted = False
        self._children[status].kill()

    def _reap(self) -> None:
        """Say of children how they ended. One that cannot be killed, yet, is not waited for."""
        for status, child in list(self._children.items()):
            if not child.ended:
                pid, how = os.waitpid(child.pid, os.WNOHANG)
                if pid:
                    child.ended = True
                    _say(status, os.waitstatus_to_exitcode(how))
            if child.ended and not child.wanted:
                del self._children[status]
                status.close()


def _say(status: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # the caller is gone: seen at the next look
        status.sendall(NUMBER.pack(number))


def _be_child(request: _Request, *, fit: bool) -> None:
    """Go on as a child of the server's; from the start where this fork is not fit to be one."""
    os.setsid()
    with contextlib.suppress(OSError):  # the folder was removed, or is not for this user
        os.fchdir(request.folder)
    os.close(request.folder)
    for number, each in enumerate(request.streams):
        os.dup2(each, number)
        os.close(each)
    if not fit or _touched_a_device():
        code = f"import sys; sys.path[:] = {sys.path!r}; from composer.child import serving"
        code = f"{code}; serving.work({request.server})"
        os.execv(sys.executable, [sys.executable, "-X", "faulthandler", "-c", code])
    _be_nobody_elses_copy()
    work(request.server)


def _touched_a_device() -> bool:
    """Whether the imports did, whatever it was; no fork can use it then."""
    if "torch" not in sys.modules:
        return False
    from composer import _torch

    return _torch.compiles.is_in_bad_fork()


def _be_nobody_elses_copy() -> None:
    """Random numbers are drawn afresh, as in an interpreter that was just started."""
    if torch := sys.modules.get("torch"):
        torch.seed()
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()


def work(server: int) -> None:
    """Be a child: do what is asked for on stdin. All that is printed goes to stderr.

    Args:
        server: Process number of the server.
    """
    _die_with(server)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    request = json.loads(_read())
    payload = _read()
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    _settle(request["path"], request["environment"])

    def say(answer: dict[str, Any]) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    function: Callable[..., dict[str, Any]] = pkgutil.resolve_name(request["work"])
    say({"here": True})
    say(function(payload, lambda: say({"ready": True})))


def _die_with(parent: int) -> None:
    """Linux kills this process with the thread that started it, also while an engine is stuck."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was gone before
        os._exit(1)


def _outlive_the_thread_that_asked() -> None:
    """From now on the server sees by itself that its caller is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0)


def _end_with_stdin() -> None:
    """Elsewhere the end of its pipe tells that the caller is gone."""
    os.read(0, 1)  # a buffered read would hold a lock that a process that exits wants
    os._exit(1)


def _read() -> bytes:
    (size,) = SIZE.unpack(_exactly(SIZE.size))
    return _exactly(size)


def _exactly(size: int) -> bytes:
    read = sys.stdin.buffer.read(size)
    if len(read) < size:  # the caller is gone
        os._exit(1)
    return read


def _settle(path: list[str], environment: Mapping[str, str]) -> None:
    """Import what the caller can import, from where it stands now."""
    sys.path[:] = path
    sys.path_importer_cache.clear()
    importlib.invalidate_caches()
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
