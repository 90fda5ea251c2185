"""The values of an ONNX model, by name: which nodes make and read them, their types and numbers.

``onnx_ir`` knows all this, too. Its import would take 0.2 s of a warm start, where nothing else
needs it.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    import onnx


class Type(NamedTuple):
    """A number of ``onnx.TensorProto.DataType``, and the sizes: numbers or names of symbols.

    The number 0 stands for an unknown dtype or size.
    """

    dtype: int = 0
    shape: tuple[int | str, ...] = ()


class Values:
    """The values of a model, as they are when this object is made."""

    def __init__(self, model: onnx.ModelProto) -> None:
        graph = model.graph
        self.types: dict[str, Type] = defaultdict(Type)
        """The type of each value, as far as the model states it."""
        for each in itertools.chain(graph.input, graph.value_info, graph.output):
            tensor = each.type.tensor_type
            sizes = [dim.dim_param or dim.dim_value for dim in tensor.shape.dim]
            self.types[each.name] = Type(tensor.elem_type, tuple(sizes))
        self.initializers = {each.name for each in graph.initializer}
        """The names of the initializers."""
        for each in graph.initializer:
            self.types[each.name] = Type(each.data_type, tuple(each.dims))
        self._producers: dict[str, onnx.NodeProto] = {}
        self.users: dict[str, list[onnx.NodeProto]] = defaultdict(list)
        """The nodes that read each value. A node that reads it twice is there twice."""
        for node in graph.node:
            self._producers.update(dict.fromkeys(node.output, node))
            for name in node.input:
                self.users[name].append(node)
        self._results = {each.name for each in graph.output}

    def producer(self, name: str, *op_types: str) -> onnx.NodeProto | None:
        """The node that makes a value, if its operator is one of these; else ``None``."""
        node = self._producers.get(name)
        return node if node is not None and node.op_type in op_types else None

    def has_one_use(self, name: str) -> bool:
        """True if one operand of one node reads a value, and the model does not return it."""
        return len(self.users[name]) == 1 and name not in self._results

    def constant(self, name: str) -> np.ndarray | None:
        """The value that a ``Constant`` node makes; ``None`` for any other value."""
        import numpy as np
        import onnx

        node = self.producer(name, "Constant")
        if node is None:
            return None
        (value,) = attributes(node).values()
        is_tensor = isinstance(value, onnx.TensorProto)
        return onnx.numpy_helper.to_array(value) if is_tensor else np.asarray(value)

    def is_number(self, name: str) -> bool:
        """True for an initializer or a constant that has one element."""
        if name in self.initializers:
            return math.prod(self.types[name].shape) == 1
        array = self.constant(name)
        return array is not None and array.size == 1


def attributes(node: onnx.NodeProto) -> dict[str, Any]:
    """The attributes of a node, by name."""
    import onnx

    return {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}


def drop_unread(model: onnx.ModelProto) -> None:
    """Remove the nodes whose results nothing reads.

    ONNX Runtime 1.32 would run them (``test_nodes_are_still_run_whose_results_nothing_reads``).
    """
    read = {each.name for each in model.graph.output}
    kept = []
    for node in reversed(model.graph.node):
        if not read.isdisjoint(node.output):
            read.update(node.input)
            kept.append(node)
    kept.reverse()
    del model.graph.node[:]
    model.graph.node.extend(kept)
