"""Run sessions by ONNX Runtime's native module, which is faster than the public API.

Tensors are passed by DLPack, without copies and without the checks of the Python wrapper. These
functions are not public. So :func:`why_not_native` first tries each of them once on real values. If
one fails, :mod:`~composer.backends.onnxrt.binding` is used instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]  # no __all__

from composer.backends.onnxrt.library import native, onnxruntime
from composer.backends.onnxrt.ports import Ports, Run, allocator
from composer.errors import class_and_text
from composer.lowering.export.onnx import Output, as_scalar


def native_run(session: Any, ports: Ports) -> Run:
    """A function that runs a session by its native call.

    If the shapes of all results are fixed, torch allocates the results. Otherwise ONNX Runtime
    allocates them, and DLPack passes their memory to torch.
    """
    library = native()
    new_vector, options = library.OrtValueVector, library.RunOptions()
    run = session._sess.run_with_ortvaluevector
    fed, output_names = ports.fed(session), ports.output_names
    names = [ports.names[i] for i in fed]
    feeds = [(i, _feed_for(ports.dtypes[i])) for i in fed]
    static = ports.outputs if ports.is_static else ()
    allocators = [_allocator(each, ports.device) for each in static]
    receivers = [_receiver(each, ports.device) for each in ports.outputs]
    devices = [_device(ports.device)] * len(ports.outputs)
    if ports.device.type != "cpu":
        options.add_run_config_entry("disable_synchronize_execution_providers", "1")

    def allocate(args: tuple[Any, ...], fetches: Any) -> list[torch.Tensor]:
        reused = ports.reused(args)
        return [
            _lend(reused[i], fetches) if i in reused else new(fetches)
            for i, new in enumerate(allocators)
        ]

    def call(args: tuple[Any, ...]) -> list[torch.Tensor]:
        given, fetches = new_vector(), new_vector()
        for position, feed in feeds:
            feed(given, args[position])
        if ports.rewritten:
            results = allocate(args, fetches)
        else:
            results = [new(fetches) for new in allocators]
        run(options, names, given, output_names, fetches, devices)
        if not results:  # by index: iterating over the vector takes 30 us (ONNX Runtime 1.31)
            results = [receive(fetches.dlpack_at(i)) for i, receive in enumerate(receivers)]
        return results

    return call


def native_value(tensor: torch.Tensor) -> Any:
    """A native value over the memory of a contiguous tensor."""
    if _is_flagged(tensor.dtype):
        return native().OrtValue.from_dlpack(to_dlpack(tensor.view(torch.uint8)), True)
    return native().OrtValue.from_dlpack(to_dlpack(tensor))


def _device(device: torch.device) -> Any:
    library = native()
    place, memory = getattr(library.OrtDevice, device.type)(), library.OrtDevice.default_memory()
    return library.OrtDevice(place, memory, device.index or 0)


def _feed_for(dtype: torch.dtype | None) -> Callable[[Any, Any], None]:
    """The function that appends an argument of this dtype to a vector of ONNX Runtime values.

    Only a non-contiguous tensor is copied. ``None`` stands for a Python number.
    """
    if dtype is None:
        return lambda vector, number: vector.push_back(to_dlpack(as_scalar(number)))
    if _is_flagged(dtype):
        return _feed_bools
    flag = _flag()
    return lambda vector, tensor: vector.push_back(to_dlpack(tensor.contiguous()), *flag)


def _feed_bools(vector: Any, tensor: torch.Tensor) -> None:
    vector.push_back(to_dlpack(tensor.contiguous().view(torch.uint8)), True)


def _is_flagged(dtype: torch.dtype | None) -> bool:
    """True if tensors of this dtype are passed as bytes, with a flag that they are of bools."""
    return dtype is torch.bool and _has_flag()


@functools.cache
def _has_flag() -> bool:
    """True if tensors of bools need a flag: ONNX Runtime before 1.32 does not know their DLPack."""
    try:
        native().OrtValueVector().push_back(to_dlpack(torch.zeros(1, dtype=torch.bool)))
    except RuntimeError:
        return True
    return False


def _flag() -> tuple[bool, ...]:
    """The flag for a tensor that is not of bools, where there is a flag.

    It could be left out, but then a call of ONNX Runtime 1.31 takes 0.5 us more.
    """
    return (False,) if _has_flag() else ()


def _allocator(output: Output, device: torch.device) -> Callable[[Any], torch.Tensor]:
    """A function that allocates an output of fixed shape and appends it to a vector of results."""
    empty, flag = allocator(output, device), _flag()

    def allocate(fetches: Any) -> torch.Tensor:
        tensor = empty()
        fetches.push_back(to_dlpack(tensor), *flag)
        return tensor

    def allocate_bools(fetches: Any) -> torch.Tensor:
        tensor = empty()
        _feed_bools(fetches, tensor)
        return tensor

    return allocate_bools if _is_flagged(output.dtype) else allocate


def _lend(tensor: torch.Tensor, fetches: Any) -> torch.Tensor:
    """Have an output written to the memory of a contiguous tensor. Returns that tensor."""
    _feed_for(tensor.dtype)(fetches, tensor)
    return tensor


def _receiver(output: Output, device: torch.device) -> Callable[[Any], torch.Tensor]:
    """A function that turns a DLPack capsule from ONNX Runtime into a tensor.

    On a GPU it copies: ONNX Runtime reuses the memory that it allocated without asking a stream.
    """
    is_flagged = _is_flagged(output.dtype)
    copies = device.type != "cpu"

    def receive(capsule: Any) -> torch.Tensor:
        tensor: torch.Tensor = from_dlpack(capsule)
        if not tensor.numel():  # its strides are 0 (1.32; test_onnxrt_library.py)
            tensor = tensor.new_empty(tensor.shape)
        if is_flagged:
            tensor = tensor.view(torch.bool)
        return tensor.clone() if copies else tensor

    return receive


_IDENTITY = """
<ir_version: 8, opset_import: ["" : 18]>
identity (bool[2] x0, int64 x1, float[1, 3] x2, float[0, 2] x3)
=> (bool[2] y0, int64 y1, float[1, 3] y2, float[0, 2] y3)
{ y0 = Identity(x0) y1 = Identity(x1) y2 = Identity(x2) y3 = Identity(x3) }
"""
"""A model that returns its inputs: bools, a number, floats, and a tensor without elements."""


@functools.cache
def why_not_native(device_type: str) -> str:
    """The reason why the native functions cannot be used; empty if they work.

    The check runs each of them on a model that returns its inputs. It takes about 3 ms, once for
    each device type in a process (``"cpu"`` or ``"cuda"``).
    """
    try:
        _device(torch.device(device_type))
        native_value(torch.zeros(1, dtype=torch.bool, device="cpu"))
        _require_same(is_static=True)
        _require_same(is_static=False)
    except Exception as error:  # noqa: BLE001  # any failure has the same remedy: the public API
        return class_and_text(error)
    return ""


def _require_same(*, is_static: bool) -> None:
    """Raise unless a session of the identity model returns the values that it is given."""
    import onnx

    samples = (
        torch.tensor([True, False], device="cpu"),
        torch.tensor(7, dtype=torch.int64, device="cpu"),
        torch.tensor([[1.5, -2.0, 0.0]], dtype=torch.float32, device="cpu"),
        torch.zeros(0, 2, dtype=torch.float32, device="cpu"),
    )
    model = onnx.parser.parse_model(_IDENTITY)
    ports = Ports(
        names=tuple(each.name for each in model.graph.input),
        dtypes=tuple(each.dtype for each in samples),
        types={},
        outputs=tuple(Output(each.dtype, tuple(each.shape), None) for each in samples),
        output_names=[each.name for each in model.graph.output],
        device=torch.device("cpu"),
        is_static=is_static,
        rewritten={},
        read=(),
    )
    content = model.SerializeToString()
    session = onnxruntime().InferenceSession(content, providers=["CPUExecutionProvider"])
    for sample, result in zip(samples, native_run(session, ports)(samples), strict=True):
        if result.dtype is not sample.dtype or not torch.equal(result, sample):
            raise ValueError(f"ONNX Runtime gave back {result} for {sample}")
