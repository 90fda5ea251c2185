"""Fuse the nodes of a norm into the one operator that ONNX Runtime has for it.

The fused operator is faster: it reads the elements once.

This module fuses norms over the last dimension, in float32, with a constant epsilon and a weight.
The following becomes ``LayerNormalization``:

    centred = x - mean(x);  centred / sqrt(mean(centred ** 2) + epsilon) * weight [+ bias]

The same without the subtraction and the bias becomes ``SimplifiedLayerNormalization``.

ONNX Runtime's own optimizers for norms are disabled, since those of ONNX Runtime 1.31 are wrong:

- They also fuse graphs that are not norms: with powers other than 2, with a quotient whose operands
  are swapped, or with ``mean - x`` in place of ``x - mean``.
- They use 1e-5 where they cannot read the epsilon.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import onnx

FUSIONS = ("LayerNormFusionL1", "LayerNormFusionL2", "SimplifiedLayerNormFusion")
"""ONNX Runtime's optimizers for norms, which are disabled."""


class _Norm(NamedTuple):
    """A norm without its weight and bias.

    Attributes:
        x: The name of the value that is normalised.
        epsilon: The number added under the root.
        centred: Whether the mean is subtracted.
    """

    x: str
    epsilon: float
    centred: bool


def fuse_norms(model: onnx.ModelProto) -> None:
    """Replace each norm by one operator, if nothing else reads its intermediate values.

    Args:
        model: A model with its weights as initializers. It is changed in place.
    """
    if any(each.HasField("g") for node in model.graph.node for each in node.attribute):
        return  # a subgraph may read any value
    values = _Values(model)
    changed = [_fuse(node, values) for node in model.graph.node if node.op_type == "Mul"]
    if any(changed):
        _drop_unread(model)


def _fuse(scaled: onnx.NodeProto, values: _Values) -> bool:
    """Turn the ``Mul`` by a norm's weight, or the ``Add`` of a bias after it, into the operator.

    Args:
        scaled: The ``Mul``.
        values: The values of the model.

    Returns:
        Whether a node was changed. The nodes of the norm stay; nothing reads them any more.
    """
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
    """The values of a model, by name: which nodes make and read them, their shapes and numbers."""

    def __init__(self, model: onnx.ModelProto) -> None:
        graph = model.graph
        self._made_by = {name: node for node in graph.node for name in node.output}
        self._readers = Counter(name for node in graph.node for name in node.input)
        self._readers.update(each.name for each in graph.output)
        self._only_reader = {name: node for node in graph.node for name in node.input}
        self._shapes = dict(_shapes(model))
        self._numbers = dict(_numbers(model))

    def norm(self, name: str) -> _Norm | None:
        """The norm that a value is, before the weight; ``None`` if it is not a norm."""
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
        """True if the value is a vector as long as the last dimension of ``x``."""
        shape, last = self._shapes.get(name), self._shapes.get(x, ())[-1:]
        return shape is not None and len(shape) == 1 and shape == last

    def biased(self, scaled: onnx.NodeProto, x: str) -> tuple[onnx.NodeProto, str] | None:
        """The ``Add`` of a bias to a scaled norm, and the name of the bias.

        ``None`` if there is no such ``Add``, or if something else reads the scaled norm.

        Args:
            scaled: The ``Mul`` of the norm and its weight.
            x: The name of the value that is normalised.
        """
        (name,) = scaled.output
        reader = self._only_reader.get(name) if self._readers[name] == 1 else None
        if reader is not None and reader.op_type == "Add":
            for summand, bias in _both_ways(reader):
                if summand == name and self.is_along_last(bias, x):
                    return reader, bias
        return None

    def _part(self, name: str | None, *op_types: str) -> onnx.NodeProto | None:
        """The node that makes a value, if it has one of the types and the value has one reader."""
        node = self._made_by.get(name) if name and self._readers[name] == 1 else None
        return node if node is not None and node.op_type in op_types else None

    def _input(self, name: str, op_type: str) -> str | None:
        """The first input of the node that :meth:`_part` finds."""
        node = self._part(name, op_type)
        return None if node is None else node.input[0]

    def _quotients(self, name: str) -> Iterator[tuple[str, str]]:
        """Numerator and divisor of a value that is ``x / root`` or ``x * (1 / root)``."""
        node = self._part(name, "Div", "Mul")
        if node is not None and node.op_type == "Div":
            yield node.input[0], node.input[1]
        elif node is not None:
            for numerator, factor in _both_ways(node):
                if root := self._input(factor, "Reciprocal"):
                    yield numerator, root

    def _mean_over_last(self, name: str, like: str) -> str | None:
        """The operand of a value that is a mean over the last dimension, with ``keepdims``.

        The operand must have the rank of ``like``, whose shape has to be known.
        """
        node = self._made_by.get(name)
        if node is None or node.op_type != "ReduceMean" or like not in self._shapes:
            return None
        if any(each.name == "keepdims" and not each.i for each in node.attribute):
            return None
        rank = len(self._shapes[like])
        axis = self._numbers.get(self._reshaped(node.input[1])) if len(node.input) > 1 else None
        return node.input[0] if rank and axis in (-1, rank - 1) else None

    def _reshaped(self, name: str) -> str:
        """The operand of a ``Reshape``: the exporter uses one to make a list of one dimension."""
        node = self._made_by.get(name)
        return node.input[0] if node is not None and node.op_type == "Reshape" else name

    def _squares(self, node: onnx.NodeProto) -> bool:
        """True if a ``Mul`` or ``Pow`` computes a square."""
        base, other = node.input
        return base == other if node.op_type == "Mul" else self._numbers.get(other) == 2

    def _same(self, one: str, other: str) -> bool:
        """True if both values are one, or both are the same ``x - mean(x)``, computed twice."""
        return one == other or ((x := self._centred(one)) is not None and x == self._centred(other))

    def _centred(self, name: str) -> str | None:
        """The ``x`` of a value that is ``x - mean(x)``."""
        node = self._made_by.get(name)
        if node is None or node.op_type != "Sub":
            return None
        x, mean = node.input
        return x if self._mean_over_last(mean, x) == x else None


def _both_ways(node: onnx.NodeProto | None) -> Iterator[tuple[str, str]]:
    """The two operands of a commutative operator, in both orders."""
    if node is not None:
        one, other = node.input
        yield one, other
        yield other, one


def _shapes(model: onnx.ModelProto) -> Iterator[tuple[str, tuple[int | str, ...]]]:
    """Names and shapes of the float32 values. A size is a number or the name of a symbol."""
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
    """Names and numbers of the constants that are scalars, or vectors of one element."""
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
    """Remove the nodes whose outputs nothing reads: ONNX Runtime would run them."""
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
