"""What the functions of an engine that runs ONNX models get, and how they say no.

The functions are those of :class:`~composer.backends.onnx_engine.OnnxEngine`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
import torch.fx

from composer.build import BuildTerms
from composer.errors import Refusal
from composer.lowering.export.onnx import OnnxGraph
from composer.lowering.partition.regions import Region
from composer.system.subprocesses import Limits

if TYPE_CHECKING:
    from composer.lowering.export.plain import PlainOnnx

S = TypeVar("S")


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxBuild(Generic[S]):
    """What the functions of an engine know about a build.

    Attributes:
        settings: The candidate's options, as the engine's
            :meth:`~composer.backends.onnx_engine.OnnxEngine.settings` returns them.
        device: The device of the graph's tensors; the CPU for a graph without tensors.
        mode: ``torch.compile``'s mode.
        terms: The terms of the build: time limit, precision, facts.
        weights: The weights that the engine takes in, by the names of the placeholders of the
            functional graph.
        is_mixed: True if the policy allows low precision for a part of the graph only.
        is_at_call: True for a load at a call, after the graph was compiled.
    """

    settings: S
    device: torch.device
    mode: str | None = None
    terms: BuildTerms = field(default_factory=BuildTerms)
    weights: Mapping[str, torch.Tensor] = field(default_factory=dict)
    is_mixed: bool = False
    is_at_call: bool = False

    def without_weights(self) -> OnnxBuild[S]:
        """Return the terms for a load. What is loaded may keep them, so they refer to no tensor."""
        return replace(self, weights={})

    def at_a_call(self) -> OnnxBuild[S]:
        """Return the terms of a later load, at a call: it has no time limit.

        It still uses a child process if the build did.
        """
        limits = Limits(isolate=self.terms.limits.isolate)
        terms = BuildTerms(limits=limits, precision=self.terms.precision)
        return replace(self, terms=terms, weights={}, is_at_call=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxRegion:
    """A region of a graph as an ONNX model, which an engine loads. It refers to no weight.

    Attributes:
        graph: The model. Weights are inputs of it.
        read: What the engine's :meth:`~composer.backends.onnx_engine.OnnxEngine.read` returned.
        dtypes: The dtype of each argument; ``None`` for an integer.
        weights: Positions of the arguments that are weights.
        constants: Positions of the arguments that are constants of the graph. A constant whose
            position is after that of the last input is not passed at a call.
        rewritten: Position of each output that may be written to the memory of an argument, mapped
            to the argument's.
        tables: Positions of the arguments whose values are positions in a table, mapped to the size
            of the table. Eager raises for a position outside of it.
        keeps_float32: True if float32 has to be computed in float32, since the policy allows low
            precision for another part of the graph only.
    """

    graph: OnnxGraph
    read: Any = None
    dtypes: tuple[torch.dtype | None, ...]
    weights: tuple[int, ...] = ()
    constants: tuple[int, ...] = ()
    rewritten: Mapping[int, int] = field(default_factory=dict)
    tables: Mapping[int, int] = field(default_factory=dict)
    keeps_float32: bool = False

    @staticmethod
    def of(
        graph: OnnxGraph,
        region: Region,
        tables: Mapping[int, int],
        *,
        keeps_float32: bool = False,
    ) -> OnnxRegion:
        """Return a region as an ONNX model. The arguments are the attributes of this class."""
        return OnnxRegion(
            graph=graph,
            dtypes=region.input_dtypes,
            weights=tuple(region.weights),
            constants=tuple(region.constants),
            rewritten=region.rewritten,
            tables=tables,
            keeps_float32=keeps_float32,
        )

    def names(self, positions: tuple[int, ...]) -> set[str]:
        """Return the model's names of the arguments at these positions."""
        return {self.graph.inputs[i] for i in positions}


class NodesRefused(Exception):
    """Raised by an engine that names the nodes that it does not take: torch runs them.

    Args:
        plain: The model that the engine read.
        reasons: The reason for each refused node, by its index in the model.
    """

    def __init__(self, plain: PlainOnnx, reasons: Mapping[int, str]) -> None:
        super().__init__("; ".join(dict.fromkeys(reasons.values())))
        self.plain = plain
        self.reasons = reasons


class ModelRefused(Refusal):
    """Raised by an engine that does not take a model, and names no node.

    composer then asks for each call of the region alone, to find those that torch has to run.
    """
