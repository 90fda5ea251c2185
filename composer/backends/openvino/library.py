"""OpenVINO, imported here only: by itself it tells its makers of its use.

Its core, one for the process, and what it says of devices and their properties.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Mapping
from typing import Any

from composer.errors import refuse
from composer.records import Reason, Status

_TELEMETRY = "openvino_telemetry"
"""What OpenVINO sends events with, where it can import it."""


@functools.cache
def openvino() -> Any:
    """The package, with its telemetry off; what the program imported itself stays as it is.

    Its converter, which it imports with itself, sends an event from a thread that forks the process
    for that, and writes an identity of the user to the home directory (2026.4). No variable stops
    it. Without the package that sends, it takes a stub of its own.

    Raises:
        ImportError: it is not installed, or broken.
    """
    if "openvino" in sys.modules or _TELEMETRY in sys.modules:
        return importlib.import_module("openvino")
    sys.modules[_TELEMETRY] = None  # type: ignore[assignment]  # an import raises ImportError
    try:
        return importlib.import_module("openvino")
    finally:
        sys.modules.pop(_TELEMETRY, None)  # another thread may have been here too


def passes() -> Any:
    """Its passes over models, which it does not import with itself."""
    openvino()
    return importlib.import_module("openvino.passes")


@functools.cache
def core() -> Any:
    """What reads and compiles models; it loads the plugin of a device once."""
    return openvino().Core()


def version() -> str:
    """OpenVINO's version, without the build's name."""
    return str(openvino().__version__).partition("-")[0]


def require_device(device: str) -> None:
    """Refuse where OpenVINO does not find a device of this kind.

    Raises:
        Refusal: ``unavailable`` with ``no_device``.
    """
    found = core().available_devices
    if family(device) not in map(family, found):
        what = f"OpenVINO finds no device {device!r} here (it finds {', '.join(found) or 'none'})"
        refuse(Status.UNAVAILABLE, Reason.NO_DEVICE, what)


def family(device: str) -> str:
    """The kind of a device: ``"GPU"`` of ``"GPU.1"``."""
    return device.partition(".")[0]


def properties(device: str) -> tuple[str, ...]:
    """Names of the properties that models for a device can be compiled with; none if not here."""
    if family(device) not in map(family, core().available_devices):
        return ()
    found = core().get_property(device, "SUPPORTED_PROPERTIES")
    return tuple(name for name, access in found.items() if "W" in access)


def complaints(device: str, config: Mapping[str, str]) -> list[str]:
    """What the device says of each value that it does not take, a line each."""
    said: list[str] = []
    for name, value in config.items():
        asked = openvino().Core()  # which keeps what it is told, and judges it when it is asked
        asked.set_property(device, {name: value})
        try:
            asked.get_property(device, name)
        except RuntimeError as error:
            said.append(f"{name} = {value!r}: {last_line(error)}")
    return said


def last_line(error: BaseException) -> str:
    """What OpenVINO says after the places in its sources."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
