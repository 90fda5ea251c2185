"""Run sessions by ONNX Runtime's public API.

This is the fallback where the native way (:mod:`composer.backends.onnxrt.native`) does not work.
Each call binds torch's memory by its address (``IOBinding``). A result is copied if its size is
known only after the call.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from composer.backends.onnxrt.library import onnxruntime
from composer.backends.onnxrt.ports import Ports, Run, allocator
from composer.lowering.export.onnx import as_scalar

_NOWHERE = torch.zeros(1, device="cpu")
"""Its address is used for tensors without elements: their own is 0, and ONNX Runtime refuses 0."""


def bound_run(session: Any, ports: Ports) -> Run:
    """A function that runs a session by an ``IOBinding``."""
    options = onnxruntime().RunOptions()
    if ports.device.type != "cpu":
        options.add_run_config_entry("disable_synchronize_execution_providers", "1")
    fed = ports.fed(session)
    static = ports.outputs if ports.is_static else ()
    allocators = [allocator(each, ports.device) for each in static]
    dtypes = [each.dtype or torch.int64 for each in ports.outputs]

    def memory(name: str, tensor: torch.Tensor) -> tuple[Any, ...]:
        where = tensor.device.type, tensor.device.index or 0
        address = tensor.data_ptr() or _NOWHERE.data_ptr()
        return name, *where, ports.types[name], list(tensor.shape), address

    def run_static(binding: Any, args: tuple[Any, ...]) -> list[torch.Tensor]:
        reused = ports.reused(args)
        results = [reused[i] if i in reused else new() for i, new in enumerate(allocators)]
        for name, result in zip(ports.output_names, results, strict=True):
            binding.bind_output(*memory(name, result))
        session.run_with_iobinding(binding, options)
        return results

    def run_dynamic(binding: Any, args: tuple[Any, ...]) -> list[torch.Tensor]:
        for name in ports.output_names:
            binding.bind_output(name, "cpu")
        session.run_with_iobinding(binding, options)
        made = zip(binding.get_outputs(), dtypes, strict=True)
        return [_copied(value, dtype).to(ports.device) for value, dtype in made]

    run_bound = run_static if ports.is_static else run_dynamic

    def call(args: tuple[Any, ...]) -> list[torch.Tensor]:
        binding = session.io_binding()
        inputs = {ports.names[i]: _contiguous(args[i]) for i in fed}  # alive until the end
        for name, tensor in inputs.items():
            binding.bind_input(*memory(name, tensor))
        return run_bound(binding, args)

    return call


def _contiguous(value: torch.Tensor | int | float) -> torch.Tensor:
    return value.contiguous() if isinstance(value, torch.Tensor) else as_scalar(value)


def _copied(value: Any, dtype: torch.dtype) -> torch.Tensor:
    """A tensor with a copy of a value in ONNX Runtime's memory on the CPU."""
    size = value.tensor_size_in_bytes()
    if not size:
        return torch.empty(value.shape(), dtype=dtype, device="cpu")
    there = (ctypes.c_char * size).from_address(value.data_ptr())
    return torch.frombuffer(there, dtype=dtype).reshape(value.shape()).clone()
