"""One thread for what can wait, one task after another, beside the user's program.

The thread begins with the first task and ends with the last, so that none lies about in between. It
runs at the priority of the program's own: threads inherit it, and the pools that engines make for
themselves while they are built here go on to serve the program's calls.

A process that ends does not wait for a task to be done. The thread is stopped at its next line of
Python: torch's native code, left to run while the interpreter goes down, may abort the process, and
an engine whose build fails because pools are closed is no engine that failed. A forked child has no
such thread, waits for none, and begins with no task.
"""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401  # closes its pools at the end: after ours
import contextlib
import contextvars
import ctypes
import os
import threading
from collections import deque
from collections.abc import Callable

import torch

from composer import _torch

Task = Callable[[], None]

_LAST_WAIT = 10.0
"""Seconds that the process waits at its end for native code to come back to Python."""


class _Ended(BaseException):
    """The process is ending."""


class Worker:
    """The thread, while there is something to do, and what it has to do yet."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._tasks: deque[Task] = deque()
        self._thread: threading.Thread | None = None
        self._ending = False

    def submit(self, task: Task) -> None:
        """Have a task done after those that wait already; it answers for its own errors.

        Raises:
            RuntimeError: the system gives no thread.
        """
        with self._changed:
            if self._ending:
                return
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="composer", daemon=True)
                thread.start()
                self._thread = thread
            self._tasks.append(task)

    def settled(self, timeout: float | None = None) -> bool:
        """Wait until nothing is left to do; whether it came to that within so many seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._thread is None, timeout)

    @property
    def is_busy(self) -> bool:
        """Whether the thread is there."""
        return self._thread is not None

    def end(self) -> None:
        """Let go of what waits, and stop what is under way."""
        with self._changed:
            self._ending = True
            self._tasks.clear()
            thread = self._thread
        if thread is None or thread is threading.current_thread():
            return
        # The one way to stop a thread; what it leaves half done, nobody will meet any more.
        raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
        raise_in(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(_Ended))
        thread.join(_LAST_WAIT)

    def _run(self) -> None:
        try:
            while task := self._next():
                task()
        except _Ended:
            return
        finally:
            with self._changed:
                self._gone()

    def _next(self) -> Task | None:
        with self._changed:
            if self._tasks and not self._ending:
                return self._tasks.popleft()
            self._gone()
            return None

    def _gone(self) -> None:
        if self._thread is threading.current_thread():  # another may have followed
            self._thread = None
            self._changed.notify_all()


_worker = Worker()


def submit(task: Task) -> None:
    """Have a task done in the background, as :meth:`Worker.submit`."""
    _worker.submit(task)


def settled(timeout: float | None = None) -> bool:
    """Wait for all tasks, as :meth:`Worker.settled`."""
    return _worker.settled(timeout)


def _end() -> None:
    _worker.end()


# ``atexit`` comes after this, when pools take no more work; there is no public way to be earlier.
threading._register_atexit(_end)  # type: ignore[attr-defined]


def _begin_anew() -> None:
    """A forked child has none of the threads, and what they held is held by nobody."""
    global _worker
    if _worker.is_busy:
        _torch.forget_other_threads_compile()
    _worker = Worker()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)


def carried(task: Task, device: str) -> Task:
    """A task that runs in another thread as it would in this one, now.

    Threads have torch's modes for themselves, and so they have contexts: the settings of Dynamo's
    and Inductor's configs are among those (torch 2.13).

    Args:
        task: What to run.
        device: Where the task computes, such as ``"cuda:0"``.
    """
    kind = device.partition(":")[0]
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    casts = torch.amp.is_autocast_available(kind)
    enabled = casts and torch.is_autocast_enabled(kind)
    dtype = torch.get_autocast_dtype(kind) if casts else None
    cached = torch.is_autocast_cache_enabled()
    accelerated = torch.accelerator.is_available()
    index = torch.accelerator.current_device_index() if accelerated else 0
    context = contextvars.copy_context()

    def run() -> None:
        with contextlib.ExitStack() as state:
            state.enter_context(torch.inference_mode(inference))
            state.enter_context(torch.set_grad_enabled(grad))
            if casts:
                state.enter_context(torch.autocast(kind, dtype, enabled, cached))
            if accelerated:
                torch.accelerator.set_device_index(index)
            task()

    return lambda: context.run(run)
