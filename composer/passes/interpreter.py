"""A kind of pass that visits the graph node by node and may emit other operations instead."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch.fx

from composer.passes.base import GraphPass
from composer.passes.walk import Value as Value
from composer.passes.walk import Walk, emit

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
        return Walk(self, _PLAIN, gm).run()

    def call_operator(
        self, op: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], meta: Meta
    ) -> Any:
        """Emit a call of an ATen or custom operator; at stage ``torch``, of a torch function."""
        return emit("call_function", op, args, kwargs, meta)

    def call_sym(self, op: Callable[..., Any], args: tuple[Any, ...], meta: Meta) -> Any:
        """Emit arithmetic on symbolic sizes."""
        return emit("call_function", op, args, {}, meta)

    def call_getitem(self, value: Any, key: Any, meta: Meta) -> Any:
        """Emit one result of an operator with several; at stage ``torch`` also tensor indexing."""
        if not isinstance(value, Value):  # an override returned a tuple
            return value[key]
        return emit("call_function", operator.getitem, (value, key), {}, meta)

    def call_method(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], meta: Meta
    ) -> Any:
        """Emit a call of a method of the first argument; only at stage ``torch``."""
        return emit("call_method", name, args, kwargs, meta)

    def call_submodule(
        self, target: str, args: tuple[Any, ...], kwargs: dict[str, Any], meta: Meta
    ) -> Any:
        """Emit a call of a submodule; only at stage ``torch``."""
        return emit("call_module", target, args, kwargs, meta)

    def get_attr(self, target: str, meta: Meta) -> Any:
        """Emit the read of an attribute: a tensor or a nested graph of the module."""
        return emit("get_attr", target, (), {}, meta)

    def placeholder(self, name: str, value: Value, meta: Meta) -> Any:
        """Return the value to use in place of an input. The input itself stays in the graph."""
        return value

    def output(self, results: Any, meta: Meta) -> Any:
        """Return the outputs of the graph, in the structure of ``results``."""
        return results


_PLAIN = InterpreterPass()
"""Emits every operation unchanged."""
