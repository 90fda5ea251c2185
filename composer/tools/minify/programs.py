"""A graph with its inputs, and the ways to make it smaller.

A graph that has lost some of its calls gets their values as inputs, if other calls read them. Eager
mode computes these values. So what is left runs on the numbers of the program.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch.fx.node import map_aggregate, map_arg

from composer import _torch
from composer.graphs import clones
from composer.graphs.nodes import drop_unread, placeholders_of, returned_by

_NAMES = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_READING = ("item", "tolist", torch.ops.aten._local_scalar_dense.default)
_PLAIN = (int, float, complex, str, type(None), *_NAMES)
"""The classes of values that stand in a graph as they are."""


class Uncuttable(Exception):
    """A graph cannot do without these calls."""


class _Over(Exception):
    """A run has come to its end."""


@dataclass(frozen=True)
class Program:
    """A graph that runs by itself.

    Attributes:
        gm: The graph; its weights are inputs. It is not changed.
        inputs: The values of its placeholders.
    """

    gm: torch.fx.GraphModule
    inputs: Sequence[Any]

    @staticmethod
    def of(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Program:
        """Return a program without what the graph knows of the place that it came from."""
        graph = copy.deepcopy(gm.graph)
        for node in graph.nodes:
            node.meta = {}
        return Program(torch.fx.GraphModule(gm, graph), inputs)

    @property
    def calls(self) -> list[torch.fx.Node]:
        """The nodes that call something, in order."""
        silent = ("placeholder", "get_attr", "output")
        return [node for node in self.gm.graph.nodes if node.op not in silent]

    @property
    def outputs(self) -> list[Any]:
        """What the graph returns."""
        return returned_by(self.gm.graph)

    def values(self, wanted: Collection[torch.fx.Node] = ()) -> dict[torch.fx.Node, Any]:
        """Run the program in eager mode; return the values of these nodes.

        Raises:
            Exception: whatever eager mode raises.
        """
        recording = _Recording(self.gm, wanted)
        torch.manual_seed(0)
        with contextlib.suppress(_Over), _torch.modes.restored_modes():
            recording.run(*clones.copy_inputs(self.inputs, frozenset()))
            # A part of a graph may turn on a mode and not off again. Modes are put back after an
            # exception only.
            raise _Over
        return recording.found


class _Recording(torch.fx.Interpreter):
    """Runs a graph, and keeps values as they are before a later call writes to them."""

    def __init__(self, gm: torch.fx.GraphModule, wanted: Collection[torch.fx.Node]) -> None:
        super().__init__(gm)
        self._wanted = frozenset(wanted)
        self.found: dict[torch.fx.Node, Any] = {}

    def run_node(self, n: torch.fx.Node) -> Any:
        value = super().run_node(n)
        if n in self._wanted:
            self.found[n] = map_aggregate(value, _kept)
        return value


def _kept(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


def without_calls(program: Program, first: int, last: int) -> Program:
    """Return the program without the calls from one position up to another.

    It returns what it has returned, as far as that is left, and what only those calls have read.

    Raises:
        Uncuttable: nothing is left to return, or a value can be no input.
    """
    calls = program.calls
    dropped = _with_partners(calls, set(calls[first:last]))
    kept = {node: None for node in calls if node not in dropped}
    cut = [node for node in calls if node in dropped and not kept.keys().isdisjoint(node.users)]
    ends = [node for node in kept if kept.keys().isdisjoint(node.users)]
    values = program.values((*cut, *ends))
    returned = [node for node in kept if node in program.outputs]
    returned += [n for n in ends if n not in returned and isinstance(values[n], torch.Tensor)]
    return _rebuilt(program, kept, returned, {node: values[node] for node in cut})


def _with_partners(
    calls: Sequence[torch.fx.Node], dropped: set[torch.fx.Node]
) -> set[torch.fx.Node]:
    """Return the calls, with the other one of each pair that turns autocast on and off."""
    changes = [node for node in calls if _torch.modes.changes_autocast(node.target)]
    pairs = [{node, *node.all_input_nodes} for node in changes if node.args]
    return dropped.union(*(pair for pair in pairs if not dropped.isdisjoint(pair)))


def without_outputs(program: Program, first: int, last: int) -> Program:
    """Return the program without some outputs, and without the calls that only they need.

    Raises:
        Uncuttable: nothing is left to return.
    """
    outputs = program.outputs
    return _rebuilt(program, program.calls, [*outputs[:first], *outputs[last:]], {})


def only_returning(program: Program, call: torch.fx.Node) -> Program:
    """Return the program that ends with a call."""
    return _rebuilt(program, program.calls, [call], {})


def _rebuilt(
    program: Program,
    calls: Collection[torch.fx.Node],
    returned: Sequence[Any],
    values: dict[torch.fx.Node, Any],
) -> Program:
    """Return a program of some calls, with values in place of other calls.

    It has the inputs that it reads, as Dynamo gives them to an engine.

    Raises:
        Uncuttable: nothing is left to return, or a value can be no input.
    """
    if not any(isinstance(each, torch.fx.Node) for each in returned):
        raise Uncuttable("nothing is left to return")
    graph = torch.fx.Graph()
    twins: dict[torch.fx.Node, Any] = {}
    inputs: dict[torch.fx.Node, Any] = {}
    for node, value in zip(placeholders_of(program.gm.graph), program.inputs, strict=True):
        twins[node] = graph.node_copy(node)
        inputs[twins[node]] = value

    def put(name: str, value: Any) -> Any:
        """Return what stands for a value: an input, or the value itself."""
        if isinstance(value, torch.Tensor):
            twin = graph.placeholder(name)
            twin.target = twin.name  # which no other node has
            inputs[twin] = value
            return twin
        if isinstance(value, _PLAIN):
            return value
        raise Uncuttable(f"a {type(value).__name__} can be no input")

    for node, value in values.items():
        if node.target in _READING or isinstance(value, float):
            raise Uncuttable("a number that was computed from the data would stand in the graph")
        twins[node] = map_aggregate(value, functools.partial(put, node.name))
    for node in program.gm.graph.nodes:
        if node in calls or node.op == "get_attr":
            twins[node] = graph.node_copy(node, twins.__getitem__)
    graph.output(map_arg(tuple(returned), twins.__getitem__))
    drop_unread(graph)
    for node in placeholders_of(graph):
        if not node.users:
            graph.erase_node(node)
            del inputs[node]
    return Program(torch.fx.GraphModule(program.gm, graph), [*inputs.values()])


def sizes(program: Program) -> set[int]:
    """Return the sizes of the inputs that can become smaller."""
    tensors = _torch.tensors.tensors_among(program.inputs)
    return {size for each in tensors for size in each.shape if size > 1}


def with_size(program: Program, old: int, new: int, *, also_arguments: bool) -> Program:
    """Return the program with a smaller size in place of another, in all inputs.

    Args:
        program: The program.
        old: The size.
        new: The smaller one.
        also_arguments: True to replace that number in the arguments of calls as well.
    """

    def argument(value: Any) -> Any:
        is_it = type(value) is int and value == old
        return new if is_it else value

    gm = torch.fx.GraphModule(program.gm, copy.deepcopy(program.gm.graph))
    for node in gm.graph.nodes if also_arguments else ():
        node.args = map_aggregate(node.args, argument)
        node.kwargs = map_aggregate(node.kwargs, argument)
    gm.recompile()
    return Program(gm, [_narrowed(each, old, new) for each in program.inputs])


def _narrowed(value: Any, old: int, new: int) -> Any:
    if not isinstance(value, torch.Tensor) or old not in value.shape:
        return value
    small = value.detach()
    for dim, size in enumerate(value.shape):
        small = small.narrow(dim, 0, new if size == old else size)
    return _in_place_of(value, small.clone())


def with_fill(
    program: Program, position: int, fill: Callable[[torch.Tensor], torch.Tensor]
) -> Program:
    """Return the program with zeros, ones or a range as one of its inputs.

    Args:
        program: The program.
        position: The input's position.
        fill: One of :data:`FILLS`.

    Raises:
        Uncuttable: the input is as simple already.
    """
    value = program.inputs[position]
    if not isinstance(value, torch.Tensor) or any(torch.equal(value, f(value)) for f in FILLS):
        raise Uncuttable("it is simple")
    inputs = [*program.inputs]
    inputs[position] = _in_place_of(value, fill(value.detach()))
    return Program(program.gm, inputs)


def _arange_like(value: torch.Tensor) -> torch.Tensor:
    numbers = torch.arange(value.numel(), device=value.device).view(value.shape)
    return torch.empty_like(value).copy_(numbers)


def _in_place_of(value: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same kind as another: a parameter, or one that gets a gradient."""
    if isinstance(value, torch.nn.Parameter):
        return torch.nn.Parameter(new, requires_grad=value.requires_grad)
    return new.requires_grad_(value.requires_grad)


FILLS = (torch.zeros_like, torch.ones_like, _arange_like)
"""Make a simple tensor of the shape, dtype and strides of another."""
