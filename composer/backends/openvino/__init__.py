"""OpenVINO reads and compiles the shared ONNX lowering.

In composer's chain the backend is called ``openvino``, and as a Dynamo backend
``composer_openvino``. The OpenVINO package has a Dynamo backend of its own named ``openvino``. In a
chain that one is ``dynamo:openvino``.

The package imports nothing of composer but the public interface of ONNX engines
(:mod:`composer.backends.onnx_engine`) and :mod:`composer.errors`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.fx

from composer.backends.onnx_engine import (
    BuildFacts,
    Loaded,
    OnnxBuild,
    OnnxEngine,
    OnnxRegion,
    Operators,
    Region,
    dynamo_backend,
    install,
    read_options,
)
from composer.backends.openvino import library
from composer.backends.openvino.alone import write_alone
from composer.backends.openvino.compiled import load
from composer.backends.openvino.kernels import why_not_here
from composer.backends.openvino.model import read_region
from composer.backends.openvino.operators import entries
from composer.backends.openvino.settings import Settings


class OpenVinoEngine(OnnxEngine[Settings]):
    """Inference on the CPU; torch runs what OpenVINO does not compute exactly.

    Its options are the fields of :class:`~composer.backends.openvino.settings.Settings`.
    """

    title = "OpenVINO"
    trains = False
    chooses_precision = True
    gains_by_int8 = "weights"
    has_self_test = True
    writes_as_the_graph = True
    packages = ("openvino", "onnx", "onnxscript")
    modules = ("openvino", "onnx", "onnxscript")
    remedy = install("openvino")

    def settings(self, options: Mapping[str, Any]) -> Settings:
        """Check names and values of options, including OpenVINO's own properties."""
        return read_options(Settings, options, "openvino")

    def stricter(self, options: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the options for accuracy, in float32, and with NaN kept."""
        config = {**options.get("config", {}), "EXECUTION_MODE_HINT": "ACCURACY"}
        strict = {**options, "config": config, "precision": "fp32", "keeps_nan": True}
        return None if strict == options else strict

    def facts(self, build: OnnxBuild[Settings]) -> BuildFacts:
        """Return version, device, and if NaN is kept; refuse if the device is not here."""
        library.require_device(build.settings.device)
        return BuildFacts(
            versions={"openvino": library.version()},
            device=build.settings.device,
            keeps_nan=build.settings.keeps_nan,
        )

    def operators(self) -> Operators:
        """Return OpenVINO's entries of operators."""
        return entries()

    def why_not(self, node: torch.fx.Node, build: OnnxBuild[Settings]) -> str | None:
        """Return why torch must run a call, without asking OpenVINO's reader."""
        return why_not_here(node, build.weights)

    def read(self, model: OnnxRegion, region: Region, build: OnnxBuild[Settings]) -> Any:
        """Read a model with OpenVINO, or say which nodes it does not convert."""
        del region
        return read_region(model, build)

    def load(
        self, region: OnnxRegion, weights: Mapping[str, torch.Tensor], build: OnnxBuild[Settings]
    ) -> Loaded:
        """Compile a model with its weights."""
        return load(region, weights, build)

    def alone(
        self,
        folder: Path,
        region: OnnxRegion,
        weights: Mapping[str, torch.Tensor],
        build: OnnxBuild[Settings],
    ) -> str:
        """Write the model as OpenVINO reads it, and return a program of it."""
        return write_alone(folder, region, weights, build)


composer_openvino = dynamo_backend(OpenVinoEngine, "composer_openvino")
