"""What a graph writes to is known, and outlives engines and comparisons that run it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import engines
import pytest
import torch
from common import compiled, in_threads, last, needs_torch
from torch.nn import functional

from composer.backends.base import Backend, Build, BuildRequest
from composer.backends.inductor import InductorBackend
from composer.graphs import writes
from composer.graphs.capture import read_request
from composer.runtime import calls
from composer.runtime.served import ServedGraph
from composer.testing import FakeBackend

pytestmark = [
    pytest.mark.filterwarnings("ignore::composer.errors.FallbackWarning"),
    pytest.mark.filterwarnings("ignore:Profiler record function"),
]


def late_at(number: int) -> Callable[..., Any]:
    """An engine that does all its work and then raises, at one of its calls."""

    def late(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        calls = iter(range(1, 100))

        def run(*args: Any) -> Any:
            outputs = gm.forward(*args)
            if next(calls) == number:
                raise RuntimeError("too late")
            return outputs

        return run

    return late


def stepper() -> tuple[torch.nn.Parameter, torch.optim.Optimizer]:
    weight = torch.nn.Parameter(torch.ones(4))
    weight.grad = torch.ones(4)
    return weight, torch.optim.SGD([weight], lr=0.1)


def test_verifying_an_optimizers_step_is_one_step() -> None:
    """The parameters that it writes to are put back, and compared."""
    weight, optimizer = stepper()
    compiled(optimizer.step, "aot_eager", verify="compile")()
    torch.testing.assert_close(weight.data, torch.full((4,), 0.9))
    assert last().attempts[0].engine["verified"]["values"] == 2


def test_wrong_step_of_an_optimizer_is_rejected() -> None:
    """What a graph writes to tensors that it holds is its answer."""

    def steps_twice(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        return lambda *args: (gm.forward(*args), gm.forward(*args))[1]

    weight, optimizer = stepper()
    compiled(optimizer.step, steps_twice, verify="compile")()
    assert last().attempts[0].reason == "numeric_mismatch"
    torch.testing.assert_close(weight.data, torch.full((4,), 0.9))


def test_optimizers_step_is_not_taken_twice_when_an_engine_fails_behind_it() -> None:
    """The parameters have been written to, so nobody answers."""
    weight, optimizer = stepper()
    step = compiled(optimizer.step, late_at(2), FakeBackend())
    step()
    with pytest.raises(RuntimeError, match="too late"):
        step()
    torch.testing.assert_close(weight.data, torch.full((4,), 0.8))
    step()
    torch.testing.assert_close(weight.data, torch.full((4,), 0.7))
    assert last().chosen == "fake_honest"


def test_optimizers_step_is_answered_for_when_nothing_was_written() -> None:
    """One step a call."""
    weight, optimizer = stepper()
    step = compiled(optimizer.step, FakeBackend("raises", at=2), FakeBackend())
    for _ in range(4):
        step()
    torch.testing.assert_close(weight.data, torch.full((4,), 0.6))


T, P = torch.ones(2, 2), torch.nn.Parameter(torch.ones(2, 2))


@pytest.mark.parametrize(
    ("function", "writing"),
    [
        (lambda x, w: x + w, False),
        (lambda x, w: x.add_(w), True),
        (lambda x, w: x.__ior__(w), True),
        (lambda x, w: x.__or__(w), False),
        (lambda x, w: (x & w) | w, False),
        (lambda x, w: torch.add(x, w, out=x), True),
        (lambda x, w: functional.relu(x + w, inplace=True), True),
        (lambda x, w: torch.ops.aten.copy_.default(x, w), True),
        (lambda x, w: torch.ops.aten.add.Tensor(x, w), False),
        (lambda x, w: functional.embedding(x, w, None, 1.0), True),
        (lambda x, w: functional.embedding(x, w), False),
        (lambda x, w: functional.embedding_bag(x, w, max_norm=1.0), True),
        (lambda x, w: torch.embedding(w, x, -1, True, False), False),
        (lambda x, w: torch.ops.aten.embedding.default(w, x, -1, True), False),
        (lambda x, w: torch.ops.aten.embedding_bag.padding_idx(w, x, x, False, 0), False),
        (lambda x, w: torch.native_batch_norm(x, w, w, w, w, True, 0.1, 1e-5), True),
        (lambda x, w: torch.native_batch_norm(x, w, w, w, w, False, 0.1, 1e-5), False),
        (lambda x, w: functional.instance_norm(x, w, w), True),
        (lambda x, w: functional.instance_norm(x, w, w, use_input_stats=False), False),
    ],
)
def test_writes_are_known_by_name_mark_and_schema(function: Any, writing: bool) -> None:
    """In-place names, ``out=``, ``inplace=True``, mutable schemas, norms that move."""
    assert writes.may_write(torch.fx.symbolic_trace(function)) is writing


@pytest.mark.parametrize(
    ("function", "computing"),
    [
        (lambda x, w: x.detach(), False),
        (lambda x, w: x.chunk(2)[1].reshape(-1), False),
        (lambda x, w: x.view(x.shape[0] * x.shape[1]), False),
        (lambda x, w: w.t(), False),
        (lambda x, w: x.contiguous().float(), False),
        (lambda x, w: x.clone(), True),
        (lambda x, w: x.double(), True),
        (lambda x, w: x.view(-1).add_(1), True),
        (lambda x, w: functional.relu(x, inplace=True), True),
        (lambda x, w: torch.rand(2), True),
    ],
)
def test_graph_of_views_computes_nothing(function: Any, computing: bool) -> None:
    """A graph that writes to its inputs, or returns memory of its own, computes something."""
    seen: list[bool] = []

    def see(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        seen.append(not writes.computes_nothing(gm))
        return gm.forward

    weight = torch.nn.Parameter(torch.ones(2, 2))
    with torch.no_grad():
        torch.compile(lambda x: (function(x, weight),), backend=see)(torch.ones(2, 2))
    assert seen == [computing]


@needs_torch("2.12", "no branch may write")
@pytest.mark.parametrize("selected", [{"verify": "compile"}, {"select": "fastest"}])
@torch.no_grad()
def test_write_within_a_branch_is_done_once(selected: dict[str, Any]) -> None:
    """However often the engines are tried."""
    weight = torch.nn.Parameter(torch.zeros(4))

    def write(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        w.add_(x)
        return x + 1

    def leave(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x + 1

    def step(chosen: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(chosen, write, leave, (weight, x)) * 2

    run = compiled(step, "aot_eager", **selected)
    assert torch.equal(run(torch.tensor(True), torch.ones(4)), torch.full((4,), 4.0))
    assert torch.equal(weight, torch.ones(4))


class Leaks(torch.nn.Module):
    """Writes to its parameter at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(-torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + functional.leaky_relu(self.weight, 0.5, True)


@torch.no_grad()
def test_inplace_by_position_is_a_write() -> None:
    """As Dynamo has it in the graph: it is done once, however often the engines are tried."""
    model = Leaks()
    compiled(model, "aot_eager", verify="compile")(torch.zeros(3))
    assert torch.equal(model.weight, torch.full((3,), -0.5))


def test_what_is_no_inplace_by_position_is_no_write() -> None:
    """Others are given in the same place, too."""
    seen: list[bool] = []

    def looks(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        seen.append(writes.may_write(gm))
        return gm.forward

    x = torch.ones(3)
    for more in ((True,), (True, True)):
        torch.compile(lambda x, more=more: functional.dropout(x, 0.5, *more) * 2, backend=looks)(x)
    assert seen == [False, True]


class Counts(torch.nn.Module):
    """Writes to its buffer, through a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(2, 2))

    def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        self.seen.view(4)[0] = 1
        return x + w


def _assigned_item(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x @ w
    y[0] += 1
    return y


@pytest.mark.parametrize(
    ("function", "writing"),
    [
        (lambda x, w: functional.relu(x @ w, inplace=True), False),
        (_assigned_item, False),
        (lambda x, w: x.clone().view(-1).add_(1), False),
        (lambda x, w: x.t().mul_(2) + w, True),
        (lambda x, w: torch.add(x, w, out=w[:]), True),
        (Counts(), True),
    ],
)
def test_only_what_outlives_the_call_is_written_to(function: Any, writing: bool) -> None:
    """What the graph has made by itself is nobody else's, its views too."""
    seen: list[bool] = []

    def see(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        seen.append(writes.may_write(gm))
        return gm.forward

    with torch.no_grad():
        torch.compile(function, backend=see)(torch.ones(2, 2), torch.ones(2, 2))
    assert seen == [writing]


def test_only_the_parameters_that_are_written_to_count() -> None:
    """One that is only read does not."""
    gm = torch.fx.symbolic_trace(lambda w, v, x: (w.add_(x), v + x))
    request = read_request(gm, [P, P, T])
    request = dataclasses.replace(request, weights=frozenset({0, 1}))
    assert writes.written_parameters(request) == {0}


@torch.library.custom_op("composer_test::count_up", mutates_args=("counter",))
def _count_up(counter: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    counter.add_(1)
    return x * counter


_count_up.register_fake(lambda counter, x: torch.empty_like(x))


class _Counting(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.counter = torch.nn.Buffer(torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.composer_test.count_up(self.counter, x) + 1


def test_buffer_that_a_custom_operator_wrote_to_is_not_written_to_again() -> None:
    """Dynamo leaves the overload of ``torch.ops.name.space`` open; any of them may write."""
    module = _Counting()
    f = compiled(module, late_at(2))
    with torch.no_grad():
        assert torch.equal(f(torch.ones(3)), torch.full((3,), 2.0))
        with pytest.raises(RuntimeError, match="too late"):
            f(torch.ones(3))
        assert torch.equal(f(torch.ones(3)), torch.full((3,), 4.0))


def test_threads_whose_engines_fail_in_turn_are_all_answered() -> None:
    """A failure while another thread compiles or calls the successor costs nobody an answer."""
    chain = [FakeBackend("raises", at=1 + i, name=f"engine{i}") for i in range(6)]
    f = compiled(torch.sin, *chain)
    f(torch.ones(3))
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(30):
                assert torch.equal(f(torch.ones(3)), torch.ones(3).sin())
        except Exception as error:  # noqa: BLE001  # handed to the thread that waits
            errors.append(error)

    in_threads(lambda _: work(), range(8))
    assert errors == []
    assert last().chosen == "eager"
    assert [a.status for a in last().attempts] == ["failed"] * 6


@pytest.mark.parametrize("at", [None, 1])
def test_error_that_cannot_be_printed_is_a_failure_like_any_other(at: int | None) -> None:
    """Its own ``__str__`` raises."""

    class Mute(Exception):
        def __str__(self) -> str:
            raise ValueError("no words")

    def mute(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        if at is None:
            raise Mute

        def run(*args: Any) -> Any:
            raise Mute

        return run

    x = torch.ones(3)
    assert torch.equal(compiled(torch.sin, mute, FakeBackend())(x), x.sin())
    assert "cannot be read" in last().attempts[0].message


class Careful(Backend):
    """An engine that says of itself that it writes where the graph does."""

    writes_as_the_graph = True

    def build(self, request: BuildRequest) -> Build:
        raise NotImplementedError


@torch.library.custom_op("composer_test::quietly_writes", mutates_args=())
def quietly_writes(x: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return x * 2


@quietly_writes.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@pytest.mark.parametrize(
    ("function", "chain", "looks"),
    [
        (lambda x, y: x * 2 + y, ["inductor", "onnxrt"], False),
        (lambda x, y: torch.nn.functional.softmax(x, 0).relu().sum() + y.t(), [Careful], False),
        (lambda x, y: x.add_(y), ["inductor", "onnxrt"], True),
        (lambda x, y: x * 2 + y, ["inductor", engines.honest], True),
        (lambda x, y: quietly_writes(x) + y, ["inductor"], True),
    ],
)
def test_inputs_are_looked_at_where_anything_may_write(
    function: Any, chain: list[Any], looks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not those of a graph that writes to nothing and whose engines do not, either."""
    seen: list[ServedGraph] = []
    around = calls.around

    def see(served: ServedGraph, *args: Any) -> Any:
        seen.append(served)
        return around(served, *args)

    monkeypatch.setattr(calls, "around", see)
    for engine in (InductorBackend, Careful):
        monkeypatch.setattr(engine, "build", lambda _, r: engines.honest(r.gm, r.example_inputs))
    with torch.no_grad():
        compiled(function, *chain)(torch.ones(3, 3), torch.ones(3, 3))
    (served,) = seen
    assert (served.versions.read is not None) is looks
    assert served.versions.unread == ()


def test_engine_that_raises_is_answered_for_where_nothing_was_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There is nothing that it could have changed."""
    raising = FakeBackend("raises", at=2)
    monkeypatch.setattr(Careful, "build", lambda _, r: raising(r.gm, r.example_inputs))
    run, x = compiled(torch.sin, Careful), torch.ones(3)
    for _ in range(3):
        torch.testing.assert_close(run(x), torch.sin(x))
    assert last().chosen == "eager"
    assert last().runtime.fallbacks == 1


@pytest.mark.parametrize("kind", [torch.nn.Embedding, torch.nn.EmbeddingBag])
def test_buffers_are_put_back_where_rows_of_an_embedding_are_shortened(kind: Any) -> None:
    """Both write to their weight; the benchmark leaves everything else as it was."""

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = kind(10, 8, max_norm=0.5)
            self.norm = torch.nn.BatchNorm1d(8)

        def forward(self, at: torch.Tensor) -> torch.Tensor:
            return self.norm(self.rows(at).reshape(4, 8, -1))

    model = Net().train()
    at = torch.randint(10, (4, 3) if kind is torch.nn.EmbeddingBag else (4,))
    compiled(model, "aot_eager", select="fastest")(at)
    assert model.norm.num_batches_tracked == 1
