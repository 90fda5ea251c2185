"""Fake backends, one per fault, and one honest engine that needs no compiler."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._dynamo import lookup_backend

from composer.errors import refuse
from composer.records import Reason, Status


def honest(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
    """AOTAutograd's graph run eagerly: real work, right numbers, no code generation."""
    return lookup_backend("aot_eager")(gm, example_inputs)


def raises(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
    raise RuntimeError("no such kernel")


def out_of_memory(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
    raise torch.OutOfMemoryError("tried to allocate 80 GiB")


def lacks_a_package(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
    refuse(Status.UNAVAILABLE, Reason.NOT_INSTALLED, "vendor_sdk is not installed")


def returns_none(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
    return None


def returns_text(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
    return "compiled!"


def ruins_the_graph(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
    """Replace every operation by one with other numbers, in nested graphs too, then fail."""
    for module in gm.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                if node.op == "call_function":
                    node.target = torch.zeros_like
                    node.args, node.kwargs = node.args[:1], {}
            module.recompile()
    raise RuntimeError("failed after changing the graph")


def ruins_the_inputs(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
    for value in example_inputs:
        if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
            value.detach().fill_(-1)
    raise RuntimeError("failed after changing the inputs")


def ruins_a_weight(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
    with torch.no_grad():
        next(v for v in example_inputs if isinstance(v, torch.nn.Parameter)).add_(0)
    return honest(gm, example_inputs)


def assigns_a_weight(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
    """Twice, so that what was there first is freed in between."""
    passed = (each for each in example_inputs if isinstance(each, torch.nn.Parameter))
    for weight in (*passed, *gm.parameters()):
        for _ in range(2):
            weight.data = weight.data * 2
    return honest(gm, example_inputs)


def turns_a_weight(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
    """The same memory, read in another order."""
    for weight in gm.parameters():
        weight.data = weight.data.t()
    return honest(gm, example_inputs)


def aborts_after_a_word(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
    os.write(1, b"loading the vendor's library\n")
    os.abort()


def hangs_and_says_who(gm: torch.fx.GraphModule, example_inputs: list[Any], options: Any) -> Any:
    """Write its process id to ``options["file"]``, then sleep for ever."""
    Path(options["file"]).write_text(str(os.getpid()))
    while True:
        time.sleep(1)


def only_here(gm: torch.fx.GraphModule, example_inputs: list[Any], options: Any) -> Any:
    """Raise in any process but the one that ``options["pid"]`` names."""
    if os.getpid() != options["pid"]:
        raise RuntimeError("not in this process")
    return honest(gm, example_inputs)


def multiplies(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
    """Refuse graphs in which nothing is multiplied."""
    if not any("mul" in str(node.target) for node in gm.graph.nodes):
        raise RuntimeError("nothing is multiplied")
    return honest(gm, example_inputs)


def cosine_to_sine(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
    """Change the graph and return its forward: real, if wrong, work."""
    for node in gm.graph.nodes:
        if node.target is torch.cos:
            node.target = torch.sin
    gm.recompile()
    return gm.forward
