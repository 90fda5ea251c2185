"""TensorRT, through the backend that ``torch_tensorrt`` registers under the name.

``torch_tensorrt`` has no entry points: its backends exist once it is imported. It is imported only
when a graph on a CUDA device asks for it. The name is never registered by composer, since
Dynamo's registry refuses duplicates and a later ``import torch_tensorrt`` would break in the
user's hands (the placeholder in torch itself is commented out).
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.fx

from composer.backends.base import Backend, is_installed, note
from composer.backends.dynamo import NamedBackend
from composer.errors import Refusal, refuse
from composer.records import GraphRequest, Reason, Status

_PCI_DEVICES = Path("/sys/bus/pci/devices")
_NVIDIA = "0x10de"


class TensorRTBackend(Backend):
    """``torch_tensorrt``'s Dynamo backend, after a probe that touches nothing of TensorRT.

    The order matters: without a driver TensorRT's own factories end the process with a
    segmentation fault, and ``import torch_tensorrt`` raises anything from ``AssertionError`` to a
    bare ``Exception``.
    """

    packages = ("torch-tensorrt", "tensorrt")

    def probe(self, request: GraphRequest) -> None:
        """Device, driver, package, in this order; nothing is imported."""
        if not torch.cuda.is_available():
            _refuse_without_device()
        if not request.device.startswith("cuda"):
            refuse(
                Status.UNAVAILABLE,
                Reason.NO_DEVICE,
                f"the graph is on {request.device}; TensorRT runs graphs on CUDA devices",
            )
        if not is_installed("torch_tensorrt"):
            refuse(
                Status.UNAVAILABLE,
                Reason.NOT_INSTALLED,
                "torch_tensorrt is not installed; install the release made for this torch",
            )

    def build(
        self,
        gm: torch.fx.GraphModule,
        example_inputs: list[Any],
        *,
        mode: str | None,
        options: Mapping[str, Any],
    ) -> object:
        """Compile with ``torch_tensorrt``, asked to raise rather than hand the graph back."""
        _import_torch_tensorrt()
        backend = NamedBackend("tensorrt")
        asked = {"pass_through_build_failures": True, **options}
        return backend.build(gm, example_inputs, mode=mode, options=asked)


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


def _import_torch_tensorrt() -> None:
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # its import prints on failure
            module = importlib.import_module("torch_tensorrt")
    except Exception as error:
        raise Refusal(
            Status.UNAVAILABLE,
            Reason.NOT_INSTALLED,
            f"torch_tensorrt is installed but cannot be imported: {type(error).__name__}: {error}",
        ) from error
    note(torch_tensorrt=getattr(module, "__version__", "unknown"))
