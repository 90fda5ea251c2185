"""A barrier that lets background work be timed between two calls of a graph, never during one.

An engine cannot be timed while a call of the program runs. Both want the same cores, the threads of
one spin while the other computes, and the work would use another thread pool than the program does.
On two cores this was seen to reverse the order of two engines.

So the background thread offers its work at the barrier. The next call of the graph does the work in
the program's own thread, and is answered after that. If no call comes within a moment, the
background thread does the work itself, and a call that comes meanwhile waits. Then the barrier
stays open for as long as it was closed, so the program keeps at least half of the time.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from composer.system import control_flow, forks

T = TypeVar("T")

Work = Callable[[], float]

_PATIENCE = 0.02
"""Seconds to wait for a call that does the work."""

_LONGEST = 10.0
"""Seconds that a thread waits for others. A call within a call of the same graph waits for itself,
and would wait forever."""


class _Offer:
    """Work that waits to be done; ``begun`` once a thread has taken it."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.begun = False
        self.result: Future[float] = Future()


class Barrier:
    """Keeps the calls of a graph and the work of one background thread apart.

    Attributes:
        waited: Seconds that the background thread has spent waiting, for calls or to let them pass.
    """

    def __init__(self) -> None:
        self.waited = 0.0
        self._closed = 0.0
        self._changed = threading.Condition(forks.lock())
        self._offer: _Offer | None = None
        self._inside: set[object] = set()
        self._process = os.getpid()

    def perform(self, work: Work) -> float:
        """Have work done while no call is under way, in this thread or in that of a call.

        Args:
            work: What to do.

        Returns:
            What ``work`` returns.

        Raises:
            BaseException: whatever ``work`` raises.
        """
        arrived = time.perf_counter()
        time.sleep(self._closed)
        self._closed = 0.0
        offer = _Offer(work)
        with self._changed:
            self._offer = offer
            self._changed.wait_for(lambda: offer.begun, _PATIENCE)
        self._do(offer)
        try:
            return offer.result.result()
        finally:
            self.waited += time.perf_counter() - arrived - self._closed

    def admit(self, serve: Callable[..., T], *args: Any) -> T:
        """Make a call, once the work that is offered or under way is done.

        In a forked child the barrier is open: the threads that could close it do not exist there.

        Args:
            serve: What answers the call.
            *args: The call's inputs.
        """
        if os.getpid() != self._process:
            return serve(*args)
        offer = self._offer
        if offer is not None:
            self._do(offer)
        this_call = object()
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._offer is None, _LONGEST)
                self._inside.add(this_call)
            return serve(*args)
        finally:
            with self._changed:
                self._inside.discard(this_call)
                self._changed.notify_all()

    def _do(self, offer: _Offer) -> None:
        """Do the work once the calls under way are over, unless another thread has begun it.

        Calls that come meanwhile wait. An error is handed to the thread that offered the work. An
        exception that interrupts the program is raised here as well, since this may be the
        program's thread. It may come at any line. The thread that takes the work has to end it in
        any case, or all others would wait.
        """
        mine, started = False, time.perf_counter()
        try:
            with self._changed:
                mine = not offer.begun
                if not mine:
                    return
                offer.begun = True
                self._changed.notify_all()
                self._changed.wait_for(lambda: not self._inside, _LONGEST)
            started = time.perf_counter()
            offer.result.set_result(offer.work())
        except BaseException as error:  # noqa: BLE001  # raised in the thread that waits for it
            if mine and not offer.result.done():
                offer.result.set_exception(error)
            control_flow.pass_on(error)
        finally:
            if mine:
                self._offer = None
                self._closed = time.perf_counter() - started
                with self._changed:
                    self._changed.notify_all()
