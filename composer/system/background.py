"""A background thread that does one task after another beside the user's program.

The thread starts with the first task and ends with the last. It runs at normal priority: the thread
pools that engines create while they are built here inherit its priority, and serve the program's
calls later.

A forked child has no such thread and no tasks. A process that ends does not wait for a build, which
may take minutes, and must not leave one running: native code of torch's that runs while the
interpreter shuts down may abort the process, and a build fails once the thread pools are closed. No
public interface stops a thread, and torch and the engines ask nobody whether to go on. So the
thread is stopped by an exception that CPython raises in it, ``PyThreadState_SetAsyncExc``::

    program's thread                       composer's thread
    ----------------                       -----------------
    the program returns                    a build runs
    Worker.end: drops waiting tasks
                raises ProcessEnds  -----> comes out of its next line of Python
                waits, 10 s at most <----- Worker._run ends
    thread pools close, atexit runs

Invariants:

- Only this thread is stopped, and only when the process ends. So what it leaves half done is not
  used by anybody.
- ``interrupts.pass_on`` lets ``ProcessEnds`` through, so no attempt records it as a failure.
- The step is registered after that of ``concurrent.futures``, and such steps run in reverse order.
- Native code is not interrupted. It is waited for, for 10 s at most.
"""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401  # registers its step at the end before ours
import contextlib
import contextvars
import ctypes
import threading
from collections import deque
from collections.abc import Callable

import torch

from composer.system import control_flow, forks

Task = Callable[[], None]

_LAST_WAIT = 10.0
"""Seconds that the process waits at its end for native code to return to Python."""


class Worker:
    """The background thread, which lives while there are tasks, and the tasks that wait."""

    def __init__(self) -> None:
        self._begin()
        forks.with_each_child(self, Worker._begin)  # a forked child has no such thread
        # ``atexit`` comes after this, when pools take no more work. No public way is earlier.
        threading._register_atexit(self.end)  # type: ignore[attr-defined]

    def _begin(self) -> None:
        self._changed = threading.Condition(forks.lock())
        self._tasks: deque[Task] = deque()
        self._thread: threading.Thread | None = None
        self._ending = False

    def submit(self, task: Task) -> None:
        """Queue a task; it handles its own errors.

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
        """Wait until no task is left, or for ``timeout`` seconds; true if no task is left then."""
        with self._changed:
            return self._changed.wait_for(lambda: self._thread is None, timeout)

    def end(self) -> None:
        """Drop the tasks that wait, and stop the task that runs."""
        with self._changed:
            self._ending = True
            self._tasks.clear()
            thread = self._thread
        if thread is None or thread is threading.current_thread():
            return
        raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
        raise_in(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(control_flow.ProcessEnds))
        thread.join(_LAST_WAIT)

    def _run(self) -> None:
        try:
            while task := self._next():
                task()
        except control_flow.ProcessEnds:
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


def in_this_context(task: Task, device: str) -> Task:
    """A task that runs in another thread under the modes and contexts of this one, as they are now.

    torch keeps grad mode, autocast and the like for each thread, and Dynamo's and Inductor's
    configs are context variables (torch 2.13).

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
