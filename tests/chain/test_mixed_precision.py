"""``precision = "auto"`` where bfloat16 holds for a part of a graph: the worst products stay."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from common import compiled, last
from naps import short_nap
from spies import Spy, cancels, error, layers, told
from torch import Tensor, nn
from torch.distributed import HashStore

from composer import _torch
from composer.build import current_build
from composer.chain import mixed_precision, precision
from composer.chain.sandbox import parcel
from composer.graphs import low_precision
from composer.passes import GraphPass
from composer.testing import FakeBackend

WHOLE, PART = {torch.bfloat16}, {torch.float32}


@pytest.fixture(autouse=True)
def _processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """One with bf16 arithmetic, whatever the tests run on."""
    monkeypatch.setattr(_torch.processor, "multiplies_bf16", lambda: True)


class Early(nn.Module):
    """The first of four products takes the difference of large numbers; the others take any."""

    def __init__(self, far: float = 1000.0) -> None:
        super().__init__()
        self.far = far
        self.rest = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        ones = x.new_ones(16, 16)
        near = torch.matmul(x + self.far, ones) - 16 * self.far
        rest: Tensor = self.rest(near)
        return rest


class Builds(Spy):
    """A spy that counts how often it is asked."""

    def __init__(self, name: str = "spy") -> None:
        super().__init__(name)
        self.built = 0

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        self.built += 1
        return super().__call__(gm, example_inputs)


def in_bf16(module: nn.Module, x: Tensor) -> float:
    """The error of all of it in bfloat16."""
    return error(compiled(module, Spy(), precision="bf16")(x), module(x))


@torch.no_grad()
def test_what_does_not_hold_stays_in_fp32_and_the_rest_is_taken() -> None:
    """One attempt, accepted; the record says how many products are in which."""
    module, x, spy = Early().eval(), torch.randn(4, 16), Builds()
    got = compiled(module, spy, precision="auto")(x)
    assert told() == [("spy", "bf16", "succeeded", None)]
    assert 0 < error(got, module(x)) < 0.01
    assert spy.products == [PART, WHOLE, WHOLE, WHOLE]
    engine = last().attempts[0].engine
    assert (engine["products_in_fp32"], engine["products_in_bf16"]) == (1, 3)


class Late(Early):
    """The last of four products is the one that bfloat16 ruins."""

    def forward(self, x: Tensor) -> Tensor:
        near = self.rest[:3](x)
        difference = torch.matmul(near + self.far, near.new_ones(16, 16)) - 16 * self.far
        last: Tensor = difference + self.rest[3](near).sum()
        return last


@torch.no_grad()
def test_product_with_the_largest_share_of_the_error_stays_wherever_it_is() -> None:
    """Not the first ones: each product alone in bfloat16 tells its share."""
    module, x, spy = Late().eval(), torch.randn(4, 16), Builds()
    got = compiled(module, spy, precision="auto")(x)
    assert told() == [("spy", "bf16", "succeeded", None)]
    assert 0 < error(got, module(x)) < 0.01
    assert spy.products == [WHOLE, WHOLE, PART, WHOLE]


@torch.no_grad()
def test_all_of_it_is_not_built_where_that_is_beyond_hope() -> None:
    """What engines differ by does not make up for it; else they are asked for all of it first."""
    module, x = Early().eval(), torch.randn(4, 16)
    off = in_bf16(module, x)
    for share, times in ((0.7, 2), (0.3, 1)):
        torch.compiler.reset()
        spy = Builds()
        compiled(module, spy, precision={"mode": "auto", "max_error": share * off})(x)
        assert spy.products == [PART, WHOLE, WHOLE, WHOLE]
        assert spy.built == times


@torch.no_grad()
def test_whole_that_holds_is_taken_whole() -> None:
    """Nothing is looked for then, and the record says nothing of a part."""
    spy = Builds()
    compiled(layers(), spy, precision="auto")(torch.randn(4, 32))
    assert spy.products == [WHOLE, WHOLE]
    assert "products_in_fp32" not in last().attempts[0].engine


class SmoothSign(GraphPass):
    """The sine in place of the sign, which no rounding leaves as it is."""

    stage = "post_grad"

    def run(self, gm: torch.fx.GraphModule) -> None:
        for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.sign.default):
            node.target = torch.ops.aten.sin.default


@torch.no_grad()
def test_part_is_looked_for_in_the_graph_that_later_passes_leave() -> None:
    """Of the captured graph only the part behind the sign would hold, and be built first."""
    first, rest = nn.Linear(16, 512), Early().rest
    rest[0] = nn.Linear(512, 16)
    f = compiled(lambda x: rest(first(x).sign()), Spy(), precision="auto", passes=[SmoothSign()])
    f(torch.randn(4, 16))
    assert told() == [("spy", "bf16", "succeeded", None)]
    assert "products_in_fp32" not in last().attempts[0].engine


def test_fp32_serves_where_no_part_holds() -> None:
    """The attempt in bf16 is rejected by the engine's own numbers."""
    x = torch.rand(4, 16)
    f = compiled(lambda x: cancels(x) + cancels(x + 1), Spy(), precision="auto")
    assert torch.equal(f(x), cancels(x) + cancels(x + 1))
    assert told() == [
        ("spy", "bf16", "rejected", "numeric_mismatch"),
        ("spy", "fp32", "succeeded", None),
    ]


class Rounds(Builds):
    """Is off by another hundredth while the second product is in bfloat16."""

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        run = super().__call__(gm, example_inputs)
        worse = 1.02 if self.products[1:2] == [WHOLE] else 1.0
        return lambda *args: [each * worse for each in run(*args)]


@torch.no_grad()
def test_more_is_kept_where_an_engine_rounds_besides(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was run eagerly was just within what is allowed: there is a second try, and no third."""
    monkeypatch.setattr(
        mixed_precision._Search,
        "fewest_within",
        lambda _, margin: (0,) if margin > 0.7 else (0, 1),
    )
    spy = Rounds()
    compiled(Early().eval(), spy, precision="auto")(torch.randn(4, 16))
    assert told() == [("spy", "bf16", "succeeded", None)]
    assert (spy.built, spy.products) == (2, [PART, PART, WHOLE, WHOLE])


@torch.no_grad()
def test_record_is_of_the_last_build() -> None:
    """What the first one, of all in bfloat16, said of coverage and of what is left is forgotten."""

    class Leaves(Builds):
        def __call__(self, gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
            run = super().__call__(gm, example_inputs)
            taken = self.products.count(PART)
            left = [f"{len(self.products) - taken} in bf16"]
            current_build().facts.covers(taken, len(self.products), left)
            return run

    module, x, spy = Early().eval(), torch.randn(4, 16), Leaves()
    precision = {"mode": "auto", "max_error": 0.7 * in_bf16(module, x)}
    torch.compiler.reset()
    compiled(module, spy, precision=precision, min_coverage=0.0)(x)
    (attempt,) = last().attempts
    assert (spy.built, attempt.accepted, attempt.coverage) == (2, True, 0.25)
    assert attempt.engine["left_to_torch"] == ["3 in bf16"]
    assert attempt.engine["tentative"]


@torch.no_grad()
def test_part_is_looked_for_where_rounding_leaves_no_number() -> None:
    """The largest number becomes infinite, and nothing times that is none."""
    module, spy = Early().rest.eval(), Builds()

    def f(x: Tensor) -> Tensor:
        largest = (0 * x + torch.finfo(torch.float32).max) @ torch.eye(16)
        answer: Tensor = module(x + (largest - largest))
        return answer

    compiled(f, spy, precision="auto")(torch.randn(4, 16))
    assert told() == [("spy", "bf16", "succeeded", None)]
    assert (spy.built, spy.products) == (1, [PART, WHOLE, WHOLE, WHOLE])


@torch.no_grad()
def test_whole_numbers_are_to_be_eagers() -> None:
    """The product that they are made of stays in float32."""
    module, spy = layers(16), Builds()
    weight = torch.randn(16, 16)

    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        near = x @ weight
        return (1000 * near).int(), module(near)

    x = torch.randn(4, 16)
    assert torch.equal(compiled(f, spy, precision="auto")(x)[0], f(x)[0])
    assert told() == [("spy", "bf16", "succeeded", None)]
    assert spy.products == [PART, WHOLE, WHOLE]


@torch.no_grad()
def test_what_is_not_measured_for_a_second_candidate_does_not_fail_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first was content with what is known; more of it would take a run, and those are slow."""
    measured = (3.0, 0.8, 0.5, 0.4)
    monkeypatch.setattr(
        mixed_precision._Search, "_measured", lambda _, wide, __: measured[len(wide)]
    )

    class Wrong(Builds):
        def __call__(self, gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
            monkeypatch.setattr(mixed_precision, "_LONG", 0.0)
            run = super().__call__(gm, example_inputs)
            return lambda *args: [each * 2 for each in run(*args)]

    options = {"precision": "auto", "select": {"by": "fastest", "seconds": 0.01}}
    compiled(Early().eval(), Builds("a"), Wrong("b"), **options)(torch.randn(4, 16))
    assert told()[2] == ("b", "bf16", "rejected", "numeric_mismatch")


@torch.no_grad()
@pytest.mark.parametrize("why", ["slow", "slow in bf16", "random"])
def test_graph_that_cannot_be_run_again_is_taken_whole_or_not(
    monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """Where a run takes too long, or eager's numbers are others each time."""
    run = mixed_precision.run

    def slower(*args: Any) -> Any:
        found = run(*args)
        if why != "random":
            monkeypatch.setattr(mixed_precision, "_LONG", 0.0)
        return found

    if why == "slow":
        monkeypatch.setattr(mixed_precision, "_LONG", 0.0)
    monkeypatch.setattr(mixed_precision, "run", slower)
    module, x, spy = Early().eval(), torch.randn(4, 16), Builds()
    noise = 1e-9 if why == "random" else 0.0
    compiled(lambda x: module(x) + noise * torch.rand_like(x[:, :4]), spy, precision="auto")(x)
    assert spy.built == 2
    assert told() == [
        ("spy", "bf16", "rejected", "numeric_mismatch"),
        ("spy", "fp32", "succeeded", None),
    ]


@torch.no_grad()
def test_run_that_waits_for_other_programs_is_not_a_long_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The load of the machine decides nothing: only the CPU time of a run counts."""
    run, waits = mixed_precision.run, iter([0.6])

    def slower(*args: Any) -> Any:
        time.sleep(next(waits, 0.0))
        return run(*args)

    monkeypatch.setattr(mixed_precision, "run", slower)
    monkeypatch.setattr(mixed_precision, "_LONG", 0.5)
    compiled(Early().eval(), Builds(), precision="auto")(torch.randn(4, 16))
    assert last().attempts[0].engine["products_in_fp32"] == 1


@torch.no_grad()
def test_runs_may_get_too_slow_once_the_first_was_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was tried so far is all that is."""
    module, x, spy = Early().eval(), torch.randn(4, 16), Builds()
    off = in_bf16(module, x)
    torch.compiler.reset()
    of = mixed_precision._Search.of

    def slower(search: Any, wide: tuple[int, ...]) -> float:
        found = of(search, wide)
        monkeypatch.setattr(mixed_precision, "_LONG", 0.0)
        return found

    monkeypatch.setattr(mixed_precision._Search, "of", slower)
    compiled(module, spy, precision={"mode": "auto", "max_error": 0.7 * off})(x)
    assert spy.built == 2
    assert [status for _, _, status, _ in told()] == ["rejected", "succeeded"]


@torch.no_grad()
def test_no_further_part_is_built_once_the_timeout_is_over() -> None:
    """It is the attempt's, though each of its builds took less."""

    class Slow(Builds):
        def __call__(self, gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
            run = super().__call__(gm, example_inputs)

            def slow(*args: Any) -> Any:
                time.sleep(0.7)
                return run(*args)

            return slow

    module, x = Early().eval(), torch.randn(4, 16)
    off = in_bf16(module, x)
    for timeout, built in ((0.6, 2), (60.0, 2)):
        torch.compiler.reset()
        spy = Slow()
        compiled(module, spy, precision={"mode": "auto", "max_error": 0.7 * off}, timeout=timeout)(
            x
        )
        assert spy.built == built
        assert last().attempts[0].accepted is (timeout == 60.0)


@torch.no_grad()
def test_ranks_that_agree_on_an_engine_take_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each might find another part, since each looks at inputs of its own."""
    monkeypatch.setattr(_torch.ranks, "world_size", lambda: 2)
    member = _torch.ranks.GroupMember(0, 2, HashStore())
    monkeypatch.setattr(_torch.ranks, "group_member", lambda: member)
    spy = Builds()
    compiled(Early().eval(), spy, precision="auto")(torch.randn(4, 16))
    assert [status for _, _, status, _ in told()] == ["rejected", "succeeded"]
    assert spy.built == 2


@torch.no_grad()
def test_candidates_share_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph is not run again for the second of them."""
    runs: list[int] = []
    run = mixed_precision.run
    monkeypatch.setattr(mixed_precision, "run", lambda *args: runs.append(1) or run(*args))
    x, options = torch.randn(4, 16), {"select": {"by": "fastest", "seconds": 0.01}}
    counts = []
    for chain in ([Spy("a")], [Spy("a"), Spy("b")]):
        torch.compiler.reset()
        runs.clear()
        compiled(Early().eval(), *chain, precision="auto", **options)(x)
        counts.append(len(runs))
        assert {a.engine["products_in_fp32"] for a in last().attempts[::2]} == {1}
    assert counts[0] == counts[1] > 1


@torch.no_grad()
def test_part_serves_dynamic_sizes() -> None:
    """One graph, and another size is close as well."""
    module, spy = Early().eval(), Builds()
    f = compiled(module, spy, precision="auto", dynamic=True)
    for size in (4, 7):
        x = torch.randn(size, 16)
        assert error(f(x), module(x)) < 0.02
    assert (spy.built, spy.products) == (1, [PART, WHOLE, WHOLE, WHOLE])


@pytest.mark.filterwarnings("ignore::composer.errors.FallbackWarning")
@torch.no_grad()
def test_successor_at_run_time_computes_a_part_in_bf16() -> None:
    """It is compiled after Dynamo's compile is over."""
    module, spy = Early().eval(), Spy()
    f = compiled(module, FakeBackend("raises", at=2), spy, precision="auto")
    for _ in range(4):
        x = torch.randn(4, 16)
        assert error(f(x), module(x)) < 0.02
    assert spy.products == [PART, WHOLE, WHOLE, WHOLE]


@pytest.mark.filterwarnings("ignore::composer.errors.FallbackWarning")
@torch.no_grad()
def test_successor_at_run_time_is_given_marks() -> None:
    """When a graph with symbols cannot be traced any more: its form in ATen was kept."""
    pytest.importorskip("openvino", reason="the engine itself")
    module, first = Early().eval(), FakeBackend("raises", at=2)
    f = compiled(module, first, "openvino", precision="auto", dynamic=True)
    for size in (4, 5, 6, 7, 8):
        x = torch.randn(size, 16)
        assert error(f(x), module(x)) < 0.02
    served = last().attempts[-1]
    assert (served.backend, served.accepted) == ("openvino", True)
    assert served.engine["products_in_fp32"] == 1


@torch.no_grad()
def test_graph_is_traced_once_for_all_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """That takes far longer than to put casts into it, or to run it."""
    traced: list[int] = []
    trace = precision.to_aten
    monkeypatch.setattr(precision, "to_aten", lambda *args: traced.append(1) or trace(*args))
    compiled(Early().eval(), Spy(), precision="auto")(torch.randn(4, 16))
    assert last().attempts[0].engine["products_in_fp32"] == 1
    assert traced == [1]


@torch.no_grad()
def test_openvino_computes_each_part_in_its_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """It chooses its precision itself: two models, the first in single precision."""
    pytest.importorskip("openvino", reason="the engine itself")
    from composer.backends.openvino import compiled as compiling

    asked: list[str] = []
    precision_of = compiling.precision_of

    def spied(model: Any, build: Any) -> str:
        asked.append(precision_of(model, build))
        return asked[-1]

    monkeypatch.setattr(compiling, "precision_of", spied)
    module, x = Early().eval(), torch.randn(4, 16)
    got = compiled(module, "openvino", precision="auto")(x)
    assert last().chosen == "openvino"
    assert [*dict.fromkeys(asked)] == ["fp32", "bf16"]
    assert error(got, module(x)) < 0.01
    assert last().attempts[0].engine["products_in_fp32"] == 1
    assert last().attempts[0].coverage == 1.0


@torch.no_grad()
def test_openvino_keeps_float32_where_it_takes_nothing_of_the_rest() -> None:
    """There is one model then, of the part whose numbers do not hold in bfloat16."""
    pytest.importorskip("openvino", reason="the engine itself")
    left = (nn.Conv2d(4, 4, 1, stride=2, padding=1) for _ in range(3))
    module, x = Early().eval(), torch.randn(4, 16)
    module.rest = nn.Sequential(nn.Unflatten(1, (4, 2, 2)), *left).eval()
    got = compiled(module, "openvino", precision="auto", min_coverage=0.0)(x)
    assert error(got, module(x)) < 0.01
    engine = last().attempts[0].engine
    assert (engine["products_in_fp32"], engine["precision"]) == (1, "f32")
    assert last().attempts[0].accepted


def test_marks_are_sent_to_a_child_process() -> None:
    """So what is built there first is what is built here."""
    gm = torch.fx.symbolic_trace(lambda x: torch.relu(x).exp())
    (exp,) = gm.graph.find_nodes(op="call_method", target="exp")
    low_precision.mark(exp)
    with parcel.Memory() as memory:
        arrived = parcel.unpack(parcel.pack({"the graph": gm}, memory))["the graph"]
    assert {node.name for node in low_precision.marked(arrived.graph)} == {"exp", "output"}


def test_what_reads_a_marked_node_is_marked() -> None:
    """So no part in float32 waits for one in bfloat16, which would make a circle of regions."""
    gm = torch.fx.symbolic_trace(lambda x, y: (torch.relu(x) + torch.tanh(y)).exp())
    (tanh,) = gm.graph.find_nodes(op="call_function", target=torch.tanh)
    assert low_precision.marked(gm.graph) == set()
    low_precision.mark(tanh)
    assert {node.name for node in low_precision.marked(gm.graph)} == {
        "tanh",
        "add",
        "exp",
        "output",
    }


class Recalls(Builds):
    """Quick in bfloat16 only: it gives again what it computed, where it was given the same."""

    def uuid(self) -> str:
        return "the same in every process"

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        compute = super().__call__(gm, example_inputs)
        if WHOLE not in self.products:
            return compute
        known: list[Any] = []

        def run(*args: Any) -> list[Tensor]:
            if not known or not all(map(torch.equal, known[0], args)):
                known[:] = [[each.clone() for each in args], compute(*args)]
            return [each.clone() for each in known[1]]

        return run


@torch.no_grad()
def test_verdict_goes_straight_to_the_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """The part is a fact of its own: the graph is not run to find out, and built once."""
    module, x, spy = Early().eval(), torch.randn(4, 16), Recalls()
    precision = {"mode": "auto", "max_error": 0.9 * in_bf16(module, x)}
    options = {"precision": precision, "select": "fastest"}
    for built in (3, 1):  # all of it, the part, and in fp32
        torch.compiler.reset()
        spy.built = 0
        compiled(lambda x: module(short_nap(x)), spy, **options)(x)
        assert (last().chosen, spy.built) == ("spy", built)
        assert last().attempts[0].engine["products_in_fp32"] == 1
        monkeypatch.setattr(mixed_precision, "run", None)
