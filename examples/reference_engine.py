"""An engine of one's own: the reference evaluator of ``onnx`` computes the regions of a graph.

It is slow, and right. An engine that is fast has the same two functions. composer does the rest:
AOTAutograd, the partition of the graph, the backward, changed weights, and the report.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx.reference
import torch
import torch.fx

import composer
from composer.backends.onnx_engine import Loaded, OnnxBuild, OnnxEngine, OnnxRegion, dtypes_of

LACKING = {torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2}
"""Dtypes that NumPy does not have."""


class ReferenceEngine(OnnxEngine[Mapping[str, Any]]):
    """Inference and training on the CPU, by the reference evaluator of ``onnx``."""

    title = "the reference evaluator"
    packages = ("onnx", "onnxscript")

    def why_not(self, node: torch.fx.Node, build: OnnxBuild[Mapping[str, Any]]) -> str | None:
        """Leave to torch what ONNX cannot express, and what NumPy has no dtype for."""
        if node.target is torch.ops.aten.gather.default:
            return "the evaluator gathers from few columns only (onnx 1.23)"
        lacking = dtypes_of(node) & LACKING
        return f"NumPy has no {lacking}" if lacking else super().why_not(node, build)

    def load(
        self,
        region: OnnxRegion,
        weights: Mapping[str, torch.Tensor],
        build: OnnxBuild[Mapping[str, Any]],
    ) -> Loaded:
        """Return a function that runs the model of a region with these weights."""
        evaluator = onnx.reference.ReferenceEvaluator(region.graph.model)
        held = {name: array(weight) for name, weight in weights.items()}
        position = {name: i for i, name in enumerate(region.graph.inputs)}
        fed = [name for name in evaluator.input_names if name not in held]

        def run(args: tuple[Any, ...]) -> list[torch.Tensor]:
            feeds = {name: array(args[position[name]]) for name in fed}
            results = evaluator.run(None, {**held, **feeds})
            return [torch.from_numpy(np.array(each, order="C")) for each in results]

        return Loaded(run=run)


def array(value: torch.Tensor | int) -> np.ndarray:
    """Return a tensor, or a size, as an array."""
    return value.detach().numpy() if isinstance(value, torch.Tensor) else np.array(value, np.int64)


def main() -> None:
    """Compile a small model with the engine, and print the report."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
    compiled = torch.compile(model, backend="composer", options={"chain": [ReferenceEngine]})
    compiled(torch.randn(3, 8)).sum().backward()
    print(composer.report())


if __name__ == "__main__":
    main()
