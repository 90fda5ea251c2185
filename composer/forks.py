"""What a forked child does first. Of its parent's threads only the one that forked is there.

A lock that another one held would be held for ever, so all locks of this package are made here, and
a child frees them. It finds what they guard as that thread left it. So a change is made in a
few lines, with nothing between them that takes its time: what is compiled, written to disk or told
to sinks comes before or after it.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

Step = TypeVar("Step", bound=Callable[[], object])

_locks: weakref.WeakSet[Any] = weakref.WeakSet()


def lock() -> threading.RLock:
    """A lock that is free in a forked child, unless the thread that forked holds it.

    It may be taken again by its holder: only a lock of that kind knows who holds it.
    """
    made = threading.RLock()
    _locks.add(made)
    return made


def in_child(step: Step) -> Step:
    """Have each forked child take this step at once; for functions of modules, which stay."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=step)
    return step


def freed(held: Any) -> bool:
    """In a forked child: free a lock that another thread of the parent's held; whether one did."""
    if held.acquire(blocking=False):  # nobody did, or the thread that forked
        held.release()
        return False
    held._at_fork_reinit()  # CPython's, as for its own locks
    return True


@in_child
def _free_all() -> None:
    for each in list(_locks):
        freed(each)
