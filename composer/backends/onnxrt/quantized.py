"""Quantized models in ONNX Runtime: products are computed in eight bits, and a softmax is not.

The optimizer (ONNX Runtime 1.32) makes integer kernels of ``DequantizeLinear``, an operator and
``QuantizeLinear``. For most operators the kernel gives eager's integers. That for ``Softmax`` is
off by one step in up to a quarter of them (``test_roundings_are_still_left_out``).

It makes no integer kernel of a ``Gemm`` whose result is not quantized, as of a linear layer with a
bias. Here such a product becomes ``MatMulIntegerToFloat``, a kernel that the optimizer makes of
products without a bias.

Some products are kept from becoming integer kernels. On processors with AVX2 or AVX-512 and without
VNNI, sums of products of uint8 and int8 saturate. ONNX Runtime then reads weights in uint8 if it is
told to (``session.x64quantprecision``). That does not help where the second factor is no weight,
and it has no kernel for int8 times such a weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from composer.backends.onnxrt.products import DOMAIN
from composer.backends.onnxrt.values import Values, attributes

if TYPE_CHECKING:
    import onnx

_QUANTIZED = frozenset(
    {"QuantizeLinear", "DequantizeLinear", "MatMulInteger", "MatMulIntegerToFloat"}
)
"""Operators of the models whose products may be computed in eight bits."""

_PRODUCTS = frozenset(
    {"ConvInteger", "DynamicQuantizeMatMul", "MatMulInteger", "MatMulIntegerToFloat", "QAttention"}
    | {"QGemm", "QLinearConv", "QLinearMatMul"}
)
"""ONNX Runtime's operators that multiply 8-bit numbers."""

_BESIDE = {
    "session.optimized_model_external_initializers_file_name": "weights",
    "session.optimized_model_external_initializers_min_size_in_bytes": "1024",
}
"""Have ONNX Runtime write the weights to a file of their own."""

_MOST_BYTES = 1 << 28
"""Most bytes of weights that are written to a temporary file."""


def compute_softmax_in_floats(model: onnx.ModelProto) -> None:
    """Put a ``Sum`` of one operand, which changes nothing, behind the softmax of such numbers."""
    import onnx

    values, nodes = Values(model), []
    for node in model.graph.node:
        nodes.append(node)
        if node.op_type == "Softmax" and values.producer(node.input[0], "DequantizeLinear"):
            result = node.output[0]
            node.output[0] = f"{result}_in_floats"
            nodes.append(onnx.helper.make_node("Sum", [node.output[0]], [result]))
    _replace_nodes(model, nodes)


def quantize_once(model: onnx.ModelProto) -> None:
    """Read the integers of ``DynamicQuantizeLinear`` where the same are computed a second time.

    The operators by which PT2E quantizes choose scale and zero point first, and quantize then.
    """
    values = Values(model)
    for node in model.graph.node:
        if node.op_type not in ("QuantizeLinear", "DequantizeLinear") or len(node.input) < 3:
            continue
        scale, zero_point = (_unmoved(each, values) for each in node.input[1:])
        chosen = values.producer(scale, "DynamicQuantizeLinear")
        if chosen is None or [scale, zero_point] != list(chosen.output[1:]):
            continue
        node.input[1] = scale
        node.input[2] = zero_point
        if node.op_type == "QuantizeLinear" and node.input[0] == chosen.input[0]:
            node.op_type = "Identity"
            del node.input[:]
            del node.attribute[:]
            node.input.append(chosen.output[0])


def _unmoved(name: str, values: Values) -> str:
    """Return the name of a number before casts and changes of its shape."""
    moved = values.producer(name, "Cast", "Reshape")
    return name if moved is None else _unmoved(moved.input[0], values)


def multiply_in_integers(model: onnx.ModelProto) -> None:
    """Make one ``MatMulIntegerToFloat`` of each product of dequantized uint8 and a weight.

    A product of which ONNX Runtime would make a wrong kernel, or one that it does not have, gets a
    ``Sum`` of one operand in front, which keeps it from that.
    """
    values, nodes = Values(model), list[Any]()
    for node in model.graph.node:
        factors = _factors_of(node, values)
        if factors is not None:
            nodes += _in_integers(node, *factors)
        elif _would_be_wrong(node, values):
            nodes += _in_floats(node)
        else:
            nodes.append(node)
    _replace_nodes(model, nodes)


def give_zero_points(model: onnx.ModelProto) -> None:
    """Give weights that have a scale for each channel and no zero points a zero for each channel.

    Where ONNX Runtime (1.32) reads weights in uint8, it adds one zero point for all channels, and
    then fails. Each weight gets a constant of its own, since it also fails if two share one.
    """
    import numpy as np
    import onnx

    values, nodes = Values(model), list[Any]()
    for node in model.graph.node:
        if node.op_type == "DequantizeLinear" and len([*filter(None, node.input)]) == 2:
            channels = _count(node.input[1], values)
            if node.input[0] in values.initializers and channels not in (None, 1):
                name = f"{node.output[0]}_zero_points"
                dtype = onnx.helper.tensor_dtype_to_np_dtype(values.types[node.input[0]].dtype)
                zeros = onnx.numpy_helper.from_array(np.zeros(channels, dtype))
                nodes.append(onnx.helper.make_node("Constant", [], [name], value=zeros))
                del node.input[2:]
                node.input.append(name)
        nodes.append(node)
    _replace_nodes(model, nodes)


def dequantize_for_each_reader(model: onnx.ModelProto) -> None:
    """Give each further reader of a dequantized weight a node of its own that dequantizes it."""
    values = Values(model)

    def dequantizes_weight(node: onnx.NodeProto) -> bool:
        return node.op_type == "DequantizeLinear" and node.input[0] in values.initializers

    _copy_for_each_reader(model, values, dequantizes_weight)


def name_for_each_reader(model: onnx.ModelProto) -> dict[str, str]:
    """Give each further reader of an int8 weight, or of zero points, a name of its own for them.

    Where ONNX Runtime (1.32) reads weights in uint8, it names what it makes of a weight and of its
    zero points after them, and so fails at the second reader.

    Returns:
        The name of the weight, by each name that was added.
    """
    import onnx

    values = Values(model)

    def casts_to_int8(node: onnx.NodeProto) -> bool:
        if node.op_type != "Cast" or node.input[0] not in values.initializers:
            return False
        return bool(attributes(node)["to"] == onnx.TensorProto.INT8)

    _copy_for_each_reader(model, values, casts_to_int8)
    values = Values(model)
    added: dict[str, str] = {}
    for weight in [*model.graph.initializer]:
        is_int8 = weight.data_type == onnx.TensorProto.INT8
        for place, reader in enumerate(values.users[weight.name][1:]):
            if is_int8 or casts_to_int8(reader):
                name = f"{weight.name}_{place}"
                added[name] = weight.name
                _read(reader, weight.name, name)
                model.graph.initializer.add().CopyFrom(weight)
                model.graph.initializer[-1].name = name
    return added


def _copy_for_each_reader(
    model: onnx.ModelProto, values: Values, is_copied: Callable[[onnx.NodeProto], bool]
) -> None:
    """Copy nodes of one result, so that each copy has one reader."""
    import onnx

    nodes: list[Any] = []
    for node in model.graph.node:
        nodes.append(node)
        if is_copied(node):
            for place, reader in enumerate(values.users[node.output[0]][1:]):
                own = onnx.NodeProto()
                own.CopyFrom(node)
                own.name = ""
                own.output[0] = f"{node.output[0]}_{place}"
                _read(reader, node.output[0], own.output[0])
                nodes.append(own)
    _replace_nodes(model, nodes)


def _read(reader: onnx.NodeProto, name: str, other: str) -> None:
    """Let a node read another value in the place of one."""
    reader.input[[*reader.input].index(name)] = other


def _would_be_wrong(node: onnx.NodeProto, values: Values) -> bool:
    """True for a ``MatMul`` of dequantized numbers for which there is no right kernel."""
    import onnx

    made = [values.producer(each, "DequantizeLinear") for each in node.input]
    if node.op_type != "MatMul" or None in made:
        return False
    numbers = [cast("onnx.NodeProto", each).input[0] for each in made]
    left, right = (values.types[each].dtype for each in numbers)
    if numbers[1] in values.initializers:
        return left != onnx.TensorProto.UINT8
    return left != right


def _in_floats(node: onnx.NodeProto) -> list[Any]:
    """Return a product, and a node in front that hides that its first factor was dequantized."""
    import onnx

    hidden = f"{node.output[0]}_of_floats"
    sum_of_one = onnx.helper.make_node("Sum", [node.input[0]], [hidden])
    node.input[0] = hidden
    return [sum_of_one, node]


def _replace_nodes(model: onnx.ModelProto, nodes: list[Any]) -> None:
    import onnx

    # A protobuf copies what it is given, so the nodes are copied before they are deleted.
    changed = onnx.GraphProto(node=nodes)
    del model.graph.node[:]
    model.graph.node.extend(changed.node)


class _Dequantized(NamedTuple):
    """A dequantized factor: names of 8-bit numbers, their scale and their zero point.

    ``move`` is the node, a ``Reshape`` or a ``Transpose``, that moves the dequantized numbers.
    """

    numbers: str
    scale: str
    zero_point: str
    move: onnx.NodeProto | None


def _factors_of(node: onnx.NodeProto, values: Values) -> tuple[_Dequantized, _Dequantized] | None:
    """Return the factors of a product that the integer kernel can compute; else ``None``."""
    import onnx

    if node.op_type not in ("MatMul", "Gemm") or not _is_plain(node):
        return None
    left = _dequantized(node.input[0], "Reshape", values)
    right = _dequantized(node.input[1], "Transpose", values)
    if left is None or right is None or _count(left.scale, values) != 1:
        return None
    if values.types[left.numbers].dtype != onnx.TensorProto.UINT8:
        return None
    shape = values.types[right.numbers].shape
    if right.numbers not in values.initializers or len(shape) != 2:
        return None
    columns = shape[1 if right.move is None else 0]
    bias = "".join(node.input[2:])  # there may be none
    if bias and values.types[bias].shape != (columns,):
        return None
    return (left, right) if _count(right.scale, values) in (1, columns) else None


def _is_plain(node: onnx.NodeProto) -> bool:
    """True for a ``MatMul``, and for a ``Gemm`` without factors and transposed operands."""
    if node.op_type == "MatMul":
        return True
    given = attributes(node)
    usual = {"alpha": 1.0, "beta": 1.0, "transA": 0, "transB": 0}
    return bool(usual | given == usual)


def _dequantized(name: str, move: str, values: Values) -> _Dequantized | None:
    """Return what a value was dequantized from, before it was moved or not."""
    moved = values.producer(name, move)
    made = values.producer(name if moved is None else moved.input[0], "DequantizeLinear")
    if made is None:
        return None
    numbers, scale, *others = made.input
    if move == "Transpose" and not _is_for_columns(made, moved, values):
        return None
    return _Dequantized(numbers, scale, "".join(others), moved)


def _is_for_columns(made: onnx.NodeProto, transpose: onnx.NodeProto | None, values: Values) -> bool:
    """True if a matrix has one scale, or one for each column after it was transposed."""
    if transpose is not None and attributes(transpose).get("perm", [1, 0]) != [1, 0]:
        return False
    axis = attributes(made).get("axis", 1)
    return _count(made.input[1], values) == 1 or axis == (1 if transpose is None else 0)


def _count(name: str, values: Values) -> int | None:
    """Return the number of elements of a value, if it is known."""
    if values.producer(name, "DynamicQuantizeLinear"):  # a scale or a zero point
        return 1
    constant, move = values.constant(name), values.producer(name, "Cast", "Reshape")
    if constant is not None:
        return int(constant.size)
    if move is not None:
        return _count(move.input[0], values)
    dtype, shape = values.types[name]
    if not dtype or not all(isinstance(size, int) for size in shape):
        return None
    return math.prod(int(size) for size in shape)


def _in_integers(node: onnx.NodeProto, left: _Dequantized, right: _Dequantized) -> list[Any]:
    """Return the nodes that take the place of a product."""
    import onnx

    nodes, numbers = [], []
    for factor in (left, right):
        numbers.append(factor.numbers)
        if factor.move is not None:
            move = onnx.NodeProto()
            move.CopyFrom(factor.move)
            numbers[-1] = move.output[0] = f"{node.output[0]}_of_{factor.numbers}"
            move.input[0] = factor.numbers
            move.name = ""
            nodes.append(move)
    bias = "".join(node.input[2:])  # there may be none
    scales = left.scale, right.scale, left.zero_point, right.zero_point
    inputs = [*numbers, *scales, bias]
    product = onnx.helper.make_node("MatMulIntegerToFloat", inputs, [node.output[0]], domain=DOMAIN)
    return [*nodes, product]


@contextmanager
def counted_products(model: onnx.ModelProto, size: int, options: Any) -> Iterator[list[int]]:
    """Count the products in eight bits of the optimized model of the session that is made within.

    ONNX Runtime tells the optimized model only by a file, with the weights. Nothing is counted for
    a model that is not quantized, or whose weights have too many bytes.

    Args:
        model: The model.
        size: The bytes of its weights.
        options: The options of the session; they are changed.

    Yields:
        A list, to which the number is added.
    """
    counts: list[int] = []
    if size > _MOST_BYTES or _QUANTIZED.isdisjoint(each.op_type for each in model.graph.node):
        yield counts
        return
    import onnx

    with TemporaryDirectory() as folder:
        path = Path(folder) / "optimized.onnx"
        options.optimized_model_filepath = str(path)
        for key, value in _BESIDE.items():
            options.add_session_config_entry(key, value)
        yield counts
        if path.exists():
            nodes = onnx.load(path, load_external_data=False).graph.node
            counts.append(sum(node.op_type in _PRODUCTS for node in nodes))
