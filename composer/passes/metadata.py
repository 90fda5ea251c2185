"""Keeps fake values correct: it recomputes those of changed nodes, and of nodes that use them."""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.fx

from composer import _torch
from composer.errors import text_of
from composer.graphs.nodes import attribute_at, described
from composer.passes.aliasing import tensors
from composer.records import Stage


class Unknown(Exception):
    """An operation cannot run on the fake values of its inputs. ``node`` is that operation."""

    def __init__(self, node: torch.fx.Node, why: str) -> None:
        super().__init__(why)
        self.node = node


def key_at(stage: Stage | str) -> str:
    """Return the key of the fake value in a node's ``meta``."""
    return "example_value" if stage == Stage.TORCH else "val"


_OF_VALUES = frozenset({"val", "example_value", "tensor_meta", "unbacked_bindings"})
_OF_OPERATORS = frozenset({"original_aten", "eager_input_vals", "from_node"})


def provenance(*nodes: torch.fx.Node) -> dict[str, Any]:
    """Return the metadata for new nodes that replace ``nodes``.

    It says where they come from: the user's line, the module, and forward or backward. If two nodes
    have different values for a key, the later node takes precedence.
    """
    merged: dict[str, Any] = {}
    for node in nodes:
        merged |= node.meta
    for key in _OF_VALUES | _OF_OPERATORS:
        merged.pop(key, None)
    return merged


def fill(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], key: str) -> None:
    """Compute the fake values of a graph that has none, such as one that Dynamo did not capture.

    Args:
        gm: The graph; it is not changed if its placeholders have fake values already.
        example_inputs: The inputs, in the order of the placeholders.
        key: The key of fake values in ``meta``.

    Raises:
        Unknown: An operation fails on the fake values of its inputs.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    if all(key in node.meta for node in placeholders):
        return
    mode = _torch.fakes.fake_mode_of(example_inputs)
    for node, value in zip(placeholders, example_inputs, strict=True):
        node.meta[key] = _torch.fakes.as_fake(mode, value)
    propagate(gm, key, keep=(), known={})


def propagate(
    gm: torch.fx.GraphModule,
    key: str,
    keep: Container[torch.fx.Node],
    known: Mapping[torch.fx.Node, Any],
) -> None:
    """Compute the fake values of changed operations, and of operations that depend on them.

    Args:
        gm: The graph.
        key: The key of fake values in ``meta``.
        keep: The nodes that did not change.
        known: The fake values from before the change.

    Raises:
        Unknown: An operation fails on the fake values of its inputs.
    """
    news = _News(known)
    computed: dict[str, str] = {}
    mode = mode_of(gm, key)
    with evaluating(mode), autocast_regions() as regions:
        for node in gm.graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            if _torch.modes.changes_state(node.target):
                follow(node, regions)
                continue
            has_old = node in known and node.meta.get(key) is known[node]
            if has_old and node in keep and not news.reach(node):
                continue
            call = _described(node, key, regions)
            if has_old and news.owns_memory(node) and computed.get(call) == layout(known[node]):
                continue  # an equal operation on equal inputs just gave an equal fake value
            value = node.meta[key] = _computed(gm, node, key, mode)
            news.add(node, value)
            inputs = [source.meta.get(key) for source in node.all_input_nodes]
            if _memory(value).isdisjoint(_memory(*inputs)):
                computed[call] = layout(value)


class _News:
    """Tracks which fake values are new, and which old ones are no longer valid because of them.

    The fake value of a view shares memory with its base, so it is valid only together with that
    same fake value. The same is true if an operation returns its argument. Any other fake value is
    valid as long as the layouts of its inputs do not change.
    """

    def __init__(self, known: Mapping[torch.fx.Node, Any]) -> None:
        self._known = known
        self._owners: dict[int, torch.fx.Node] = {}
        self._new: set[torch.fx.Node] = set()
        self._moved: set[torch.fx.Node] = set()
        for node, value in known.items():
            for memory in _memory(value):
                self._owners.setdefault(memory, node)

    def add(self, node: torch.fx.Node, value: Any) -> None:
        """Note a fake value that was computed."""
        self._new.add(node)
        if node not in self._known or layout(self._known[node]) != layout(value):
            self._moved.add(node)

    def reach(self, node: torch.fx.Node) -> bool:
        """True if the old fake value of an unchanged node is no longer valid."""
        sources = node.all_input_nodes
        if not self._moved.isdisjoint(sources):
            return True
        bases = [self._known[source] for source in self._new.intersection(sources)]
        return not _memory(self._known[node]).isdisjoint(_memory(*bases))

    def owns_memory(self, node: torch.fx.Node) -> bool:
        """True if the node's old fake value shared no memory with an earlier node."""
        return all(self._owners[memory] is node for memory in _memory(self._known[node]))


def _memory(*values: Any) -> set[int]:
    return {_torch.tensors.storage_id(each) for value in values for each in tensors(value)}


def _described(node: torch.fx.Node, key: str, regions: AutocastRegions) -> str:
    """Return a call as text, with the layouts of its inputs in place of its inputs."""

    def described_input(source: torch.fx.Node) -> str:
        return f"<{layout(source.meta.get(key))}>"

    arguments = torch.fx.map_arg((node.args, node.kwargs), described_input)
    return f"{node.op} {node.target} {arguments} {[region.name for region in regions]}"


def mode_of(gm: torch.fx.GraphModule, key: str) -> Any:
    """Return the fake mode of a graph's placeholders, or a new one if they have none."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    return _torch.fakes.fake_mode_of([each.meta[key] for each in placeholders if key in each.meta])


@contextlib.contextmanager
def evaluating(mode: Any) -> Iterator[None]:
    """Return the context in which :func:`recompute` must be called, for any number of nodes."""
    with _torch.fakes.faking(mode), torch.no_grad():
        yield


def recompute(gm: torch.fx.GraphModule, node: torch.fx.Node, key: str, mode: Any) -> bool:
    """Compute the node's fake value. Returns true if its layout differs from before.

    Raises:
        Unknown: The operation fails on the fake values of its inputs.
    """
    value = _computed(gm, node, key, mode)
    if key in node.meta and layout(node.meta[key]) == layout(value):
        return False
    node.meta[key] = value
    return True


def _computed(gm: torch.fx.GraphModule, node: torch.fx.Node, key: str, mode: Any) -> Any:
    try:
        return _evaluate(gm, node, key, mode)
    except Exception as error:
        why = f"{node.target} cannot be run on its inputs: {text_of(error)}"
        raise Unknown(node, why) from error


def _evaluate(gm: torch.fx.GraphModule, node: torch.fx.Node, key: str, mode: Any) -> Any:
    if node.op == "get_attr":
        return _torch.fakes.as_fake(mode, attribute_at(gm, str(node.target)))
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda each: each.meta[key])
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    if node.op == "call_module":
        module = gm.get_submodule(str(node.target))
        state = dict(module.named_parameters()) | dict(module.named_buffers())
        fakes = {name: _torch.fakes.as_fake(mode, value) for name, value in state.items()}
        return torch.func.functional_call(module, fakes, args, kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]  # a call_function's target


AutocastRegions = dict[torch.fx.Node, torch.autocast]


@contextlib.contextmanager
def autocast_regions() -> Iterator[AutocastRegions]:
    """Yield the autocast regions that are open in the graph; close the rest of them at the end."""
    regions: AutocastRegions = {}
    try:
        yield regions
    finally:
        for region in reversed(regions.values()):
            region.__exit__(None, None, None)


def follow(node: torch.fx.Node, regions: AutocastRegions) -> None:
    """Enter or leave an autocast region if ``node`` does.

    Changes of grad mode are ignored, since they do not affect fake values.
    """
    if _torch.modes.enters_autocast(node.target):
        device, dtype, enabled, caches = node.args
        region = torch.autocast(device, dtype, enabled, caches)  # type: ignore[arg-type]  # what Dynamo wrote
        region.__enter__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        regions[node] = region
    elif node.args and node.args[0] in regions:
        regions.pop(node.args[0]).__exit__(None, None, None)  # type: ignore[arg-type]


def layout(value: Any) -> str:
    """Describe a value as text, with the storage offsets of its tensors; views depend on them."""
    return f"{described(value)} {[str(each.storage_offset()) for each in tensors(value)]}"
