"""A rewrite that walks through the graph operation by operation and may emit others instead."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch.fx

from composer.passes.base import GraphPass
from composer.passes.walk import Value as Value
from composer.passes.walk import Walk, emit

Meta = dict[str, Any]
"""Where new nodes come from: the user's line, the module, the direction, and the walk under way."""


class InterpreterPass(GraphPass):
    """Runs the graph on fake values, one method call an operation; override the ones to change.

    Every method emits the operation that it is asked for, and returns its :class:`Value`. An
    override may look at its arguments' values, emit other operations by calling these methods
    (``super()``'s or its own), return a value that it was given, or a tuple of them. An override
    hands ``meta`` on, so that new nodes get into the graph and say where they come from.

    Arguments are values, literals, and lists, tuples, dicts and slices of them. A size that is a
    symbol is emitted (``aten.sym_size.int``), not read off a value.

    The idea is that of torch's ``_ExportPassBase``. Here what is emitted as it was stays the same
    node with the same fake value, so that a pass that overrides nothing changes nothing. A match
    is an operation of which an override made anything else. Grad mode and autocast are followed,
    not offered.
    """

    def run(self, gm: torch.fx.GraphModule) -> int:
        """Walk through the graph; how many operations were made into something else."""
        return Walk(self, _PLAIN, gm).run()

    def call_operator(
        self, op: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], meta: Meta
    ) -> Any:
        """An ATen or custom operator; at stage ``torch`` a function of torch's."""
        return emit("call_function", op, args, kwargs, meta)

    def call_sym(self, op: Callable[..., Any], args: tuple[Any, ...], meta: Meta) -> Any:
        """Arithmetic on sizes that are symbols."""
        return emit("call_function", op, args, {}, meta)

    def call_getitem(self, value: Any, key: Any, meta: Meta) -> Any:
        """One result of an operator that has several; indexing a tensor, at stage ``torch``."""
        if not isinstance(value, Value):  # an override returned a tuple
            return value[key]
        return emit("call_function", operator.getitem, (value, key), {}, meta)

    def call_method(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], meta: Meta
    ) -> Any:
        """A method of the first argument; at stage ``torch`` only."""
        return emit("call_method", name, args, kwargs, meta)

    def call_submodule(
        self, target: str, args: tuple[Any, ...], kwargs: dict[str, Any], meta: Meta
    ) -> Any:
        """A submodule that is called; at stage ``torch`` only."""
        return emit("call_module", target, args, kwargs, meta)

    def get_attr(self, target: str, meta: Meta) -> Any:
        """A tensor or a nested graph that the module holds."""
        return emit("get_attr", target, (), {}, meta)

    def placeholder(self, name: str, value: Value, meta: Meta) -> Any:
        """An input, which stays; what is returned stands for it from here on."""
        return value

    def output(self, results: Any, meta: Meta) -> Any:
        """What the graph is to return, in the structure of ``results``."""
        return results


_PLAIN = InterpreterPass()
"""Emits every operation as it was."""
