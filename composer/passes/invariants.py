"""The rules for a pass. They are checked after each pass that changed the graph.

- ``raises``: The pass does not raise an exception.
- ``inputs``: The placeholders are the same, in the same order, with the same fake values.
- ``outputs``: The number of outputs is the same, and each has the same shape, dtype and device.
  Before autograd (stages ``torch`` and ``aten``) the user's code sees the strides, so they are the
  same as well.
- ``order``: No operation needs its own result. The graph can be sorted so that every node comes
  after its inputs, and no node has to move across an operation that writes to memory.
- ``lint``: Every argument is a node of this graph, and every attribute exists (``Graph.lint``).
- ``metadata``: Every operation can run on the fake values of its inputs.
- ``numbers``: A pass that declares ``keeps_numbers`` keeps them. The rule is checked if the policy
  compares numbers (:mod:`composer.chain.verify.rewrites`).
- ``stage``: composer could make the graph of the pass's stage.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import torch.fx

from composer import _torch
from composer.graphs.nodes import described, placeholders_of, returned_by
from composer.passes import metadata, order
from composer.passes.purity import is_pure, keeps_to_itself
from composer.passes.snapshot import Snapshot, lines_of
from composer.records import BEFORE_AUTOGRAD, Stage


class Broken(Exception):
    """A pass broke a rule.

    Args:
        rule: The name of the rule.
        node: The name of the node where the error shows; may be empty.
        message: What is wrong.
    """

    def __init__(self, rule: str, node: str, message: str) -> None:
        super().__init__(message)
        self.rule = rule
        self.node = node


@dataclass(frozen=True, slots=True)
class Interface:
    """The inputs and outputs of a graph, as text that can be compared.

    ``inputs`` maps each placeholder's target to its fake value. ``outputs`` are the fake values of
    the results; constants are kept as they are.
    """

    inputs: dict[str, Any]
    outputs: tuple[Any, ...]

    @staticmethod
    def of(gm: torch.fx.GraphModule, stage: Stage | str) -> Interface:
        """Read the interface of a graph."""
        key = metadata.key_at(stage)
        strides = stage in BEFORE_AUTOGRAD
        inputs = {
            str(node.target): described(node.meta.get(key)) for node in placeholders_of(gm.graph)
        }
        outputs = []
        for value in returned_by(gm.graph):
            fake = value.meta.get(key) if isinstance(value, torch.fx.Node) else value
            outputs.append(described(fake, strides=strides))
        return Interface(inputs, tuple(outputs))


def enforce(
    gm: torch.fx.GraphModule, stage: Stage | str, before: Snapshot, promised: Interface
) -> None:
    """Sort the nodes, update the fake values, and check the rules after a pass.

    Raises:
        Broken: A rule does not hold; it names the first one.
    """
    _check_inputs(gm, promised)
    _carry_inputs(before, gm)
    _check_number_of_outputs(gm, promised)
    changed = before.changed_graphs()
    for graph in (gm, *changed.values()):
        _check_arguments(graph)
    _sort(gm.graph, functional=stage not in BEFORE_AUTOGRAD)
    for graph in (gm, *changed.values()):
        _lint(graph)
    for graph in changed.values():
        graph.recompile()
    _make_buffers(gm)
    try:
        key = metadata.key_at(stage)
        metadata.propagate(gm, key, _kept(gm, before, changed), before.values(key))
    except metadata.Unknown as unknown:
        raise Broken("metadata", unknown.node.name, str(unknown)) from unknown
    _check_values(gm, stage, promised)


def _carry_inputs(before: Snapshot, gm: torch.fx.GraphModule) -> None:
    """Copy the metadata of the old placeholders to placeholders that the pass created."""
    for old, new in zip(
        before.copy.find_nodes(op="placeholder"), placeholders_of(gm.graph), strict=True
    ):
        new.meta = {**old.meta, **new.meta}
        _torch.sources.carry_node_source(old, new)


def _make_buffers(gm: torch.fx.GraphModule) -> None:
    """Turn tensors that a pass stored as plain attributes into buffers, for AOTAutograd."""
    for node in gm.graph.find_nodes(op="get_attr"):
        path, _, name = str(node.target).rpartition(".")
        owner = gm.get_submodule(path)
        held = vars(owner).get(name)
        if isinstance(held, torch.Tensor):
            delattr(owner, name)
            owner.register_buffer(name, held, persistent=False)


def _lint(gm: torch.fx.GraphModule) -> None:
    try:
        gm.graph.lint()
    except Exception as error:
        raise Broken("lint", "", str(error)) from error


def _kept(
    gm: torch.fx.GraphModule, before: Snapshot, changed: Container[str]
) -> set[torch.fx.Node]:
    """Return the nodes that did not change and do not run a nested graph that changed."""
    kept = set()
    for node, line in lines_of(gm.graph).items():
        nested = [each for each in (node, *node.all_input_nodes) if each.target in changed]
        if before.lines.get(node) == line and not nested:
            kept.add(node)
    return kept


def _sort(graph: torch.fx.Graph, *, functional: bool) -> None:
    before = list(graph.nodes)
    try:
        order.sort(graph)
    except order.Cycle as cycle:
        raise Broken("order", cycle.node.name, str(cycle)) from cycle
    if functional:
        return
    moved = order.moved_across(before, list(graph.nodes), _is_barrier)
    if moved is not None:
        what = "it moves across a write to memory or a change of state"
        remedy = "insert it where it is to run"
        raise Broken("order", moved.name, f"to stand behind what it reads {what}; {remedy}")


def _is_barrier(node: torch.fx.Node) -> bool:
    """True if another operation must not be moved across this node."""
    is_call = node.op in ("call_function", "call_method", "call_module")
    return is_call and not is_pure(node) and not keeps_to_itself(node)


def _check_inputs(gm: torch.fx.GraphModule, promised: Interface) -> None:
    now, was = [str(node.target) for node in placeholders_of(gm.graph)], list(promised.inputs)
    if now == was:
        return
    pairs = zip(now, was, strict=False)
    last = (now + was)[-1]
    first_other = next((name for name, old in pairs if name != old), last)
    what = "in another order" if sorted(now) == sorted(was) else "others"
    raise Broken("inputs", first_other, f"the inputs were {was} and are {what} now: {now}")


def _check_number_of_outputs(gm: torch.fx.GraphModule, promised: Interface) -> None:
    found = gm.graph.find_nodes(op="output")
    if len(found) != 1:
        raise Broken("outputs", "output", f"the graph has {len(found)} output nodes")
    now, was = len(returned_by(gm.graph)), len(promised.outputs)
    if now != was:
        raise Broken("outputs", "output", f"the graph returned {was} values and returns {now} now")


def _check_arguments(gm: torch.fx.GraphModule) -> None:
    nodes = set(gm.graph.nodes)
    for node in gm.graph.nodes:
        foreign = [source for source in node.all_input_nodes if source not in nodes]
        if foreign:
            what = f"it reads {foreign[0].name}, which is not in the graph"
            raise Broken("lint", node.name, what)


def _check_values(gm: torch.fx.GraphModule, stage: Stage | str, promised: Interface) -> None:
    now = Interface.of(gm, stage)
    for name, was in promised.inputs.items():
        if now.inputs[name] != was:
            what = f"its fake value was {was} and is {now.inputs[name]} now"
            raise Broken("inputs", name, what)
    for index, returned in enumerate(returned_by(gm.graph)):
        was, value = promised.outputs[index], now.outputs[index]
        if value != was:
            node = returned.name if isinstance(returned, torch.fx.Node) else "output"
            raise Broken("outputs", node, f"output {index} was {was} and is {value} now")
