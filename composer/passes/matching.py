"""Finds the matches of a pattern in a graph with ``torch.fx``'s matcher, and explains near misses.

Torch's matcher compares arguments as they are written. This module normalizes the calls first.
Positional arguments, keyword arguments and omitted defaults then compare equal. It also refuses a
match if rewriting it would move an operation across a write to memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.fx
from torch.fx.operator_schemas import normalize_function
from torch.fx.passes.utils.matcher_utils import InternalMatch as InternalMatch
from torch.fx.passes.utils.matcher_utils import SubgraphMatcher

from composer.passes.purity import is_pure, keeps_to_itself
from composer.passes.unmatched import NearMiss, compare

Filter = Callable[[InternalMatch, torch.fx.Graph, torch.fx.Graph], bool]
"""A function of the match, the graph and the pattern's graph. It has the signature of the filters
of torch's ``replace_pattern_with_filters``."""


@dataclass(frozen=True, slots=True)
class Query:
    """A pattern, and the conditions for its matches.

    ``graph`` is the pattern's graph. Two searches must not share it, since a search edits it.
    """

    graph: torch.fx.Graph
    filters: Sequence[Filter] = ()
    ignore_literals: bool = False

    @property
    def returned(self) -> list[torch.fx.Node]:
        """The nodes that the pattern returns."""
        return list(self.graph.output_node().all_input_nodes)

    @property
    def anchors(self) -> list[torch.fx.Node]:
        """The operations from which the matcher starts: only the output uses their result."""
        return [node for node in self.returned if len(node.users) == 1]


def find(graph: torch.fx.Graph, query: Query) -> tuple[list[InternalMatch], list[NearMiss]]:
    """Return the matches to rewrite, which do not overlap, and the refused matches."""
    matches: list[InternalMatch] = []
    refused: list[NearMiss] = []
    places = {node: place for place, node in enumerate(graph.nodes)}
    taken: dict[torch.fx.Node, str] = {}
    for match in _all_matches(graph, query):
        anchor = match.nodes_map[match.anchors[0]]
        why = _refusal(match, graph, query, places, taken)
        if why:
            refused.append(NearMiss(anchor.name, match.anchors[0].name, anchor.name, why))
            continue
        matches.append(match)
        taken.update(dict.fromkeys(matched_nodes(match), anchor.name))
    return matches, refused


def near_misses(graph: torch.fx.Graph, query: Query) -> list[NearMiss]:
    """Return every place where an anchor of the pattern was found, but there is no rewrite."""
    matches, refused = find(graph, query)
    anchors = {match.nodes_map[match.anchors[0]].name for match in matches}
    misses = [miss for miss in refused if miss.anchor not in anchors]
    explained = {miss.anchor for miss in refused}
    for match in matches:
        explained.update(node.name for node in matched_nodes(match))
    with _one_form(query.graph, graph):
        for anchor, node in itertools.product(query.anchors, graph.nodes):
            if _call(node) == _call(anchor) and node.name not in explained:
                misses.append(_explain(anchor, node, query))
    places = {node.name: place for place, node in enumerate(graph.nodes)}
    return sorted(misses, key=lambda miss: places[miss.anchor])


def matched_nodes(match: InternalMatch) -> list[torch.fx.Node]:
    """Return the operations that the match covers; the last one of the pattern comes first."""
    return [node for wanted, node in match.nodes_map.items() if wanted.op != "placeholder"]


def _all_matches(graph: torch.fx.Graph, query: Query) -> list[InternalMatch]:
    wanted = {_call(node) for node in query.graph.nodes if node.op not in ("placeholder", "output")}
    if not wanted.issubset(map(_call, graph.nodes)):
        return []  # torch's matcher raises KeyError where one of several anchors has no candidate
    matcher = SubgraphMatcher(
        query.graph, remove_overlapping_matches=False, ignore_literals=query.ignore_literals
    )
    with _one_form(query.graph, graph):
        return matcher.match(graph)


def _refusal(
    match: InternalMatch,
    graph: torch.fx.Graph,
    query: Query,
    places: dict[torch.fx.Node, int],
    taken: dict[torch.fx.Node, str],
) -> str:
    """Return why a match must not be rewritten; empty if it may be."""
    nodes = matched_nodes(match)
    rivals = [taken[node] for node in nodes if node in taken]
    if rivals:
        return f"overlaps the match at {rivals[0]}"
    writer = _disturbing(nodes, places)
    if writer is not None:
        return f"{writer.name} stands between the matched nodes and changes memory or state"
    for accepts in query.filters:
        if not accepts(match, graph, query.graph):
            return f"the filter {getattr(accepts, '__name__', accepts)} said no"
    return ""


def _disturbing(
    nodes: list[torch.fx.Node], places: dict[torch.fx.Node, int]
) -> torch.fx.Node | None:
    """Return an operation between the matched ones that they must not be moved across."""
    last = max(nodes, key=places.__getitem__)
    are_pure = all(map(is_pure, nodes))
    node = min(nodes, key=places.__getitem__)
    while node is not last:
        is_harmless = is_pure(node) or (are_pure and keeps_to_itself(node))
        if not is_harmless and node not in nodes:
            return node
        node = node.next
    return None


def _explain(anchor: torch.fx.Node, node: torch.fx.Node, query: Query) -> NearMiss:
    result = compare(anchor, node, ignore_literals=query.ignore_literals)
    if isinstance(result, NearMiss):
        return result
    why = "its other outputs are not found with it, or need each other"
    outside = _outside_reader(node, result, query)
    return outside or NearMiss(node.name, anchor.name, node.name, why)


def _outside_reader(
    place: torch.fx.Node, images: dict[torch.fx.Node, Any], query: Query
) -> NearMiss | None:
    """Return an inner node of the match that has a user outside, so that it cannot be erased."""
    operations = {wanted: node for wanted, node in images.items() if wanted.op != "placeholder"}
    matched = set(operations.values())
    for wanted, node in operations.items():
        outside = [user.name for user in node.users if user not in matched]
        if outside and wanted not in query.returned:
            why = f"it is read by {', '.join(outside)} as well, outside of the pattern"
            return NearMiss(place.name, wanted.name, node.name, why)
    return None


def _call(node: torch.fx.Node) -> tuple[str, Any]:
    return node.op, node.target


@contextmanager
def _one_form(pattern: torch.fx.Graph, graph: torch.fx.Graph) -> Iterator[None]:
    """Normalize calls in both graphs while the context is open; restore them at its end.

    Calls of the pattern's targets pass every argument by keyword, including defaults.
    """
    forms: dict[torch.fx.Node, dict[str, Any]] = {}
    for target in {node.target for node in pattern.nodes if node.op == "call_function"}:
        forms |= _forms(target, pattern, graph)
    as_written = {node: (node.args, node.kwargs) for node in forms}
    for node, kwargs in forms.items():
        node.args, node.kwargs = (), kwargs
    try:
        yield
    finally:
        for node, (args, kwargs) in as_written.items():
            node.args, node.kwargs = args, kwargs


def _forms(target: Any, *graphs: torch.fx.Graph) -> dict[torch.fx.Node, dict[str, Any]]:
    """Return every call of the target with its arguments by name.

    The result is empty if the arguments of one call cannot be named without doubt.
    """
    forms: dict[torch.fx.Node, dict[str, Any]] = {}
    for graph in graphs:
        for node in graph.find_nodes(op="call_function", target=target):
            form = _by_keyword(node)
            if form is None:
                return {}
            forms[node] = form
    return forms


def _by_keyword(node: torch.fx.Node) -> dict[str, Any] | None:
    try:
        form = normalize_function(
            node.target,  # type: ignore[arg-type]  # of a call_function: a callable
            node.args,
            node.kwargs,
            normalize_to_only_use_kwargs=True,
        )
    except (RuntimeError, ValueError, TypeError):  # overloads that differ only by type; builtins
        return None
    return None if form is None else form.kwargs
