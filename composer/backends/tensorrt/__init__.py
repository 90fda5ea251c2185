"""TensorRT, and TensorRT for RTX: composer's own engine, for inference on CUDA devices.

Where ``torch_tensorrt`` is installed, the name ``tensorrt`` in a chain stands for that package
(:mod:`composer.backends.torch_tensorrt`). Composer registers the Dynamo backend ``tensorrt`` only
when its own engine is first used. Dynamo's registry rejects duplicates, so a later ``import
torch_tensorrt`` by the user would fail otherwise. (Torch's own placeholder of that name is
commented out.) A backend that the program itself registers under that name takes precedence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.fx

from composer import _torch
from composer.backends.base import Build, BuildRequest
from composer.backends.onnx_engine import (
    BuildFacts,
    Loaded,
    NodesRefused,
    OnnxBuild,
    OnnxEngine,
    OnnxRegion,
    Region,
    dynamo_backend,
    install,
    read_options,
    to_plain,
)
from composer.backends.tensorrt import probe
from composer.backends.tensorrt.alone import write_alone
from composer.backends.tensorrt.dtypes import why_not_here
from composer.backends.tensorrt.library import load_library
from composer.backends.tensorrt.loading import in_host_memory
from composer.backends.tensorrt.network import parse
from composer.backends.tensorrt.place import place_on
from composer.backends.tensorrt.regions import Plans, Read
from composer.backends.tensorrt.settings import Settings
from composer.backends.tensorrt.tf32 import require_as_allowed

NAME = "tensorrt"


class TensorRTEngine(OnnxEngine[Settings]):
    """Inference on CUDA devices, after a probe that uses nothing of TensorRT.

    Its options are the fields of :class:`~composer.backends.tensorrt.settings.Settings`. The mode
    ``"reduce-overhead"`` replays CUDA graphs where all shapes are fixed.
    """

    title = "TensorRT"
    trains = False
    devices = ("cuda",)
    isolates_itself = True
    writes_as_the_graph = True
    packages = ("tensorrt", "tensorrt-rtx")
    remedy = install("tensorrt-rtx")

    def settings(self, options: Mapping[str, Any]) -> Settings:
        """Check names and values of the options."""
        return read_options(Settings, options, "tensorrt")

    def require(self, devices: Sequence[torch.device]) -> None:
        """Refuse without a CUDA device, a driver or a package; nothing of TensorRT is imported."""
        for each in devices or [torch.device("cpu")]:
            probe.require_device(str(each))
        probe.require_package()
        super().require(devices)

    def build(self, request: BuildRequest) -> Build:
        """Compile the graph, and register the Dynamo backend ``tensorrt`` if there is none."""
        built = super().build(request)
        if NAME not in _torch.dynamo.list_backends():
            _torch.dynamo.register_backend(tensorrt, name=NAME)
        return built

    def facts(self, build: OnnxBuild[Settings]) -> BuildFacts:
        """Return the library, its version, the GPU and the precision."""
        trt = load_library()
        gpu = place_on(build.device).target.gpu
        extra = {"library": trt.name, "version": trt.version, "gpu": gpu}
        return BuildFacts(precision=build.settings.precision, extra=extra)

    def why_not(self, node: torch.fx.Node, build: OnnxBuild[Settings]) -> str | None:
        """Return why torch must run a call, without asking TensorRT's parser."""
        del build
        return why_not_here(node)

    def read(self, model: OnnxRegion, region: Region, build: OnnxBuild[Settings]) -> Read:
        """Simplify a model, and ask TensorRT's parser about it."""
        trt = load_library()
        settings = build.settings
        if settings.precision == "fp32":
            require_as_allowed(region.gm, trt, place_on(build.device).target)
        plain = to_plain(model.graph, settings.precision)
        weights = in_host_memory(plain.graph.inputs, region.weights | region.constants)
        with trt.busy, trt.log.recording() as lines:
            parsed = parse(trt, plain.graph, weights, lines)
        if parsed.error is not None:
            raise parsed.error
        if parsed.refused:
            raise NodesRefused(plain, parsed.refused)
        return Read.of(plain.graph, region, settings)

    def load(
        self, region: OnnxRegion, weights: Mapping[str, torch.Tensor], build: OnnxBuild[Settings]
    ) -> Loaded:
        """Build a plan for these weights, or load it from disk."""
        return Plans(load_library(), place_on(build.device), region.read, build).load(weights)

    def alone(
        self,
        folder: Path,
        region: OnnxRegion,
        weights: Mapping[str, torch.Tensor],
        build: OnnxBuild[Settings],
    ) -> str:
        """Write the model that TensorRT reads; return a program that needs TensorRT and torch."""
        return write_alone(folder, load_library(), region.read, weights, build)


tensorrt = dynamo_backend(TensorRTEngine, NAME)
