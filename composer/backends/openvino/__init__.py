"""OpenVINO reads and compiles the shared ONNX lowering.

In composer's chain the backend is called ``openvino``, and as a Dynamo backend
``composer_openvino``. The OpenVINO package has a Dynamo backend of its own named ``openvino``. In a
chain that one is ``dynamo:openvino``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.fx

from composer.backends.base import (
    Backend,
    Build,
    BuildRequest,
    current_build,
    require_inference,
    require_installed,
)
from composer.backends.openvino import library
from composer.backends.openvino.dialect import dialect
from composer.backends.openvino.engine import OpenVinoEngine
from composer.backends.openvino.partition import partition
from composer.backends.openvino.settings import read_settings
from composer.errors import refuse
from composer.graphs import low_precision
from composer.lowering.aot import (
    FunctionalGraph,
    GraphKind,
    as_dynamo_backend,
    compile_functional,
)
from composer.lowering.trial import try_once
from composer.records import GraphRequest, Reason, Status
from composer.system.distribution import install

NAME = "openvino"
ONLY_INFERENCE = f"{NAME} runs inference; under torch.no_grad() the graph is that"


class OpenVinoBackend(Backend):
    """Inference on the CPU; torch runs what OpenVINO does not compute exactly.

    Its options are the fields of :class:`~composer.backends.openvino.settings.Settings`.
    """

    reads_example_inputs = False
    runs_shared_passes = True
    writes_as_the_graph = True
    has_self_test = True
    chooses_precision = True
    packages = ("openvino", "onnx", "onnxscript")

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Check names and values of options, including OpenVINO's own properties."""
        read_settings(options)

    def probe(self, request: GraphRequest) -> None:
        """Check that packages and device are here, and that the graph needs no backward."""
        _require(request.device)
        require_inference(request, ONLY_INFERENCE)

    def build(self, request: BuildRequest) -> Build:
        """Compile the graph with the Dynamo backend :func:`composer_openvino`."""
        compiled = composer_openvino(request.gm, request.example_inputs, options=request.options)
        return Build(compiled)


@as_dynamo_backend
def composer_openvino(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """The Dynamo backend ``composer_openvino``: compile a graph for OpenVINO or say why not.

    Args:
        gm: The captured graph.
        example_inputs: Tensors and symbols, in the order of the placeholders.
        mode: ``torch.compile``'s mode; it has no effect here.
        options: The fields of :class:`~composer.backends.openvino.settings.Settings`.

    Raises:
        OptionError: an option is unknown or malformed.
        Refusal: OpenVINO can run no part of the graph, or OpenVINO or its device is not available.
    """
    settings = read_settings(options or {})
    tensors = (each for each in example_inputs if isinstance(each, torch.Tensor))
    _require(*dict.fromkeys(str(each.device) for each in tensors))
    library.require_device(settings.device)
    terms = current_build()
    facts, asked = terms.facts, settings.precision or terms.precision
    is_mixed = bool(low_precision.marked(gm.graph))

    def build(graph: FunctionalGraph) -> Callable[..., Any]:
        if graph.kind is not GraphKind.INFERENCE:
            refuse(Status.DECLINED, Reason.TRAINING_GRAPH, ONLY_INFERENCE)
        pieces = partition(graph, terms)
        parts = pieces.parts
        facts.covers(parts.taken, parts.total, parts.left)
        parts.decline_if_empty()
        engines: dict[str, OpenVinoEngine] = {}
        for name, region in sorted(
            parts.regions.items(), key=lambda part: part[1].is_low_precision
        ):
            terms.check_time()
            wanted = "fp32" if is_mixed and not region.is_low_precision else asked
            engines[name] = OpenVinoEngine(pieces.models[name], region, settings, wanted)
            # Regions in low precision come last, so the report shows their precision.
            facts.precision, facts.threads = engines[name].precision, engines[name].threads
            if engines[name].streams is not None:
                facts.extra["streams"] = engines[name].streams
        compiled = parts.assemble(engines)
        try_once(compiled, graph, parts.written)
        return compiled

    facts.versions["openvino"] = library.version()
    facts.device, facts.keeps_nan = settings.device, settings.keeps_nan
    compiled = compile_functional(gm, example_inputs, build, dialect(), terms)
    if told := str(terms.artefacts):
        facts.extra["artefacts"] = told
    return compiled


def _require(*devices: str) -> None:
    """Refuse if packages are missing, or if tensors of the graph are not on the CPU."""
    require_installed(("openvino", "onnx", "onnxscript"), install("openvino"))
    if any(torch.device(each).type != "cpu" for each in devices):
        what = f"the graph is on {', '.join(devices)}; {NAME} runs graphs on the CPU"
        refuse(Status.UNAVAILABLE, Reason.NO_DEVICE, what)
