"""The shared ONNX model as a model of OpenVINO's, weights by address."""

from __future__ import annotations

import io
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from composer.backends.openvino.library import core
from composer.backends.openvino.memory import as_tensor
from composer.lowering.onnx import OnnxGraph


@dataclass(frozen=True, slots=True)
class Model:
    """What OpenVINO read, and what it was made from; nothing where it could not be read."""

    read: Any
    graph: OnnxGraph


def read_model(graph: OnnxGraph) -> Model:
    """Have OpenVINO read a model whose weights are inputs.

    Raises:
        RuntimeError: OpenVINO's own, where it cannot convert a node.
    """
    return Model(core().read_model(graph.model.SerializeToString()), graph)


def unread_nodes(graph: OnnxGraph) -> dict[int, str]:
    """Why nodes of a model are not converted, by their index; empty where all are."""
    from openvino.frontend import FrontEndManager

    frontend = FrontEndManager().load_by_framework("onnx")
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
    """A copy of the model in which these inputs are constants over the memory of the tensors.

    No value enters the protobuf, so its limit of 2 GB never matters. What is compiled from it keeps
    a copy of its own, laid out as the device likes it, and the tensors must live until then.

    Args:
        model: The model.
        weights: Contiguous tensors by the names of the inputs.
    """
    import openvino

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


_SAME_MEMORY = {"Transpose", "Reshape", "Squeeze", "Unsqueeze"}
"""Nodes that hand a weight on to a product without a copy."""


def read_in_several_ways(model: Model, weights: Collection[str]) -> set[str]:
    """Weights that products read both transposed and as they are, or in other shapes.

    OpenVINO (2026.4) knows what it laid out for a product by the address of the weight, and takes
    what it made of the transposed one for the other. What is an input is laid out at every call.

    Args:
        model: The model.
        weights: Names of its inputs that stay as they are.
    """
    found: set[str] = set()
    for parameter in model.read.get_parameters():
        if parameter.friendly_name in weights:
            ways: dict[str, set[str]] = {}
            _collect(parameter.output(0), "", "", ways)
            if any(len(each) > 1 for each in ways.values()):
                found.add(parameter.friendly_name)
    return found


def _collect(value: Any, made: str, seen: str, ways: dict[str, set[str]]) -> None:
    """By how a tensor was made of a weight, how products read it.

    Args:
        value: The weight, or what was made of it.
        made: How its memory was made.
        seen: How that is seen since.
        ways: What is collected.
    """
    for reader in value.get_target_inputs():
        node, way = reader.get_node(), _way(reader)
        if "Convolution" in node.get_type_name():
            ways.setdefault(made, set()).add(f"{seen}{node.get_type_name()}")
        elif node.get_type_name() == "MatMul":
            ways.setdefault(made, set()).add(f"{seen}{way}")
        elif node.get_type_name() in _SAME_MEMORY:
            _collect(node.output(0), made, f"{seen}{way}", ways)
        elif _is_constant(node, value.get_node()):
            for output in node.outputs():
                _collect(output, f"{made}{seen}{way}{output.get_index()}", "", ways)


def _is_constant(node: Any, weight: Any, depth: int = 4) -> bool:
    """Whether nothing but constants goes into a node beside what is made of a weight."""
    others = [each.get_node() for each in node.input_values()]
    return bool(others) and all(
        each.get_type_name() == "Constant"
        or each.get_name() == weight.get_name()
        or (depth > 0 and _is_constant(each, weight, depth - 1))
        for each in others
    )


def _way(reader: Any) -> str:
    """How a node reads one of its inputs: what it is, by which axes or shape, at which place."""
    node = reader.get_node()
    given = (each.get_node() for each in node.input_values())
    said = [
        each.get_data().tolist()
        for each in given
        if each.get_type_name() == "Constant" and len(each.get_output_shape(0)) < 2
    ]
    return f"{node.get_type_name()} {node.get_attributes()} {said} {reader.get_index()}; "
