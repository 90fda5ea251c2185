"""One ONNX model in a session, called on torch's memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from composer.backends.onnxrt.capacity import require_memory
from composer.backends.onnxrt.library import native
from composer.backends.onnxrt.memory import (
    Feed,
    allocator,
    feed_for,
    lend,
    receiver,
)
from composer.backends.onnxrt.session import make_session, nodes_by_provider
from composer.backends.onnxrt.settings import Settings
from composer.lowering import in_place
from composer.lowering.bindings import BindingEngine
from composer.lowering.onnx import OnnxGraph
from composer.lowering.regions import Region


@dataclass(frozen=True, slots=True)
class Bound:
    """A session with the weights it took in.

    Attributes:
        session: The ``onnxruntime.InferenceSession``.
        run: Its native call, without the checks of the Python wrapper.
        names: Of the inputs that it is fed at a call.
        feeds: For each of these, its position among the arguments and the function that feeds it.
        keep_alive: The values of the weights, whose memory the session reads.
    """

    session: Any
    run: Callable[..., None]
    names: list[str]
    feeds: tuple[tuple[int, Feed], ...]
    keep_alive: tuple[Any, ...]


class OnnxRuntimeEngine(BindingEngine[Bound]):
    """Calls one model with a region's inputs; may be called from several threads.

    Args:
        graph: The model.
        region: What the model was made from: its weights are taken in by address.
        settings: How to make sessions.
        device: Where the region's tensors are.
    """

    def __init__(
        self, graph: OnnxGraph, region: Region, settings: Settings, device: torch.device
    ) -> None:
        super().__init__(region)
        library = native()
        self.graph = graph
        """The model."""
        self._dtypes = region.input_dtypes
        self._settings = settings
        self._device = device
        self._new_vector = library.OrtValueVector
        self._options = library.RunOptions()
        self._output_names = [each.name for each in graph.model.graph.output]
        place = getattr(library.OrtDevice, device.type)()
        memory = library.OrtDevice.default_memory()
        self._devices = [library.OrtDevice(place, memory, device.index or 0)] * len(graph.outputs)
        static = all(output.shape is not None and output.dtype for output in graph.outputs)
        self._allocators = [allocator(each, device) for each in graph.outputs] if static else []
        self.rewritten = region.rewritten if static else {}
        """Position of each output that may lie in the memory of an argument, to the argument's."""
        held = region.weights.keys() | region.constants.keys()
        self._read = [i for i, each in enumerate(self._dtypes) if each and i not in held]
        self._receivers = [receiver(each) for each in graph.outputs]
        first = self.bind_first(region)
        self.providers: list[str] = list(first.session.get_providers())
        """The providers of a session, the preferred first."""
        self.nodes = nodes_by_provider(first.session)
        """How many nodes of the model each provider took."""

    def __call__(self, *args: Any) -> list[Any]:
        """Run the session on torch's memory.

        Outputs are torch's memory where all their shapes are fixed, and ONNX Runtime's, handed
        over by DLPack, where a size is only known afterwards.
        """
        bound = self._made_for(args)
        feeds, fetches = self._new_vector(), self._new_vector()
        for position, feed in bound.feeds:
            feed(feeds, args[position])
        if self.rewritten:
            results = self._results_in_place(args, fetches)
        else:
            results = [allocate(fetches) for allocate in self._allocators]
        bound.run(self._options, bound.names, feeds, self._output_names, fetches, self._devices)
        if not results:  # by index: iterating over the vector costs 30 us (onnxruntime 1.31)
            received = enumerate(self._receivers)
            results = [receive(fetches.dlpack_at(i)) for i, receive in received]
        return results

    def _results_in_place(self, args: tuple[Any, ...], fetches: Any) -> list[torch.Tensor]:
        """Memory for the outputs; for some that of the input of which they change a part.

        Where another input is the same memory, that would be read when it was written already.
        """
        shared = in_place.overlapping({i: args[i] for i in self._read})
        results = []
        for i, allocate in enumerate(self._allocators):
            at = self.rewritten.get(i)
            if at is None or at in shared or not args[at].is_contiguous():
                results.append(allocate(fetches))
            else:
                results.append(lend(args[at], fetches))
        return results

    def _make(self, values: Mapping[int, torch.Tensor]) -> Bound:
        names = self.graph.inputs
        if self._device.type == "cpu":
            require_memory(values.values())
        weights = {names[i]: each.detach().contiguous() for i, each in values.items()}
        session, held = make_session(self.graph, weights, self._settings, self._device)
        asked = {each.name for each in session.get_inputs()}
        fed = [i for i, name in enumerate(names) if name in asked]
        return Bound(
            session=session,
            run=session._sess.run_with_ortvaluevector,
            names=[names[i] for i in fed],
            feeds=tuple((i, feed_for(self._dtypes[i])) for i in fed),
            keep_alive=held,
        )


class CudaEngine(OnnxRuntimeEngine):
    """Runs on a stream beside the caller's, which waits for it. The caller does not.

    All engines of a device share it. ONNX Runtime takes the default stream for none, and would work
    on one that nobody waits for.
    """

    def __init__(
        self, graph: OnnxGraph, region: Region, settings: Settings, device: torch.device
    ) -> None:
        self._stream = _stream_of(device)
        torch.cuda.synchronize(device)  # weights are read on a stream that waits for no other yet
        super().__init__(graph, region, settings, device)
        self._options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        if not self._allocators:  # what ONNX Runtime allocated, it reuses without asking a stream
            self._receivers = [_cloned(each) for each in self._receivers]

    def __call__(self, *args: Any) -> list[Any]:
        """Order the work after what the caller's stream holds, and that stream after the work."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                results = super().__call__(*args)
        finally:
            current.wait_stream(self._stream)  # so what is freed there is not reused too early
        for each in results:
            if isinstance(each, torch.Tensor):
                each.record_stream(current)
        return results

    def _make(self, values: Mapping[int, torch.Tensor]) -> Bound:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            return super()._make(values)


@functools.cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _cloned(receive: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def received(capsule: Any) -> Any:
        value = receive(capsule)
        return value.clone() if isinstance(value, torch.Tensor) else value

    return received


def make_engine(
    graph: OnnxGraph, region: Region, settings: Settings, device: torch.device
) -> OnnxRuntimeEngine:
    """The engine for the device of the region's tensors."""
    kind = CudaEngine if device.type == "cuda" else OnnxRuntimeEngine
    return kind(graph, region, settings, device)
