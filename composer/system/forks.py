"""Fork safety: the steps that a forked child takes first.

A child has only the thread that forked. A lock that another thread of the parent held would never
be released, so all locks of this package are made here, and a child frees them. The child finds
the guarded data as that other thread left them. So code under a lock is a few quick lines:
compiling, writing to disk and calling sinks stand before or after it.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
Step = TypeVar("Step", bound=Callable[[], object])

_steps: weakref.WeakKeyDictionary[Any, Callable[[Any], object]] = weakref.WeakKeyDictionary()
"""The step that a forked child takes with each of these objects."""


def with_each_child(made: T, step: Callable[[T], object]) -> T:
    """Make each forked child take a step with an object, if the object is alive then.

    Args:
        made: The object, which is compared by identity.
        step: Called with the object.

    Returns:
        The object.
    """
    _steps[made] = step
    return made


def never_freed_in_forks(made: T) -> T:
    """Return ``made``; children forked while it is alive never free it.

    Sessions of ONNX Runtime 1.31 and compiled models of OpenVINO 2026.4 wait for their threads when
    they are freed (microsoft/onnxruntime#31961 would fix the sessions). A forked child has no
    threads of its parent. So it would wait forever: at a garbage collection, at a change of
    weights, or at its end. The child can still call these objects. It may free objects that it
    builds itself.

    For each library a test frees such an object in a forked child. When the child no longer hangs,
    this function can be removed.
    """
    return with_each_child(made, _keep)


def _keep(made: object) -> None:
    """Add a reference without an owner. It survives the end of the interpreter, too."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(made))


def lock() -> threading.RLock:
    """A lock that is free in a forked child, unless the thread that forked holds it.

    It is reentrant, because only a reentrant lock knows which thread holds it.
    """
    return with_each_child(threading.RLock(), freed)


def in_child(step: Step) -> Step:
    """Make each forked child call a function of a module right after the fork."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=step)
    return step


def freed(held: Any) -> bool:
    """In a forked child, free a lock that another thread of the parent held.

    Args:
        held: The lock.

    Returns:
        True if another thread held it.
    """
    if held.acquire(blocking=False):  # nobody did, or the thread that forked
        held.release()
        return False
    held._at_fork_reinit()  # CPython's, as for its own locks
    return True


@in_child
def _take_steps() -> None:
    for made, step in list(_steps.items()):
        step(made)
