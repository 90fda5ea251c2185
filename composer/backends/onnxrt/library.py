"""The package ``onnxruntime``, imported here only: by itself it tells its makers of its use."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from typing import Any

_SWITCH = "ORT_DISABLE_TELEMETRY"
"""Read by the package (1.29 and newer) when it is imported."""


@functools.cache
def onnxruntime() -> Any:
    """The package, with its telemetry off unless the environment has a word on that.

    From 1.29 on a thread sends events away on Linux and macOS too, from a database that it keeps,
    with an identity of the machine, in the user's cache directory. A forked child has no such
    thread, and waits for it for ever when it ends. Where the program imported the package itself,
    its events are no longer recorded from here on.

    Raises:
        ImportError: it is not installed, or broken.
    """
    if _SWITCH in os.environ:
        return importlib.import_module("onnxruntime")
    if "onnxruntime" in sys.modules:
        package = importlib.import_module("onnxruntime")
        package.disable_telemetry_events()
        return package
    os.environ[_SWITCH] = "1"
    try:
        return importlib.import_module("onnxruntime")
    finally:
        os.environ.pop(_SWITCH, None)


def native() -> Any:
    """Its native module: values, vectors of them, and the exceptions of sessions."""
    return onnxruntime().capi.onnxruntime_pybind11_state
