"""A graph written down: what texts tell apart and refuse, and what comes back of the parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composer.graphs.written import Unsayable, as_bytes, exact_text, lines, of_bytes


def calling(function: Any, *args: Any) -> torch.fx.GraphModule:
    """A graph that calls a function with its one input and these arguments."""
    graph = torch.fx.Graph()
    graph.output((graph.call_function(function, (graph.placeholder("x"), *args)),))
    return torch.fx.GraphModule(nn.Module(), graph)


ALIKE = {
    "an integer and a bool": (1, True),
    "an integer and a float": (1, 1.0),
    "two zeros": (0.0, -0.0),
    "a list and a tuple": ([1], (1,)),
    "a number and its text": (1, "1"),
    "two slices": (slice(1, None), slice(None, 1)),
}


@pytest.mark.parametrize(("one", "other"), ALIKE.values(), ids=ALIKE)
def test_arguments_that_python_takes_for_alike_are_told_apart(one: Any, other: Any) -> None:
    """In both texts."""
    x = torch.ones(3)
    first, second = calling(torch.add, one), calling(torch.add, other)
    assert exact_text(first, [x]) != exact_text(second, [x])
    assert list(lines(first, [x])) != list(lines(second, [x]))


def test_lines_say_nothing_of_the_names_of_nodes() -> None:
    """They are the same for a graph whose nodes are called otherwise."""
    a, b = (torch.fx.symbolic_trace(f) for f in (lambda x: x.sin() + 1, lambda y: y.sin() + 1))
    assert list(lines(a)) == list(lines(b))
    assert exact_text(a, [torch.ones(3)]) != exact_text(b, [torch.ones(3)])


@pytest.mark.parametrize(
    "other",
    [torch.ones(4), torch.ones(6)[::2], torch.ones(4)[1:], torch.ones(3).requires_grad_()],
    ids=["shape", "stride", "offset", "requires grad"],
)
def test_exact_text_changes_with_the_layout_of_an_input(other: Tensor) -> None:
    """Also with where in its memory it begins, of which the lines say nothing."""
    gm = calling(torch.add, 1)
    assert exact_text(gm, [torch.ones(3)]) != exact_text(gm, [other])


def test_exact_text_says_the_bounds_of_a_symbol() -> None:
    """A translation may depend on them; the lines of the two graphs are the same."""
    texts: list[tuple[str, list[str]]] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        values = [node.meta["example_value"] for node in gm.graph.find_nodes(op="placeholder")]
        texts.append((exact_text(gm, values), list(lines(gm))))
        return gm.forward

    for top in (8, 16):
        torch.compiler.reset()
        x = torch.ones(4, 3)
        torch._dynamo.mark_dynamic(x, 0, min=2, max=top)
        torch.compile(lambda x: torch.relu(x), backend=backend)(x)
    (exact, said), (other_exact, other_said) = texts
    assert exact != other_exact
    assert said == other_said


def of_the_user(x: Tensor, *args: Any) -> Tensor:
    return x + 1


def test_exact_text_refuses_what_it_cannot_say() -> None:
    """A function of the user's, a tensor within the graph, an argument of another kind."""
    with pytest.raises(Unsayable, match="of_the_user"):
        exact_text(calling(of_the_user), [torch.ones(3)])
    with pytest.raises(Unsayable, match="an argument is a set"):
        exact_text(calling(torch.add, {1}), [torch.ones(3)])
    holder = nn.Module()
    holder.register_buffer("table", torch.ones(3))
    graph = torch.fx.Graph()
    graph.output((graph.call_function(torch.relu, (graph.get_attr("table"),)),))
    with pytest.raises(Unsayable, match="'table'"):
        exact_text(torch.fx.GraphModule(holder, graph), [])


def test_parts_become_the_graph_again() -> None:
    """With the user's own functions, nested arguments, buffers, and the names of nodes."""
    holder = nn.Module()
    holder.register_buffer("table", torch.arange(6.0))
    graph = torch.fx.Graph()
    x, table = graph.placeholder("x"), graph.get_attr("table")
    part = graph.call_function(of_the_user, (table, [x, (x, slice(0, 2))], {"of": x}))
    graph.output((graph.call_method("mul", (part,), {"other": x}),))
    gm = torch.fx.GraphModule(holder, graph).eval()
    back = of_bytes(as_bytes(gm))
    assert [node.name for node in back.graph.nodes] == [node.name for node in graph.nodes]
    assert list(lines(back)) == list(lines(gm))
    assert not back.training
    assert torch.equal(back(torch.tensor(2.0))[0], (torch.arange(6.0) + 1) * 2)
