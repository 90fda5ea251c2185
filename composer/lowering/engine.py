"""The interface of an engine that runs ONNX models: two functions, and what they get.

:meth:`RegionEngine.why_not` says which calls of a graph the engine does not take, and
:meth:`RegionEngine.load` turns a part of the graph, a region, into something that runs. Everything
else is the same for all engines (:mod:`composer.lowering.compile`). The idea is that of ONNX
Runtime's execution providers, which have ``GetCapability`` and ``Compile``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import torch
import torch.fx

from composer.build import BuildFacts, BuildTerms
from composer.errors import Refusal
from composer.lowering.export.onnx import OnnxGraph, why_not
from composer.lowering.loaded import Loaded
from composer.lowering.operators.entry import Operators
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
        key: A text that changes when the engine changes; empty if there is none. The model of a
            whole graph is kept on disk under it.
    """

    settings: S
    device: torch.device
    mode: str | None = None
    terms: BuildTerms = field(default_factory=BuildTerms)
    weights: Mapping[str, torch.Tensor] = field(default_factory=dict)
    is_mixed: bool = False
    key: str = ""

    def at_a_call(self) -> OnnxBuild[S]:
        """Return what holds for a load at a call: it has no time limit, and refers to no tensor.

        A child process still does a part of it if it did at the build.
        """
        limits = Limits(isolate=self.terms.limits.isolate)
        terms = BuildTerms(limits=limits, precision=self.terms.precision)
        return replace(self, terms=terms, weights={})


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxRegion:
    """A region of a graph as an ONNX model, which an engine loads. It refers to no weight.

    Attributes:
        graph: The model. Weights are inputs of it.
        read: What the engine's :meth:`RegionEngine.read` returned.
        dtypes: The dtype of each argument; ``None`` for an integer.
        weights: Positions of the arguments that are weights.
        constants: Positions of the arguments that are constants of the graph. Those after the last
            argument are not passed at a call.
        rewritten: Position of each output that may be written to the memory of an argument, mapped
            to the argument's.
        tables: Positions of the arguments whose values are positions in a table, mapped to the size
            of the table. Eager raises for a position outside of it.
        precision: The precision that the engine may choose for float32.
    """

    graph: OnnxGraph
    read: Any = None
    dtypes: tuple[torch.dtype | None, ...]
    weights: tuple[int, ...] = ()
    constants: tuple[int, ...] = ()
    rewritten: Mapping[int, int] = field(default_factory=dict)
    tables: Mapping[int, int] = field(default_factory=dict)
    precision: str = "fp32"

    def names(self, positions: tuple[int, ...]) -> set[str]:
        """Return the model's names of the arguments at these positions."""
        return {self.graph.inputs[i] for i in positions}


class NodesRefused(Exception):
    """Raised by :meth:`RegionEngine.read` and :meth:`RegionEngine.load`: torch runs these nodes.

    Args:
        plain: The model that the engine read.
        reasons: The reason for each refused node, by its index in the model.
    """

    def __init__(self, plain: PlainOnnx, reasons: Mapping[int, str]) -> None:
        super().__init__("; ".join(dict.fromkeys(reasons.values())))
        self.plain = plain
        self.reasons = reasons


class ModelRefused(Refusal):
    """Raised by :meth:`RegionEngine.read` and :meth:`RegionEngine.load`, where no node is named.

    composer then asks for each call of the region alone, to find those that torch has to run.
    """


class RegionEngine(ABC, Generic[S]):
    """An engine that runs ONNX models."""

    title: ClassVar[str]
    """The name of the engine in messages."""

    trains: ClassVar[bool] = True
    """True if it may run the forward and backward graphs of a training step."""

    def dialect(self) -> Operators:
        """Return the engine's own entries of operators, which precede composer's."""
        return MappingProxyType({})

    def why_not(self, node: torch.fx.Node, build: OnnxBuild[S]) -> str | None:
        """Return why torch has to run a call of the functional graph; ``None`` if it need not.

        What the engine refuses when it reads or loads a model need not be known here. The default
        refuses what has no translation to ONNX.
        """
        del build
        return why_not(node, self.dialect())

    def writes(self, node: torch.fx.Node, build: OnnxBuild[S]) -> bool:
        """Return True if the engine can do a call that writes rows of an input in place."""
        del node, build
        return False

    def prepare(self, gm: torch.fx.GraphModule, build: OnnxBuild[S]) -> None:
        """Rewrite a region before it is translated to ONNX. The default changes nothing."""

    def read(self, model: OnnxRegion, region: Region, build: OnnxBuild[S]) -> Any:
        """Read the model of a region, which is cheaper than to load it. The default reads nothing.

        What is returned becomes ``model.read`` of the model that :meth:`load` gets. It must refer
        to no weight.

        Args:
            model: The region as an ONNX model.
            region: The region, with its graph and weights. Its graph is empty where an earlier
                process made the model.
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
            weights: Contiguous tensors, by the names of the model's inputs. The engine reads their
                memory, so it keeps a reference to those that it does not copy.
            build: The terms of the build.

        Raises:
            NodesRefused: the engine names nodes that it does not take.
            ModelRefused: it does not take the model, and names no node.
            Refusal: it cannot run the model here.
        """

    def facts(self, build: OnnxBuild[S]) -> BuildFacts:
        """Return what the record says of the engine, before anything is read or loaded.

        Raises:
            Refusal: the engine cannot work here.
        """
        del build
        return BuildFacts()


def as_onnx_region(
    graph: OnnxGraph, region: Region, precision: str, tables: Mapping[int, int]
) -> OnnxRegion:
    """Return a region as an ONNX model, which refers to no weight.

    Args:
        graph: The model.
        region: The region.
        precision: The precision that the engine may choose.
        tables: As in :class:`OnnxRegion`.
    """
    return OnnxRegion(
        graph=graph,
        dtypes=region.input_dtypes,
        weights=tuple(region.weights),
        constants=tuple(region.constants),
        rewritten=region.rewritten,
        tables=tables,
        precision=precision,
    )
