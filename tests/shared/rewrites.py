"""Passes that tests share: one that works at every stage, and one mistake each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from composer.passes import GraphPass, Stage

aten = torch.ops.aten
COSINES = (torch.cos, aten.cos.default)


def cosines(gm: torch.fx.GraphModule) -> list[torch.fx.Node]:
    return [node for node in gm.graph.nodes if node.target in COSINES]


def reroute(node: torch.fx.Node, new: torch.fx.Node) -> None:
    """Have all that read ``node`` read ``new``, which reads ``node`` itself."""
    node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)


class CosineToSine(GraphPass):
    """The sine wherever the graph says cosine."""

    def run(self, gm):
        found = cosines(gm)
        for node in found:
            node.target = aten.sin.default
        return len(found)


def at(stage: str, cls: type[GraphPass] = CosineToSine) -> GraphPass:
    """The same pass, at another stage."""
    return dataclass(frozen=True)(type(cls.__name__, (cls,), {"stage": stage, "name": cls.name}))()


def nested(stage: str, cls: type[GraphPass] = CosineToSine) -> GraphPass:
    """The same pass, on the graphs that are nested in the one it is given, such as branches."""

    def run(self, gm):
        graphs = [each for each in gm.children() if isinstance(each, torch.fx.GraphModule)]
        return sum(cls.run(self, each) or 0 for each in graphs if cosines(each))

    return at(stage, type(f"Nested{cls.__name__}", (cls,), {"run": run}))


class MakesTheGraphAnew(CosineToSine):
    """Puts another graph in place of the module's."""

    def run(self, gm):
        made, twins = torch.fx.Graph(), {}
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                twins[node] = made.placeholder(node.target)
            else:
                twins[node] = made.node_copy(node, twins.__getitem__)
        gm.graph = made
        return super().run(gm)


class KeepsATensor(GraphPass):
    """Adds to every cosine a tensor that it keeps as a plain attribute."""

    def run(self, gm):
        gm.kept = torch.ones(4)
        for node in cosines(gm):
            with gm.graph.inserting_before(node):
                kept = gm.graph.create_node("get_attr", "kept")
            with gm.graph.inserting_after(node):
                reroute(node, gm.graph.call_function(aten.add.Tensor, (node, kept)))


class Raises(GraphPass):
    def run(self, gm):
        cosines(gm)[0].target = aten.sin.default
        raise ValueError("lost the thread")


class DropsAnOutput(GraphPass):
    def run(self, gm):
        (output,) = gm.graph.find_nodes(op="output")
        output.args = (output.args[0][:-1],)


class ReordersInputs(GraphPass):
    def run(self, gm):
        first, second = gm.graph.find_nodes(op="placeholder")[:2]
        second.append(first)


class AddsAnInput(GraphPass):
    def run(self, gm):
        (last,) = gm.graph.find_nodes(op="placeholder")[-1:]
        with gm.graph.inserting_after(last):
            gm.graph.placeholder("surprise")


class MakesACycle(GraphPass):
    def run(self, gm):
        node = cosines(gm)[0]
        with gm.graph.inserting_after(node):
            loop = gm.graph.call_function(aten.add.Tensor, (node, node))
        node.args = (loop,)


class ChangesAShape(GraphPass):
    def run(self, gm):
        node = cosines(gm)[0]
        with gm.graph.inserting_after(node):
            summed = gm.graph.call_function(aten.sum.default, (node,))
        reroute(node, summed)


class ChangesADtype(GraphPass):
    def run(self, gm):
        node = cosines(gm)[0]
        with gm.graph.inserting_after(node):
            double = gm.graph.call_function(aten.to.dtype, (node, torch.float64))
        reroute(node, double)


class CallsWhatCannotBe(GraphPass):
    def run(self, gm):
        node = cosines(gm)[0]
        node.target, node.args = aten.mm.default, (node.args[0], 3)


class ReadsAnErasedNode(GraphPass):
    def run(self, gm):
        stranger = torch.fx.Graph().placeholder("stranger")
        cosines(gm)[0].args = (stranger,)


class ReturnsTheModule(GraphPass):
    def run(self, gm):
        return gm


MISTAKES = {
    Raises: "raises",
    DropsAnOutput: "outputs",
    ReordersInputs: "inputs",
    AddsAnInput: "inputs",
    MakesACycle: "order",
    ChangesAShape: "outputs",
    ChangesADtype: "outputs",
    CallsWhatCannotBe: "metadata",
    ReadsAnErasedNode: "lint",
    ReturnsTheModule: "raises",
}
"""Each mistake with the rule that it breaks."""


@dataclass(frozen=True)
class Scale(GraphPass):
    """Multiply every cosine by a number."""

    factor: float = 2.0
    stage: ClassVar[Stage | str] = Stage.POST_GRAD

    def run(self, gm):
        found = cosines(gm)
        for node in found:
            with gm.graph.inserting_after(node):
                scaled = gm.graph.call_function(aten.mul.Tensor, (node, self.factor))
            node.replace_all_uses_with(
                scaled, delete_user_cb=lambda user, new=scaled: user is not new
            )
        return len(found)


class NeedsAName(CustomGraphPass):
    def __init__(self, name):
        self.name = name


class Fails(GraphPass):
    """Raise within AOTAutograd."""

    stage = "joint"

    def run(self, gm):
        raise ValueError("lost the thread")


class Factors(GraphPass):
    """The Cholesky factor in place of a ReLU: it raises for most matrices."""

    stage = "post_grad"

    def run(self, gm):
        for node in gm.graph.find_nodes(op="call_function", target=aten.relu.default):
            node.target = aten.cholesky.default
