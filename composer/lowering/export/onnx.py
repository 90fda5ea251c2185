"""Translates a region of a functional graph to one ONNX model."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
import torch.fx

from composer import _torch
from composer.build import Artefacts
from composer.errors import Refusal, class_and_text
from composer.graphs.keys import graph_key
from composer.graphs.nodes import are_static, graphs_in
from composer.graphs.written import Unsayable, exact_text
from composer.lowering.export import artefacts
from composer.lowering.export.linears import keep_dimensions
from composer.lowering.export.repeats import share_heads
from composer.lowering.export.reshapes import join_views
from composer.lowering.export.vocabulary import vocabulary
from composer.lowering.operators.entry import Operators
from composer.lowering.operators.translations import translator
from composer.lowering.partition.regions import Region, draws, is_complex, seen_by
from composer.lowering.partition.unsupported import why_unsupported
from composer.records import Reason, Status

if TYPE_CHECKING:
    import onnx
    import onnx_ir


def as_scalar(number: int | float) -> torch.Tensor:
    """Return a number as a tensor without dimensions, int64 or float32, on the CPU.

    Engines take sizes in this form. Device and dtype are explicit, since the program may set other
    defaults.
    """
    dtype = torch.float32 if isinstance(number, float) else torch.int64
    return torch.tensor(number, dtype=dtype, device="cpu")


@dataclass(frozen=True, slots=True)
class Output:
    """One output of the model, and how it is turned into the region's output.

    Attributes:
        dtype: The dtype of the tensor. ``None`` for an integer that the graph computes with; the
            model returns it as an int64 tensor without dimensions.
        shape: The shape in which the model returns the tensor; ``None`` where a size is dynamic.
        order: Permutes the model's dimensions to the region's; ``None`` where they are the same.
            The model returns every output row-major. Where eager's strides are not row-major, the
            model returns the dimensions in the order of eager's memory.
    """

    dtype: torch.dtype | None
    shape: tuple[int, ...] | None
    order: tuple[int, ...] | None

    @property
    def is_as_returned(self) -> bool:
        """True if the region's output is the model's, as it is."""
        return self.dtype is not None and self.order is None

    def receiver(self) -> Callable[[torch.Tensor], Any]:
        """Return the function that turns the engine's tensor into the region's output."""
        order = self.order
        if self.dtype is None:
            return torch.Tensor.item
        if order is None:
            return lambda tensor: tensor
        return lambda tensor: tensor.permute(order)


@dataclass(frozen=True, slots=True)
class Source:
    """Names in the region that a model was translated from.

    Attributes:
        nodes: The names of the region's nodes, in order.
        symbols: For each placeholder, the symbol that it stands for; empty for a tensor.
    """

    nodes: tuple[str, ...] = ()
    symbols: tuple[str, ...] = ()

    @staticmethod
    def of(gm: torch.fx.GraphModule) -> Source:
        """Return the source of a region that is to be translated."""
        values = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
        symbols = [str(value) if isinstance(value, torch.SymInt) else "" for value in values]
        return Source(tuple(node.name for node in gm.graph.nodes), tuple(symbols))


@dataclass(frozen=True, slots=True)
class OnnxGraph:
    """A region as an ONNX model.

    Attributes:
        model: Its inputs are the placeholders that it reads, weights among them. Dynamic sizes are
            named dimensions, after the symbols of the captured graph.
        inputs: The names of all placeholders, by position, with those that no node reads.
        outputs: The outputs, in the model's order.
        key: The key of the model on disk; empty where it is not kept.
        source: Names in the region that was translated.
        nodes: The names of this region's nodes, by names in ``source``, where this region shares
            the model of an equal one; ``None`` where it was translated itself.
    """

    model: onnx.ModelProto
    inputs: tuple[str, ...]
    outputs: tuple[Output, ...]
    key: str = ""
    source: Source = Source()
    nodes: Mapping[str, str] | None = None

    def node_of(self, name: str) -> str:
        """Return the name of the region's node for a name in ``source``; empty if there is none."""
        return name if self.nodes is None else self.nodes.get(name, "")

    def rounds_to_bfloat16(self) -> bool:
        """True if a node of the model casts to bfloat16."""
        import onnx

        for node in self.model.graph.node:
            attributes = {attribute.name: attribute.i for attribute in node.attribute}
            if node.op_type == "Cast" and attributes["to"] == onnx.TensorProto.BFLOAT16:
                return True
        return False

    def with_weights(self, names: Iterable[str]) -> onnx.ModelProto:
        """Return the model with these inputs as initializers without data.

        The engine gets the data by address. No value is in the protobuf, so its limit of 2 GB does
        not matter.
        """
        import onnx

        chosen = set(names)
        model = onnx.ModelProto()
        model.CopyFrom(self.model)
        for value in [value for value in model.graph.input if value.name in chosen]:
            model.graph.input.remove(value)
            tensor_type = value.type.tensor_type
            model.graph.initializer.append(
                onnx.TensorProto(
                    name=value.name,
                    data_type=tensor_type.elem_type,
                    dims=[dim.dim_value for dim in tensor_type.shape.dim],
                    data_location=onnx.TensorProto.EXTERNAL,
                    external_data=[onnx.StringStringEntryProto(key="location", value="weights")],
                )
            )
        return model


def why_not(node: torch.fx.Node, entries: Operators = MappingProxyType({})) -> str | None:
    """Return why a call cannot be translated to ONNX; ``None`` if it can.

    The translations are those of the exporter's registry and composer's own. ``entries`` has the
    engine's entries.
    """
    values, _ = _torch.tensors.flatten(node.meta.get("val"))
    if any(isinstance(value, torch.SymFloat | torch.SymBool) for value in values):
        return "a symbolic number that is no integer"
    if is_complex(node):
        return "complex numbers"
    sizes = itertools.chain.from_iterable(tensor.shape for tensor in seen_by(node))
    if any(map(_torch.symbols.depends_on_data, sizes)):
        return "a size that only the data tell"
    if node.target is operator.getitem:
        return None
    if graphs_in(node):
        return "a nested graph"
    if draws(node):
        return "random numbers stay torch's"
    if not vocabulary().translates(node.target):
        return "no ONNX translation"
    return why_unsupported(node, entries)


def to_onnx(region: Region, models: Artefacts | None = None) -> OnnxGraph:
    """Translate a region to an ONNX model.

    The model is made once for each captured graph, also if several engines ask for it. It is not
    made at all if an earlier process kept it (:mod:`composer.lowering.export.artefacts`).

    Args:
        region: A part of a functional graph. It is changed.
        models: The models of the build; by default none is shared, and all are kept on disk.

    Raises:
        Refusal: ``failed`` with ``export_failed`` where the exporter fails.
    """
    gm, models = region.gm, models or Artefacts()
    outputs = _plan_outputs(gm)
    source = Source.of(gm)

    def make() -> OnnxGraph:
        return dataclasses.replace(_find_or_translate(gm, outputs, models), source=source)

    made = models.once(graph_key(gm), make)
    if made.source == source:
        return made
    return dataclasses.replace(made, nodes=dict(zip(made.source.nodes, source.nodes, strict=True)))


def _find_or_translate(
    gm: torch.fx.GraphModule, outputs: tuple[Output, ...], models: Artefacts
) -> OnnxGraph:
    """Return the model that is kept on disk for this graph, or make one and keep it."""
    keep_dimensions(gm)
    share_heads(gm)
    join_views(gm)
    if not artefacts.is_enabled(models):
        return _translate(gm, outputs)
    try:
        key = artefacts.key_of("model", f"{torch.get_default_dtype()}\n{exact_text(gm)}")
    except Unsayable as why:
        models.lost.append(str(why))
        return _translate(gm, outputs)
    found = read_model(models, key, outputs)
    if found is not None:
        models.reused += 1
        return found
    values = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    guards = _torch.symbols.guards_on(values)
    made = _translate(gm, outputs)
    if _torch.symbols.guards_on(values) != guards:
        # A process that finds the model on disk would not set these guards.
        models.lost.append("the translation asked how large a size is")
        return made
    return _keep(models, made, key)


def read_model(models: Artefacts, key: str, outputs: tuple[Output, ...]) -> OnnxGraph | None:
    """Return the model that is kept under this key; ``None`` if there is none."""
    entry = artefacts.find(models, key)
    if entry is None or entry.blob is None:
        return None
    import onnx

    model = onnx.ModelProto.FromString(entry.blob)
    return OnnxGraph(model, tuple(entry.facts["inputs"]), outputs, key)


def _keep(models: Artefacts, made: OnnxGraph, key: str) -> OnnxGraph:
    facts = {"kind": "model", "nodes": len(made.model.graph.node), "inputs": made.inputs}
    trouble = artefacts.put(models, key, facts, made.model.SerializeToString())
    if trouble:
        models.lost.append(trouble)
        return made
    models.kept += 1
    return dataclasses.replace(made, key=key)


def _translate(gm: torch.fx.GraphModule, outputs: tuple[Output, ...]) -> OnnxGraph:
    import onnx_ir
    from onnx_ir.passes.common import RemoveUnusedNodesPass

    try:
        model = translator().translate(translator().prepare(gm))
        _settle_casts(model)
        # ONNX Runtime runs nodes without users (tests/backends/onnxrt/test_onnxrt_library.py).
        RemoveUnusedNodesPass()(model)
        _forget_places(model)
    except Exception as error:
        raise Refusal(Status.FAILED, Reason.EXPORT_FAILED, _root_cause(error)) from error
    names = tuple(str(value.name) for value in model.graph.inputs)
    remove_unused_inputs(model)
    return OnnxGraph(onnx_ir.to_proto(model), names, outputs)


def remove_unused_inputs(model: onnx_ir.Model) -> None:
    """Remove the inputs that no node reads: engines refuse a weight that is not read."""
    for value in [value for value in model.graph.inputs if not value.uses()]:
        model.graph.inputs.remove(value)


def _forget_places(model: onnx_ir.Model) -> None:
    """Remove all metadata of nodes but the name of the graph's node that each was made from.

    The exporter writes every line of the user's code that led to a node. That is nine tenths of a
    model's bytes, and ONNX Runtime 1.31 takes a third longer to make a session from the model.
    """
    origin = "pkg.torch.onnx.fx_node"
    for node in model.graph:
        name = node.metadata_props.get(origin, "").partition(" ")[0]
        node.metadata_props.clear()
        if name:
            node.metadata_props[origin] = f"{name} "


def _settle_casts(model: onnx_ir.Model) -> None:
    """Turn each ``CastLike`` into a ``Cast``, where the type is known.

    ``CastLike`` is a function, which ONNX Runtime 1.32 inlines only after it has folded constants
    (microsoft/onnxruntime#17798). A constant that is cast by it, such as a table of positions,
    would be computed at each call.
    """
    import onnx_ir

    for node in model.graph:
        if node.op_type != "CastLike":
            continue
        dtype = _dtype_of(node.inputs[1])
        if dtype is not None:
            node.op_type = "Cast"
            node.resize_inputs(1)
            node.attributes.add(onnx_ir.AttrInt64("to", dtype))


def _dtype_of(value: onnx_ir.Value | None) -> int | None:
    """Return the ONNX type of a value's elements; ``None`` if it is not known.

    The exporter sets types only on values that stand for nodes of the graph. For a value in
    between, the type is known if a ``Cast`` or a constant made it.
    """
    from onnx_ir.convenience import get_const_tensor

    assert value is not None
    made_by = value.producer()
    if value.dtype is not None or made_by is None:
        return value.dtype
    if made_by.op_type == "Cast":
        return made_by.attributes["to"].as_int()
    constant = get_const_tensor(value)
    return None if constant is None else constant.dtype


def _strides(value: torch.Tensor) -> list[int]:
    """Return a tensor's strides in the first call.

    An expanded tensor repeats in memory. For it, the strides of ``torch.empty_like`` are returned,
    since torch draws random numbers for it in that order.
    """
    strides = [*map(_torch.symbols.value_for_strides, value.stride())]
    if 0 in strides:
        strides = [*map(_torch.symbols.value_for_strides, torch.empty_like(value).stride())]
    return strides


def _plan_outputs(gm: torch.fx.GraphModule) -> tuple[Output, ...]:
    """Have the graph return each output in the order of its memory, and return how to undo that.

    An ONNX output is always row-major. By the permutation, any other strides of eager's are
    reproduced.
    """
    (returned,) = gm.graph.find_nodes(op="output")
    plans = [_plan_output(node, returned) for node in returned.args[0]]
    returned.args = (tuple(node for _, node in plans),)
    return tuple(output for output, _ in plans)


def _plan_output(node: torch.fx.Node, returned: torch.fx.Node) -> tuple[Output, torch.fx.Node]:
    """Return one output, and the node that the graph returns for it."""
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor):
        return Output(None, (), None), node
    strides, dims = _strides(value), range(value.dim())
    order = sorted(dims, key=lambda dim: -strides[dim])
    inverse = None
    if order != [*dims]:
        inverse = tuple(map(order.index, dims))
        with node.graph.inserting_before(returned):
            node = node.graph.call_function(torch.ops.aten.permute.default, (node, order))
        node.meta["val"] = value.permute(order)
    sizes = tuple(node.meta["val"].shape)
    return Output(value.dtype, sizes if are_static(sizes) else None, inverse), node


def _root_cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return class_and_text(error)
