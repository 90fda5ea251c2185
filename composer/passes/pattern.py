"""A rewrite given as two Python functions: the pattern to find, and its replacement."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch.fx

from composer import _torch
from composer.errors import OptionError, text_of
from composer.graphs.nodes import described, placeholders_of, returned_by
from composer.passes import matching, metadata, order
from composer.passes.base import GraphPass, as_stage
from composer.passes.function import qualified_name
from composer.passes.matching import Filter, InternalMatch, Query
from composer.passes.unmatched import NearMiss, called
from composer.records import Stage

_OWN = ("pattern", "replacement", "filters", "example_inputs", "ignore_literals")


@dataclass(frozen=True)
class PatternPass(GraphPass):
    """Replaces every occurrence of the function ``pattern`` by the function ``replacement``.

    There are two ways to use it. Create an object with both functions as arguments. Or write a
    subclass: both functions are static methods, and the other arguments are class attributes.

    Both functions are traced symbolically. At ``aten``, ``joint`` and ``post_grad`` they call the
    ``torch.ops.aten`` overloads that the graph calls. At ``torch`` they call what the user's
    program calls. With ``example_inputs``, which only stage ``aten`` accepts, they are written in
    plain torch.

    A parameter matches any one value: a tensor, or a literal such as a stride. The replacement
    receives that value. A match with a literal that the replacement cannot take is left alone. Two
    parameters never match the same tensor. A literal in the pattern matches only an equal literal.

    A match is rewritten if two conditions hold: no operation outside the match uses its inner
    values, and no operation between the matched ones writes to memory. New nodes take their source
    locations from the matched nodes.

    Args:
        pattern: The function to find; it returns one value or a tuple of values.
        replacement: The function to put in its place. It has the same number of parameters and of
            returned values.
        filters: Functions that receive the match, the graph and the pattern's graph. A match is
            left alone if one of them returns false.
        example_inputs: Small tensors on which both functions are traced.
        ignore_literals: True if every literal of the pattern matches any literal.
        stage: The stage at which it runs; ``aten`` by default.
        name: The recorded name; by default the qualified name of ``pattern``, or the class's.

    Raises:
        OptionError: One of the functions is missing or cannot be traced, or the two do not agree.
    """

    pattern: Callable[..., Any] | None = None
    replacement: Callable[..., Any] | None = None
    filters: Sequence[Filter] = ()
    example_inputs: Sequence[Any] = ()
    ignore_literals: bool = False
    stage: Stage | str | None = field(default=None, kw_only=True)  # type: ignore[misc,assignment]  # of each, not of the class
    name: str = field(default="", kw_only=True)  # type: ignore[misc]  # likewise

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.stage = cls.stage or Stage.ATEN

    def __post_init__(self) -> None:
        for name in _OWN:
            if not getattr(self, name):  # let the subclass's own be seen
                object.__delattr__(self, name)
        if self.pattern is None or self.replacement is None:
            raise OptionError(f"{type(self).__name__} needs a pattern and a replacement")
        stage = as_stage(self.stage or type(self).stage or Stage.ATEN)
        name = self.name or type(self).name or qualified_name(self.pattern)
        object.__setattr__(self, "stage", stage)
        object.__setattr__(self, "name", name)
        if self.example_inputs and stage != Stage.ATEN:
            raise OptionError(f"{self.name}: example_inputs serve the stage aten, not {stage}")

    def run(self, gm: torch.fx.GraphModule) -> int:
        """Rewrite every match, and return the number of matches."""
        matches, _ = matching.find(gm.graph, self._query())
        rewriting = _Rewriting(gm.graph, self._graphs[1])
        chosen = list(self.chosen(matches))
        for match in chosen:
            rewriting.replace(match)
        if chosen:
            order.sort(gm.graph)
        return len(chosen)

    def near_misses(self, gm: torch.fx.GraphModule) -> tuple[NearMiss, ...]:
        """Return the places where only a part of the pattern matches, with the reason for each.

        A near miss is a place where the last operation of the pattern was found, but not the whole
        pattern.

        Args:
            gm: A graph of the pass's stage; it is not changed.
        """
        return tuple(matching.near_misses(gm.graph, self._query()))

    def _query(self) -> Query:
        pattern = torch.fx.Graph()  # a copy, since matching normalizes the calls in it
        pattern.output(pattern.graph_copy(self._graphs[0], {}))
        filters = (*self.filters, self._takes_the_literals)
        return Query(pattern, filters, self.ignore_literals)

    def _takes_the_literals(self, match: InternalMatch, *_: torch.fx.Graph) -> bool:
        """True unless the replacement cannot run on a literal that a parameter meets."""
        inputs, key = match.placeholder_nodes, metadata.key_at(self.stage or Stage.ATEN)
        nodes = [each for each in inputs if isinstance(each, torch.fx.Node)]
        if len(nodes) == len(inputs) or not all(key in node.meta for node in nodes):
            return True
        values = torch.fx.map_arg(inputs, lambda node: node.meta[key])
        trial = torch.fx.Graph()
        trial.output(trial.graph_copy(self._graphs[1], {}))
        for node in trial.nodes:
            node.meta.pop(key, None)  # as it was on the example inputs
        try:
            metadata.fill(torch.fx.GraphModule({}, trial), values, key)
        except metadata.Unknown:
            return False
        return True

    @cached_property
    def _graphs(self) -> tuple[torch.fx.Graph, torch.fx.Graph]:
        """The pattern and the replacement, traced."""
        pattern, replacement = self._trace("pattern"), self._trace("replacement")
        unused = [node.name for node in pattern.nodes if node.op != "output" and not node.users]
        if unused:
            raise OptionError(f"{self.name}: the pattern does not need its {', '.join(unused)}")
        for what, values in (("parameters", placeholders_of), ("returned values", returned_by)):
            ours, theirs = len(values(pattern)), len(values(replacement))
            if ours != theirs:
                counts = f"{ours} {what}, its replacement {theirs}"
                raise OptionError(f"{self.name}: the pattern has {counts}")
        if not set(returned_by(pattern)).isdisjoint(placeholders_of(pattern)):
            raise OptionError(f"{self.name}: the pattern returns its own parameter")
        foreign = next(filter(_is_plain_torch, pattern.nodes), None)
        if foreign is not None and self.stage != Stage.TORCH:
            what = f"the pattern calls {called(foreign)}, which no graph at {self.stage} has"
            remedy = "call overloads of torch.ops.aten, or give example_inputs at the stage aten"
            raise OptionError(f"{self.name}: {what}, so it never matches; {remedy}")
        return pattern, replacement

    def _trace(self, which: str) -> torch.fx.Graph:
        function = getattr(self, which)
        try:
            if self.example_inputs:
                graph = _torch.canonical.capture_aten(function, self.example_inputs).graph
            else:
                graph = torch.fx.symbolic_trace(function).graph
        except Exception as error:
            what = f"its {which} cannot be traced: {text_of(error)}"
            raise OptionError(f"{self.name}: {what}") from error
        if graph.find_nodes(op="get_attr"):
            raise OptionError(f"{self.name}: its {which} holds a tensor; make it a parameter")
        if not all(isinstance(value, torch.fx.Node) for value in returned_by(graph)):
            raise OptionError(f"{self.name}: its {which} returns what is no result of it")
        return graph

    def _parameters(self) -> dict[str, Any]:
        examples = [described(value) for value in self.example_inputs]
        return {**super()._parameters(), "example_inputs": examples}


class _Rewriting:
    """Replaces the matches, one after the other."""

    def __init__(self, graph: torch.fx.Graph, replacement: torch.fx.Graph) -> None:
        self._graph = graph
        self._replacement = replacement
        self._places = {node: place for place, node in enumerate(graph.nodes)}
        self._replaced: dict[torch.fx.Node, torch.fx.Node] = {}

    def replace(self, match: InternalMatch) -> None:
        nodes = matching.matched_nodes(match)
        inputs = torch.fx.node.map_arg(match.placeholder_nodes, self._current)
        in_order = sorted(nodes, key=self._places.__getitem__)
        with self._graph.inserting_before(in_order[-1]):
            outputs = self._emit(inputs, metadata.provenance(*in_order))
        for node, new in zip(match.returning_nodes, outputs, strict=True):
            node.replace_all_uses_with(new)
            self._replaced[node] = new
        for node in reversed(in_order):
            self._graph.erase_node(node)

    def _current(self, node: torch.fx.Node) -> torch.fx.Node:
        """Return the node itself, or the one that an earlier rewrite put in its place."""
        while node in self._replaced:
            node = self._replaced[node]
        return node

    def _emit(self, inputs: Sequence[Any], meta: dict[str, Any]) -> list[torch.fx.Node]:
        twins = dict(zip(placeholders_of(self._replacement), inputs, strict=True))
        for node in self._replacement.nodes:
            if node.op not in ("placeholder", "output"):
                twins[node] = self._graph.node_copy(node, twins.__getitem__)
                twins[node].meta = dict(meta)
        return [twins[node] for node in returned_by(self._replacement)]


def _is_plain_torch(node: torch.fx.Node) -> bool:
    """True if a node calls a function, method or module that no graph of ATen operators has."""
    is_overload = isinstance(node.target, _torch.operators.OpOverload)
    is_operator = is_overload or _torch.operators.takes_functions(node.target)
    is_call = node.op.startswith("call_") and node.target is not operator.getitem
    return is_call and not is_operator
