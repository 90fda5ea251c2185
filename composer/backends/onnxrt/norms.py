"""Root mean square norms, for ONNX Runtime's optimizer.

It makes one ``SimplifiedLayerNormalization`` of such a norm and its weight, a single pass over the
numbers. But it (1.31) looks for a quotient, ``x / sqrt(mean(x ** 2) + eps)``, where models multiply
by the reciprocal, and the kernel for float64 is right to float32 only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx

FUSION = "SimplifiedLayerNormFusion"
"""The optimizer."""

_FACTOR = ("Reciprocal", "Sqrt", "Add", "ReduceMean", "Pow")
"""What leads from a norm's factor back to ``x``, an operator each."""


def divide_by_roots(model: onnx.ModelProto) -> None:
    """Have norms in float32 divide by their root, where nobody else reads the reciprocal.

    Args:
        model: With its weights as initializers.
    """
    nodes = model.graph.node
    if any(each.HasField("g") for node in nodes for each in node.attribute):
        return  # a graph within, which may read any value
    made_by = {name: node for node in nodes for name in node.output}
    readers = Counter(name for node in nodes for name in node.input)
    readers.update(each.name for each in model.graph.output)
    single = _values_of(model, "FLOAT")
    for node in [each for each in nodes if each.op_type == "Mul"]:
        for x, factor in (tuple(node.input), tuple(reversed(node.input))):
            if x in single and readers[factor] == 1 and _is_factor_of(x, factor, made_by):
                reciprocal = made_by[factor]
                node.op_type, node.input[:] = "Div", [x, reciprocal.input[0]]
                nodes.remove(reciprocal)
                break


def _is_factor_of(x: str, factor: str, made_by: Mapping[str, onnx.NodeProto]) -> bool:
    """Whether the factor is the reciprocal of the root of a mean of ``x`` to some power."""
    name = factor
    for op_type in _FACTOR:
        node = made_by.get(name)
        if node is None or node.op_type != op_type:
            return False
        name = node.input[0]
    return name == x


def may_have_norms_in_float64(model: onnx.ModelProto) -> bool:
    """Whether there is a root of float64 numbers, of which the fusion could lose the digits."""
    double = _values_of(model, "DOUBLE")
    return any(each.op_type == "Sqrt" and each.input[0] in double for each in model.graph.node)


def _values_of(model: onnx.ModelProto, kind: str) -> set[str]:
    """The names of all values of this type but weights."""
    import onnx

    values: Iterable[onnx.ValueInfoProto] = (*model.graph.input, *model.graph.value_info)
    asked = onnx.TensorProto.DataType.Value(kind)
    return {each.name for each in values if each.type.tensor_type.elem_type == asked}
