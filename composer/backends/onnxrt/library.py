"""Import the package ``onnxruntime`` with its telemetry off.

Only this module imports it: by default the package reports its use to its makers.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

_SWITCH = "ORT_DISABLE_TELEMETRY"
"""An environment variable that ONNX Runtime 1.29 and newer reads when it is imported."""


@functools.cache
def onnxruntime() -> Any:
    """The package ``onnxruntime``, with its telemetry off unless the environment variable is set.

    From ONNX Runtime 1.29 on, a thread sends events on Linux and macOS too. It keeps them in a
    database in the user's cache directory, together with an identifier of the machine. A forked
    child does not have that thread, and waits for it forever at its end.

    If the program has already imported the package itself, recording of events is turned off now.

    Raises:
        ImportError: the package is not installed, or is broken.
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


def is_for_cpu_alone() -> bool:
    """True if the installed package was built with no provider except the CPU's.

    Every other provider is a shared library of its own, so this looks for files and imports
    nothing.
    """
    spec = importlib.util.find_spec("onnxruntime")
    assert spec is not None, "the probe looks for the package before"
    libraries = Path(str(spec.origin)).parent.glob("capi/*onnxruntime_providers_*")
    return all("providers_shared" in library.name for library in libraries)


def native() -> Any:
    """The package's native module. It is not public, so use it only where there is a fallback."""
    return onnxruntime().capi.onnxruntime_pybind11_state


def errors(*names: str) -> tuple[type[Exception], ...]:
    """The exception classes of the native module with these names; unknown names are skipped."""
    module = native()
    return tuple(getattr(module, name) for name in names if hasattr(module, name))
