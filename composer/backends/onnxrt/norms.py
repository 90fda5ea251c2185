"""Fuse the nodes of a norm into the one operator that ONNX Runtime has for it.

The fused operator is faster: it reads the elements once.

This module fuses norms over the last dimension, in float32, with a constant epsilon and a weight.
The following becomes ``LayerNormalization``:

    centred = x - mean(x);  centred / sqrt(mean(centred ** 2) + epsilon) * weight [+ bias]

The same without the subtraction and the bias becomes ``SimplifiedLayerNormalization``.

ONNX Runtime's own optimizers for norms are disabled, since those of ONNX Runtime 1.32 are wrong
(``test_onnxruntime_still_takes_for_norms_what_is_none`` fails when they are right):

- They also fuse graphs that are not norms: with powers other than 2, with a quotient whose operands
  are swapped, or with ``mean - x`` in place of ``x - mean``.
- In ONNX Runtime 1.31 they use 1e-5 where they cannot read the epsilon.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from composer.backends.onnxrt.values import Values, attributes

if TYPE_CHECKING:
    import onnx

FUSIONS = ("LayerNormFusionL1", "LayerNormFusionL2", "SimplifiedLayerNormFusion")
"""ONNX Runtime's optimizers for norms, which are disabled."""


class _Norm(NamedTuple):
    """A norm without its weight and bias.

    Attributes:
        x: The name of the value that is normalised.
        epsilon: The number added under the root.
        centred: True if the mean is subtracted.
    """

    x: str
    epsilon: float
    centred: bool


def fuse_norms(model: onnx.ModelProto) -> None:
    """Replace each norm by one operator, if nothing else reads its intermediate values.

    The nodes of the norms stay in the model, and nothing reads their results any more.
    """
    values = _Values(model)
    for node in model.graph.node:
        if node.op_type == "Mul":
            _fuse(node, values)


def _fuse(scaled: onnx.NodeProto, values: _Values) -> None:
    """Turn the ``Mul`` by a norm's weight, or the ``Add`` of a bias after it, into the operator."""
    for normalised, weight in _both_ways(scaled):
        norm = values.norm(normalised)
        if norm is None or not values.is_along_last(weight, norm.x):
            continue
        biased = values.biased(scaled, norm.x) if norm.centred else None
        if biased is None:
            _write(norm, scaled, norm.x, weight)
        else:
            added, bias = biased
            _write(norm, added, norm.x, weight, bias)
        return


def _write(norm: _Norm, node: onnx.NodeProto, *inputs: str) -> None:
    """Turn a node into the operator for the norm."""
    import onnx

    node.op_type = "LayerNormalization" if norm.centred else "SimplifiedLayerNormalization"
    node.input[:] = inputs
    node.attribute.append(onnx.helper.make_attribute("axis", -1))
    node.attribute.append(onnx.helper.make_attribute("epsilon", norm.epsilon))


class _Values(Values):
    """The values of a model, and which of them are norms or parts of norms."""

    def norm(self, name: str) -> _Norm | None:
        """The norm that a value is, before the weight; ``None`` if it is not a norm."""
        for numerator, divisor in self._quotients(name):
            root = self._root_mean_square(divisor)
            if root is None:
                continue
            squared, epsilon = root
            x, centred = self._centred(numerator)
            if self._centred(squared) == (x, centred):
                return _Norm(x, epsilon, centred)
        return None

    def biased(self, scaled: onnx.NodeProto, x: str) -> tuple[onnx.NodeProto, str] | None:
        """The ``Add`` of a bias to a scaled norm, and the name of the bias.

        ``None`` if there is no such ``Add``, or if something else reads the scaled norm.
        """
        (name,) = scaled.output
        if not self.has_one_use(name):
            return None
        (user,) = self.users[name]
        if user.op_type == "Add":
            for summand, bias in _both_ways(user):
                if summand == name and self.is_along_last(bias, x):
                    return user, bias
        return None

    def is_along_last(self, vector: str, x: str) -> bool:
        """True if a vector is as long as the last dimension of ``x``, and both are float32."""
        import onnx

        one, other = self.types[vector], self.types[x]
        if {one.dtype, other.dtype} != {onnx.TensorProto.FLOAT}:
            return False
        return one.shape == other.shape[-1:] and one.shape not in ((), (0,))

    def _quotients(self, name: str) -> Iterator[tuple[str, str]]:
        """Numerator and divisor of a value that is ``x / root`` or ``x * (1 / root)``."""
        division = self._part(name, "Div")
        if division is not None:
            numerator, divisor = division.input
            yield numerator, divisor
        for numerator, factor in _both_ways(self._part(name, "Mul")):
            inverse = self._part(factor, "Reciprocal")
            if inverse is not None:
                yield numerator, inverse.input[0]

    def _root_mean_square(self, name: str) -> tuple[str, float] | None:
        """``y`` and ``epsilon`` of a value that is ``sqrt(mean(y ** 2) + epsilon)``."""
        root = self._part(name, "Sqrt")
        if root is None:
            return None
        for mean, summand in _both_ways(self._part(root.input[0], "Add")):
            epsilon, squared = self._number(summand), self._base(self._averaged(mean))
            if epsilon is not None and squared is not None:
                return squared, epsilon
        return None

    def _base(self, name: str | None) -> str | None:
        """The ``y`` of a value that is ``y ** 2`` or ``y * y``."""
        node = self._part(name, "Pow", "Mul")
        if node is None:
            return None
        base, other = node.input
        is_square = base == other if node.op_type == "Mul" else self._number(other) == 2
        return base if is_square else None

    def _centred(self, name: str) -> tuple[str, bool]:
        """``x`` and true for a value that is ``x - mean(x)``; any other value itself and false."""
        node = self.producer(name, "Sub")
        if node is not None:
            x, mean = node.input
            if self._averaged(mean) == x:
                return x, True
        return name, False

    def _averaged(self, name: str) -> str | None:
        """The operand of a value that is a mean over the last dimension, with ``keepdims``."""
        node = self.producer(name, "ReduceMean")
        if node is None or len(node.input) < 2 or not attributes(node).get("keepdims", 1):
            return None
        operand, axes = node.input
        reshape = self.producer(axes, "Reshape")  # the exporter makes a list of an axis
        axis = self._number(axes if reshape is None else reshape.input[0])
        return operand if axis in (-1, len(self.types[operand].shape) - 1) else None

    def _number(self, name: str) -> float | None:
        """The number in a constant of one element and at most one dimension."""
        array = self.constant(name)
        if array is None or array.size != 1 or array.ndim > 1:
            return None
        return float(array.item())

    def _part(self, name: str | None, *op_types: str) -> onnx.NodeProto | None:
        """The node that makes a value, if it has one of the types and the value has one use."""
        if name is None or not self.has_one_use(name):
            return None
        return self.producer(name, *op_types)


def _both_ways(node: onnx.NodeProto | None) -> Iterator[tuple[str, str]]:
    """The two operands of a commutative operator, in both orders."""
    if node is not None:
        one, other = node.input
        yield one, other
        yield other, one
