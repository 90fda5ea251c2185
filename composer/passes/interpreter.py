"""A kind of pass that visits the graph node by node and may emit other operations instead."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch.fx.node import map_aggregate, map_arg

from composer import _torch
from composer.passes import metadata
from composer.passes.base import GraphPass
from composer.passes.snapshot import frozen


@dataclass(frozen=True, slots=True)
class Value:
    """The result of an operation: its node in the graph, and its fake value (shape and dtype)."""

    node: torch.fx.Node
    value: Any


Meta = dict[str, Any]
"""The source of new nodes: the user's line, the module, forward or backward, and the walk."""


class InterpreterPass(GraphPass):
    """Visits each operation of the graph with one method call; override methods to rewrite.

    Every method emits its operation, and returns the result as a :class:`Value`. An override may
    look at the fake values of its arguments. It may emit other operations by calling these methods,
    its own or those of ``super()``. It may return one of its arguments, or a tuple of values. It
    passes ``meta`` on in every call, so that new nodes enter the graph and keep their source.

    Arguments are values, literals, and lists, tuples, dicts and slices of these. To use a symbolic
    size, emit ``aten.sym_size.int``; do not read it from the fake value.

    The idea comes from torch's ``_ExportPassBase``. In contrast to that class, an operation that is
    emitted unchanged keeps its node and its fake value, so a pass without overrides changes
    nothing. A match is an operation that an override changed. Calls that switch grad mode or
    autocast take effect, but no method receives them.
    """

    def run(self, gm: torch.fx.GraphModule) -> int:
        """Visit the graph, and return the number of operations that were changed."""
        return _Walk(self, gm).run()

    def call_operator(
        self, op: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], meta: Meta
    ) -> Any:
        """Emit a call of an ATen or custom operator; at stage ``torch``, of a torch function."""
        return _emit("call_function", op, args, kwargs, meta)

    def call_sym(self, op: Callable[..., Any], args: tuple[Any, ...], meta: Meta) -> Any:
        """Emit arithmetic on symbolic sizes."""
        return _emit("call_function", op, args, {}, meta)

    def call_getitem(self, value: Any, key: Any, meta: Meta) -> Any:
        """Emit one result of an operator with several; at stage ``torch`` also tensor indexing."""
        if not isinstance(value, Value):  # an override returned a tuple
            return value[key]
        return _emit("call_function", operator.getitem, (value, key), {}, meta)

    def call_method(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], meta: Meta
    ) -> Any:
        """Emit a call of a method of the first argument; only at stage ``torch``."""
        return _emit("call_method", name, args, kwargs, meta)

    def call_submodule(
        self, target: str, args: tuple[Any, ...], kwargs: dict[str, Any], meta: Meta
    ) -> Any:
        """Emit a call of a submodule; only at stage ``torch``."""
        return _emit("call_module", target, args, kwargs, meta)

    def get_attr(self, target: str, meta: Meta) -> Any:
        """Emit the read of an attribute: a tensor or a nested graph of the module."""
        return _emit("get_attr", target, (), {}, meta)

    def placeholder(self, name: str, value: Value, meta: Meta) -> Any:
        """Return the value to use in place of an input. The input itself stays in the graph."""
        return value

    def output(self, results: Any, meta: Meta) -> Any:
        """Return the outputs of the graph, in the structure of ``results``."""
        return results


_PLAIN = InterpreterPass()
"""Emits every operation unchanged; used where a match limit forbids a rewrite."""


_WALK = "composer_walk"
"""The key in ``meta`` under which an interpreter pass's methods pass on the current walk."""


def _emit(op: str, target: Any, args: Any, kwargs: dict[str, Any], meta: dict[str, Any]) -> Value:
    """Emit an operation into the graph that ``meta`` comes from.

    Raises:
        TypeError: ``meta`` is not the one that the method received.
    """
    if _WALK not in meta:
        raise TypeError(f"{target} is emitted without the meta that the method was given")
    walk: _Walk = meta[_WALK]
    origin = {key: value for key, value in meta.items() if key != _WALK}
    return walk.emit(op, target, args, kwargs, origin)


class _Walk:
    """Visits every node once, in order.

    An operation that is emitted unchanged keeps its node. Its fake value then need not be computed
    again, and a data-dependent symbol stays the same symbol. ``methods`` is the pass: for each node
    one of its methods is called, by the kind of the node.
    """

    def __init__(self, methods: InterpreterPass, gm: torch.fx.GraphModule) -> None:
        self._methods, self._gm = methods, gm
        self._key = metadata.key_at(methods.stage)
        self._mode = metadata.mode_of(gm, self._key)
        self._results: dict[torch.fx.Node, Any] = {}
        self._kept: set[torch.fx.Node] = set()
        self._moved: set[torch.fx.Node] = set()
        first = next(iter(gm.graph.nodes))
        self._inputs_end: torch.fx.Node = [first, *gm.graph.find_nodes(op="placeholder")][-1]

    def run(self) -> int:
        """Visit all nodes, and erase the nodes that were replaced.

        Returns:
            The number of nodes that were not emitted unchanged.
        """
        originals = list(self._gm.graph.nodes)
        with metadata.autocast_regions() as regions:
            matches = sum(self._step(node, regions) for node in originals)
        for node in reversed(originals):
            if node not in self._kept:
                self._gm.graph.erase_node(node)
        return matches

    def _step(self, node: torch.fx.Node, regions: metadata.AutocastRegions) -> bool:
        """Visit one node. Returns true if it was rewritten."""
        if _torch.modes.changes_state(node.target):
            self._kept.add(node)
            metadata.follow(node, regions)
            return False
        before = node.args, node.kwargs, dict(node.meta)
        result, rewritten = self._visit(self._methods, node)
        if rewritten and not list(self._methods.chosen([node])):
            self._undo(node, *before)
            result, rewritten = self._visit(_PLAIN, node)[0], False
        if result is None and node.users and node.op != "output":
            reader = next(iter(node.users)).name
            raise TypeError(f"nothing was returned for {node.name}, which {reader} reads")
        self._results[node] = result
        if node.op == "placeholder":
            self._inputs_end = self._cursor
        return rewritten

    def _visit(self, methods: InterpreterPass, node: torch.fx.Node) -> tuple[Any, bool]:
        """Call the method for a node. Returns its result, and true if it rewrote the node."""
        self._node, self._new = node, list[torch.fx.Node]()
        # New nodes for an input go after the last input, so that inputs stay together.
        self._cursor = self._inputs_end if node.op == "placeholder" else node.prev
        args, kwargs = map_arg((node.args, node.kwargs), self._results.__getitem__)
        unchanged = frozen((_to_nodes(args), _to_nodes(kwargs)))
        meta = {**metadata.provenance(node), _WALK: self}
        result = self._call(methods, node, args, kwargs, meta)
        if self._new or frozen((node.args, node.kwargs)) != unchanged:
            return result, True
        is_other = not isinstance(result, Value) or result.node is not node
        return result, is_other and node.op != "output"

    def _call(
        self,
        methods: InterpreterPass,
        node: torch.fx.Node,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        meta: dict[str, Any],
    ) -> Any:
        target: Any = node.target
        if node.op == "placeholder":
            self._kept.add(node)
            return methods.placeholder(target, Value(node, node.meta.get(self._key)), meta)
        if node.op == "output":
            self._kept.add(node)
            node.args = (_to_nodes(methods.output(args[0], meta)),)
            return None
        if node.op == "get_attr":
            return methods.get_attr(target, meta)
        if node.op == "call_method":
            return methods.call_method(target, args, kwargs, meta)
        if node.op == "call_module":
            return methods.call_submodule(target, args, kwargs, meta)
        if target is operator.getitem:
            value, key = args
            return methods.call_getitem(value, key, meta)
        if self._is_symbolic(node):
            return methods.call_sym(target, args, meta)
        return methods.call_operator(target, args, kwargs, meta)

    def _is_symbolic(self, node: torch.fx.Node) -> bool:
        """True if a call computes with sizes only: no ATen operator and no tensors."""
        if node.kwargs or isinstance(node.target, _torch.operators.OpOverload):
            return False
        numbers = (torch.SymInt, torch.SymFloat, torch.SymBool, int, float)
        values = [each.meta.get(self._key) for each in (node, *node.all_input_nodes)]
        return all(isinstance(value, numbers) for value in values)

    def emit(
        self, op: str, target: Any, args: Any, kwargs: dict[str, Any], meta: dict[str, Any]
    ) -> Value:
        """Emit an operation.

        The visited node is used again for the first call of the same target. Any other operation
        becomes a new node after the last one that was emitted.
        """
        node = self._node
        args, kwargs = _to_nodes(args), _to_nodes(kwargs)
        if node not in self._kept and (op, target) == (node.op, node.target):
            is_stale = self._keep(node, args, kwargs)
        else:
            with self._gm.graph.inserting_after(self._cursor):
                node = self._gm.graph.create_node(op, target, args, kwargs)
            self._new.append(node)
            is_stale = True
        self._cursor = node
        node.meta.update(meta)
        if is_stale:
            with metadata.evaluating(self._mode):
                moved = metadata.recompute(self._gm, node, self._key, self._mode)
            if moved:
                self._moved.add(node)
        return Value(node, node.meta.get(self._key))

    def _keep(self, node: torch.fx.Node, args: Any, kwargs: Any) -> bool:
        """Set the node's arguments. Returns true if its fake value may have changed."""
        self._kept.add(node)
        if frozen((node.args, node.kwargs)) != frozen((args, kwargs)):
            node.args, node.kwargs = args, kwargs
            return True
        return self._key not in node.meta or not self._moved.isdisjoint(node.all_input_nodes)

    def _undo(self, node: torch.fx.Node, args: Any, kwargs: Any, meta: dict[str, Any]) -> None:
        node.args, node.kwargs, node.meta = args, kwargs, meta
        for new in reversed(self._new):
            self._gm.graph.erase_node(new)
        self._kept.discard(node)
        self._moved.difference_update({node, *self._new})


def _to_nodes(arguments: Any) -> Any:
    """Replace every :class:`Value` by its node, also within lists, tuples, dicts and slices.

    Raises:
        TypeError: An argument is a fake tensor or a symbol, which a graph cannot hold.
    """
    return map_aggregate(arguments, _to_node)


def _to_node(argument: Any) -> Any:
    if isinstance(argument, Value):
        return argument.node
    if isinstance(argument, torch.SymInt | torch.SymFloat | torch.SymBool):
        raise TypeError(f"the symbol {argument} is no argument; emit aten.sym_size.int instead")
    if isinstance(argument, _torch.fakes.FakeTensor):
        raise TypeError("a fake tensor is no argument; give the Value that it was read off")
    return argument
