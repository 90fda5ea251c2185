"""What counts as the untouched graph, and what does not."""

from __future__ import annotations

import functools

import pytest
import torch
from common import compiled, last


class Runner:
    def __init__(self, gm):
        self.gm = gm

    def __call__(self, *args):
        return self.gm(*args)

    def run(self, *args):
        return self.gm.forward(*args)


def variable(gm):
    def run(*args):
        result = gm(*args)
        return result  # noqa: RET504  # the variable is what this case is about

    return run


def keywords(gm):
    def run(*args, **kwargs):
        return gm(*args, **kwargs)

    return run


UNTOUCHED = {
    "module": lambda gm: gm,
    "forward": lambda gm: gm.forward,
    "call": lambda gm: gm.__call__,
    "lambda": lambda gm: lambda *args: gm(*args),
    "named argument": lambda gm: lambda x: gm(x),
    "lambda forward": lambda gm: lambda *args: gm.forward(*args),
    "variable": variable,
    "keywords": keywords,
    "nested": lambda gm: (lambda inner: lambda *args: inner(*args))(lambda *args: gm(*args)),
    "partial": functools.partial,
    "object": Runner,
    "method": lambda gm: Runner(gm).run,
    "disabled": lambda gm: torch.compiler.disable(gm.forward),
    "disabled module": torch.compiler.disable,
    "another module": lambda gm: torch.fx.GraphModule(gm, gm.graph),
}


def add_one(gm):
    return lambda *args: [each + 1 for each in gm(*args)]


def helper(gm):
    return lambda *args: act(gm, args)


def act(gm, args):
    return [each + 1 for each in gm(*args)]


def wraps(gm):
    engine = torch.jit.trace(gm, (torch.ones(3),))

    @functools.wraps(gm.forward)
    def run(*args):
        return engine(*args)

    return run


WORK = {
    "adds one": add_one,
    "passes the graph on": helper,
    "wears the graph's name": wraps,
    "script": lambda gm: torch.jit.trace(gm, (torch.ones(3),)),
}


@pytest.mark.parametrize("wrap", UNTOUCHED.values(), ids=UNTOUCHED)
def test_running_the_untouched_graph_is_not_success(wrap) -> None:
    """It is rejected as ``returned_original`` and the eager fallback serves."""
    x = torch.randn(3)
    result = compiled(torch.cos, lambda gm, example_inputs: wrap(gm))(x)
    assert torch.equal(result, torch.cos(x))
    assert (last().chosen, last().attempts[0].reason) == ("eager", "returned_original")


@pytest.mark.parametrize("wrap", WORK.values(), ids=WORK)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_work_is_not_mistaken_for_the_untouched_graph(wrap) -> None:
    """A callable that does more, or may, is accepted."""
    compiled(torch.cos, lambda gm, example_inputs: wrap(gm))(torch.ones(3))
    assert last().attempts[0].status == "succeeded"


def test_arguments_in_another_order_are_work() -> None:
    """A function that swaps its arguments does not run the untouched graph."""
    run = compiled(torch.sub, lambda gm, example_inputs: lambda x, y: gm(y, x))
    assert run(torch.tensor(3.0), torch.tensor(1.0)).item() == -2.0
    assert last().attempts[0].status == "succeeded"


def test_a_new_object_under_the_same_code_is_work() -> None:
    """Replacing a submodule leaves the code as it was."""
    gm = torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(2, 2)))

    def replace(gm, example_inputs):
        setattr(gm, "0", torch.nn.Identity())
        return gm.forward

    run = torch._dynamo.lookup_backend("composer")(
        gm, [torch.ones(2)], options={"chain": [replace]}
    )
    assert torch.equal(run(torch.ones(2)), torch.ones(2))
    assert last().chosen == "replace"
