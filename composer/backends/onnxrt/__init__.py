"""ONNX Runtime: graphs are lowered to ONNX and run by inference sessions.

``onnxrt`` is a candidate of composer's chain. ``torch.compile(model, backend="onnxrt")`` works,
too: torch had a backend of that name, and removed it (pytorch/pytorch#158258).

:mod:`~composer.backends.onnxrt.partition` decides which regions of a graph ONNX Runtime takes;
:mod:`~composer.backends.onnxrt.engine` runs one region by a session that
:mod:`~composer.backends.onnxrt.session` makes, on torch's memory
(:mod:`~composer.backends.onnxrt.native`, else :mod:`~composer.backends.onnxrt.binding`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
import torch.fx

from composer import _torch
from composer.backends.base import (
    Backend,
    Build,
    BuildRequest,
    current_build,
    require_installed,
)
from composer.backends.onnxrt.dialect import dialect
from composer.backends.onnxrt.engine import OnnxRuntimeEngine, make_engine
from composer.backends.onnxrt.kernels import widens_bfloat16
from composer.backends.onnxrt.library import is_for_cpu_alone, onnxruntime
from composer.backends.onnxrt.native import why_not_native
from composer.backends.onnxrt.partition import partition
from composer.backends.onnxrt.settings import read_settings
from composer.build import BuildFacts
from composer.errors import refuse
from composer.lowering.aot import (
    FunctionalGraph,
    GraphKind,
    as_dynamo_backend,
    compile_functional,
)
from composer.lowering.devices import devices_of
from composer.lowering.export.whole import whole_of
from composer.lowering.trial import try_once
from composer.records import GraphRequest, Reason, Status
from composer.system.distribution import install


class OnnxRuntimeBackend(Backend):
    """Runs inference and training on the CPU and CUDA. Torch runs what ONNX cannot express.

    Its options are the fields of :class:`~composer.backends.onnxrt.settings.Settings`.
    """

    reads_example_inputs = False
    runs_shared_passes = True
    writes_as_the_graph = True
    has_self_test = True
    packages = ("onnxruntime", "onnxruntime-gpu", "onnx", "onnxscript")

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Check names and values of the options, also those of providers and session entries."""
        read_settings(options)

    def probe(self, request: GraphRequest) -> None:
        """Refuse without the packages, the device, or a build of ONNX Runtime for the device.

        Nothing is imported.
        """
        if _require([request.device]).type == "cuda" and is_for_cpu_alone():
            message = (
                "this onnxruntime is for the CPU alone; pip install onnxruntime-gpu in its place"
            )
            refuse(Status.UNAVAILABLE, Reason.NOT_INSTALLED, message)

    def build(self, request: BuildRequest) -> Build:
        """Look up ``onnxrt`` in Dynamo's registry and call it, like any other backend."""
        backend: Any = _torch.dynamo.lookup_backend("onnxrt")
        return Build(backend(request.gm, request.example_inputs, options=request.options))


@as_dynamo_backend
def onnxrt(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """The Dynamo backend ``onnxrt``: compile a graph for ONNX Runtime, or raise with the reason.

    Args:
        gm: The captured graph.
        example_inputs: Tensors and symbols, in the order of the placeholders.
        mode: ``torch.compile``'s mode. ONNX Runtime ignores it.
        options: The fields of :class:`~composer.backends.onnxrt.settings.Settings`.

    Raises:
        OptionError: an option is unknown or malformed.
        Refusal: ONNX Runtime can run no part of the graph, or is not available here.
    """
    settings = read_settings(options or {})
    device = _require([str(each) for each in devices_of(example_inputs)])
    version = onnxruntime().__version__
    terms = current_build()
    facts = terms.facts
    facts.versions["onnxruntime"], facts.threads = version, settings.threads
    why = why_not_native(device.type)
    how = f"by the public API, since the native way fails: {why}" if why else "native"
    facts.keeps_nan, facts.extra["calls"] = True, how
    engine = f"onnxrt {version} {device} {settings!r} {terms.precision}"
    whole = whole_of(gm, example_inputs, engine, terms)

    def build(graph: FunctionalGraph) -> Callable[..., Any]:
        pieces = partition(graph, settings, device, terms)
        parts, engines = pieces.parts, pieces.models
        facts.covers(parts.taken, parts.total, parts.left)
        if graph.kind is not GraphKind.BACKWARD:  # a backward may hold nothing but a view
            parts.decline_if_empty()
        _state(facts, engines.values(), device)
        compiled = parts.assemble(engines)
        try_once(compiled, graph, parts.written)
        if whole is not None:
            whole.keep(graph, parts, [engine.graph for engine in engines.values()])
        return compiled

    kept = None if whole is None else whole.find(example_inputs)
    if kept is None:
        compiled = compile_functional(gm, example_inputs, build, dialect(), terms)
    else:
        parts, model = kept
        facts.covers(parts.taken, parts.total)
        regions = parts.regions.items()
        engines = {name: make_engine(model, each, settings, device) for name, each in regions}
        _state(facts, engines.values(), device)
        compiled = parts.assemble(engines)
    if artefacts := str(terms.artefacts):
        facts.extra["artefacts"] = artefacts
    return compiled


def _state(facts: BuildFacts, engines: Collection[OnnxRuntimeEngine], device: torch.device) -> None:
    """Add the engines of one functional graph to the facts of the build."""
    for engine in engines:
        facts.providers = engine.providers
        facts.extra["nodes"] = dict(Counter(facts.extra.get("nodes", {})) + Counter(engine.nodes))
        if widens_bfloat16(device) and engine.graph.rounds_to_bfloat16():
            facts.extra["bfloat16"] = "computed in float32"
    written = sum(len(engine.rewritten) for engine in engines)
    if written:
        facts.extra["written_in_place"] = written


def _require(devices: Sequence[str]) -> torch.device:
    """The device of a graph that has tensors on these devices; the CPU for a graph without any.

    Raises:
        Refusal: a package is missing, or the graph is not on the CPU or on one GPU.
    """
    require_installed(("onnxruntime", "onnx", "onnxscript"), install("onnxrt"))
    device = torch.device(devices[0] if devices else "cpu")
    if len(devices) > 1 or device.type not in ("cpu", "cuda"):
        message = f"the graph is on {', '.join(devices)}; onnxrt runs graphs on the CPU or one GPU"
        refuse(Status.UNAVAILABLE, Reason.NO_DEVICE, message)
    return device
