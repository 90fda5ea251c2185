"""One ONNX model in a session, called on torch's memory."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from composer.backends.onnxrt.memory import (
    Feed,
    allocator,
    as_value,
    feed_for,
    input_dtypes,
    receiver,
)
from composer.backends.onnxrt.session import make_session, nodes_by_provider
from composer.backends.onnxrt.settings import Settings
from composer.lowering.onnx import OnnxGraph
from composer.lowering.regions import Region
from composer.lowering.statistics import find_witnesses
from composer.lowering.weights import BoundWeights, WeightSet, can_bind, identities, picker

_RESTLESS = 2
"""After so many changes a weight is no longer taken in but passed as an input at every call; and
after so many sets of weights died, the next ones have to come back to be taken in."""

_PROOF = 3
"""At which call a set of weights has come back."""

_SETS = 128
"""How many sets of weights are bound at once; others are passed as inputs at every call."""


@dataclass(frozen=True, slots=True)
class Bound:
    """A session and the weights it took in; replaced whole when one of them changes.

    ``feeds`` are the position of each input among the arguments and what hands it over.
    """

    session: Any
    run: Callable[..., None]
    members: WeightSet
    weights: BoundWeights
    names: list[str]
    feeds: tuple[tuple[int, Feed], ...]
    keep_alive: tuple[Any, ...]


class OnnxRuntimeEngine:
    """Calls one model with a region's inputs; may be called from several threads.

    Dynamo may give one engine the weights of several modules in turn, since it compiles their
    common code once. The engine keeps a session for each such set, for as long as the set lives.

    Args:
        graph: The model.
        region: What it was made from: the weights to take in by address, and their witnesses.
        settings: How to make sessions.
        device: Where the region's tensors are.
    """

    def __init__(
        self, graph: OnnxGraph, region: Region, settings: Settings, device: torch.device
    ) -> None:
        from onnxruntime.capi import _pybind_state as native

        self._graph = graph
        self._dtypes = input_dtypes(region.gm)
        self._constants = region.constants
        self._settings = settings
        self._device = device
        self._lock = threading.Lock()
        self._positions = tuple(region.weights)
        self._pick = picker(self._positions)
        self._witnessed = [i for i, at in enumerate(self._positions) if at in region.witnesses]
        self._sets: dict[Hashable, Bound] = {}
        self._waiting: dict[Hashable, WeightSet] = {}
        self._died = 0
        self._new_vector = native.OrtValueVector
        self._options = native.RunOptions()
        self._output_names = [each.name for each in graph.model.graph.output]
        place = native.OrtDevice.cuda() if device.type == "cuda" else native.OrtDevice.cpu()
        memory = native.OrtDevice.default_memory()
        self._devices = [native.OrtDevice(place, memory, device.index or 0)] * len(graph.outputs)
        static = all(output.shape is not None and output.dtype for output in graph.outputs)
        self._allocators = [allocator(each, device) for each in graph.outputs] if static else []
        self._receivers = [receiver(each) for each in graph.outputs]
        given = tuple(region.weights.values())
        witnesses = {i: region.witnesses[self._positions[i]] for i in self._witnessed}
        first = self._bind(given, self._members(given, witnesses))
        self.providers: list[str] = list(first.session.get_providers())
        """The providers of a session, the preferred first."""
        self.nodes = nodes_by_provider(first.session)
        """How many nodes of the model each provider took."""
        self._sets[identities(given)] = first
        self._weightless = None if given else first
        self._unbound: Bound | None = None

    @property
    def bounds(self) -> list[Bound]:
        """What is bound now, the oldest first."""
        return list(self._sets.values())

    def __call__(self, *args: Any) -> list[Any]:
        """Run the session on torch's memory.

        Outputs are torch's memory where all their shapes are fixed, and ONNX Runtime's, handed
        over by DLPack, where a size is only known afterwards.
        """
        bound = self._weightless or self._bound_to(self._pick(args))
        feeds, fetches = self._new_vector(), self._new_vector()
        for position, feed in bound.feeds:
            feed(feeds, args[position])
        results = [allocate(fetches) for allocate in self._allocators]
        bound.run(self._options, bound.names, feeds, self._output_names, fetches, self._devices)
        if not results:  # by index: iterating over the vector costs 30 us (onnxruntime 1.31)
            received = enumerate(self._receivers)
            results = [receive(fetches.dlpack_at(i)) for i, receive in received]
        return results

    def _bound_to(self, given: tuple[torch.Tensor, ...]) -> Bound:
        bound = self._sets.get(identities(given))
        if bound is not None and bound.weights.unchanged(given):
            return bound
        with self._lock:
            return self._renewed(given)

    def _renewed(self, given: tuple[torch.Tensor, ...]) -> Bound:
        """A session with the weights as they are now. The model is not exported again."""
        key = identities(given)
        bound = self._sets.get(key)
        if bound is None:
            return self._met(key, given)
        changed = bound.weights.changed(given)
        if changed or bound.weights.expired:
            bound.members.changes.update(changed)
            bound = self._sets[key] = self._bind(given, bound.members)
        return bound

    def _met(self, key: Hashable, given: tuple[torch.Tensor, ...]) -> Bound:
        """A session for a set of weights that has none."""
        if len(self._sets) >= _SETS:
            return self._without_weights()
        members = self._waiting.get(key)
        if members is None:
            witnesses = find_witnesses({i: given[i] for i in self._witnessed})
            members = self._waiting[key] = self._members(given, witnesses)
        members.calls += 1
        if self._died >= _RESTLESS and members.calls < _PROOF:
            return self._without_weights()
        bound = self._sets[key] = self._bind(given, members)
        self._waiting.pop(key, None)
        return bound

    def _members(
        self, given: tuple[torch.Tensor, ...], witnesses: Mapping[int, torch.Tensor]
    ) -> WeightSet:
        """The weights as a set that the engine forgets when one of them dies.

        That may happen at any moment, in any thread and while the lock is held: it takes none.
        """
        key, this = identities(given), weakref.ref(self)

        def forget(_: object) -> None:
            engine = this()
            if engine is not None:
                engine._waiting.pop(key, None)
                engine._died += engine._sets.pop(key, None) is not None

        return WeightSet(given, witnesses, forget)

    def _without_weights(self) -> Bound:
        """The session that takes all weights as inputs."""
        if self._unbound is None:
            self._unbound = self._bind((), self._members((), {}))
        return self._unbound

    def _bind(self, given: tuple[torch.Tensor, ...], members: WeightSet) -> Bound:
        witnessed = members.witnesses.keys()
        weights = {
            i: each
            for i, each in enumerate(given)
            if members.changes[i] < _RESTLESS
            and can_bind(each)
            and (i in witnessed or i not in self._witnessed)
        }
        names = self._graph.inputs
        held = {self._positions[i]: each for i, each in weights.items()} | self._constants
        values = {names[i]: as_value(each.detach().contiguous()) for i, each in held.items()}
        session = make_session(self._graph, values, self._settings, self._device)
        asked = {each.name for each in session.get_inputs()}
        fed = [i for i, name in enumerate(names) if name in asked]
        return Bound(
            session=session,
            run=session._sess.run_with_ortvaluevector,
            members=members,
            weights=BoundWeights(weights, members.witnesses, len(given)),
            names=[names[i] for i in fed],
            feeds=tuple((i, feed_for(self._dtypes[i])) for i in fed),
            keep_alive=tuple(values.values()),
        )


class CudaEngine(OnnxRuntimeEngine):
    """Runs on the stream that was current when the session was made, and waits for others.

    Not run: no CUDA build of ONNX Runtime was at hand.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._stream = torch.cuda.current_stream(self._device)

    def __call__(self, *args: Any) -> list[Any]:
        """Order the work after what the caller's stream holds, and that stream after the work."""
        current = torch.cuda.current_stream(self._device)
        if current == self._stream:
            return super().__call__(*args)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            results = super().__call__(*args)
        current.wait_stream(self._stream)
        for each, stream in (*((a, self._stream) for a in args), *((r, current) for r in results)):
            if isinstance(each, torch.Tensor):
                each.record_stream(stream)
        return results


def make_engine(
    graph: OnnxGraph, region: Region, settings: Settings, device: torch.device
) -> OnnxRuntimeEngine:
    """The engine for the device of the region's tensors."""
    kind = CudaEngine if device.type == "cuda" else OnnxRuntimeEngine
    return kind(graph, region, settings, device)
