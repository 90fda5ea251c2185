"""The public interface of engines that run ONNX models.

An engine is a class with two functions, :meth:`OnnxEngine.why_not` and :meth:`OnnxEngine.load`, and
some declarations. ``docs/how-to/write-an-engine.md`` has a whole one. This module also exports what
such an engine may need of composer: OpenVINO's engine imports nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
import torch.fx

from composer import _torch
from composer.backends.arrays import array_over
from composer.backends.base import (
    Backend,
    Build,
    BuildFacts,
    BuildRequest,
    check_known,
    current_build,
    is_installed,
    require_inference,
    require_installed,
)
from composer.backends.forks import never_freed_in_forks
from composer.backends.options import read_options
from composer.errors import refuse
from composer.graphs.nodes import tensors_of
from composer.lowering.compile import as_captured, compile_graph, only_inference
from composer.lowering.devices import devices_of
from composer.lowering.engine import (
    ModelRefused,
    NodesRefused,
    OnnxBuild,
    OnnxRegion,
    RegionEngine,
    S,
)
from composer.lowering.export.onnx import OnnxGraph, Output, as_scalar, why_not
from composer.lowering.export.plain import PlainOnnx, to_plain
from composer.lowering.loaded import LoadAgain, Loaded
from composer.lowering.operators.attention import widened_attention
from composer.lowering.operators.entry import Operator, Operators, stays
from composer.lowering.operators.fused import fuse_attention, fusions
from composer.lowering.operators.reductions import long_log_softmax
from composer.lowering.partition.regions import Region, constant_at, dtypes_of
from composer.lowering.partition.tables import positions_of
from composer.records import GraphRequest, Reason, Status
from composer.registry import did_you_mean
from composer.system.distribution import install

argument = _torch.operators.argument
empty = _torch.tensors.empty
may_be_empty = _torch.symbols.may_be_empty
multiplies_bf16 = _torch.processor.multiplies_bf16
operator_name = _torch.operators.operator_name

# fmt: off
__all__ = [
    "BuildFacts", "GraphRequest", "LoadAgain", "Loaded", "ModelRefused", "NodesRefused",
    "OnnxBuild", "OnnxEngine", "OnnxGraph", "OnnxRegion", "Operator", "Operators", "Output",
    "PlainOnnx", "Reason", "Region", "Status", "argument", "array_over", "as_scalar", "constant_at",
    "did_you_mean", "dtypes_of", "dynamo_backend", "empty", "fuse_attention", "fusions", "install",
    "is_installed", "long_log_softmax", "may_be_empty", "multiplies_bf16", "never_freed_in_forks",
    "operator_name",
    "positions_of", "read_options", "refuse", "require_installed", "stays", "tensors_of",
    "to_plain", "why_not", "widened_attention",
]
# fmt: on

_DEVICES = {"cpu": "the CPU", "cuda": "one GPU"}

DynamoBackend = Callable[..., Callable[..., Any]]


class OnnxEngine(Backend, RegionEngine[S]):
    """An engine that runs ONNX models, as a candidate of a chain.

    A subclass defines :attr:`title` and :meth:`load`, and often :meth:`why_not` and
    :meth:`settings`.
    It has no state: everything about a build is an argument of its methods.
    """

    reads_example_inputs = False
    runs_shared_passes = True
    writes_as_the_graph = True
    has_self_test = True

    modules: ClassVar[tuple[str, ...]] = ("onnx", "onnxscript")
    """The top-level modules that must be installed."""

    remedy: ClassVar[str] = "pip install onnx onnxscript"
    """The command that installs them."""

    devices: ClassVar[tuple[str, ...]] = ("cpu",)
    """The types of the devices on which the tensors of a graph may be."""

    def settings(self, options: Mapping[str, Any]) -> S:
        """Check the candidate's options, and return them in the engine's own form.

        The default takes no options.

        Raises:
            OptionError: an option is unknown or has an invalid value.
        """
        check_known(options, (), self.title)
        return cast(S, options)

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Check names and values of the options."""
        self.settings(options)

    def probe(self, request: GraphRequest) -> None:
        """Refuse without the packages, on another device, and a training graph it cannot take."""
        self.require([torch.device(request.device)])
        if not self.trains:
            require_inference(request, only_inference(self.title))

    def require(self, devices: Sequence[torch.device]) -> None:
        """Refuse if a module is missing, or a graph with tensors on these devices.

        Raises:
            Refusal: ``unavailable``.
        """
        require_installed(self.modules, self.remedy)
        if len(devices) > 1 or any(each.type not in self.devices for each in devices):
            where = ", ".join(map(str, devices))
            runs = " or ".join(_DEVICES.get(each, each) for each in self.devices)
            what = f"the graph is on {where}; {self.title} runs graphs on {runs}"
            refuse(Status.UNAVAILABLE, Reason.NO_DEVICE, what)

    def build(self, request: BuildRequest) -> Build:
        """Compile the graph of the request."""
        settings = self.settings(request.options)
        devices = devices_of(request.example_inputs)
        self.require(devices)
        identity = self.identity()
        text = f"{identity} {settings!r} {devices} {request.mode} {request.terms.precision}"
        build = OnnxBuild(
            settings=settings,
            device=devices[0] if devices else torch.device("cpu"),
            mode=request.mode,
            terms=request.terms,
            key=text if identity else "",
        )

        def compile_flat(gm: torch.fx.GraphModule) -> Callable[..., Any]:
            return compile_graph(gm, request.example_inputs, self, build)

        return Build(as_captured(request.gm, request.example_inputs, compile_flat))


def dynamo_backend(engine: type[OnnxEngine[Any]], name: str) -> DynamoBackend:
    """Return the engine as a function that Dynamo takes as a backend.

    The function raises ``OptionError`` for an unknown or malformed option, and ``Refusal`` if the
    engine can run no part of the graph or is not available here.

    Args:
        engine: The engine's class.
        name: The name of the function.
    """

    def compile_with_engine(
        gm: torch.fx.GraphModule,
        example_inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
        name: str | None = None,
    ) -> Callable[..., Any]:
        del name  # the region's name, passed from torch 2.15 on; these engines do not use it
        request = BuildRequest(gm, [*example_inputs], mode, options or {}, current_build())
        return engine().build(request).compiled

    compile_with_engine.__name__ = compile_with_engine.__qualname__ = name
    compile_with_engine.__module__ = engine.__module__
    return compile_with_engine
