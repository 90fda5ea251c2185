"""What a fork server does, and each sandbox that it forks.

The server is a fresh interpreter. It imports the module of the work, and then waits for requests on
the channel, a socket that it shares with its caller::

    caller                    server                     sandbox
      | -- (empty frame) ---->  |                           |
      | <- ["listening"] -----  |                           |
      | -- frame: head ------>  |                           |
      | -- frame: payload --->  | -- fork --------------->  |
      | <- ["pid", 123] ------  |                           |
      | <- ["here"] ---------------------------------- imports are done
      | <- ["ready"] --------------------------------- the limit of time begins
      | <- ["step", ...] ----------------------------- a further step, maybe with its own limits
      | <- ["answer", {...}] ------------------------- exits
      | <- ["ended", 0] ------  |

- A frame is a size and so many bytes. An answer is one line of JSON.
- The server serves one sandbox at a time. It never runs the work itself, so nothing that the work
  leaves behind is seen by the next.
- A sandbox ends with the server, and the server with its caller. The caller ends a sandbox by
  killing it.
- Where a fork would not be safe, the server is itself the sandbox of its first request, and ends
  with it: outside Linux, and where the imports started a thread or used a device.

``multiprocessing``'s fork server is not used, because its children run the program's main module
again. A script that compiles at its top level would compile in each child.
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
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

SIZE = struct.Struct("<Q")
_STEP_SECONDS = 0.02
_LOOK_SECONDS = 1.0
_PR_SET_PDEATHSIG = 1

_SESSION = Path("/proc/self/autogroup")
_NICENESS = 9
"""Two busy threads of a program take 1.3 to 1.7 times as long beside a build that stands back, and
four to seven times beside one that does not: they wait for each other. A build gets some 20 % of a
core beside them. With 13 it hardly got on beside small calls without a pause."""


def serve(work: str, channel: int, caller: int, patience: float, *, stands_back: bool) -> None:
    """Run as the server, until the caller is gone or has not asked for a while.

    Args:
        work: ``module:function`` of the first request. The module is imported first. The sandbox's
            output receives what the import prints, and an error in the import ends the server.
        channel: Descriptor of the socket.
        caller: Process number of the caller.
        patience: Seconds to wait for a request.
        stands_back: True if the server and its sandboxes yield to others of the machine. Two busy
            threads of a program wait for each other, so already the imports would hold it up.
    """
    if stands_back:
        os.nice(_NICENESS)
        _let_session_stand_back()
    link = _Link(socket.socket(fileno=channel), caller)
    _die_with(caller)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a caller that ignores it passes that on
    if sys.platform == "linux":  # elsewhere a fork of what has imported torch is not safe
        importlib.import_module(work.partition(":")[0])
    if not _can_fork():
        _be_sandbox_of_first_request(link, patience)
        return
    _outlive_the_thread_that_asked()
    gc.collect()
    gc.freeze()  # else a collection in a sandbox would copy the pages it visits
    server = os.getpid()
    while True:
        request = link.next_request(patience)
        if not _fork(link):
            _be_sandbox(link, request, server, stands_back=stands_back)
            return


@dataclass(frozen=True, slots=True)
class _Request:
    """A request of the caller. Its head has ``work``, ``path`` and ``environment``."""

    head: Mapping[str, Any]
    payload: bytes


class _Link:
    """The server's end of the channel."""

    def __init__(self, channel: socket.socket, caller: int) -> None:
        channel.set_inheritable(False)  # what the imports start may outlive the server
        self._channel = channel
        self._caller = caller

    def next_request(self, patience: float) -> _Request:
        """The next request. Without a request in time, or without a caller, this process ends."""
        while not (head := self._frame(patience)):
            self.say("listening")
        return _Request(json.loads(head), self._frame(patience))

    def say(self, kind: str, *values: Any) -> None:
        """Send one line. A newline comes first, because a line that was cut short may stand before.

        If the caller is gone, other code notices that.
        """
        with contextlib.suppress(OSError):
            self._channel.sendall(f"\n{json.dumps([kind, *values])}\n".encode())

    def is_caller_gone(self, seconds: float) -> bool:
        """Wait for ``seconds``; true if the caller has ended or closed the channel by then.

        A process that the caller forked may hold the channel open, so the caller's process number
        is checked as well.
        """
        readable = wait(self._channel, selectors.EVENT_READ, seconds)
        return os.getppid() != self._caller or (readable and not self._peek())

    def _peek(self) -> bytes:
        try:
            return self._channel.recv(1, socket.MSG_PEEK)
        except ConnectionError:
            return b""

    def _frame(self, patience: float) -> bytes:
        (size,) = SIZE.unpack(self._exactly(SIZE.size, patience))
        return self._exactly(size, patience)

    def _exactly(self, size: int, patience: float) -> bytes:
        read = bytearray()
        until = time.monotonic() + patience
        while len(read) < size:
            readable = wait(self._channel, selectors.EVENT_READ, _LOOK_SECONDS)
            if readable:
                some = self._channel.recv(min(size - len(read), 1 << 20))
                read += some
                until = time.monotonic() + patience
            is_closed = readable and not some
            if is_closed or os.getppid() != self._caller or time.monotonic() > until:
                _end_all()
        return bytes(read)


def _let_session_stand_back() -> None:
    """Let the session that this process leads yield to others of the machine.

    That counts besides the nice value of a process where Linux groups processes by sessions (``man
    7 sched``, "The autogroup feature"). The kernel takes one such value in a tenth of a second, of
    all processes.
    """
    with contextlib.suppress(OSError):  # there are no such groups
        for _ in range(10):
            try:
                _SESSION.write_text(str(_NICENESS))
            except BlockingIOError:
                time.sleep(0.1)
            else:
                return


def wait(channel: socket.socket, events: int, seconds: float) -> bool:
    """Wait for a socket; true if it is ready. ``select.select`` takes only numbers below 1,024."""
    with selectors.PollSelector() as selector:
        selector.register(channel, events)
        return bool(selector.select(seconds))


def _can_fork() -> bool:
    """True if a fork of this process can do the work.

    CUDA tells only in a fork that the parent has used it, so this function makes a fork to ask.
    """
    if sys.platform != "linux" or threading.active_count() > 1:
        return False
    try:
        pid = _forked()
    except OSError:  # no process or memory is left now
        return True
    if not pid:
        os._exit(_touched_a_device())
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status) == 0


def _touched_a_device() -> bool:
    if "torch" not in sys.modules:
        return False
    from composer import _torch

    return _torch.compiles.is_in_bad_fork()


def _forked() -> int:
    with warnings.catch_warnings():  # a warning of threads: numpy's idle pool handles forks
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _fork(link: _Link) -> bool:
    """Fork a sandbox and wait until it has ended; false in the sandbox itself.

    A sandbox's process group is killed before the sandbox is reaped. Until then no other process
    can have its number.
    """
    try:
        pid = _forked()
    except OSError as error:  # no process or memory is left now
        sys.stderr.write(f"{error}\n")
        sys.stderr.flush()
        link.say("ended", 1)
        return True
    if not pid:
        return False
    link.say("pid", pid)
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        if link.is_caller_gone(_STEP_SECONDS):
            kill(pid)
            _end_all()
    kill(pid)
    _, status = os.waitpid(pid, 0)
    link.say("ended", os.waitstatus_to_exitcode(status))
    return True


def kill(pid: int) -> None:
    """Kill a sandbox and what it started. It may not have made its process group yet."""
    for each in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            each(pid, signal.SIGKILL)


def _end_all() -> NoReturn:
    """End this process and what its imports started, without any cleanup."""
    os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _be_sandbox(link: _Link, request: _Request, server: int, *, stands_back: bool) -> None:
    """In a fork of the server: do the work. The fork has the server's nice value."""
    os.setsid()
    if stands_back:
        _let_session_stand_back()
    _die_with(server)
    if torch := sys.modules.get("torch"):  # or each sandbox would draw the same numbers
        torch.seed()
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    _work(link, request)


def _be_sandbox_of_first_request(link: _Link, patience: float) -> None:
    request = link.next_request(patience)
    threading.Thread(target=_end_with_caller, args=(link,), daemon=True).start()
    link.say("pid", os.getpid())
    _work(link, request)


def _end_with_caller(link: _Link) -> None:
    while not link.is_caller_gone(_LOOK_SECONDS):
        pass
    _end_all()


def _work(link: _Link, request: _Request) -> None:
    head = request.head
    _settle(head["path"], head["environment"])
    function: Callable[..., dict[str, Any]] = pkgutil.resolve_name(head["work"])
    link.say("here")
    link.say("answer", function(request.payload, lambda *step: _say_step(link, step)))


def _say_step(link: _Link, step: tuple[Any, ...]) -> None:
    """Say that the work begins or, with values, that it begins a further step."""
    link.say("step", *step) if step else link.say("ready")


def _die_with(parent: int) -> None:
    """Have Linux kill this process when the thread that started it ends.

    That works also while an engine is stuck.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was gone before
        os._exit(1)


def _outlive_the_thread_that_asked() -> None:
    """Undo :func:`_die_with`. The server itself notices from now on that its caller is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0)


def _settle(path: list[str], environment: Mapping[str, str]) -> None:
    """Take over the caller's import path and environment as they are now."""
    sys.path[:] = path
    importlib.invalidate_caches()
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
