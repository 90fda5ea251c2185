"""TensorRT with its execution faked: real parser, real builder, and a runtime on ONNX Runtime.

Deserializing and executing need a driver. Here the plan that the real builder made is put aside,
and what stands in for it holds the ONNX model that it was made from. The runtime runs that on the
CPU: it reads inputs from, and writes outputs to, the addresses that it is given, and refuses what
the real one refuses. Each fault that the real one shows can be asked for by name.
"""

from __future__ import annotations

import ctypes
import functools
import json
import re
import threading
import types
import weakref
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch

from composer.backends.tensorrt.library import Library
from composer.backends.tensorrt.plan import Target

MAGIC = b"a plan for the fake runtime\n"
FAULTS = ("builder", "plan", "engine", "context", "address", "infer", "execute", "no memory")
ERROR = "[executor.cpp::run::1] Error Code 1: Cuda Runtime (something broke)"
NO_MEMORY = "[defaultAllocator.cpp::allocate::1] Error Code 2: OutOfMemory (Requested 80 GiB)"


class FakePlace:
    """The CPU in the place of a GPU; a stream for each thread."""

    def __init__(self, capability: tuple[int, int] = (8, 9)) -> None:
        self.device = torch.device("cpu")
        self.target = Target("pretended", capability, "0")
        self.launched: list[int] = []
        self.waited = 0
        self.recorded = 0
        self.entered = 0

    def stream(self) -> int:
        return threading.get_ident()

    @contextmanager
    def current(self):
        self.entered += 1
        yield
        self.entered -= 1

    @contextmanager
    def launching(self):
        assert self.entered
        self.launched.append(self.stream())
        yield

    def record(self, launch: Any) -> Any:
        assert self.entered
        launch(self.stream())
        self.recorded += 1
        stream = self.stream()
        return lambda: launch(stream)

    def wait(self) -> None:
        self.waited += 1


class Fake:
    """A library and what it did. ``faults`` are looked at whenever one could strike.

    ``hidden`` are outputs whose shapes the engine says only after it ran, ``asked`` those of them
    that memory was asked for, ``on_host`` those that it
    leaves in the host's memory.
    """

    def __init__(self, real: Library) -> None:
        self.faults: set[str] = set()
        self.hidden: set[str] = set()
        self.asked: list[str] = []
        self.on_host: set[str] = set()
        self.contexts: list[FakeContext] = []
        self.loaded = 0
        self.built = 0
        self.refitted = 0
        self._log = real.log
        module = types.ModuleType(real.name)
        module.__dict__.update(vars(real.module))
        module.Builder = functools.partial(FakeBuilder, self, real.module)
        module.OnnxParser = functools.partial(FakeParser, self, real.module)
        module.Refitter = module.OnnxParserRefitter = FakeRefitter
        module.Runtime = functools.partial(FakeRuntime, self, module)
        self.parsed: dict[int, tuple[onnx.ModelProto, dict[str, bytes]]] = {}
        self.library = Library(module, real.name, real.version, real.log)

    def strikes(self, fault: str) -> bool:
        """Whether this fault was asked for; then the log says why."""
        if fault in self.faults:
            no_memory = "no memory" in self.faults
            self._log.log(self.library.module.ILogger.ERROR, NO_MEMORY if no_memory else ERROR)
        return fault in self.faults


class FakeBuilder:
    """Builds with the real one; what it returns is a plan for the fake runtime."""

    def __init__(self, fake: Fake, real: Any, log: Any) -> None:
        if fake.strikes("builder"):
            raise TypeError("pybind11::init(): factory function returned nullptr")
        self.fake, self.real = fake, real.Builder(log)
        self.flags = real.BuilderFlag
        self.profiles: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def create_optimization_profile(self) -> Any:
        self.profiles.append(self.real.create_optimization_profile())
        return self.profiles[-1]

    def build_serialized_network(self, network: Any, config: Any) -> bytes | None:
        self.fake.built += 1
        config.clear_flag(self.flags.REFIT)  # the real builder asks a GPU for that
        plan = self.real.build_serialized_network(network, config)
        if self.fake.strikes("plan") or plan is None:
            return None
        model, weights = self.fake.parsed[id(network)]
        _fill(model, weights)
        ranges = [_ranges(profile, model) for profile in self.profiles]
        return MAGIC + json.dumps(ranges).encode() + b"\n" + model.SerializeToString()


def _ranges(profile: Any, model: onnx.ModelProto) -> dict[str, list[list[int]]]:
    dynamic = (each.name for each in model.graph.input if any(map(_dynamic, _dims(each))))
    return {name: [list(shape) for shape in profile.get_shape(name)] for name in dynamic}


def _fill(model: onnx.ModelProto, weights: dict[str, bytes]) -> None:
    for each in model.graph.initializer:
        if each.name in weights:
            each.ClearField("external_data")
            each.data_location = onnx.TensorProto.DEFAULT
            each.raw_data = weights[each.name]


class FakeRefitter:
    """Takes weights for an engine; as an ``OnnxParserRefitter`` reads them, too."""

    def __init__(self, engine: Any, log: Any) -> None:
        self.engine = engine.engine if isinstance(engine, FakeRefitter) else engine
        self.refitter = engine
        self.weights: dict[str, bytes] = {}

    def load_model_proto(self, data: bytes, path: str | None) -> bool:
        self.model = onnx.ModelProto.FromString(data)
        return True

    def load_initializer(self, name: str, address: int, size: int) -> bool:
        self.weights[name] = ctypes.string_at(address, size)
        return True

    def refit_model_proto(self) -> bool:
        _fill(self.model, self.weights)
        self.refitter.model = self.model
        return not self.engine.fake.strikes("refit")

    def refit_cuda_engine(self) -> bool:
        self.engine.fake.refitted += 1
        self.engine.open(self.model)
        return True


class FakeParser:
    """Parses with the real one, and remembers what."""

    def __init__(self, fake: Fake, real: Any, network: Any, log: Any) -> None:
        self.real = real.OnnxParser(network, log)
        self.fake, self.network_id, self.weights = fake, id(network), dict[str, bytes]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def load_model_proto(self, data: bytes, path: str | None) -> bool:
        model = onnx.ModelProto.FromString(data)
        self.fake.parsed[self.network_id] = (model, self.weights)
        return self.real.load_model_proto(data, path)

    def load_initializer(self, name: str, address: int, size: int) -> bool:
        self.weights[name] = ctypes.string_at(address, size)
        return self.real.load_initializer(name, address, size)

    def parse_from_file(self, path: str) -> bool:
        self.fake.parsed[self.network_id] = (onnx.load(path), self.weights)
        return self.real.parse_from_file(path)


class FakeRuntime:
    """Loads the plans of the fake builder, and nothing else."""

    def __init__(self, fake: Fake, module: Any, log: Any) -> None:
        if fake.strikes("runtime"):
            raise TypeError("pybind11::init(): factory function returned nullptr")
        self.fake, self.module, self.log = fake, module, log

    def deserialize_cuda_engine(self, plan: bytes) -> FakeEngine | None:
        if self.fake.strikes("engine") or not plan.startswith(MAGIC):
            return None
        self.fake.loaded += 1
        return FakeEngine(self, plan.removeprefix(MAGIC))


class FakeEngine:
    """A model; dies with its runtime, as the real one does."""

    def __init__(self, runtime: FakeRuntime, plan: bytes) -> None:
        ranges, _, model = plan.partition(b"\n")
        self.runtime = weakref.ref(runtime)
        self.fake, self.trt = runtime.fake, runtime.module
        self.profiles = json.loads(ranges) or [{}]
        self.ranges, self.model = ranges, onnx.ModelProto.FromString(model)
        graph = self.model.graph
        self.inputs = {each.name: each for each in graph.input}
        self.outputs = {each.name: each for each in graph.output}
        self.tensors = self.inputs | self.outputs
        self.num_io_tensors = len(self.tensors)
        self.open(self.model)

    @property
    def weight_streaming_budget_v2(self) -> int:
        return self.budget

    @weight_streaming_budget_v2.setter
    def weight_streaming_budget_v2(self, size: int) -> None:
        assert not self.fake.contexts, "there is a context already"
        self.budget = -1 if self.fake.strikes("budget") else size

    def open(self, model: onnx.ModelProto) -> None:
        providers = ["CPUExecutionProvider"]
        self.session = onnxruntime.InferenceSession(model.SerializeToString(), providers=providers)

    def create_serialization_config(self) -> Any:
        return self

    def set_flag(self, flag: Any) -> bool:
        return flag == self.trt.SerializationFlag.EXCLUDE_WEIGHTS

    def serialize_with_config(self, config: Any) -> bytes:
        model = onnx.ModelProto()
        model.CopyFrom(self.model)
        for each in model.graph.initializer:
            each.raw_data = bytes(len(each.raw_data))
        return MAGIC + self.ranges + b"\n" + model.SerializeToString()

    def get_tensor_name(self, index: int) -> str:
        return [*self.tensors][index]

    def get_tensor_dtype(self, name: str) -> Any:
        names = {1: "FLOAT", 6: "INT32", 7: "INT64", 9: "BOOL", 10: "HALF", 16: "BF16"}
        return self.trt.DataType.__members__[names[self.tensors[name].type.tensor_type.elem_type]]

    def get_tensor_location(self, name: str) -> Any:
        places = self.trt.TensorLocation
        return places.HOST if name in self.fake.on_host else places.DEVICE

    def create_execution_context(self) -> FakeContext | None:
        if self.fake.strikes("context"):
            return None
        self.fake.contexts.append(FakeContext(self))
        return self.fake.contexts[-1]


class FakeContext:
    """Holds shapes and addresses; used by one thread at a time."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine, self.fake = engine, engine.fake
        self.profile: int | None = None
        self.profiles_set: list[int] = []
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.allocators: dict[str, Any] = {}
        self.streams: set[int] = set()
        self._busy = threading.Lock()

    def set_optimization_profile_async(self, index: int, stream: int) -> bool:
        self.profile = index
        self.profiles_set.append(index)
        self.shapes.clear()
        return index < len(self.engine.profiles)

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        assert self.profile is not None
        ranges = self.engine.profiles[self.profile].get(name)
        least, _, greatest = ranges or (shape, shape, shape)
        fits = all(a <= n <= c for a, n, c in zip(least, shape, greatest, strict=True))
        if fits:
            self.shapes[name] = shape
        return fits

    def set_tensor_address(self, name: str, address: int) -> bool:
        assert address, "a null pointer"
        if self.fake.strikes("address"):
            return False
        self.addresses[name] = address
        return name in self.engine.tensors

    def set_output_allocator(self, name: str, allocator: Any) -> bool:
        self.allocators[name] = weakref.ref(allocator)
        return name in self.engine.outputs

    def infer_shapes(self) -> list[str]:
        if "infer" in self.fake.faults:
            return ["a_shape_tensor"]
        dynamic = (n for n, each in self.engine.inputs.items() if any(map(_dynamic, _dims(each))))
        return [name for name in dynamic if name not in self.shapes]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        if name in self.fake.hidden:
            return tuple(-1 for _ in _dims(self.engine.outputs[name]))
        return self._shape(name)

    def _shape(self, name: str) -> tuple[int, ...]:
        values: dict[str, int] = {}
        for known, shape in self.shapes.items():
            values |= dict(zip(_dims(self.engine.inputs[known]), shape, strict=True))
        dims = _dims(self.engine.tensors[name])
        return tuple(eval(dim, {}, values) if _dynamic(dim) else int(dim) for dim in dims)

    def execute_async_v3(self, stream: int) -> bool:
        assert self.profile is not None, "no profile was set"
        assert self.engine.runtime() is not None, "the runtime died before its engine"
        assert self._busy.acquire(blocking=False), "two calls use one context"
        try:
            self.streams.add(stream)
            if self.fake.strikes("execute"):
                return False
            feeds = {name: self._read(name) for name in self.engine.inputs}
            names = [*self.engine.outputs]
            for name, array in zip(names, self.engine.session.run(names, feeds), strict=True):
                self._write(name, np.ascontiguousarray(array), stream)
            return True
        finally:
            self._busy.release()

    def _read(self, name: str) -> np.ndarray:
        shape = self.shapes.get(name) or self._shape(name)
        kind = self.engine.inputs[name].type.tensor_type.elem_type
        dtype = onnx.helper.tensor_dtype_to_np_dtype(kind)
        size = int(np.prod(shape)) * dtype.itemsize
        raw = ctypes.string_at(self.addresses[name], size) if size else b""
        return np.frombuffer(raw, dtype).reshape(shape)

    def _write(self, name: str, array: np.ndarray, stream: int) -> None:
        address = self.addresses.get(name, 0)
        if name in self.fake.hidden:
            allocator = self.allocators[name]()
            self.fake.asked.append(name)
            address = allocator.reallocate_output_async(name, 0, array.nbytes, 256, stream)
            allocator.notify_shape(name, array.shape)
        ctypes.memmove(address, array.ctypes.data, array.nbytes)


def _dims(value: Any) -> list[str]:
    return [dim.dim_param or str(dim.dim_value) for dim in value.type.tensor_type.shape.dim]


def _dynamic(dim: str) -> bool:
    return re.fullmatch(r"\d+", dim) is None
