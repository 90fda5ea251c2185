"""What an engine's library may not free in a forked child.

ONNX Runtime's sessions (1.31; microsoft/onnxruntime#31961 would mend it) and OpenVINO's compiled
models (2026.4) wait for their threads when they are freed. A forked child has none of its parent's
threads, so it would wait for ever: at a collection of garbage, at a change of weights, or at its
end. Calls are answered there, and what the child builds itself it may free.

A test of each library frees one in a forked child. When it no longer hangs, this may go.
"""

from __future__ import annotations

import ctypes
from typing import TypeVar

from composer.system.forks import with_each_child

T = TypeVar("T")


def never_freed_in_forks(made: T) -> T:
    """Have children that are forked while ``made`` lives keep it until they end; returns it."""
    return with_each_child(made, _keep)


def _keep(made: object) -> None:
    """A reference that nobody owns outlives the end of the interpreter, too."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(made))
