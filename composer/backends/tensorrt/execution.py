"""A loaded plan, called on torch's memory and torch's stream."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from composer.backends.onnx_engine import LoadAgain
from composer.backends.tensorrt.allocator import make_allocator
from composer.backends.tensorrt.library import Library
from composer.backends.tensorrt.loading import Signature, load, require_same, stream_weights
from composer.backends.tensorrt.log import Lines
from composer.backends.tensorrt.place import Place
from composer.backends.tensorrt.profiles import Shape, holds
from composer.backends.tensorrt.refit import without_weights
from composer.records import Reason
from composer.system import forks

_ALIGNMENT = 256
"""Bytes at which an input must begin: kernels read many numbers at once."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """A CUDA graph, and the memory that it reads and writes at every replay."""

    inputs: Mapping[str, torch.Tensor]
    outputs: Sequence[torch.Tensor]
    replay: Callable[[], None]


@dataclass(slots=True)
class Lane:
    """An execution context, the profile that is set in it, and the CUDA graph of its work.

    Only one call uses it at a time.
    """

    context: Any
    profile: int = -1
    recorded: Recorded | None = None


class LoadedPlan:
    """A plan that runs. Several threads may call it, on one stream or on several.

    A context belongs to one stream, because TensorRT reuses its scratch memory without waiting. A
    context that no call uses waits in the pool of its stream.

    ``widen`` widens the profiles of later plans, to contain the shapes of a call.

    With ``record``, calls replay CUDA graphs, if all shapes are fixed. For a plan without weights,
    ``fill`` gives the engine its weights.

    Raises:
        Refusal: the plan cannot be loaded here or is for another model, or memory is short.
    """

    def __init__(
        self,
        library: Library,
        plan: bytes,
        signature: Signature,
        place: Place,
        widen: Callable[[Mapping[str, Shape]], None],
        *,
        record: bool = False,
        fill: Callable[[Any, Lines], None] | None = None,
    ) -> None:
        self._library = library
        self._signature = signature
        self._place = place
        self._widen = widen
        self._pool: defaultdict[int, list[Lane]] = defaultdict(list)
        self._lock = forks.lock()
        self._somewhere = torch.empty(1, dtype=torch.uint8, device=place.device)
        with place.current(), library.busy, library.log.recording() as lines:
            self._runtime, self._engine = load(library, plan, lines)
            require_same(self._engine, signature)
            stream_weights(self._engine, signature.weights_on_device, lines)
            if fill is not None:
                fill(self._engine, lines)
            first = Lane(self._context(lines))
        self._pool[place.stream()].append(first)
        trt = library.module
        self._on_host = {
            name
            for name, _ in signature.outputs
            if self._engine.get_tensor_location(name) == trt.TensorLocation.HOST
        }
        fixed = all(None not in (each.shape, each.dtype) for _, each in signature.outputs)
        self.is_recorded = record and fixed and not signature.profiles and not self._on_host
        """True if calls replay a CUDA graph."""

    def __call__(self, args: Sequence[Any]) -> list[torch.Tensor]:
        """Run the plan on the arguments of the region.

        Raises:
            LoadAgain: no profile of the plan contained the shapes; the profiles are wider now.
            Refusal: the engine failed.
            torch.OutOfMemoryError: the engine failed because the device has too little memory.
        """
        with self._place.current():
            return self._run(args)

    def _run(self, args: Sequence[Any]) -> list[torch.Tensor]:
        inputs = {name: self._given(name, args[at]) for name, at in self._signature.inputs}
        profile = self._profile({name: tuple(each.shape) for name, each in inputs.items()})
        stream = self._place.stream()
        lane = self._take(stream)
        with self._library.log.recording() as lines:
            if self.is_recorded:
                results = self._replayed(lane, inputs, stream, lines)
            else:
                results = self._launched(lane, profile, inputs, stream, lines)
        with self._lock:
            self._pool[stream].append(lane)
        return results

    def without_weights(self) -> bytes:
        """Return the plan without its weights; the plan must be refittable.

        Raises:
            Refusal: TensorRT does not write it.
        """
        library = self._library
        with self._place.current(), library.busy, library.log.recording() as lines:
            return without_weights(self._library, self._engine, lines)

    def _launched(
        self,
        lane: Lane,
        profile: int,
        inputs: Mapping[str, torch.Tensor],
        stream: int,
        lines: Lines,
    ) -> list[torch.Tensor]:
        self._set_inputs(lane, profile, inputs, stream, lines)
        outputs = [self._place_output(lane, name, lines) for name, _ in self._signature.outputs]
        with self._place.launching():
            _execute(lane.context, stream, lines)
        if self._on_host:
            self._place.wait()
        return [fetch() for fetch in outputs]

    def _replayed(
        self, lane: Lane, inputs: Mapping[str, torch.Tensor], stream: int, lines: Lines
    ) -> list[torch.Tensor]:
        """Replay the CUDA graph of the lane.

        The graph reads and writes memory of its own, so inputs and outputs are copied. Everything
        runs on the caller's stream, to which the lane belongs.
        """
        recorded = lane.recorded
        if recorded is None:
            recorded = lane.recorded = self._record(lane, inputs, stream, lines)
        for name, memory in recorded.inputs.items():
            memory.copy_(inputs[name])
        recorded.replay()
        return [each.clone() for each in recorded.outputs]

    def _record(
        self, lane: Lane, inputs: Mapping[str, torch.Tensor], stream: int, lines: Lines
    ) -> Recorded:
        held = {name: each.clone() for name, each in inputs.items()}
        self._set_inputs(lane, 0, held, stream, lines)
        outputs = [self._place_output(lane, name, lines)() for name, _ in self._signature.outputs]
        replay = self._place.record(lambda handle: _execute(lane.context, handle, lines))
        return Recorded(held, outputs, replay)

    def _given(self, name: str, value: Any) -> torch.Tensor:
        """Return an argument as TensorRT needs it: contiguous, aligned and on the device."""
        device, dtype = self._place.device, self._signature.dtypes[name]
        if not isinstance(value, torch.Tensor):
            return torch.tensor(value, dtype=dtype, device=device)
        tensor = value.to(device).contiguous()
        return tensor.clone() if tensor.data_ptr() % _ALIGNMENT else tensor

    def _profile(self, shapes: Mapping[str, Shape]) -> int:
        for index, profile in enumerate(self._signature.profiles):
            if holds(profile, shapes):
                return index
        if self._signature.profiles:
            self._widen(shapes)
            raise LoadAgain
        return 0

    def _take(self, stream: int) -> Lane:
        with self._lock:
            if self._pool[stream]:
                return self._pool[stream].pop()
        with self._library.busy, self._library.log.recording() as lines:
            return Lane(self._context(lines))

    def _context(self, lines: Lines) -> Any:
        context = self._engine.create_execution_context()
        if context is None:
            raise lines.refusal("TensorRT makes no execution context", Reason.OUT_OF_MEMORY)
        return context

    def _set_inputs(
        self,
        lane: Lane,
        profile: int,
        inputs: Mapping[str, torch.Tensor],
        stream: int,
        lines: Lines,
    ) -> None:
        context = lane.context
        if lane.profile != profile:
            if not context.set_optimization_profile_async(profile, stream):
                _fail(lines, f"profile {profile} cannot be set")
            lane.profile = profile
        for name, tensor in inputs.items():
            shape = tuple(tensor.shape)
            if self._signature.profiles and not context.set_input_shape(name, shape):
                _fail(lines, f"input {name} cannot have the shape {shape}")
            self._set_address(context, name, tensor, lines)
        missing = context.infer_shapes()
        if missing:
            _fail(lines, f"shapes depend on {', '.join(missing)}, which nothing sets")

    def _place_output(self, lane: Lane, name: str, lines: Lines) -> Callable[[], torch.Tensor]:
        """Give an output its memory; return a function that fetches the output.

        Call the function only after the work was launched.
        """
        dtype = self._signature.dtypes[name]
        shape = tuple(lane.context.get_tensor_shape(name))
        device = torch.device("cpu") if name in self._on_host else self._place.device
        if -1 in shape:
            allocator = make_allocator(self._library.module, device)
            if not lane.context.set_output_allocator(name, allocator):
                _fail(lines, f"output {name} takes no allocator")
            return lambda: allocator.tensor(dtype)
        tensor = torch.empty(shape, dtype=dtype, device=device)
        self._set_address(lane.context, name, tensor, lines)
        return lambda: tensor

    def _set_address(self, context: Any, name: str, tensor: torch.Tensor, lines: Lines) -> None:
        """Set the address of a tensor.

        A tensor without elements has no address, and TensorRT rejects that, so it gets a dummy
        address.
        """
        address = tensor.data_ptr() or self._somewhere.data_ptr()
        if not context.set_tensor_address(name, address):
            _fail(lines, f"TensorRT takes no address for {name}")


def _execute(context: Any, stream: int, lines: Lines) -> None:
    if not context.execute_async_v3(stream):
        _fail(lines, "the engine fails")


def _fail(lines: Lines, failure: str) -> NoReturn:
    """Raise an error for a failed call, with TensorRT's own message."""
    refusal = lines.refusal(failure, Reason.RAISED_AT_RUNTIME)
    if refusal.reason is Reason.OUT_OF_MEMORY:
        raise torch.OutOfMemoryError(str(refusal))
    raise refusal
