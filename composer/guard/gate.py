"""A gate at the calls of one graph: what a call would disturb is done between two of them.

An engine that is timed beside a call is not timed: both want the same cores, the threads of the one
wait by spinning while the other computes, and a second caller's pool is not the program's. On two
cores the order of two engines was seen to be reversed.

So the thread that has something to time offers it here. The next call of the graph does it, in the
program's own thread, before it is answered; if none comes within a moment the one that offered does
it, and a call that comes meanwhile waits. Then the gate stands open for as long as it was closed:
the program keeps half of its time.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

Work = Callable[[], float]

_PATIENCE = 0.02
"""Seconds in which a call may come and do what is offered."""

_LONGEST = 10.0
"""Seconds that anybody waits for others: who calls a graph within a call of it is one of them."""


class _Offer:
    """Something to do; ``begun`` once somebody does it."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.begun = False
        self.result: Future[float] = Future()


class Gate:
    """Keeps the calls of a graph, and what one thread does beside them, apart.

    Attributes:
        waited: Seconds in which that thread had to wait, for the calls or to let them pass.
    """

    def __init__(self) -> None:
        self.waited = 0.0
        self._closed = 0.0
        self._changed = threading.Condition()
        self._offer: _Offer | None = None
        self._inside = 0
        self._process = os.getpid()

    def perform(self, work: Work) -> float:
        """Have something done while no call is under way, in this thread or one that calls.

        Args:
            work: What to do; returns a number, as this does.

        Raises:
            BaseException: what it raises.
        """
        arrived = time.perf_counter()
        time.sleep(self._closed)
        self._closed = 0.0
        offer = _Offer(work)
        with self._changed:
            self._offer = offer
            self._changed.wait_for(lambda: offer.begun, _PATIENCE)
            mine = self._begins(offer)
        if mine:
            self._do(offer)
        try:
            return offer.result.result()
        finally:
            self.waited += time.perf_counter() - arrived - self._closed

    def admit(self, serve: Callable[..., T], *args: Any) -> T:
        """Make a call, after what is offered or under way is done.

        A forked child has inherited a gate whose other threads are not there.

        Args:
            serve: What answers it.
            *args: Its inputs.
        """
        if os.getpid() != self._process:
            return serve(*args)
        with self._changed:
            offer = self._offer
            mine = self._begins(offer)
        if mine and offer is not None:
            self._do(offer)
        with self._changed:
            self._changed.wait_for(lambda: self._offer is None, _LONGEST)
            self._inside += 1
        try:
            return serve(*args)
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    def _begins(self, offer: _Offer | None) -> bool:
        """Whether the one that asks is to do it, as nobody does yet; with the condition held."""
        if offer is None or offer.begun:
            return False
        offer.begun = True
        self._changed.notify_all()
        return True

    def _do(self, offer: _Offer) -> None:
        """Do it once the calls under way are over; those that come wait.

        Its error is for the one that asked; who interrupts the program interrupts that, too.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._inside == 0, _LONGEST)
        started = time.perf_counter()
        try:
            offer.result.set_result(offer.work())
        except Exception as error:  # noqa: BLE001  # raised where it is waited for
            offer.result.set_exception(error)
        except BaseException as error:
            offer.result.set_exception(error)
            raise
        finally:
            self._closed = time.perf_counter() - started
            with self._changed:
                self._offer = None
                self._changed.notify_all()
