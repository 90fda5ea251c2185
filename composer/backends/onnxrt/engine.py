"""Run one ONNX model in a session, on torch's memory."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from composer.backends.onnxrt.binding import bound_run
from composer.backends.onnxrt.capacity import require_memory
from composer.backends.onnxrt.native import native_run, why_not_native
from composer.backends.onnxrt.ports import Ports, Run
from composer.backends.onnxrt.session import make_session, nodes_by_provider
from composer.backends.onnxrt.settings import Settings
from composer.lowering.export.onnx import OnnxGraph
from composer.lowering.partition.regions import Region
from composer.lowering.weights.bindings import BindingEngine


@dataclass(frozen=True, slots=True)
class Bound:
    """A session with the weights that it was made with.

    Attributes:
        session: The ``onnxruntime.InferenceSession``.
        run: Runs it on the arguments of the region.
        fed: Positions of the arguments that the session gets at each call.
        keep_alive: The values of the weights, whose memory the session reads.
    """

    session: Any
    run: Run
    fed: tuple[int, ...]
    keep_alive: tuple[Any, ...]


class OnnxRuntimeEngine(BindingEngine[Bound]):
    """Calls one model with a region's inputs. Several threads may call it.

    The device is that of the region's tensors. Sessions read the region's weights in place.
    """

    def __init__(
        self, graph: OnnxGraph, region: Region, settings: Settings, device: torch.device
    ) -> None:
        super().__init__(region)
        self.graph = graph
        """The model."""
        self._ports = Ports.of(graph, region, device)
        self._settings = settings
        self._device = device
        self._start = bound_run if why_not_native(device.type) else native_run
        self.rewritten = self._ports.rewritten
        """Maps the position of each output that may be written in place to that of its argument."""
        first = self.bind_first(region)
        self.providers: list[str] = list(first.session.get_providers())
        """The providers of the session, in order of preference."""
        self.nodes = nodes_by_provider(first.session)
        """How many nodes of the model each provider took."""

    def __call__(self, *args: Any) -> list[Any]:
        """Run the session on torch's memory."""
        return self._made_for(args).run(args)

    def _make(self, values: Mapping[int, torch.Tensor]) -> Bound:
        names = self.graph.inputs
        if self._device.type == "cpu":
            require_memory(values.values())
        weights = {names[i]: each.detach().contiguous() for i, each in values.items()}
        session, held = make_session(self.graph, weights, self._settings, self._device)
        return Bound(session, self._start(session, self._ports), self._ports.fed(session), held)


class CudaEngine(OnnxRuntimeEngine):
    """Runs sessions on a second CUDA stream.

    The caller's stream waits for that stream; the calling thread does not wait. All engines of a
    device share the second stream. It is needed because ONNX Runtime takes the default stream for
    "no stream". It would then use a stream of its own, which nothing waits for.
    """

    def __init__(
        self, graph: OnnxGraph, region: Region, settings: Settings, device: torch.device
    ) -> None:
        self._stream = _stream_of(device)
        torch.cuda.synchronize(device)  # the stream that reads the weights waits for no other yet
        super().__init__(graph, region, settings, device)

    def __call__(self, *args: Any) -> list[Any]:
        """Run after the work in the caller's stream; later work in that stream waits for this."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                results = super().__call__(*args)
        finally:
            current.wait_stream(self._stream)  # so memory freed there is not reused too early
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


def make_engine(
    graph: OnnxGraph, region: Region, settings: Settings, device: torch.device
) -> OnnxRuntimeEngine:
    """The engine for a region on this device."""
    kind = CudaEngine if device.type == "cuda" else OnnxRuntimeEngine
    return kind(graph, region, settings, device)
