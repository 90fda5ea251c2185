"""The public interface of engines that run ONNX models.

An engine is a class with two functions, :meth:`OnnxEngine.why_not` and :meth:`OnnxEngine.load`, and
some declarations. ``docs/how-to/write-an-engine.md`` has a whole one. This module also exports what
such an engine may need of composer: OpenVINO's engine imports nothing else.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Generic, cast

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
from composer.backends.options import read_options
from composer.errors import first_line, refuse
from composer.graphs.nodes import are_static, tensors_of
from composer.lowering.compile import compile_graph, only_inference
from composer.lowering.devices import devices_of
from composer.lowering.engine import ModelRefused, NodesRefused, OnnxBuild, OnnxRegion, S
from composer.lowering.export.onnx import OnnxGraph, Output, as_scalar, why_not
from composer.lowering.export.plain import PlainOnnx, to_plain
from composer.lowering.loaded import LoadAgain, Loaded
from composer.lowering.operators.attention import widened_attention
from composer.lowering.operators.entry import Operator, Operators, stays
from composer.lowering.operators.fused import fuse_attention, fusions
from composer.lowering.operators.quantized import written_out
from composer.lowering.operators.reductions import long_log_softmax
from composer.lowering.partition.regions import Region, constant_at, dtype_names, dtypes_of
from composer.lowering.partition.tables import positions_of
from composer.records import GraphRequest, Reason, Status
from composer.registry import did_you_mean, unknown_among
from composer.system.distribution import install
from composer.system.forks import never_freed_in_forks
from composer.system.hardware import nvidia_driver

argument = _torch.operators.argument
empty = _torch.tensors.empty
may_be_empty = _torch.symbols.may_be_empty
multiplies_bf16 = _torch.processor.multiplies_bf16
operator_name = _torch.operators.operator_name

# fmt: off
__all__ = [
    "BuildFacts", "GraphRequest", "LoadAgain", "Loaded", "ModelRefused", "NodesRefused",
    "OnnxBuild", "OnnxEngine", "OnnxGraph", "OnnxRegion", "Operator", "Operators", "Output",
    "PlainOnnx", "Reason", "Region", "Status", "are_static", "argument", "array_over", "as_scalar",
    "constant_at",
    "did_you_mean", "dtype_names", "dtypes_of", "dynamo_backend", "empty", "fuse_attention",
    "fusions", "install", "is_installed", "long_log_softmax", "may_be_empty", "multiplies_bf16",
    "never_freed_in_forks", "operator_name", "positions_of", "read_options", "refuse",
    "require_installed", "stays", "tensors_of", "to_plain", "unknown_among", "why_not",
    "widened_attention", "written_out",
]
# fmt: on

_DEVICES = {"cpu": "the CPU", "cuda": "one GPU"}


class OnnxEngine(Backend, Generic[S]):
    """An engine that runs ONNX models: a subclass defines :meth:`load`, and often :meth:`why_not`.

    The rest is the same for all engines (:mod:`composer.lowering.compile`). The idea is that of
    ONNX Runtime's execution providers, which have ``GetCapability`` and ``Compile``. An engine has
    no state: everything about a build is an argument of its methods.
    """

    reads_example_inputs = False
    runs_shared_passes = True

    title: ClassVar[str] = ""
    """The name of the engine in messages; by default that of the class."""

    trains: ClassVar[bool] = True
    """True if it may run the forward and backward graphs of a training step."""

    modules: ClassVar[tuple[str, ...]] = ("onnx", "onnxscript")
    """The top-level modules that must be installed."""

    remedy: ClassVar[str] = "pip install onnx onnxscript"
    """The command that installs them."""

    devices: ClassVar[tuple[str, ...]] = ("cpu",)
    """The types of the devices on which the tensors of a graph may be."""

    def __init_subclass__(cls) -> None:
        """Give a class without a title its own name."""
        super().__init_subclass__()
        cls.title = cls.title or cls.__name__

    def settings(self, options: Mapping[str, Any]) -> S:
        """Check the candidate's options, and return them in the engine's own form.

        The default takes no options.

        Raises:
            OptionError: an option is unknown or has an invalid value.
        """
        check_known(options, (), self.title)
        return cast(S, options)

    def facts(self, build: OnnxBuild[S]) -> BuildFacts:
        """Return what the record says of the engine, before anything is read or loaded.

        Raises:
            Refusal: the engine cannot work here.
        """
        del build
        return BuildFacts()

    def operators(self) -> Operators:
        """Return the engine's own entries of operators, which precede composer's."""
        return MappingProxyType({})

    def why_not(self, node: torch.fx.Node, build: OnnxBuild[S]) -> str | None:
        """Return why torch has to run a call of the functional graph; ``None`` if it need not.

        It need not know what :meth:`read` and :meth:`load` refuse. The default refuses what has no
        translation to ONNX.
        """
        del build
        return why_not(node, self.operators())

    def writes(self, node: torch.fx.Node, build: OnnxBuild[S]) -> bool:
        """Return True if the engine can do a call that writes rows of an input in place.

        :meth:`load` then writes the outputs in ``region.rewritten`` to the memory of the arguments.
        """
        del node, build
        return False

    def prepare(self, gm: torch.fx.GraphModule, build: OnnxBuild[S]) -> None:
        """Rewrite a region before it is translated to ONNX. The default changes nothing."""

    def read(self, model: OnnxRegion, region: Region, build: OnnxBuild[S]) -> Any:
        """Read the model of a region, which is cheaper than to load it. The default reads nothing.

        What is returned becomes ``region.read`` in :meth:`load`. It must refer to no weight.

        Args:
            model: The region as an ONNX model.
            region: The region, with its graph and weights. Its graph has placeholders only where an
                earlier process made the model.
            build: The terms of the build.

        Raises:
            NodesRefused: the engine names nodes that it does not take.
            ModelRefused: it does not take the model, and names no node.
            Refusal: the graph is not for this engine.
        """

    @abstractmethod
    def load(
        self, region: OnnxRegion, weights: Mapping[str, torch.Tensor], build: OnnxBuild[S]
    ) -> Loaded:
        """Load a model with its weights, so that it runs.

        This is called for each region, and again when a weight has changed.

        Args:
            region: The region.
            weights: Contiguous tensors, by the names of their arguments. The model may not read all
                of them. The engine reads their memory, so it keeps a reference to those that it
                does not copy.
            build: The terms of the build, without weights.

        Raises:
            NodesRefused: the engine names nodes that it does not take.
            ModelRefused: it does not take the model, and names no node.
            Refusal: it cannot run the model here.
        """

    def alone(
        self,
        folder: Path,
        region: OnnxRegion,
        weights: Mapping[str, torch.Tensor],
        build: OnnxBuild[S],
    ) -> str:
        """Write the model of a region to a folder, and return a program that runs it.

        It is for a bug report, so it imports nothing of composer. The program is Python that
        defines ``engine(graph)``. That returns a function of the arguments of the region, without
        weights, and the function returns the outputs as a list of tensors. The default returns an
        empty text: the engine has no such program.

        Args:
            folder: The folder, which is that of the program.
            region: The region.
            weights: As for :meth:`load`.
            build: The terms of the build.
        """
        return ""

    def described(self, refusal: ModelRefused, node: torch.fx.Node) -> str:
        """Return a short text on why a call is refused by itself. The default is the first line."""
        del node
        return first_line(str(refusal))

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
        devices = devices_of(request.example_inputs)
        self.require(devices)
        build = OnnxBuild(
            settings=self.settings(request.options),
            device=devices[0] if devices else torch.device("cpu"),
            mode=request.mode,
            terms=request.terms,
        )
        return Build(
            compile_graph(request.gm, request.example_inputs, self, build, self._key(request))
        )

    def _key(self, request: BuildRequest) -> str:
        """Return a text of all that decides what the engine takes, and how; empty if there is none.

        It has the name of the GPU: an engine may take another model on another GPU.
        """
        identity = self.identity()
        try:
            options = json.dumps(dict(request.options), sort_keys=True)
        except TypeError:  # an object, which another process does not have
            identity = None
        if identity is None:
            return ""
        devices = [*map(_named, devices_of(request.example_inputs))]
        return f"{identity} {options} {devices} {request.mode} {request.terms.precision}"


def _named(device: torch.device) -> str:
    if device.type != "cuda":
        return str(device)
    name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    return f"{device} {name} {capability} {nvidia_driver()}"


def dynamo_backend(engine: type[OnnxEngine[Any]], name: str) -> Callable[..., Callable[..., Any]]:
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
        **others: Any,
    ) -> Callable[..., Any]:
        others.pop("name", None)  # the region's name, from torch 2.15 on, which is not used here
        if others:
            raise TypeError(f"{name} takes no {', '.join(others)}")
        request = BuildRequest(gm, [*example_inputs], mode, options or {}, current_build())
        return engine().build(request).compiled

    compile_with_engine.__name__ = compile_with_engine.__qualname__ = name
    compile_with_engine.__module__ = engine.__module__
    return compile_with_engine
