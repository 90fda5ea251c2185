"""A graph in a folder runs as it did, on values of its own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from facts import FACTS
from torch.utils.checkpoint import checkpoint

from composer.graphs import capture, check
from composer.graphs.case import Case
from composer.graphs.likeness import like, like_number
from composer.graphs.written import Unsayable

T = torch.tensor


def cases_of(program: Any, *args: Any, dynamic: bool | None = None, data: bool = False) -> Case:
    """The graph that Dynamo captures of a program."""
    found: list[Case] = []

    def backend(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        request = capture.read_request(gm, inputs)
        found.append(Case.of_request(request, with_data=data))
        return gm.forward

    torch.compile(program, backend=backend, dynamic=dynamic)(*args)
    (case,) = found
    return case


def program_in(folder: Path) -> dict[str, Any]:
    """What the program of a folder defines; a file that is run is not imported twice."""
    path = folder / "graph.py"
    names: dict[str, Any] = {"__name__": "graph", "__file__": str(path)}
    exec(compile(path.read_text(), str(path), "exec"), names)
    return names


def run(folder: Path, *, grad: bool = False) -> dict[str, Any]:
    program = program_in(folder)
    settings = check.Settings(grad=grad)
    return check.values_of(program["Graph"](), program["inputs"](), lambda m: m, settings)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(50, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.net = torch.nn.Linear(8, 8)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, factor: float) -> Any:
        x = self.net(self.table(ids)).masked_fill(mask[..., None], float("-inf")).softmax(1)
        x = self.norm(x.transpose(1, 2)) * T([1.0, 2.0, 3.0]).sum() * factor
        y = torch.cond(x.shape[0] > 3, lambda a: a.sin(), lambda a: a.cos(), (x,))
        return y, x.reshape(x.shape[0] * 2, -1)


def test_a_graph_with_all_there_is_runs_from_its_folder(tmp_path: Path) -> None:
    """Weights, buffers, positions, masks, constants, symbols, numbers, and a nested graph."""
    mask = torch.zeros(6, 4, dtype=torch.bool)
    mask[:, 2] = True
    cases_of(Net(), torch.randint(50, (6, 4)), mask, 0.7, dynamic=True).write(tmp_path / "case")
    found = run(tmp_path / "case", grad=True)
    assert found["output 0"].shape == (6, 8, 4)
    assert found["output 1"].shape == (12, 16)
    assert found["gradient of attribute w0"].shape == (50, 8)
    again = run(tmp_path / "case", grad=True)
    torch.testing.assert_close(again, found, rtol=0, atol=0, equal_nan=True)


def test_a_weight_that_is_read_twice_is_one(tmp_path: Path) -> None:
    """Also in a graph that Dynamo has not captured."""

    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(3, 3))

        def forward(self, x: torch.Tensor) -> Any:
            return (x @ self.weight - x.mm(self.weight),)

    case = Case.of(torch.fx.symbolic_trace(Twice()), [torch.randn(3, 3)], (), FACTS)
    case.write(tmp_path / "case")
    assert not run(tmp_path / "case")["output 0"].any()


def test_a_checkpoint_and_autocast_run_from_their_folder(tmp_path: Path) -> None:
    """Both are calls in the captured graph."""

    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = checkpoint(lambda a: torch.sin(a @ w).relu(), x, use_reentrant=False)
        return y.t().contiguous().view(-1).expand(2, -1)

    cases_of(program, torch.randn(3, 4, requires_grad=True), torch.randn(4, 4).t()).write(
        tmp_path / "case"
    )
    found = run(tmp_path / "case", grad=True)
    assert (found["output 0"].dtype, found["output 0"].shape) == (torch.bfloat16, (2, 12))
    assert "gradient of input 0" in found


def test_values_are_those_of_the_program_only_where_they_are_asked_for(tmp_path: Path) -> None:
    """With their strides; the program is the same."""
    weight = torch.nn.Parameter(torch.full((3, 2), 1234.5678))
    x = torch.randn(4, 3).t()[:, ::2]

    def program(x: torch.Tensor) -> torch.Tensor:
        return x.t() @ weight

    drawn, exact = cases_of(program, x), cases_of(program, x, data=True)
    drawn.write(tmp_path / "drawn")
    exact.write(tmp_path / "exact")
    assert drawn.text == exact.text
    given = program_in(tmp_path / "exact")["inputs"]()
    assert [each.stride() for each in given] == [x.stride()]
    torch.testing.assert_close(run(tmp_path / "exact")["output 0"], program(x).detach())
    assert not torch.equal(run(tmp_path / "drawn")["output 0"], program(x).detach())
    for name in ("drawn", "exact"):
        about = json.loads((tmp_path / name / "about.json").read_text())
        assert about["with_data"] == (name == "exact")
        assert Case.read(tmp_path / name, with_data=name == "exact").text == drawn.text


LIKE = {
    "weights": (torch.randn(1000) * 0.03 + 0.001, ("mean=0.0", "std=0.03125")),
    "variances": (T([0.9, 1.1, 1.2]), ("mean=1.0", "std=0.125", "positive=True")),
    "a constant": (torch.full((3,), 1234.5), ("mean=1024.0", "std=0.0", "positive=True")),
    "a mask to add": (T([0.0, -torch.inf]), ("of=(0, -torch.inf,)", "share=0.5")),
    "a mask": (T([True, True]), ("of=(1,)",)),
    "a mask of few": (T([True] + [False] * 99), ("of=(0, 1,)", "share=0.125")),
    "ones": (torch.ones(3), ("of=(1,)",)),
    "positions": (torch.arange(5), ("order='range'",)),
    "indices": (T([7, 424242, 7]), ("low=8", "high=262144")),
    "distinct indices": (T([900, 3, 70]), ("low=4", "high=512", "order='distinct'")),
    "offsets": (T([0, 5, 5, 90]), ("low=0", "high=64", "order='ascending'")),
    "numbers of both signs": (T([-100, 3, 3, -100]), ("low=-64", "high=2")),
    "negative numbers": (T([-100, -3, -3]), ("low=-64", "high=-4", "order='ascending'")),
    "nothing": (torch.empty(0), ()),
}


@pytest.mark.parametrize("name", LIKE)
def test_what_is_said_of_values_is_no_value(name: str) -> None:
    """Powers of two within the range, and what masks, biases and shapes have in common."""
    value, said = LIKE[name]
    assert like(value) == said


def test_numbers_are_powers_of_two() -> None:
    """But for zeros, and for what is no finite number."""
    numbers = (0.7, -1e-5, 0.0, float("inf"))
    assert [like_number(each) for each in numbers] == [0.5, -(2.0**-17), 0.0, float("inf")]


def test_a_text_of_the_user_is_not_written() -> None:
    """An operator that is not torch's may be given a path, and torch's own is given words."""
    with torch.library._scoped_library("repro_test", "FRAGMENT") as library:
        library.define("load(Tensor x, str path) -> Tensor")
        library.impl("load", lambda x, path: x + 1, "CompositeExplicitAutograd")
        library.impl("load", lambda x, path: x + 1, "Meta")
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="a text is an argument"):
            cases_of(lambda x: torch.ops.repro_test.load(x, "secret"), torch.ones(2))
    words = cases_of(lambda x: torch.div(x, 3, rounding_mode="trunc"), torch.ones(2))
    assert "rounding_mode = 'trunc'" in words.text


def test_a_tensor_of_another_kind_is_named() -> None:
    """A program of torch alone cannot draw it."""
    sparse = torch.eye(3).to_sparse()
    gm = torch.fx.symbolic_trace(lambda x: x * 2)
    with pytest.raises(Unsayable, match="sparse_coo, which a program cannot draw"):
        Case.of(gm, [sparse], (), {})
    with pytest.raises(Unsayable, match="it calls a module"):
        Case.of(torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.ReLU())), [T(1.0)], (), {})


WRONG = {
    "is right": (lambda x: [x * 2], check.RIGHT),
    "is off": (lambda x: [x * 2.1], check.WRONG),
    "has a NaN": (lambda x: [x * float("nan")], check.WRONG),
    "has another dtype": (lambda x: [x.double() * 2], check.WRONG),
    "has another shape": (lambda x: [x[None] * 2], check.WRONG),
    "returns nothing": (lambda x: None, check.WRONG),
    "writes to its input": (lambda x: [x.mul_(2)], check.WRONG),
    "raises": (lambda x: [x @ x], check.WRONG),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_difference_from_eager_is_seen(name: str) -> None:
    """In numbers, in kind, and in what became of the inputs."""
    engine, code = WRONG[name]

    class Double(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return (x * 2,)

    inputs = lambda: [torch.arange(1.0, 7.0).view(2, 3)]  # noqa: E731
    assert check.judged(Double, inputs, lambda module: engine, check.Settings()) == code


FILLED = torch.full((2, 3), torch.finfo(torch.float32).min)
BOUNDS = {
    "beside fill values of a mask": (lambda x: torch.cat([FILLED, x]), 1.01, {}, check.WRONG),
    "within the bounds": (lambda x: x, 1.01, {"rtol": 0.1}, check.RIGHT),
    "in low precision": (lambda x: x, 1.01, {"share": 0.02}, check.RIGHT),
    "too far off in low precision": (lambda x: x, 1.01, {"share": 0.005}, check.WRONG),
    "where float64 does not overflow": (lambda x: x.half() * 60_000, 1.0, {}, check.RIGHT),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_numbers_are_compared_as_verify_compares_them(name: str) -> None:
    """In particular beside numbers of another size."""
    function, factor, bounds, code = BOUNDS[name]

    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return (function(x),)

    def engine(module: torch.nn.Module) -> Any:
        return lambda x: [torch.where(each < -1e30, each, each * factor) for each in module(x)]

    inputs = lambda: [torch.arange(1.0, 7.0).view(2, 3)]  # noqa: E731
    assert check.judged(Module, inputs, engine, check.Settings(**bounds)) == code


def test_nothing_is_said_where_eager_fails() -> None:
    """The drawn values may not be any that the graph takes."""

    class Fails(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            raise IndexError("out of range")

    got = check.judged(Fails, lambda: [T(1.0)], lambda module: module, check.Settings())
    assert got == check.UNKNOWN


def test_messages_of_assertions_are_not_told() -> None:
    """They are the user's words; the assertion stays."""

    def checked(x: torch.Tensor) -> tuple[torch.Tensor]:
        torch._assert_async((x > 0).all(), "customer ACME is positive")
        return (x * 2,)

    case = Case.of(torch.fx.symbolic_trace(checked), [torch.ones(2)], (), {})
    assert "_assert_async" in case.text
    assert "ACME" not in case.text
    text = torch.fx.symbolic_trace(lambda x: x.new_tensor("a word of mine"))
    with pytest.raises(Unsayable):
        Case.of(text, [torch.ones(2)], (), {})
