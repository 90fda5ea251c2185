"""A background thread that does one task after another beside the user's program.

A task copies what a sandbox needs and waits for it. It computes nothing itself, and changes none
of torch's state. The thread starts with the first task and ends with the last. A forked child has
no such thread and no tasks. When the process ends, no task is waited for: each reads
:attr:`Worker.is_ending`, and ends its sandbox.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from composer.system import forks

Task = Callable[[], None]

_SHARE = 0.01
"""Of the CPU time of this process, the share that goes into measuring anew."""

_EXPECTED = 10.0
"""CPU seconds that a measurement is expected to take, before one has been made."""


class Allowance:
    """The CPU time that this process may spend on measuring anew: 1 % of what it has used."""

    def __init__(self) -> None:
        self._lock = forks.lock()
        self._taken = 0.0
        self._expected = _EXPECTED
        self._under_way = 0

    def take(self) -> bool:
        """Set the CPU time of one measurement aside; return False if there is not so much."""
        with self._lock:
            aside = (self._under_way + 1) * self._expected
            if self._taken + aside > _SHARE * time.process_time():
                return False
            self._under_way += 1
            return True

    def settle(self, seconds: float) -> None:
        """Note what a measurement took, for which time was set aside; the next may take as much."""
        with self._lock:
            self._under_way -= 1
            self._taken += seconds
            self._expected = seconds


class Worker:
    """The background thread, which lives while there are tasks, and the tasks that wait.

    Attributes:
        is_ending: True if the process ends.
        allowance: The CPU time for measuring anew. A forked child counts its own.
    """

    def __init__(self) -> None:
        self._begin()
        forks.with_each_child(self, Worker._begin)  # a forked child has no such thread
        # ``atexit`` comes after other threads are waited for. No public way is earlier.
        threading._register_atexit(self.end)  # type: ignore[attr-defined]

    def _begin(self) -> None:
        self.allowance = Allowance()
        self._changed = threading.Condition(forks.lock())
        self._tasks: deque[Task] = deque()
        self._thread: threading.Thread | None = None
        self.is_ending = False

    def submit(self, task: Task) -> None:
        """Queue a task; it handles its own errors.

        Raises:
            RuntimeError: the system gives no thread.
        """
        with self._changed:
            if self.is_ending:
                return
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="composer")
                thread.start()
                self._thread = thread
            self._tasks.append(task)

    def settled(self, timeout: float | None = None) -> bool:
        """Wait until no task is left, or for ``timeout`` seconds; true if no task is left then."""
        with self._changed:
            return self._changed.wait_for(lambda: self._thread is None, timeout)

    def end(self) -> None:
        """Drop the tasks that wait, and let the task that runs know. The thread then ends soon."""
        with self._changed:
            self.is_ending = True
            self._tasks.clear()

    def _run(self) -> None:
        try:
            while task := self._next():
                task()
        finally:
            self._gone()

    def _next(self) -> Task | None:
        with self._changed:
            if self._tasks:
                return self._tasks.popleft()
            self._gone()
            return None

    def _gone(self) -> None:
        with self._changed:
            if self._thread is threading.current_thread():  # another may have followed
                self._thread = None
                self._changed.notify_all()
