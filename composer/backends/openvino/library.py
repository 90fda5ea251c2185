"""OpenVINO itself, which only this module imports, with its telemetry off.

The module also has the ``openvino.Core`` of the process, and asks it about devices and properties.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Mapping
from typing import Any

from composer.backends.onnx_engine import Reason, Status, refuse

_TELEMETRY = "openvino_telemetry"
"""The package that sends events for OpenVINO, if OpenVINO can import it."""


@functools.cache
def openvino() -> Any:
    """Import and return the package, with its telemetry off.

    ``import openvino`` also imports the converter of models. The converter sends an event from a
    thread that forks the process, and writes an identity of the user to the home directory
    (OpenVINO 2026.4). No environment variable stops it. If it cannot import the telemetry package,
    it uses a stub. If the program has imported either package before, nothing is changed.

    Raises:
        ImportError: OpenVINO is not installed, or broken.
    """
    if "openvino" in sys.modules or _TELEMETRY in sys.modules:
        return importlib.import_module("openvino")
    sys.modules[_TELEMETRY] = None  # type: ignore[assignment]  # an import raises ImportError
    try:
        return importlib.import_module("openvino")
    finally:
        sys.modules.pop(_TELEMETRY, None)  # another thread may have removed it


def passes() -> Any:
    """Return OpenVINO's module of passes over models; ``import openvino`` does not import it."""
    openvino()
    return importlib.import_module("openvino.passes")


@functools.cache
def core() -> Any:
    """Return the core, which reads and compiles models; it loads the plugin of a device once."""
    return openvino().Core()


def version() -> str:
    """Return OpenVINO's version, without the name of the build."""
    return str(openvino().__version__).partition("-")[0]


def require_device(device: str) -> None:
    """Refuse if OpenVINO does not find a device of this kind.

    Raises:
        Refusal: ``unavailable`` with ``no_device``.
    """
    if not _finds(device):
        devices = ", ".join(core().available_devices) or "none"
        what = f"OpenVINO finds no device {device!r} here (it finds {devices})"
        refuse(Status.UNAVAILABLE, Reason.NO_DEVICE, what)


def _finds(device: str) -> bool:
    return family(device) in map(family, core().available_devices)


def family(device: str) -> str:
    """Return the kind of a device: ``"GPU"`` for ``"GPU.1"``."""
    return device.partition(".")[0]


def properties(device: str) -> tuple[str, ...]:
    """Return the names of a device's properties that can be set for compilation.

    The result is empty if there is no such device.
    """
    if not _finds(device):
        return ()
    found = core().get_property(device, "SUPPORTED_PROPERTIES")
    return tuple(name for name, access in found.items() if "W" in access)


def complaints(device: str, config: Mapping[str, str]) -> list[str]:
    """Return an error message for each value that the device does not accept."""
    messages: list[str] = []
    for name, value in config.items():
        own_core = openvino().Core()  # so that a wrong value does not stay in the shared one
        own_core.set_property(device, {name: value})
        try:
            own_core.get_property(device, name)  # only now the value is checked
        except RuntimeError as error:
            messages.append(f"{name} = {value!r}: {last_line(error)}")
    return messages


def last_line(error: BaseException) -> str:
    """Return the last line of an error; the lines before it are places in OpenVINO's sources."""
    *_, last = str(error).strip().splitlines() or [type(error).__name__]
    return last.strip()
