"""The shared ONNX model as an OpenVINO model; weights are passed by address."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from composer.backends.openvino import library
from composer.backends.openvino.memory import as_tensor
from composer.lowering.export.onnx import OnnxGraph


@dataclass(frozen=True, slots=True)
class Model:
    """An OpenVINO model, and the ONNX graph it was made from.

    ``read`` is ``None`` if OpenVINO could not read the graph.
    """

    read: Any
    graph: OnnxGraph


def read_model(graph: OnnxGraph) -> Model:
    """Read an ONNX model, whose weights are inputs, with OpenVINO.

    OpenVINO's reader (2026.4) gives an input the name of a node that does nothing to it, such as a
    maximum of one tensor. The tensor of the input keeps all its names, so the input gets its own
    name back.

    Raises:
        RuntimeError: OpenVINO cannot convert a node.
    """
    read = library.core().read_model(graph.model.SerializeToString())
    names = set(graph.inputs)
    for parameter in read.get_parameters():
        (parameter.friendly_name,) = parameter.output(0).get_names() & names
    return Model(read, graph)


def unread_nodes(graph: OnnxGraph) -> dict[int, str]:
    """Return why OpenVINO does not convert nodes, by node index; empty if it converts all."""
    frontend = library.openvino().frontend.FrontEndManager().load_by_framework("onnx")
    loaded = frontend.load(io.BytesIO(graph.model.SerializeToString()))
    nodes = graph.model.graph.node
    position = {name: i for i, node in enumerate(nodes) for name in (*node.output, node.name)}
    found: dict[int, str] = {}
    for node in frontend.convert_partially(loaded).get_ops():
        if node.get_type_name() == "NotSupportedONNXNode":
            index = position[node.friendly_name]
            found[index] = f"OpenVINO does not convert {nodes[index].op_type}"
    return found


def with_weights(model: Model, weights: Mapping[str, torch.Tensor]) -> Any:
    """Return a copy of the model in which these inputs are constants over the tensors' memory.

    No value enters the protobuf, so its limit of 2 GB does not apply. The compiled model keeps its
    own copy of the weights, in the layout of the device. The tensors are contiguous, and must live
    until the model is compiled.
    """
    openvino = library.openvino()
    copy = model.read.clone()
    taken: set[int] = set()
    for parameter in copy.get_parameters():
        tensor = weights.get(parameter.friendly_name)
        if tensor is not None:
            shares = tensor.data_ptr() not in taken
            taken.add(tensor.data_ptr())
            constant = openvino.op.Constant(as_tensor(tensor), shared_memory=shares)
            parameter.output(0).replace(constant.output(0))
            copy.remove_parameter(parameter)
    copy.validate_nodes_and_infer_types()
    return copy
