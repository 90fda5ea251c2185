"""Turns an ONNX model into TensorRT's network, or into the nodes that its parser refuses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from composer.backends.tensorrt.library import Library
from composer.backends.tensorrt.log import Lines
from composer.errors import Refusal
from composer.lowering.export.onnx import OnnxGraph
from composer.records import Reason, Status

if TYPE_CHECKING:
    import onnx

INLINE = 1 << 30
"""Most bytes of weights that are copied into a model.

The limit of a protobuf is twice as large.
"""


@dataclass(frozen=True, slots=True)
class Parsed:
    """A network and the objects that must live as long as it, or why there is no network.

    Attributes:
        builder: TensorRT's builder.
        parser: TensorRT's parser.
        network: The network; ``None`` if the parser failed.
        refused: Why the parser refuses nodes of the model, by node index.
        error: What is wrong with the whole model, if there is no network and no refused node.
    """

    builder: Any
    parser: Any
    network: Any
    refused: dict[int, str]
    error: Refusal | None


def parse(
    library: Library, graph: OnnxGraph, weights: Mapping[str, torch.Tensor], lines: Lines
) -> Parsed:
    """Parse a model whose weights are in host memory; they are passed by address.

    The weights are contiguous tensors by name. They must live until a plan is built.

    Raises:
        Refusal: TensorRT makes no builder.
    """
    builder, network, parser = _fresh(library, lines)
    model = graph.with_weights(weights)
    read = weights_of(model, weights)
    if load_by_address(parser, model, read) and parser.parse_model_proto():
        return Parsed(builder, parser, network, {}, None)
    refused = dict(_errors(parser))
    if sum(tensor.nbytes for tensor in read.values()) < INLINE:
        refused |= _unsupported(library, inlined(model, read), lines)
    error = lines.refusal("TensorRT's parser fails", Reason.EXPORT_FAILED)
    return Parsed(builder, parser, None, refused, None if refused else error)


def weights_of(
    model: onnx.ModelProto, weights: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the weights that the model reads."""
    names = [each.name for each in model.graph.initializer]
    return {name: weights[name] for name in names if name in weights}


def load_by_address(
    reader: Any, model: onnx.ModelProto, weights: Mapping[str, torch.Tensor]
) -> bool:
    """Give a parser or a refitter a model and the addresses of its weights; false if it fails."""
    if not reader.load_model_proto(model.SerializeToString(), None):
        return False
    return all(
        reader.load_initializer(name, tensor.data_ptr(), tensor.nbytes)
        for name, tensor in weights.items()
    )


def _fresh(library: Library, lines: Lines) -> tuple[Any, Any, Any]:
    trt = library.module
    try:
        builder = trt.Builder(library.log)
        network = builder.create_network(creation_flags(trt))
        return builder, network, trt.OnnxParser(network, library.log)
    except TypeError as error:  # raised where a factory returns null
        raise lines.refusal("TensorRT makes no builder") from error


def creation_flags(trt: Any) -> int:
    """Return the flags for a network whose dtypes are those of the model.

    From version 11 on, and in TensorRT for RTX, all networks are strongly typed without a flag.
    """
    if "FP16" not in trt.BuilderFlag.__members__:
        return 0
    return 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)


def _unsupported(library: Library, model: bytes, lines: Lines) -> dict[int, str]:
    """Return all nodes that the parser would refuse, not only the first one.

    The parser may report a refused subgraph because of one node in it. So subgraphs count only if
    the parser names no nodes.
    """
    _, _, parser = _fresh(library, lines)
    if parser.supports_model_v2(model, None):
        return {}
    refused = dict(_errors(parser))
    if refused:
        return refused
    why = f": {lines.first_error}" if lines.first_error else ""
    for index in range(parser.num_subgraphs):
        if not parser.is_subgraph_supported(index):
            message = f"TensorRT's parser refuses its subgraph{why}"
            refused |= dict.fromkeys(parser.get_subgraph_nodes(index), message)
    return refused


def _errors(parser: Any) -> Iterator[tuple[int, str]]:
    errors = [parser.get_error(index) for index in range(parser.num_errors)]
    for error in errors:
        if error.node() < 0:
            continue
        text = " ".join(error.desc().split())
        why = f": {text}" if text not in ("", "false") else ""
        yield error.node(), f"TensorRT's parser refuses {error.node_operator()}{why}"


def inlined(model: onnx.ModelProto, weights: Mapping[str, torch.Tensor]) -> bytes:
    """Return the serialized model with the values of the weights in it."""
    import onnx

    for each in model.graph.initializer:
        if each.name in weights:
            each.raw_data = weights[each.name].reshape(-1).view(torch.uint8).numpy().tobytes()
            each.ClearField("external_data")
            each.data_location = onnx.TensorProto.DEFAULT
    data: bytes = model.SerializeToString()
    return data


def require_no_host_inputs(inputs: Iterable[Any]) -> None:
    """Refuse inputs whose values give a shape; sizes must come from the shapes of tensors.

    Raises:
        Refusal: ``declined`` with ``dynamic_shape``.
    """
    names = [each.name for each in inputs if each.is_shape_tensor]
    if names:
        message = f"{', '.join(names)} gives a size that no input tensor has"
        raise Refusal(Status.DECLINED, Reason.DYNAMIC_SHAPE, message)
