"""Fake values kept true: what a pass changed, and all that hangs on it, is computed anew."""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterator, Sequence
from typing import Any

import torch
import torch.fx

from composer import _torch
from composer.graphs.nodes import attribute_at
from composer.passes.base import Stage


class Unknown(Exception):
    """An operation cannot be run on the fake values of its inputs. ``node`` is that operation."""

    def __init__(self, node: torch.fx.Node, why: str) -> None:
        super().__init__(why)
        self.node = node


def key_at(stage: Stage | str) -> str:
    """Where a node's fake value stands in its ``meta``."""
    return "example_value" if stage == Stage.TORCH else "val"


_OF_VALUES = frozenset({"val", "example_value", "tensor_meta", "unbacked_bindings"})
_OF_OPERATORS = frozenset({"original_aten", "eager_input_vals", "from_node"})


def provenance(*nodes: torch.fx.Node) -> dict[str, Any]:
    """What nodes say of where they come from: the user's line, the module, the direction.

    For new nodes in their place; of several, what the last says has precedence.
    """
    merged = {key: value for node in nodes for key, value in node.meta.items()}
    return {k: v for k, v in merged.items() if k not in _OF_VALUES | _OF_OPERATORS}


def fill(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], key: str) -> None:
    """Give fake values to a graph that has none, as one that did not come from Dynamo.

    Raises:
        Unknown: an operation fails on them.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    if all(key in node.meta for node in placeholders):
        return
    mode = _torch.fake_mode_of(example_inputs)
    for node, value in zip(placeholders, example_inputs, strict=True):
        node.meta[key] = _torch.as_fake(mode, value)
    propagate(gm, key, keep=())


def propagate(gm: torch.fx.GraphModule, key: str, keep: Container[torch.fx.Node]) -> None:
    """Compute the fake value of every operation but those in ``keep`` that read nothing new.

    Raises:
        Unknown: an operation fails on the fake values of its inputs.
    """
    moved: set[torch.fx.Node] = set()
    computed: dict[str, str] = {}
    mode = mode_of(gm, key)
    with evaluating(mode), autocast_regions() as regions:
        for node in gm.graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            if _torch.changes_state(node.target):
                follow(node, regions)
                continue
            reads_new = not moved.isdisjoint(node.all_input_nodes)
            if key in node.meta and node in keep and not reads_new:
                continue
            call = _described(node, key, regions)
            if key in node.meta and computed.get(call) == description(node.meta[key]):
                continue  # the same operation on the same kind of inputs gave that already
            if recompute(gm, node, key, mode):
                moved.add(node)
            computed[call] = description(node.meta[key])


def _described(node: torch.fx.Node, key: str, regions: Regions) -> str:
    """A call with its inputs' fake values in place of its inputs."""
    given = torch.fx.map_arg(
        (node.args, node.kwargs), lambda each: f"<{description(each.meta.get(key))}>"
    )
    return f"{node.op} {node.target} {given} {[region.name for region in regions]}"


def mode_of(gm: torch.fx.GraphModule, key: str) -> Any:
    """The fake mode of a graph's placeholders; a new one where they have none."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    return _torch.fake_mode_of([each.meta[key] for each in placeholders if key in each.meta])


@contextlib.contextmanager
def evaluating(mode: Any) -> Iterator[None]:
    """What :func:`recompute` needs around it; entered once, it serves any number of nodes."""
    with _torch.faking(mode), torch.no_grad():
        yield


def recompute(gm: torch.fx.GraphModule, node: torch.fx.Node, key: str, mode: Any) -> bool:
    """Give the node its fake value; whether that is another one than before.

    Raises:
        Unknown: the operation fails on the fake values of its inputs.
    """
    try:
        value = _evaluate(gm, node, key, mode)
    except Exception as error:
        raise Unknown(node, f"{node.target} cannot be run on its inputs: {error}") from error
    if key in node.meta and description(node.meta[key]) == description(value):
        return False
    node.meta[key] = value
    return True


def _evaluate(gm: torch.fx.GraphModule, node: torch.fx.Node, key: str, mode: Any) -> Any:
    if node.op == "get_attr":
        return _torch.as_fake(mode, attribute_at(gm, str(node.target)))
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda each: each.meta[key])
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    if node.op == "call_module":
        module = gm.get_submodule(str(node.target))
        state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        fakes = {name: _torch.as_fake(mode, value) for name, value in state.items()}
        return torch.func.functional_call(module, fakes, args, kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]  # a call_function's target


Regions = dict[torch.fx.Node, torch.autocast]


@contextlib.contextmanager
def autocast_regions() -> Iterator[Regions]:
    """The regions of autocast that the graph has opened so far; what is left open is closed."""
    regions: Regions = {}
    try:
        yield regions
    finally:
        for region in reversed(regions.values()):
            region.__exit__(None, None, None)


def follow(node: torch.fx.Node, regions: Regions) -> None:
    """Do what the graph does to autocast; its changes of grad mode do not show in fake values."""
    if _torch.enters_autocast(node.target):
        device, dtype, enabled, caches = node.args
        region = torch.autocast(device, dtype, enabled, caches)  # type: ignore[arg-type]  # what Dynamo wrote
        region.__enter__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        regions[node] = region
    elif node.args and node.args[0] in regions:
        regions.pop(node.args[0]).__exit__(None, None, None)  # type: ignore[arg-type]


def description(value: Any, *, strides: bool = True) -> str:
    """What must agree for two fake values to be the same to whoever reads them; adds no guard."""
    if isinstance(value, torch.Tensor):
        kind = f"{value.dtype} {list(value.shape)} on {value.device}"
        shows_strides = strides and value.layout is torch.strided
        return f"{kind}, strides {tuple(value.stride())}" if shows_strides else kind
    if isinstance(value, list | tuple):
        return str([description(each, strides=strides) for each in value])
    return str(value)
