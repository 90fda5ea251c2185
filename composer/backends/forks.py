"""Keep engine objects alive in forked children, where freeing them would hang.

Sessions of ONNX Runtime 1.31 and compiled models of OpenVINO 2026.4 wait for their threads when
they are freed (microsoft/onnxruntime#31961 would fix the sessions). A forked child has no threads
of its parent. So it would wait forever: at a garbage collection, at a change of weights, or at its
end. The child can still call these objects. It may free objects that it builds itself.

For each library a test frees such an object in a forked child. When the child no longer hangs, this
module can be removed.
"""

from __future__ import annotations

import ctypes
from typing import TypeVar

from composer.system.forks import with_each_child

T = TypeVar("T")


def never_freed_in_forks(made: T) -> T:
    """Return ``made``; children forked while it is alive never free it."""
    return with_each_child(made, _keep)


def _keep(made: object) -> None:
    """Add a reference without an owner. It survives the end of the interpreter, too."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(made))
