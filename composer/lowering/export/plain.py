"""Simplifies an ONNX model, for engines whose parsers support only a part of the standard.

ONNX Runtime inlines functions, folds constants and reads sequences by itself. TensorRT's parser
needs axes, shapes and splits as constants, and sizes that come from the shapes of tensors. It reads
neither functions nor sequences. OpenVINO's reader takes more nodes of such a model, too. onnxscript
does the folding.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
import torch.fx

from composer import _torch
from composer.errors import Refusal, class_and_text
from composer.lowering.export.onnx import OnnxGraph, remove_unused_inputs
from composer.records import Reason, Status

if TYPE_CHECKING:
    import onnx_ir

Precision = Literal["fp32", "fp16", "bf16"]

_PRODUCTS = ("MatMul", "Gemm", "Conv", "ConvTranspose")
"""Operators computed in low precision: operands are rounded, sums are kept in float32."""

_LOW = {"fp16": "FLOAT16", "bf16": "BFLOAT16"}
_NODE = re.compile(r"%(\w+) ")


@dataclass(frozen=True, slots=True)
class PlainOnnx:
    """A simplified model, and where its nodes come from.

    Attributes:
        graph: The model.
        origins: For each node of the model, the name of the node in ``graph.source`` that it was
            translated from; ``None`` where that is not known.
    """

    graph: OnnxGraph
    origins: tuple[str | None, ...]


def to_plain(graph: OnnxGraph, precision: Precision = "fp32") -> PlainOnnx:
    """Simplify a model; the result has the same bytes in every process.

    Args:
        graph: The model; it is not changed.
        precision: The precision for matrix products and convolutions of float32 operands.

    Raises:
        Refusal: ``failed`` with ``export_failed`` where onnxscript's folding fails.
    """
    import numpy as np
    import onnx_ir
    from onnx_ir.passes.common import RemoveUnusedFunctionsPass, RemoveUnusedOpsetsPass
    from onnxscript import optimizer

    model = onnx_ir.from_proto(graph.model)
    try:
        with np.errstate(all="ignore"):  # a constant may well be infinite
            optimizer.inline(model)
            optimizer.fold_constants(model)
        _read_sizes_off(model, dict(zip(graph.inputs, graph.source.symbols, strict=True)))
        if precision != "fp32":
            _compute_products_in(model, onnx_ir.DataType[_LOW[precision]])
        optimizer.remove_unused_nodes(model)
        RemoveUnusedFunctionsPass()(model)  # type: ignore[no-untyped-call]  # onnx_ir's own
        RemoveUnusedOpsetsPass()(model)
    except Exception as error:
        raise Refusal(Status.FAILED, Reason.EXPORT_FAILED, class_and_text(error)) from error
    remove_unused_inputs(model)
    origins = tuple(map(_origin, model.graph))
    _forget_where_it_came_from(model)
    return PlainOnnx(dataclasses.replace(graph, model=onnx_ir.to_proto(model)), origins)


def _read_sizes_off(model: onnx_ir.Model, symbols: Mapping[str, str]) -> None:
    """Compute each symbol's value from the shape of an input tensor, where one has the symbol.

    Otherwise the symbol would be an input of its own. Such an input would have to be in the host's
    memory and would need a range of values.
    """
    import onnx_ir

    found: dict[str, tuple[onnx_ir.Value, int]] = {}
    for value in model.graph.inputs:
        for axis, size in enumerate(value.shape or ()):
            if isinstance(size, onnx_ir.SymbolicDim):
                found.setdefault(str(size.value), (value, axis))
    for value in model.graph.inputs:
        symbol = symbols.get(str(value.name), "")
        if symbol not in found or not value.uses():
            continue
        tensor, axis = found[symbol]
        shape = onnx_ir.node("Shape", [tensor], {"start": axis, "end": axis + 1})
        number = onnx_ir.node("Squeeze", [shape.outputs[0]])
        number.outputs[0].dtype = onnx_ir.DataType.INT64
        value.replace_all_uses_with(number.outputs[0])
        model.graph.insert_before(model.graph[0], [shape, number])


def _compute_products_in(model: onnx_ir.Model, low: onnx_ir.DataType) -> None:
    """Cast the operands of float32 products to ``low``, and the results back to float32."""
    import onnx_ir
    from onnx_ir.passes.common import ShapeInferencePass

    ShapeInferencePass()(model)
    wide, lowered = onnx_ir.DataType.FLOAT, dict[onnx_ir.Value, onnx_ir.Value]()
    for node in [each for each in model.graph if each.op_type in _PRODUCTS and not each.domain]:
        (result,) = node.outputs
        if result.dtype is not wide:
            continue
        for index, operand in enumerate(node.inputs):
            if operand is None:
                continue
            if operand not in lowered:
                cast = onnx_ir.node("Cast", [operand], {"to": low})
                model.graph.insert_before(node, cast)
                lowered[operand] = cast.outputs[0]
            node.replace_input_with(index, lowered[operand])
        _widen(model, node, result, wide)
        result.dtype = low


def _widen(
    model: onnx_ir.Model, node: onnx_ir.Node, result: onnx_ir.Value, wide: onnx_ir.DataType
) -> None:
    import onnx_ir

    cast = onnx_ir.node("Cast", [result], {"to": wide})
    (widened,) = cast.outputs
    widened.dtype, widened.shape = wide, result.shape
    result.replace_all_uses_with(widened, replace_graph_outputs=True)
    cast.replace_input_with(0, result)
    result.name, widened.name = f"{result.name}_low", result.name
    model.graph.insert_after(node, cast)


def _origin(node: onnx_ir.Node) -> str | None:
    match = _NODE.match(node.metadata_props.get("pkg.torch.onnx.fx_node", ""))
    return match[1] if match else None


def _forget_where_it_came_from(model: onnx_ir.Model) -> None:
    """Remove paths and lines of the user's code, which differ between machines."""
    values = itertools.chain.from_iterable(node.outputs for node in model.graph)
    for part in (model, model.graph, *model.graph, *model.graph.inputs, *values):
        part.metadata_props.clear()
        part.doc_string = None


def shapes_with_symbols(
    graph: OnnxGraph, gm: torch.fx.GraphModule
) -> dict[str, tuple[int | torch.SymInt, ...]]:
    """Return the shapes, by name, of the model's input tensors with symbolic sizes."""
    inputs = {each.name for each in graph.model.graph.input}
    shapes: dict[str, tuple[int | torch.SymInt, ...]] = {}
    for name, node in zip(graph.inputs, gm.graph.find_nodes(op="placeholder"), strict=True):
        value = node.meta["val"]
        if name not in inputs or not isinstance(value, torch.Tensor):
            continue
        if any(map(_torch.symbols.symbols, value.shape)):
            shapes[name] = tuple(value.shape)
    return shapes
