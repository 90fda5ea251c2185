"""The shared ONNX model as an OpenVINO model; weights are passed by address."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch

from composer.backends.onnx_engine import (
    NodesRefused,
    OnnxBuild,
    OnnxGraph,
    OnnxRegion,
    multiplies_bf16,
    to_plain,
)
from composer.backends.openvino import library
from composer.backends.openvino.memory import as_tensor
from composer.backends.openvino.settings import Settings
from composer.backends.openvino.wide import in_float32


def read_region(model: OnnxRegion, build: OnnxBuild[Settings]) -> Any:
    """Read the model of a region with OpenVINO.

    If the reader rejects the model, it is translated again to plain ONNX. Plain ONNX may be
    accepted, and each of its nodes is known to come from one node of the graph.

    Raises:
        NodesRefused: OpenVINO converts some nodes neither way.
    """
    try:
        read = read_model(model.graph)
    except RuntimeError:
        plain = to_plain(model.graph)
        unread = unread_nodes(plain.graph)
        if unread:
            raise NodesRefused(plain, unread) from None
        read = read_model(plain.graph)
    is_narrow = precision_of(model, build) == "bf16" and build.settings.device == "CPU"
    if is_narrow and multiplies_bf16():
        return in_float32(read, model.names(model.weights + model.constants))
    return read


def precision_of(model: OnnxRegion, build: OnnxBuild[Settings]) -> str:
    """Return the precision to compute float32 in; ``"int8"`` is float32 with weights of 8 bits.

    The option takes precedence over the policy, but for a region that has to keep float32.
    """
    if model.keeps_float32:
        return "fp32"
    return build.settings.precision or build.terms.precision


def read_model(graph: OnnxGraph) -> Any:
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
    return read


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


def with_weights(read: Any, weights: Mapping[str, torch.Tensor]) -> Any:
    """Return a copy of a model in which these inputs are constants over the tensors' memory.

    No value enters the protobuf, so its limit of 2 GB does not apply. The compiled model keeps its
    own copy of the weights, in the layout of the device. The tensors are contiguous, and must live
    until the model is compiled.
    """
    openvino = library.openvino()
    copy = read.clone()
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
