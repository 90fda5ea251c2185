"""Serialization of a graph: as text, for keys and for people, and as parts, for another process.

All forms read the arguments of a node in the same way (:func:`_arguments`). They differ in what
they must keep, so each has its own function:

- :func:`rows` and :func:`lines` describe every node, and equal graphs have equal lines. They are
  used for the key of a graph, and for dumps.
- :func:`exact_text` contains everything that a translation may depend on, or raises
  :class:`Unsayable`. It is used for the key under which another process finds a model on disk.
- :func:`apart` returns the objects themselves, from which :func:`together` makes the graph again.
  It is used for a child process: a text could not hold a user's function or the values of a buffer.

Two more forms are written by torch itself: Python code, and files that keep symbols
(:mod:`composer._torch.files`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.fx
from torch.fx.node import map_aggregate

from composer import _torch
from composer.errors import refuse
from composer.graphs import low_precision
from composer.graphs.nodes import attribute_at, described, value_of
from composer.records import Reason, Status

_NAMESPACES = ("aten", "prims", "composer")
"""Namespaces of torch's and composer's operators, whose names and versions define what they do."""

_WORDS = (str, bool, int, float, complex, type(None), type(Ellipsis))
_NAMES = (torch.dtype, torch.device, torch.layout, torch.memory_format)


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
    symbols: dict[str, list[str]] = {}
    if inputs is None:
        valued = (node for node in gm.graph.nodes if node.op != "output")
        text += [_exact_value(node.meta.get("val"), symbols) for node in valued]
    else:
        text += [_exact_value(value, symbols) for value in inputs]
        placeholders = gm.graph.find_nodes(op="placeholder")
        text += [str(_torch.dynamo.is_static_input(node)) for node in placeholders]
    return "\n".join((*text, *(f"{said} {facts}" for said, facts in symbols.items() if facts)))


def apart(gm: torch.fx.GraphModule) -> tuple[Any, ...]:
    """The parts of a graph, to be sent to another process.

    A ``GraphModule`` pickled by torch would be traced again. Symbols, and nodes whose values are
    computed from symbols, are replaced by the numbers of the first call. Metadata are kept if they
    mean the same in another process.

    Returns:
        The nodes; the tensors and modules that they use, by path; the class name; and the training
        mode.

    Raises:
        Refusal: ``declined`` with ``not_isolatable``, if a symbol depends on data.
    """
    instead = {node: _sent(node) for node in gm.graph.nodes}
    nodes = [
        (
            *(node.op, node.name, node.target, *_arguments(node, instead, _torch.symbols.hint)),
            _torch.sources.lasting_metadata(node) | low_precision.mark_of(node),
        )
        for node in gm.graph.nodes
        if isinstance(instead[node], Word)
    ]
    paths = {str(n.target) for n in gm.graph.nodes if n.op in ("get_attr", "call_module")}
    held = {path: attribute_at(gm, path) for path in sorted(paths)}
    return nodes, held, gm.__class__.__name__, gm.training


def together(
    nodes: Sequence[tuple[Any, ...]], held: dict[str, Any], name: str, training: bool
) -> torch.fx.GraphModule:
    """The graph made from the parts that :func:`apart` returned."""
    graph = torch.fx.Graph()
    made: dict[str, torch.fx.Node] = {}

    def received(value: Any) -> Any:
        return made[value] if isinstance(value, Word) else value

    for op, node_name, target, args, kwargs, metadata in nodes:
        given: Any = map_aggregate((args, kwargs), received)
        node = made[node_name] = graph.create_node(op, target, given[0], given[1], node_name)
        node.meta.update(metadata)
    gm = torch.fx.GraphModule(held, graph, name)
    gm.train(training)
    return gm


def _sent(node: torch.fx.Node) -> Any:
    """The replacement of a node among arguments: its name, or a number if its value is a symbol."""
    value = value_of(node)
    gives_number = node.op != "placeholder" and isinstance(value, torch.SymInt | torch.SymFloat)
    return number_of(value) if gives_number else Word(node.name)


def number_of(value: Any) -> Any:
    """The number of a symbol in the first call; any other value is returned as it is.

    Raises:
        Refusal: ``declined`` with ``not_isolatable``, if the symbol depends on data.
    """
    number = _torch.symbols.hint(value)
    if isinstance(value, torch.SymInt | torch.SymFloat) and not isinstance(number, int | float):
        what = f"the graph cannot be sent to another process: only data decide its size {value}"
        refuse(Status.DECLINED, Reason.NOT_ISOLATABLE, what)
    return number


def qualified(target: Any) -> str:
    """The name of an operator, such as ``"aten.add.Tensor"``, or of a function with its module."""
    name = getattr(target, "__qualname__", None) or getattr(target, "__name__", None)
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
    if node.op in ("get_attr", "call_module"):
        value = attribute_at(gm, str(node.target))
        if isinstance(value, torch.fx.GraphModule):
            return f"graph({'; '.join(lines(value))})"
        return _tensor(value) if isinstance(value, torch.Tensor) else f"{node.target}: {value!r}"
    return str(node.target) if node.op == "call_method" else ""


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
    special = ["requires grad"] * value.requires_grad
    special += [] if type(value) in _torch.tensors.PLAIN_TENSORS else [qualified(type(value))]
    special += ["conjugate"] * value.is_conj() + ["negative"] * value.is_neg()
    return ", ".join((described(value), *special))


def _exact_target(node: torch.fx.Node) -> str:
    if node.op not in ("placeholder", "call_function", "call_method", "output"):
        raise Unsayable(f"the graph holds {node.target!r} itself")
    if node.op == "call_method" and not _torch.operators.is_method_of_torch(str(node.target)):
        raise Unsayable(f"{node.target!r} is no method of torch's own")
    if node.op != "call_function":
        return str(node.target)
    if isinstance(node.target, _torch.operators.OpOverload):
        if node.target.namespace not in _NAMESPACES:
            raise Unsayable(f"{node.target} is not torch's own operator")
        return str(node.target)
    path = _torch.operators.path_in_torch(node.target)
    if path is None or _torch.modes.changes_state(node.target):
        raise Unsayable(f"{node.target!r} is no plain function of torch's own")
    return path


def _exact(value: Any) -> Any:
    if type(value) in _WORDS or isinstance(value, _NAMES):
        return value
    raise Unsayable(f"an argument is a {type(value).__qualname__}")


def _exact_value(value: Any, symbols: dict[str, list[str]]) -> str:
    """The text of a value: all its properties, but no data.

    It also stores in ``symbols``, under that text, the known facts about the symbols in the value.
    """
    if isinstance(value, list | tuple):
        return f"({', '.join(_exact_value(each, symbols) for each in value)})"
    if type(value) in _WORDS:
        return repr(value)
    is_symbol = isinstance(value, torch.SymInt)
    said, sizes = (str(value), (value,)) if is_symbol else _exact_tensor(value)
    if said not in symbols:
        symbols[said] = [_facts(size) for size in sizes if isinstance(size, torch.SymInt)]
    return said


def _exact_tensor(value: Any) -> tuple[str, tuple[Any, ...]]:
    """The text of a tensor, and its sizes, strides and offset."""
    if type(value) not in _torch.tensors.PLAIN_TENSORS or value.layout is not torch.strided:
        layout = getattr(value, "layout", "")  # of a tensor
        raise Unsayable(f"a value is a {type(value).__qualname__} {layout}".rstrip())
    offset = value.storage_offset()
    more = type(value).__name__, offset, value.is_inference(), value._is_zerotensor()
    return f"{_tensor(value)}, {more}", (*value.shape, *value.stride(), offset)


def _facts(size: torch.SymInt) -> str:
    return f"{_torch.symbols.usual(size)} {sorted(_torch.symbols.symbol_facts(size).items())}"
