"""Norms written out, as ONNX Runtime's operator for them: a single pass over the numbers.

Its optimizer makes that operator, too, but (1.31) of much that is no norm: of other powers than
squares, of quotients upside down, of ``mean - x``; and it takes 1e-5 for epsilons that it cannot
read. So it is not asked. What is a norm beyond doubt is rewritten here: over the last dimension, of
float32, with a constant epsilon and a weight, as ``LayerNormalization``

    centred = x - mean(x);  centred / sqrt(mean(centred ** 2) + epsilon) * weight [+ bias]

and, without the subtraction and the bias, as ``SimplifiedLayerNormalization``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import onnx

FUSIONS = ("LayerNormFusionL1", "LayerNormFusionL2", "SimplifiedLayerNormFusion")
"""The optimizers that are not asked."""


class _Norm(NamedTuple):
    """What is normalised, by the names of its values."""

    x: str
    epsilon: float
    centred: bool


def fuse_norms(model: onnx.ModelProto) -> None:
    """Rewrite each norm whose parts nobody else reads.

    Args:
        model: With its weights as initializers.
    """
    if any(each.HasField("g") for node in model.graph.node for each in node.attribute):
        return  # a graph within, which may read any value
    values = _Values(model)
    changed = [_fuse(node, values) for node in model.graph.node if node.op_type == "Mul"]
    if any(changed):
        _drop_unread(model)


def _fuse(scaled: onnx.NodeProto, values: _Values) -> bool:
    """Make the operator of ``normalised * weight``, or of the sum that adds a bias to it."""
    import onnx

    for normalised, weight in _both_ways(scaled):
        norm = values.norm(normalised)
        if norm is None or not values.is_along_last(weight, norm.x):
            continue
        last, inputs = scaled, [norm.x, weight]
        if norm.centred and (biased := values.biased(scaled, norm.x)):
            last, bias = biased
            inputs.append(bias)
        last.op_type = "LayerNormalization" if norm.centred else "SimplifiedLayerNormalization"
        last.input[:] = inputs
        last.attribute.append(onnx.helper.make_attribute("axis", -1))
        last.attribute.append(onnx.helper.make_attribute("epsilon", norm.epsilon))
        return True
    return False


class _Values:
    """The values of a model, by name."""

    def __init__(self, model: onnx.ModelProto) -> None:
        graph = model.graph
        self._made_by = {name: node for node in graph.node for name in node.output}
        self._readers = Counter(name for node in graph.node for name in node.input)
        self._readers.update(each.name for each in graph.output)
        self._only_reader = {name: node for node in graph.node for name in node.input}
        self._shapes = dict(_shapes(model))
        self._numbers = dict(_numbers(model))

    def norm(self, name: str) -> _Norm | None:
        """Of the value before its weight; ``None`` where it is none."""
        for numerator, root in self._quotients(name):
            sum_ = self._part(self._input(root, "Sqrt"), "Add")
            for mean, epsilon in _both_ways(sum_):
                square = self._part(self._mean_over_last(mean, numerator), "Pow", "Mul")
                if square is None or epsilon not in self._numbers or not self._squares(square):
                    continue
                if self._same(square.input[0], numerator):
                    x = self._centred(numerator)
                    return _Norm(x or numerator, self._numbers[epsilon], x is not None)
        return None

    def is_along_last(self, name: str, x: str) -> bool:
        """Whether a vector has a number for each of the last dimension of ``x``."""
        shape, last = self._shapes.get(name), self._shapes.get(x, ())[-1:]
        return shape is not None and len(shape) == 1 and shape == last

    def biased(self, scaled: onnx.NodeProto, x: str) -> tuple[onnx.NodeProto, str] | None:
        """The sum that alone reads a scaled norm, and the bias that it adds."""
        (name,) = scaled.output
        reader = self._only_reader.get(name) if self._readers[name] == 1 else None
        if reader is not None and reader.op_type == "Add":
            for summand, bias in _both_ways(reader):
                if summand == name and self.is_along_last(bias, x):
                    return reader, bias
        return None

    def _part(self, name: str | None, *op_types: str) -> onnx.NodeProto | None:
        """What makes a value for one reader only."""
        node = self._made_by.get(name) if name and self._readers[name] == 1 else None
        return node if node is not None and node.op_type in op_types else None

    def _input(self, name: str, op_type: str) -> str | None:
        node = self._part(name, op_type)
        return None if node is None else node.input[0]

    def _quotients(self, name: str) -> Iterator[tuple[str, str]]:
        """What the value is a quotient of: ``x / root`` or ``x * (1 / root)``."""
        node = self._part(name, "Div", "Mul")
        if node is not None and node.op_type == "Div":
            yield node.input[0], node.input[1]
        elif node is not None:
            for numerator, factor in _both_ways(node):
                if root := self._input(factor, "Reciprocal"):
                    yield numerator, root

    def _mean_over_last(self, name: str, like: str) -> str | None:
        """What a value of the rank of ``like`` is the mean of over the last dimension, kept."""
        node = self._made_by.get(name)
        if node is None or node.op_type != "ReduceMean" or like not in self._shapes:
            return None
        if any(each.name == "keepdims" and not each.i for each in node.attribute):
            return None
        rank = len(self._shapes[like])
        axis = self._numbers.get(self._reshaped(node.input[1])) if len(node.input) > 1 else None
        return node.input[0] if rank and axis in (-1, rank - 1) else None

    def _reshaped(self, name: str) -> str:
        """The exporter makes a list of a dimension by a reshape."""
        node = self._made_by.get(name)
        return node.input[0] if node is not None and node.op_type == "Reshape" else name

    def _squares(self, node: onnx.NodeProto) -> bool:
        base, other = node.input
        return base == other if node.op_type == "Mul" else self._numbers.get(other) == 2

    def _same(self, one: str, other: str) -> bool:
        """Models subtract the mean twice."""
        return one == other or ((x := self._centred(one)) is not None and x == self._centred(other))

    def _centred(self, name: str) -> str | None:
        """The ``x`` of a value that is ``x - mean(x)``."""
        node = self._made_by.get(name)
        if node is None or node.op_type != "Sub":
            return None
        x, mean = node.input
        return x if self._mean_over_last(mean, x) == x else None


def _both_ways(node: onnx.NodeProto | None) -> Iterator[tuple[str, str]]:
    """The operands of an operator that does not mind their order."""
    if node is not None:
        one, other = node.input
        yield one, other
        yield other, one


def _shapes(model: onnx.ModelProto) -> Iterator[tuple[str, tuple[int | str, ...]]]:
    """Of values of float32: sizes, or names of sizes."""
    import onnx

    single, graph = onnx.TensorProto.FLOAT, model.graph
    yield from ((e.name, tuple(e.dims)) for e in graph.initializer if e.data_type == single)
    for each in [*graph.input, *graph.value_info, *graph.output]:
        kind = each.type.tensor_type
        if kind.elem_type == single and kind.HasField("shape"):
            sizes = [each.dim_param or each.dim_value for each in kind.shape.dim]
            if all(sizes):
                yield each.name, tuple(sizes)


def _numbers(model: onnx.ModelProto) -> Iterator[tuple[str, float]]:
    """Of constants that hold one, and of vectors of one."""
    from onnx import numpy_helper

    for node in model.graph.node:
        if node.op_type == "Constant":
            (value,) = node.attribute
            if value.HasField("t") and len(value.t.dims) < 2:
                array = numpy_helper.to_array(value.t)
                if array.size == 1:
                    yield node.output[0], array.item()
            elif value.name == "value_float":
                yield node.output[0], value.f
            elif value.name == "value_int":
                yield node.output[0], value.i
            elif value.name == "value_ints" and len(value.ints) == 1:
                yield node.output[0], value.ints[0]


def _drop_unread(model: onnx.ModelProto) -> None:
    """ONNX Runtime runs what nobody reads."""
    nodes = model.graph.node
    read = {each.name for each in model.graph.output}
    kept = []
    for node in reversed(nodes):
        if not read.isdisjoint(node.output):
            read.update(node.input)
            kept.append(node)
    kept.reverse()
    del nodes[:]
    nodes.extend(kept)
