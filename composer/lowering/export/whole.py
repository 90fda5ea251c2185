"""Keeps on disk which ONNX model a captured graph becomes, so other processes skip AOTAutograd.

This works only where AOTAutograd's run-time wrapper would have nothing to do at a call: inference
with grad off, all sizes fixed, no input written to, no output that shares memory, no pass that runs
within its step, and a single region that is the whole graph. All other graphs go through
AOTAutograd in every process; only the ONNX models of their regions are found on disk
(:mod:`composer.lowering.export.onnx`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx

from composer import _torch
from composer.build import BuildTerms
from composer.graphs.nodes import are_static, value_of
from composer.graphs.written import Unsayable, exact_text
from composer.lowering.aot import FunctionalGraph, any_fake, bindable, own_tensors, owners_of
from composer.lowering.engine import OnnxRegion
from composer.lowering.export import artefacts
from composer.lowering.export.onnx import Output, Source, read_model
from composer.lowering.partition.regions import WHOLE, Region, Split


@dataclass(frozen=True, slots=True)
class Whole:
    """A captured graph whose model may be kept, and the key that it is kept under."""

    gm: torch.fx.GraphModule
    key: str
    terms: BuildTerms

    def find(self, inputs: Sequence[Any]) -> tuple[Split, OnnxRegion] | None:
        """Return the graph as one region, with its model; ``None`` if no earlier process kept it.

        The weights are those among ``inputs``, the example inputs that the key was made with.
        """
        entry = artefacts.find(self.terms.artefacts, self.key)
        if entry is None:
            return None
        facts = entry.facts
        outputs = tuple(map(_output_of, facts["outputs"]))
        model = read_model(self.terms.artefacts, facts["model"], outputs)
        if model is None:
            return None
        owners = owners_of(self.gm, inputs) if self.terms.freeze is not False else {}
        weights, witnesses = bindable(inputs, owners, frozenset(), dict(facts["statistics"]))
        region = Region(_placeholders(inputs), weights, witnesses, {})
        model = replace(model, source=Source.of(region.gm))
        tables: dict[int, int] = dict(facts["tables"])
        for i in weights.keys() & tables.keys():
            # An engine may take a lookup only for positions from 0 up; the key has no values.
            if not bool(((weights[i] >= 0) & (weights[i] < tables[i])).all()):
                return None
        parts = Split(None, {WHOLE: region}, facts["taken"], facts["taken"], ())
        return parts, OnnxRegion.of(model, region, tables)

    def keep(self, graph: FunctionalGraph, parts: Split, models: Sequence[OnnxRegion]) -> None:
        """Keep the graph's model, if a call of the graph is one call of an engine.

        To be called while AOTAutograd compiles the graph. ``parts`` are the functional graph's
        regions, and ``models`` their models.
        """
        if not self._is_all(graph, parts, models):
            return
        (model,) = models
        facts = {
            "kind": "graph",
            "model": model.graph.key,
            "outputs": [_facts_of(output) for output in model.graph.outputs],
            "statistics": sorted(graph.statistics.items()),
            "tables": sorted(model.tables.items()),
            "taken": parts.taken,
        }
        artefacts.put(self.terms.artefacts, self.key, facts)

    def _is_all(self, graph: FunctionalGraph, parts: Split, models: Sequence[OnnxRegion]) -> bool:
        """True if one call of an engine, whose model is kept, answers a call of the graph."""
        if graph.example_args is None or parts.outer is not None:
            return False
        if parts.regions[WHOLE].constants or not models[0].graph.key:
            return False
        outputs = models[0].graph.outputs
        if any(output.dtype is None or output.shape is None for output in outputs):
            return False
        (returned,) = self.gm.graph.find_nodes(op="output")
        return _torch.aot.aot_adds_nothing(len(returned.args[0]))


def whole_of(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any], engine: str, terms: BuildTerms
) -> Whole | None:
    """Return the captured graph with its key; ``None`` where its model cannot be kept.

    Args:
        gm: The captured graph.
        example_inputs: Tensors and symbols, in the order of the placeholders.
        engine: A text with everything that decides which operators the engine takes, and how;
            empty if there is none.
        terms: The terms of the build.
    """
    if not engine or not artefacts.is_enabled(terms.artefacts) or torch.is_grad_enabled():
        return None
    if _torch.modes.is_watched() or (terms.late is not None and terms.late.shared.late):
        return None
    if any_fake(example_inputs) or own_tensors(gm) or not _is_static(gm, example_inputs):
        return None
    try:
        text = f"{engine}\n{_torch.aot.tracing_state()}\n{exact_text(gm, example_inputs)}"
    except Unsayable:
        return None
    return Whole(gm, artefacts.key_of("graph", text), terms)


def _is_static(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> bool:
    """True if all values are plain tensors of fixed sizes; a symbol might need a guard."""
    return not any(map(_may_vary, (*example_inputs, *map(value_of, gm.graph.nodes))))


def _may_vary(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_may_vary, value))
    if not isinstance(value, torch.Tensor):
        return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)
    if type(value) not in _torch.tensors.PLAIN_TENSORS or value.layout is not torch.strided:
        return True
    return not are_static((*value.shape, *value.stride()))


def _placeholders(inputs: Sequence[Any]) -> torch.fx.GraphModule:
    """Return a graph of placeholders only: engines read nothing else of a region with a model."""
    graph = torch.fx.Graph()
    for index, value in enumerate(inputs):
        is_tensor = isinstance(value, torch.Tensor)
        known = torch.empty_like(value, device="meta") if is_tensor else value
        graph.placeholder(f"arg{index}").meta["val"] = known
    graph.output(())
    return torch.fx.GraphModule(torch.nn.Module(), graph)


def _facts_of(output: Output) -> dict[str, Any]:
    return {
        "dtype": str(output.dtype).removeprefix("torch."),
        "shape": output.shape,
        "order": output.order,
    }


def _output_of(facts: dict[str, Any]) -> Output:
    order = facts["order"]
    return Output(
        dtype=getattr(torch, facts["dtype"]),
        shape=tuple(facts["shape"]),
        order=None if order is None else tuple(order),
    )
