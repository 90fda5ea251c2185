"""Engines called by themselves, to see what composer adds to them."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from compiles import Outputs
from native_cpu import exported
from serving import Subject
from torch import Tensor

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"


class NotHere(Exception):
    """An engine that cannot be on this machine, and why."""


def torch_tensorrt(subject: Subject) -> Callable[..., Any]:
    """``torch_tensorrt``'s own backend, asked to raise where it cannot build.

    Raises:
        NotHere: it is not installed.
    """
    if importlib.util.find_spec("torch_tensorrt") is None:
        raise NotHere("torch_tensorrt is not installed")
    importlib.import_module("torch_tensorrt")  # registers the backend
    options = {"pass_through_build_failures": True}
    return torch.compile(subject.module, backend="torch_tensorrt", options=options)


def onnxruntime(subject: Subject) -> Callable[..., Any]:
    """ONNX Runtime on what ``torch.onnx.export`` makes, inputs and outputs bound where they lie.

    Raises:
        NotHere: this build of ONNX Runtime has no provider for the device.
    """
    try:
        ort = importlib.import_module("onnxruntime")
    except ImportError as error:
        raise NotHere(f"onnxruntime cannot be imported: {error}") from error
    device = next(iter(subject.inputs.values())).device
    provider = CUDA if device.type == "cuda" else CPU
    if provider not in (known := ort.get_available_providers()):
        raise NotHere(f"this build of onnxruntime has no {provider} (it has {', '.join(known)})")
    if provider == CUDA and hasattr(ort, "preload_dlls"):
        ort.preload_dlls()
    session = ort.InferenceSession(exported(subject.module, subject.inputs), providers=[provider])
    if provider not in session.get_providers():
        raise NotHere(f"asked for {provider}, got {', '.join(session.get_providers())}")
    outputs = [each.name for each in session.get_outputs()]

    def call(**inputs: Tensor) -> Outputs:
        results = tuple(each.new_empty(each.shape) for each in subject.given)  # row by row
        binding = session.io_binding()
        for name, tensor in inputs.items():
            binding.bind_input(name, *place(tensor))
        for name, tensor in zip(outputs, results, strict=True):
            binding.bind_output(name, *place(tensor))
        session.run_with_iobinding(binding)
        return results

    return call


def place(tensor: Tensor) -> tuple[str, int, int, list[int], int]:
    """Device, its index, element type, shape and address, as ONNX Runtime's bindings take them."""
    from onnx import TensorProto

    kinds = {
        torch.float32: TensorProto.FLOAT,
        torch.float16: TensorProto.FLOAT16,
        torch.bfloat16: TensorProto.BFLOAT16,
        torch.int64: TensorProto.INT64,
    }
    device = tensor.device
    at = (device.type, device.index or 0)
    return (*at, kinds[tensor.dtype], list(tensor.shape), tensor.data_ptr())
