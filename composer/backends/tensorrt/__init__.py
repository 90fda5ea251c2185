"""TensorRT: the backend of ``torch_tensorrt`` if that is installed, else composer's own engine.

Composer registers the Dynamo backend ``tensorrt`` only when it is needed, and never if
``torch_tensorrt`` is installed. Dynamo's registry rejects duplicates, so a later
``import torch_tensorrt`` by the user would fail. (Torch's own placeholder of that name is commented
out.) After composer's own engine was used once, ``torch.compile(backend="tensorrt")`` works as
well. A backend that the program itself registers under that name takes precedence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.fx

from composer import _torch
from composer.backends.base import (
    Backend,
    Build,
    BuildRequest,
    current_build,
    is_installed,
    require_inference,
)
from composer.backends.tensorrt import probe
from composer.backends.tensorrt.foreign import build_with_torch_tensorrt
from composer.errors import refuse
from composer.lowering.aot import (
    FunctionalGraph,
    GraphKind,
    as_dynamo_backend,
    compile_functional,
)
from composer.lowering.devices import devices_of
from composer.lowering.trial import try_once
from composer.records import GraphRequest, Reason, Status

NAME = "tensorrt"

ONLY_INFERENCE = "TensorRT has no backward; under torch.no_grad() the graph is inference"


class TensorRTBackend(Backend):
    """Inference on CUDA devices, after a probe that uses nothing of TensorRT.

    Its options are the fields of :class:`~composer.backends.tensorrt.settings.Settings`, or those
    of ``torch_tensorrt`` where that is installed.
    """

    packages = ("torch-tensorrt", "tensorrt", "tensorrt-rtx")

    def __init__(self) -> None:
        self._is_own = not is_installed(probe.FOREIGN)
        self.isolates_itself = self._is_own  # type: ignore[misc]  # by what is installed
        self.reads_example_inputs = not self._is_own  # type: ignore[misc]  # as above
        self.writes_as_the_graph = self._is_own  # type: ignore[misc]  # as above
        self.runs_shared_passes = self._is_own  # type: ignore[misc]  # as above

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Check names and values of options; ``torch_tensorrt`` checks its own."""
        if self._is_own:
            from composer.backends.tensorrt.settings import read_settings

            read_settings(options)

    def probe(self, request: GraphRequest) -> None:
        """Check device, driver and package, in this order, without importing TensorRT."""
        probe.require_device(request.device)
        probe.require_package()
        if self._is_own:
            require_inference(request, ONLY_INFERENCE)

    def build(self, request: BuildRequest) -> Build:
        """Compile with the Dynamo backend ``tensorrt``; register composer's if there is none."""
        if not self._is_own:
            return build_with_torch_tensorrt(request)
        if NAME not in _torch.dynamo.list_backends():
            _torch.dynamo.register_backend(tensorrt, name=NAME)
        backend: Any = _torch.dynamo.lookup_backend(NAME)
        how = {"mode": request.mode, "options": request.options}
        return Build(backend(request.gm, request.example_inputs, **how))


@as_dynamo_backend
def tensorrt(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """The Dynamo backend ``tensorrt``: compile a graph for TensorRT or say why not.

    Args:
        gm: The captured graph.
        example_inputs: Tensors and symbols, in the order of the placeholders.
        mode: ``torch.compile``'s mode. ``"reduce-overhead"`` replays CUDA graphs where all shapes
            are fixed.
        options: The fields of :class:`~composer.backends.tensorrt.settings.Settings`.

    Raises:
        OptionError: an option is unknown or malformed.
        Refusal: TensorRT can run no part of the graph, or TensorRT or its device is not available.
    """
    from composer.backends.tensorrt import library, settings
    from composer.backends.tensorrt.engine import TensorRTEngine
    from composer.backends.tensorrt.partition import partition
    from composer.backends.tensorrt.tf32 import require_as_allowed

    asked = settings.read_settings(options or {})
    place, record = _place_of(example_inputs), mode == "reduce-overhead"
    trt = library.load_library()
    terms = current_build()
    facts = terms.facts
    facts.extra |= {"library": trt.name, "version": trt.version, "gpu": place.target.gpu}
    facts.precision = asked.precision

    def build(graph: FunctionalGraph) -> Callable[..., Any]:
        if graph.kind is not GraphKind.INFERENCE:
            refuse(Status.DECLINED, Reason.TRAINING_GRAPH, ONLY_INFERENCE)
        if asked.precision == "fp32":
            require_as_allowed(graph, trt, place.target)
        pieces = partition(graph, trt, asked, terms)
        facts.covers(pieces.parts.taken, pieces.parts.total, pieces.parts.left)
        pieces.parts.decline_if_empty()
        engines = {}
        for name, region in pieces.parts.regions.items():
            terms.check_time()
            model = pieces.models[name]
            engines[name] = TensorRTEngine(
                trt, model, region, asked, place, record=record, terms=terms
            )
        facts.extra |= {
            "regions": len(engines),
            "cuda_graphs": sum(each.is_recorded for each in engines.values()),
            "ranges": [each.ranges for each in engines.values()],
            "found_on_disk": sum(each.found_on_disk for each in engines.values()),
        }
        compiled = pieces.parts.assemble(engines)
        try_once(compiled, graph, pieces.parts.written)
        return compiled

    return compile_functional(gm, example_inputs, build, terms=terms)


def _place_of(example_inputs: Sequence[Any]) -> Any:
    """Return the one device of the graph's tensors; it is checked before TensorRT is used."""
    from composer.backends.tensorrt.place import CudaPlace

    devices = devices_of(example_inputs)
    for each in devices or [torch.device("cpu")]:
        probe.require_device(str(each))
    if len(devices) > 1:
        message = f"the graph is on {', '.join(map(str, devices))}; TensorRT runs it on one GPU"
        refuse(Status.UNAVAILABLE, Reason.NO_DEVICE, message)
    return CudaPlace(devices[0])
