"""Serialization of a graph: as text, for keys and for people, and as parts, for another process.

All forms read the arguments of a node in the same way (:func:`_arguments`). They differ in what
they must keep, so each has its own function:

- :func:`rows` and :func:`lines` describe every node, and equal graphs have equal lines. They are
  used for the key of a graph, and for dumps.
- :func:`exact_text` contains everything that a translation may depend on, or raises
  :class:`Unsayable`. It is used for the key under which another process finds a model on disk.
- :func:`as_bytes` keeps the graph itself, from which :func:`of_bytes` makes it again. It is used
  for a sandbox and for saved functions: a text could not hold a user's function or the values of a
  buffer. torch writes this form (:mod:`composer._torch.files`).
"""

from __future__ import annotations

import copy
import pkgutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.fx
from torch.fx.node import map_aggregate

from composer import _torch
from composer.graphs import low_precision
from composer.graphs.nodes import attribute_at, described, nested_graphs, value_of

_NAMESPACES = ("aten", "prims", "quantized_decomposed", "composer")
"""Namespaces of torch's and composer's operators, whose names and versions define what they do."""

_WORDS = (str, bool, int, float, complex, type(None), type(Ellipsis))
_NAMES = (torch.dtype, torch.device, torch.layout, torch.memory_format)


_FUNCTION = "function "
"""Stands before the path of a function that is not torch's, in a graph for another process."""


class Unsayable(Exception):
    """A graph contains something that a text cannot express completely."""


class Word(str):
    """The name of a node or function; its ``repr`` has no quotes, unlike that of a string."""

    __slots__ = ()
    __repr__ = str.__str__


def rows(gm: torch.fx.GraphModule, names: Mapping[Any, Word]) -> list[tuple[str, ...]]:
    """For each node its name, operation, target, arguments and keyword arguments, as texts."""
    return [_row(node, names, _target(gm, node), _said) for node in gm.graph.nodes]


def lines(gm: torch.fx.GraphModule, example_inputs: Sequence[Any] = ()) -> list[str]:
    """One line of text per node; nodes are named by position, and placeholders are described.

    Args:
        gm: The graph.
        example_inputs: The values of placeholders without metadata, as in a graph that did not
            come from Dynamo.
    """
    names = {node: Word(f"%{i}") for i, node in enumerate(gm.graph.nodes)}
    placeholders = gm.graph.find_nodes(op="placeholder")
    given = dict(zip(placeholders, example_inputs, strict=False))
    held = {str(names[node]): _held(value_of(node, given.get(node))) for node in placeholders}
    return [" ".join((*row, held.get(row[0], ""))) for row in rows(gm, names)]


def exact_text(gm: torch.fx.GraphModule, inputs: Sequence[Any] | None = None) -> str:
    """A complete text: two graphs with the same text are translated to the same ONNX model.

    Args:
        gm: A graph whose nodes have values (``meta["val"]``), or a captured one.
        inputs: The inputs of a captured graph, whose nodes then need no values.

    Raises:
        Unsayable: If a text cannot express the graph; the message says why.
    """
    names = {node: Word(f"%{node.name}") for node in gm.graph.nodes}
    text = [" ".join(_row(node, names, _exact_target(node), _exact)) for node in gm.graph.nodes]
    facts: dict[str, list[str]] = {}
    if inputs is None:
        *nodes, _ = gm.graph.nodes  # the last one is the output
        text += [_exact_value(node.meta.get("val"), facts) for node in nodes]
    else:
        placeholders = gm.graph.find_nodes(op="placeholder")
        text += [_exact_value(value, facts) for value in inputs]
        text += map(str, map(_torch.dynamo.is_static_input, placeholders))
    text += [f"{value} {known}" for value, known in facts.items() if known]
    return "\n".join(text)


def as_bytes(gm: torch.fx.GraphModule) -> bytes:
    """The graph for another process, with its symbols and the tensors that it holds.

    Only the metadata that mean the same in another process are kept. :func:`of_bytes` reads it.

    Raises:
        ValueError: inputs are views of the same memory.
        TypeError: an operator has no meaning in another process.
        Exception: whatever pickle raises for an object in the graph.
    """
    for node in gm.graph.nodes:
        _torch.operators.operator_path(node.target)
    return _torch.files.graph_as_bytes(_bare(gm))


def of_bytes(data: bytes) -> torch.fx.GraphModule:
    """The graph that :func:`as_bytes` wrote."""
    if b"quantized_decomposed" in data:
        _torch.operators.load_quantizing()
    gm = _torch.files.graph_of_bytes(data)
    for node in gm.graph.find_nodes(op="call_method"):
        if str(node.target).startswith(_FUNCTION):
            path = str(node.target).removeprefix(_FUNCTION)
            node.op = "call_function"
            node.target = pkgutil.resolve_name(path)
    gm.recompile()
    return gm


def _bare(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A copy of the graph with only the metadata that mean the same in another process.

    Fake values are kept only for inputs and symbolic numbers, because the fake of a view refers to
    other fakes of this process.
    """
    bare = torch.fx.GraphModule(gm, copy.deepcopy(gm.graph), gm.__class__.__name__)
    bare.train(gm.training)
    inputs: list[_torch.fakes.FakeTensor] = []
    for node in bare.graph.nodes:
        value = node.meta.get("example_value")
        node.meta = _torch.sources.lasting_metadata(node) | low_precision.mark_of(node)
        if node.op == "call_function" and not _torch.files.takes_function(node.target):
            node.op = "call_method"  # torch writes the name of a method, whatever it is
            node.target = _FUNCTION + _path_of(node.target)
        if isinstance(value, torch.SymInt | torch.SymFloat):
            node.meta["example_value"] = value
        elif isinstance(value, _torch.fakes.FakeTensor) and node.op == "placeholder":
            node.meta["example_value"] = _by_itself(value)
            inputs.append(value)
    places = Counter(map(_torch.tensors.storage_id, inputs))
    if any(each._is_view() and places[_torch.tensors.storage_id(each)] > 1 for each in inputs):
        raise ValueError("inputs of the graph share memory, which cannot be written to a file")
    for name, child in nested_graphs(bare).items():
        setattr(bare, name, _bare(child))
    return bare


def _path_of(function: Any) -> str:
    """The path by which another process imports a function.

    Raises:
        TypeError: it is the program's own.
        ValueError: it has no name to import it by.
    """
    module, name = (getattr(function, each, "") for each in ("__module__", "__qualname__"))
    path = f"{module}:{name}"
    if module in ("", "__main__") or pkgutil.resolve_name(path) is not function:
        raise TypeError(f"another process cannot import {qualified(function)}")
    return path


def _by_itself(fake: _torch.fakes.FakeTensor) -> torch.Tensor:
    """The fake or, if it is a view, a new fake with the same sizes and strides."""
    if not fake._is_view():
        return fake
    layout = fake.shape, fake.stride()
    with fake.fake_mode:
        memory = torch.empty_strided(*layout, dtype=fake.dtype, device=fake.device)
        return memory.requires_grad_(fake.requires_grad)


def qualified(target: Any) -> str:
    """The name of an operator, such as ``"aten.add.Tensor"``, or of a function with its module."""
    name = getattr(target, "__qualname__", getattr(target, "__name__", None))
    if isinstance(target, _torch.operators.OpOverload) or name is None:
        return str(target)
    return f"{getattr(target, '__module__', '')}.{name}"


def _row(
    node: torch.fx.Node, names: Mapping[Any, Word], target: str, say: Callable[[Any], Any]
) -> tuple[str, ...]:
    return names[node], node.op, target, *map(repr, _arguments(node, names, say))


def _arguments(
    node: torch.fx.Node, instead: Mapping[Any, Any], say: Callable[[Any], Any]
) -> tuple[Any, Any]:
    """The arguments of a node, with nodes replaced by ``instead`` and other values by ``say``.

    Lists, tuples, dicts and slices are kept; their elements are replaced.
    """

    def written(value: Any) -> Any:
        return instead[value] if isinstance(value, torch.fx.Node) else say(value)

    both: Any = node.args, node.kwargs
    return cast(tuple[Any, Any], map_aggregate(both, written))


def _said(value: Any) -> Any:
    return Word(qualified(value)) if callable(value) else value


def _target(gm: torch.fx.GraphModule, node: torch.fx.Node) -> str:
    if node.op == "call_function":
        return qualified(node.target)
    if node.op == "call_method":
        return str(node.target)
    if node.op in ("placeholder", "output"):
        return ""
    value = attribute_at(gm, str(node.target))
    if isinstance(value, torch.fx.GraphModule):
        return f"graph({'; '.join(lines(value))})"
    return _tensor(value) if isinstance(value, torch.Tensor) else f"{node.target}: {value!r}"


def _held(value: Any) -> str:
    """The description of a placeholder's value; of a number only its type."""
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    kind = type(value).__name__
    return f"{kind} {value}" if kind == "SymInt" else kind


def _tensor(value: torch.Tensor) -> str:
    """The properties of a tensor for which a graph is compiled.

    They include the class of a subclass, which may run other operators, and whether the tensor is
    a lazy conjugate or negative view.
    """
    properties = {
        "requires grad": value.requires_grad,
        qualified(type(value)): type(value) not in _torch.tensors.PLAIN_TENSORS,
        "conjugate": value.is_conj(),
        "negative": value.is_neg(),
    }
    present = [name for name, is_present in properties.items() if is_present]
    return ", ".join((described(value), *present))


def _exact_target(node: torch.fx.Node) -> str:
    target = str(node.target)
    if node.op == "call_function":
        return _exact_function(node.target)
    if node.op == "call_method" and not _torch.operators.is_method_of_torch(target):
        raise Unsayable(f"{target!r} is no method of torch's own")
    if node.op in ("get_attr", "call_module"):
        raise Unsayable(f"the graph holds {target!r} itself")
    return target


def _exact_function(function: Any) -> str:
    if isinstance(function, _torch.operators.OpOverload):
        if function.namespace not in _NAMESPACES:
            raise Unsayable(f"{function} is not torch's own operator")
        return str(function)
    path = _torch.operators.path_in_torch(function)
    if path is None or _torch.modes.changes_state(function):
        raise Unsayable(f"{function!r} is no plain function of torch's own")
    return path


def _exact(value: Any) -> Any:
    if type(value) in _WORDS or isinstance(value, _NAMES):
        return value
    raise Unsayable(f"an argument is a {type(value).__qualname__}")


def _exact_value(value: Any, facts: dict[str, list[str]]) -> str:
    """The text of a value: all its properties, but no data.

    It also stores in ``facts``, under that text, the known facts about the symbols in the value.
    """
    if isinstance(value, list | tuple):
        return f"({', '.join(_exact_value(each, facts) for each in value)})"
    if type(value) in _WORDS:
        return repr(value)
    is_symbol = isinstance(value, torch.SymInt)
    text, sizes = (str(value), [value]) if is_symbol else _exact_tensor(value)
    if text not in facts:
        facts[text] = list(map(_facts, sizes))
    return text


def _exact_tensor(value: Any) -> tuple[str, list[torch.SymInt]]:
    """The text of a tensor, and the symbols among its sizes, strides and offset."""
    if type(value) not in _torch.tensors.PLAIN_TENSORS or value.layout is not torch.strided:
        layout = getattr(value, "layout", "")  # of a tensor
        raise Unsayable(f"a value is a {type(value).__qualname__} {layout}".rstrip())
    offset = value.storage_offset()
    more = type(value).__name__, offset, value.is_inference(), value._is_zerotensor()
    sizes = (*value.shape, *value.stride(), offset)
    symbols = [each for each in sizes if isinstance(each, torch.SymInt)]
    return f"{_tensor(value)}, {more}", symbols


def _facts(size: torch.SymInt) -> str:
    facts = sorted(_torch.symbols.symbol_facts(size).items())
    return f"{_torch.symbols.value_for_strides(size)} {facts}"
