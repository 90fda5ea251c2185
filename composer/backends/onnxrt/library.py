"""The package ``onnxruntime``, imported here only: by itself it tells its makers of its use."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

_PROVIDERS = "*onnxruntime_providers_*"
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


def is_for_cpu_alone() -> bool:
    """Whether the package that is installed was built without any further provider.

    Each but the CPU's is a shared library of its own, so that nothing has to be imported.
    """
    spec = importlib.util.find_spec("onnxruntime")
    folders = (spec and spec.submodule_search_locations) or ()
    names = {each.name for at in folders for each in Path(at, "capi").glob(_PROVIDERS)}
    return not any("providers_shared" not in name for name in names)


def native() -> Any:
    """Its native module, which is not public: only what has another way may depend on it."""
    return onnxruntime().capi.onnxruntime_pybind11_state


def errors(*names: str) -> tuple[type[Exception], ...]:
    """The exceptions of sessions that have these names, as far as the native module has them."""
    found = (getattr(native(), name, None) for name in names)
    return tuple(each for each in found if each is not None)
