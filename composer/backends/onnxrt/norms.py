"""Norms written out, for ONNX Runtime's optimizer.

It makes one operator of a layer norm, or of a root mean square norm, with its weight: a single pass
over the numbers. But it (1.31) takes 1e-5 for an epsilon that is no constant of float32. And it
looks for a quotient, ``x / sqrt(mean(x ** 2) + eps)``, where models multiply by the reciprocal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx

FUSIONS = ("LayerNormFusionL1", "LayerNormFusionL2", "SimplifiedLayerNormFusion")
"""The optimizers."""

_FACTOR = ("Reciprocal", "Sqrt", "Add", "ReduceMean", "Pow")
"""What leads from the factor of a root mean square norm back to ``x``, an operator each."""


def knows_epsilons(model: onnx.ModelProto) -> bool:
    """Whether the optimizer reads all that is added to a mean below a root.

    Args:
        model: With its weights as initializers.
    """
    if _has_graphs_within(model):
        return False
    made_by, constants = _producers(model), set(_constants(model))
    for root in model.graph.node:
        below = made_by.get(root.input[0]) if root.op_type == "Sqrt" else None
        if below is not None and below.op_type == "Add" and constants.isdisjoint(below.input):
            terms = (made_by.get(each) for each in below.input)
            if any(each is not None and each.op_type == "ReduceMean" for each in terms):
                return False
    return True


def divide_by_roots(model: onnx.ModelProto) -> None:
    """Have root mean square norms divide by their root, where nobody else reads the reciprocal.

    Args:
        model: One whose epsilons are known.
    """
    nodes = model.graph.node
    made_by = _producers(model)
    readers = Counter(name for node in nodes for name in node.input)
    readers.update(each.name for each in model.graph.output)
    for node in [each for each in nodes if each.op_type == "Mul"]:
        for x, factor in (tuple(node.input), tuple(reversed(node.input))):
            if readers[factor] == 1 and _is_factor_of(x, factor, made_by):
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


def _producers(model: onnx.ModelProto) -> dict[str, onnx.NodeProto]:
    return {name: node for node in model.graph.node for name in node.output}


def _has_graphs_within(model: onnx.ModelProto) -> bool:
    """Whether a branch or a loop may hold norms of its own, or read any value."""
    attributes = (each for node in model.graph.node for each in node.attribute)
    return any(each.HasField("g") for each in attributes)


def _constants(model: onnx.ModelProto) -> Iterator[str]:
    """Names of all constants of float32."""
    import onnx

    single = onnx.TensorProto.FLOAT
    yield from (each.name for each in model.graph.initializer if each.data_type == single)
    for node in model.graph.node:
        if node.op_type == "Constant":
            (value,) = node.attribute
            if value.name == "value_float" or value.t.data_type == single:
                yield node.output[0]
