"""Checks device, driver and package of TensorRT without importing TensorRT.

Without a driver, TensorRT's factories crash the process. So nothing of TensorRT is used before this
probe has passed.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from composer.backends.base import is_installed
from composer.errors import refuse
from composer.records import Reason, Status
from composer.system.distribution import install

LIBRARIES = ("tensorrt", "tensorrt_rtx")
"""Modules that composer's own engine can use; the first one is preferred."""

_PCI_DEVICES = Path("/sys/bus/pci/devices")
_NVIDIA = "0x10de"


def require_device(device: str) -> None:
    """Refuse if torch can use no CUDA device, or if the graph is on another device.

    Raises:
        Refusal: ``unavailable`` with ``no_device`` or ``driver_missing``.
    """
    if not torch.cuda.is_available():
        _refuse_without_device()
    if not device.startswith("cuda"):
        message = f"the graph is on {device}; TensorRT runs graphs on CUDA devices"
        refuse(Status.UNAVAILABLE, Reason.NO_DEVICE, message)


def require_package() -> None:
    """Refuse if the packages of composer's own engine are not installed.

    Raises:
        Refusal: ``unavailable`` with ``not_installed``.
    """
    if not any(map(is_installed, LIBRARIES)):
        message = (
            "none of torch_tensorrt, tensorrt and tensorrt_rtx is installed; install the release "
            f"of torch_tensorrt made for this torch, or {install('tensorrt-rtx')}"
        )
        refuse(Status.UNAVAILABLE, Reason.NOT_INSTALLED, message)


def _refuse_without_device() -> None:
    if torch.version.cuda is None:
        reason, why = Reason.NO_DEVICE, "this build of torch has no CUDA support"
    elif not _has_nvidia_card():
        reason, why = Reason.NO_DEVICE, "this machine has no NVIDIA GPU"
    elif not _has_driver():
        reason, why = Reason.DRIVER_MISSING, "an NVIDIA GPU is here, but libcuda.so.1 is not"
    else:
        reason, why = Reason.NO_DEVICE, "torch.cuda finds no usable device"
    refuse(Status.UNAVAILABLE, reason, why)


def _has_nvidia_card() -> bool:
    vendors = _PCI_DEVICES.glob("*/vendor")
    return any(vendor.read_text().strip() == _NVIDIA for vendor in vendors)


def _has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True
