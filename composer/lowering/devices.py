"""Finds the devices of a graph, and the calls with tensors on another device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.fx

from composer.graphs.nodes import tensors_of

WHY = "a tensor on another device"


def devices_of(example_inputs: Iterable[Any]) -> list[torch.device]:
    """Return the devices of the tensors among a graph's inputs, each once.

    A tensor without dimensions may be a number that Dynamo passes as a tensor. It is then on the
    CPU, whatever the graph's device. So such tensors count only if there are no others.
    """
    tensors = [each for each in example_inputs if isinstance(each, torch.Tensor)]
    with_dimensions = [tensor for tensor in tensors if tensor.dim()]
    counting = with_dimensions or tensors
    return [*dict.fromkeys(tensor.device for tensor in counting)]


def elsewhere(gm: torch.fx.GraphModule, home: torch.device) -> set[torch.fx.Node]:
    """Return the calls of a functional graph that read or return a tensor on another device.

    A constant may be on the CPU, unless it is returned: an engine on a GPU computes it where it
    needs it.

    Args:
        gm: The graph.
        home: The device on which the engine reads its inputs and leaves its outputs.
    """
    (returned,) = gm.graph.find_nodes(op="output")
    constants: set[torch.fx.Node] = set()
    foreign: set[torch.fx.Node] = set()
    found: set[torch.fx.Node] = set()
    for node in gm.graph.nodes:
        is_call = node.op == "call_function"
        operands = node.all_input_nodes
        allowed = {home}
        if node.op == "get_attr" or (is_call and constants.issuperset(operands)):
            constants.add(node)
            if returned not in node.users:
                allowed.add(torch.device("cpu"))
        if any(tensor.device not in allowed for tensor in tensors_of(node)):
            foreign.add(node)
        if is_call and not foreign.isdisjoint((node, *operands)):
            found.add(node)
    return found
