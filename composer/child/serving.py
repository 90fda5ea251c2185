"""What the server does, and each child that it forks.

The server is a fresh interpreter. It imports the work that it was started for, and from then on
only forks, reaps and kills. ``multiprocessing``'s would do that too, but its children run the
program's main module again, which is not for a script that compiles at its top level.

A request is one byte on the control socket with four descriptors: a socket of its own, and what is
to be the child's stdin, stdout and stderr. On its own socket the server says the child's number,
then its exit code. It kills the child when the caller shuts that socket down, or is gone.
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
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

NUMBER = struct.Struct("<i")
SIZE = struct.Struct("<Q")
_STEP_SECONDS = 0.02
_LOOK_SECONDS = 1.0
_PR_SET_PDEATHSIG = 1


@dataclass(slots=True)
class _Child:
    """A child of the server's, until its caller lets go of it."""

    pid: int
    ended: bool = False


def serve(work: str, parent: int, patience: float) -> None:
    """Be the server, until the caller is gone, asks no more, or has not asked for a while.

    Args:
        work: What the first child will be asked for; its module is imported first. What that prints
            goes where that child's output goes, and an error ends the server.
        parent: Process number of the caller.
        patience: Seconds without a child until it has not been asked for a while.
    """
    _die_with(parent)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a caller that ignores it passes that on
    control = socket.socket(fileno=os.dup(0))
    importlib.import_module(work.partition(":")[0])
    _outlive_the_thread_that_asked()
    gc.collect()
    gc.freeze()  # a child's collections would copy all that they look at
    descriptors = _Server(control, parent, patience).run()
    if descriptors is None:
        os._exit(0)  # there is nothing to put in order
    _be_child(descriptors)


class _Server:
    def __init__(self, control: socket.socket, parent: int, patience: float) -> None:
        self._control = control
        self._parent = parent
        self._patience = patience
        self._children: dict[socket.socket, _Child] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)
        self._listens = True

    def run(self) -> list[int] | None:
        """Serve; in a forked child, its stdin, stdout and stderr, in the server ``None``."""
        idle = 0.0
        while self._listens or self._children:
            step = _STEP_SECONDS if self._children else _LOOK_SECONDS
            events = self._selector.select(step)
            idle = 0.0 if events or self._children else idle + step
            for key, _ in events:
                if key.fileobj is not self._control:
                    self._let_go(key.fileobj)  # type: ignore[arg-type]  # only sockets are in it
                elif (descriptors := self._receive()) is not None:
                    return descriptors
            self._tell_of_the_ended()
            if os.getppid() != self._parent:
                for status in list(self._children):
                    self._let_go(status)
                return None
            if idle >= self._patience and self._listens:
                self._control.shutdown(socket.SHUT_RD)  # what was sent before that is still read
        return None

    def _receive(self) -> list[int] | None:
        """Fork for a request; in the child, its descriptors."""
        asked, descriptors, _, _ = socket.recv_fds(self._control, 1, 4)
        if not asked:
            self._selector.unregister(self._control)
            self._listens = False
            return None
        status = socket.socket(fileno=descriptors.pop(0))
        with warnings.catch_warnings():  # of threads: numpy's pool is idle, and sees to its forks
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if not pid:
            self._forget(status)
            return descriptors
        for each in descriptors:
            os.close(each)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for own in (1, 2):  # until now those of the first child
            os.dup2(nowhere, own)
        os.close(nowhere)
        self._children[status] = _Child(pid)
        self._selector.register(status, selectors.EVENT_READ)
        _say(status, pid)
        return None

    def _forget(self, status: socket.socket) -> None:
        """In a child: the sockets are the server's, and its end is told by their closing."""
        self._selector.close()
        for each in (self._control, status, *self._children):
            each.close()

    def _tell_of_the_ended(self) -> None:
        """A child that ended is not reaped yet: its number stays its own until it is let go of."""
        for status, child in self._children.items():
            if not child.ended:
                how = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
                if how is not None:
                    child.ended = True
                    exited = how.si_code == os.CLD_EXITED
                    _say(status, how.si_status if exited else -how.si_status)

    def _let_go(self, status: socket.socket) -> None:
        """Kill a child and what it started, reap it, and tell its caller by closing the socket."""
        child = self._children.pop(status)
        for kill in (os.killpg, os.kill):  # it may not have made its group yet
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(child.pid, signal.SIGKILL)
        os.waitpid(child.pid, 0)
        self._selector.unregister(status)
        status.close()


def _say(status: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # the caller is gone: seen at the next look
        status.sendall(NUMBER.pack(number))


def _be_child(descriptors: list[int]) -> None:
    server = os.getppid()
    os.setsid()
    for number, each in enumerate(descriptors):
        os.dup2(each, number)
        os.close(each)
    if _touched_a_device():
        code = f"import sys; sys.path[:] = {sys.path!r}; from composer.child import serving"
        code = f"{code}; serving.work({server})"
        os.execv(sys.executable, [sys.executable, "-X", "faulthandler", "-c", code])
    work(server)


def _touched_a_device() -> bool:
    """Whether the imports did, whatever it was; no fork can use it then."""
    if "torch" not in sys.modules:
        return False
    from composer import _torch

    return _torch.is_in_bad_fork()


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
    _settle(**request["place"])

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


def _settle(folder: str | None, path: list[str], environment: dict[str, str]) -> None:
    """Be where the caller is, and import what it can import."""
    if folder is not None:
        os.chdir(folder)
    sys.path[:] = path
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
