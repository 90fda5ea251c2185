"""One ONNX model in a session, called on torch's memory."""

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
    """A session with the weights it took in.

    Attributes:
        session: The ``onnxruntime.InferenceSession``.
        run: Runs it on the arguments of the region.
        fed: Positions of the arguments that it is given at a call.
        keep_alive: The values of the weights, whose memory the session reads.
    """

    session: Any
    run: Run
    fed: tuple[int, ...]
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
        self.graph = graph
        """The model."""
        self._ports = Ports.of(graph, region, device)
        self._settings = settings
        self._device = device
        self._start = bound_run if why_not_native(device.type) else native_run
        self.rewritten = self._ports.rewritten
        """Position of each output that may lie in the memory of an argument, to the argument's."""
        first = self.bind_first(region)
        self.providers: list[str] = list(first.session.get_providers())
        """The providers of a session, the preferred first."""
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


def make_engine(
    graph: OnnxGraph, region: Region, settings: Settings, device: torch.device
) -> OnnxRuntimeEngine:
    """The engine for the device of the region's tensors."""
    kind = CudaEngine if device.type == "cuda" else OnnxRuntimeEngine
    return kind(graph, region, settings, device)
