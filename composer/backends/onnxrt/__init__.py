"""ONNX Runtime: graphs are lowered to ONNX and run by inference sessions.

``onnxrt`` is a candidate of composer's chain. ``torch.compile(model, backend="onnxrt")`` works,
too: torch had a backend of that name, and removed it (pytorch/pytorch#158258).

ONNX Runtime names at most one node when it refuses a model, so composer asks about each call of the
region. :mod:`~composer.backends.onnxrt.loading` runs one region by a session that
:mod:`~composer.backends.onnxrt.session` makes, on torch's memory
(:mod:`~composer.backends.onnxrt.native`, else :mod:`~composer.backends.onnxrt.binding`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.fx

from composer.backends.onnx_engine import (
    BuildFacts,
    Loaded,
    ModelRefused,
    OnnxBuild,
    OnnxEngine,
    OnnxRegion,
    Operators,
    Reason,
    Status,
    dtypes_of,
    dynamo_backend,
    install,
    read_options,
    refuse,
)
from composer.backends.onnxrt.alone import write_alone
from composer.backends.onnxrt.kernels import lacking, narrow_here, why_not_here
from composer.backends.onnxrt.library import is_for_cpu_alone, onnxruntime
from composer.backends.onnxrt.loading import load
from composer.backends.onnxrt.native import why_not_native
from composer.backends.onnxrt.operators import entries
from composer.backends.onnxrt.settings import Settings
from composer.backends.onnxrt.tails import keep_tails
from composer.backends.onnxrt.widening import widen

_STRICT = {"graph_optimization_level": "basic"}


class OnnxRuntimeEngine(OnnxEngine[Settings]):
    """Runs inference and training on the CPU and CUDA. Torch runs what ONNX cannot express.

    Its options are the fields of :class:`~composer.backends.onnxrt.settings.Settings`.
    """

    title = "ONNX Runtime"
    has_self_test = True
    gains_by_int8 = "products"
    writes_as_the_graph = True
    packages = ("onnxruntime", "onnxruntime-gpu", "onnx", "onnxscript")
    modules = ("onnxruntime", "onnx", "onnxscript")
    remedy = install("onnxrt")
    devices = ("cpu", "cuda")

    def settings(self, options: Mapping[str, Any]) -> Settings:
        """Check names and values of the options, also those of providers and session entries."""
        return read_options(Settings, options, "onnxrt")

    def stricter(self, options: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the options with rewrites that keep every digit, and no fusions."""
        level = options.get("graph_optimization_level")
        return None if level in ("disable", "basic") else {**options, **_STRICT}

    def require(self, devices: Sequence[torch.device]) -> None:
        """Refuse without the packages, the device, or a build of ONNX Runtime for the device."""
        super().require(devices)
        if any(each.type == "cuda" for each in devices) and is_for_cpu_alone():
            message = (
                "this onnxruntime is for the CPU alone; pip install onnxruntime-gpu in its place"
            )
            refuse(Status.UNAVAILABLE, Reason.NOT_INSTALLED, message)

    def facts(self, build: OnnxBuild[Settings]) -> BuildFacts:
        """Return version, threads, and how sessions are called."""
        why = why_not_native(build.device.type)
        return BuildFacts(
            versions={"onnxruntime": onnxruntime().__version__},
            threads=build.settings.threads,
            keeps_nan=True,
            extra={"calls": f"by the public API, since the native way fails: {why}"}
            if why
            else {"calls": "native"},
        )

    def operators(self) -> Operators:
        """Return ONNX Runtime's entries of operators."""
        return entries()

    def why_not(self, node: torch.fx.Node, build: OnnxBuild[Settings]) -> str | None:
        """Return why ONNX cannot express a call, or that there is no kernel for it."""
        return why_not_here(node, build.device)

    def writes(self, node: torch.fx.Node, build: OnnxBuild[Settings]) -> bool:
        """Return True on the CPU, where torch's memory may be that of an output."""
        return build.device.type == "cpu" and not narrow_here(node, build.device)

    def prepare(self, gm: torch.fx.GraphModule, build: OnnxBuild[Settings]) -> None:
        """Compute half precision in float32 where kernels lack, and sigmoids with small errors."""
        widen(gm, lambda node: narrow_here(node, build.device))
        keep_tails(gm)

    def load(
        self, region: OnnxRegion, weights: Mapping[str, torch.Tensor], build: OnnxBuild[Settings]
    ) -> Loaded:
        """Make a session that reads the weights in place."""
        return load(region, weights, build)

    def alone(
        self,
        folder: Path,
        region: OnnxRegion,
        weights: Mapping[str, torch.Tensor],
        build: OnnxBuild[Settings],
    ) -> str:
        """Write the model as a session reads it, and return a program of it."""
        return write_alone(folder, region, weights, build)

    def described(self, refusal: ModelRefused, node: torch.fx.Node) -> str:
        """Return the dtypes that have no kernel, or ONNX Runtime's text without its code."""
        if refusal.reason is Reason.UNSUPPORTED_OP:
            return lacking(dtypes_of(node))
        without_code = super().described(refusal, node).rpartition(" : ")[2]
        return f"{self.title} refuses it: {without_code}"


onnxrt = dynamo_backend(OnnxRuntimeEngine, "onnxrt")
