"""Keeps on disk what a captured graph becomes, so that other processes skip AOTAutograd.

That is one ONNX model or, where torch runs a part of the graph, the calls of torch and the models
of the regions between them.

This works only where AOTAutograd's run-time wrapper would have nothing to do at a call: inference
with grad off, all sizes fixed, no input written to, no output that is a view of an input, and no
pass that runs within its step. All other graphs go through AOTAutograd in every process; only the
ONNX models of their regions are found on disk (:mod:`composer.lowering.export.onnx`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx

from composer import _torch
from composer.build import BuildTerms
from composer.graphs.data import graph_of, rows_of
from composer.graphs.nodes import are_static, value_of
from composer.graphs.written import Unsayable, exact_text
from composer.lowering.aot import FunctionalGraph, any_fake, bindable, own_tensors, owners_of
from composer.lowering.engine import OnnxRegion
from composer.lowering.export import artefacts
from composer.lowering.export.onnx import Output, Source, read_model
from composer.lowering.partition.regions import (
    WHOLE,
    Region,
    Split,
    called_regions,
    constant_at,
    source_line,
)

_MOST_BYTES = 1 << 20
"""Of the tensors that a graph holds: masks and positions, which it computes of nothing."""

_PLACE = re.compile(r" at (?!.* at )\S.*:\d+$")
"""A place in the user's code, as :func:`source_line` writes it."""


@dataclass(frozen=True, slots=True)
class Whole:
    """A captured graph that may be kept as what it becomes, and the key that it is kept under."""

    gm: torch.fx.GraphModule
    key: str
    terms: BuildTerms
    is_autocast: bool

    def find(self, inputs: Sequence[Any]) -> tuple[Split, dict[str, OnnxRegion]] | None:
        """Return the graph in its regions, with their models; ``None`` if none was kept.

        The weights are those among ``inputs``, the example inputs that the key was made with.
        """
        entry = artefacts.find(self.terms.artefacts, self.key)
        if entry is None or not self._are_places_known(entry.facts["left"]):
            return None
        facts = entry.facts
        owners = owners_of(self.gm, inputs) if self.terms.freeze is not False else {}
        weights, witnesses = bindable(inputs, owners, frozenset(), dict(facts["statistics"]))
        constants = _tensors_of(facts["constants"], entry.blob or b"")
        bare = {name: _placeholders(each["values"]) for name, each in facts["regions"].items()}
        outer = None
        if facts["outer"] is None:
            held = {int(name): each for name, each in constants.items()}
            regions = {WHOLE: Region(bare[WHOLE], weights, witnesses, held)}
        else:
            outer = torch.fx.GraphModule({**constants, **bare}, graph_of(facts["outer"]))
            regions = called_regions(outer, weights, witnesses)
        models: dict[str, OnnxRegion] = {}
        for name, region in regions.items():
            model = self._model_of(region, facts["regions"][name])
            if model is None:
                return None
            models[name] = model
        return Split(outer, regions, facts["taken"], facts["total"], (*facts["left"],)), models

    def _are_places_known(self, left: Sequence[str]) -> bool:
        """True if what torch runs still stands at the same places in the user's code."""
        places = set(map(source_line, self.gm.graph.nodes))
        told = filter(None, map(_PLACE.search, left))
        return places.issuperset(place[0] for place in told)

    def _model_of(self, region: Region, facts: Mapping[str, Any]) -> OnnxRegion | None:
        """Return the model of a region; ``None`` where it is gone, or not one for its weights."""
        outputs = tuple(map(_output_of, facts["outputs"]))
        model = read_model(self.terms.artefacts, facts["model"], outputs)
        if model is None:
            return None
        model = replace(model, source=Source.of(region.gm))
        tables: dict[int, int] = dict(facts["tables"])
        for i in region.weights.keys() & tables.keys():
            # An engine may take a lookup only for positions from 0 up; the key has no values.
            if not bool(((region.weights[i] >= 0) & (region.weights[i] < tables[i])).all()):
                return None
        return OnnxRegion.of(model, region, tables)

    def keep(self, graph: FunctionalGraph, parts: Split, models: Mapping[str, OnnxRegion]) -> None:
        """Keep what the graph became, if nothing but its regions and torch's calls run at a call.

        To be called while AOTAutograd compiles the graph. ``parts`` are the functional graph's
        regions, and ``models`` their models.
        """
        if not self._is_all(graph, parts, models.values()):
            return
        held = _constants_of(parts)
        try:
            outer = None if parts.outer is None else rows_of(parts.outer.graph)
            blob = _bytes_of(held)
        except Unsayable:
            return
        facts = {
            "kind": "graph",
            "outer": outer,
            "regions": {
                name: {
                    "model": model.graph.key,
                    "outputs": [_facts_of(output) for output in model.graph.outputs],
                    "tables": sorted(model.tables.items()),
                    "values": _values_of(parts.regions[name].gm),
                }
                for name, model in models.items()
            },
            "constants": {str(name): _layout_of(each) for name, each in held.items()},
            "statistics": sorted(graph.statistics.items()),
            "taken": parts.taken,
            "total": parts.total,
            "left": parts.left,
        }
        artefacts.put(self.terms.artefacts, self.key, facts, blob or None)

    def _is_all(self, graph: FunctionalGraph, parts: Split, models: Iterable[OnnxRegion]) -> bool:
        """True if the models, which are kept, and torch's calls between them answer a call."""
        if graph.example_args is None or (parts.outer is not None and self.is_autocast):
            return False  # AOTAutograd turns autocast off around the graph that it made
        for model in models:
            outputs = model.graph.outputs
            if not model.graph.key or any(None in (each.dtype, each.shape) for each in outputs):
                return False
        (returned,) = self.gm.graph.find_nodes(op="output")
        return _torch.aot.aot_adds_nothing(len(returned.args[0]))


def whole_of(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any], engine: str, terms: BuildTerms
) -> Whole | None:
    """Return the captured graph with its key; ``None`` where nothing can be kept of it.

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
        settings = f"{_torch.aot.tracing_state()} {terms.freeze is not False}"
        text = f"{engine}\n{settings}\n{exact_text(gm, example_inputs)}"
    except Unsayable:
        return None
    key = artefacts.key_of("graph", text)
    return Whole(gm, key, terms, is_autocast=bool(_torch.modes.autocasts()))


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


def _values_of(gm: torch.fx.GraphModule) -> list[Any]:
    """Return dtype, sizes and strides of each placeholder of a region; of a number its value."""
    return [_value_of(node.meta["val"]) for node in gm.graph.find_nodes(op="placeholder")]


def _value_of(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return [_name(value.dtype), [*value.shape], [*value.stride()]]


def _placeholders(values: Sequence[Any]) -> torch.fx.GraphModule:
    """Return a graph of placeholders only: engines read nothing else of a region with a model."""
    graph = torch.fx.Graph()
    for index, value in enumerate(values):
        known = value
        if isinstance(value, list):
            dtype, shape, strides = value
            known = torch.empty_strided(shape, strides, dtype=getattr(torch, dtype), device="meta")
        graph.placeholder(f"arg{index}").meta["val"] = known
    graph.output(())
    return torch.fx.GraphModule(torch.nn.Module(), graph)


def _constants_of(parts: Split) -> dict[Any, torch.Tensor]:
    """Return the tensors that the graph holds: by name, or by position if it is one region."""
    if parts.outer is None:
        return {**parts.regions[WHOLE].constants}
    nodes = parts.outer.graph.find_nodes(op="get_attr")
    return {str(node.target): constant_at(parts.outer, node) for node in nodes}


def _layout_of(tensor: torch.Tensor) -> list[Any]:
    return [_name(tensor.dtype), [*tensor.shape]]


def _bytes_of(tensors: Mapping[Any, torch.Tensor]) -> bytes:
    """Return the values of these tensors, one after the other.

    Raises:
        Unsayable: they are many, or do not lie row by row in the CPU's memory.
    """
    if sum(each.nbytes for each in tensors.values()) > _MOST_BYTES:
        raise Unsayable("the graph holds large tensors")
    if any(each.device.type != "cpu" or not each.is_contiguous() for each in tensors.values()):
        raise Unsayable("a tensor that the graph holds has another layout")
    return b"".join(map(_raw, tensors.values()))


def _raw(tensor: torch.Tensor) -> bytes:
    raw: bytes = tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
    return raw


def _tensors_of(layouts: Mapping[str, Any], blob: bytes) -> dict[str, torch.Tensor]:
    """Return the tensors of which :func:`_bytes_of` returned the values."""
    tensors: dict[str, torch.Tensor] = {}
    data = bytearray(blob)
    start = 0
    for name, (dtype, shape) in layouts.items():
        tensors[name] = torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")
        size = tensors[name].nbytes
        if size:
            values = torch.frombuffer(data, dtype=torch.uint8, count=size, offset=start)
            tensors[name].reshape(-1).view(torch.uint8).copy_(values)
        start += size
    return tensors


def _name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


def _facts_of(output: Output) -> dict[str, Any]:
    return {
        "dtype": _name(output.dtype),
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
