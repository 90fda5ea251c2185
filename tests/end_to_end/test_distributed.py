"""Two processes under ``torch.distributed``: rank 0 decides, and rank 1 follows or is on eager."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from common import compiled, last
from ranks import Pair, pair
from torch import distributed
from torch.distributed import _functional_collectives as collective
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import composer
from composer import _torch
from composer.chain import ranks as decision
from composer.testing import FakeBackend


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Both ranks."""
    with pair(tmp_path_factory.mktemp("ranks")) as ranks:
        yield ranks


class Block(torch.nn.Module):
    def __init__(self, wide: int, narrow: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(wide, narrow)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).tanh()


class Net(torch.nn.Module):
    """Equal on all ranks; 2 MB of weights, so that DDP makes buckets of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = [256, 512, 256, 512, 256]
        pairs = itertools.pairwise(sizes)
        self.blocks = torch.nn.ModuleList(Block(*pair) for pair in pairs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def seen() -> list[tuple[str, list[tuple[str, str, Any]]]]:
    """Who serves each graph, and what became of each candidate."""
    return [
        (r.chosen, [(a.backend, str(a.status), a.reason and str(a.reason)) for a in r.attempts])
        for r in composer.reports()
    ]


def agreed() -> list[Any]:
    """What the attempt that serves each graph says of the ranks."""
    return [report.attempts[-1].engine.get("agreed") for report in composer.reports()]


def train(model: Any, module: torch.nn.Module, rank: int, steps: int = 2) -> list[Any]:
    """Losses, and the gradients of the last step, whole."""
    generator = torch.Generator().manual_seed(rank)
    losses: list[Any] = []
    for _ in range(steps):
        module.zero_grad()
        loss = model(torch.randn(4, 256, generator=generator)).square().mean()
        loss.backward()
        losses.append(loss.detach())
    gradients = [each.grad for each in module.parameters()]
    return losses + [g.full_tensor() if hasattr(g, "full_tensor") else g for g in gradients]


def chain_with(fault: str | None, at: int | None, *, faulty: bool) -> list[Any]:
    first = FakeBackend(fault if faulty else None, at, name="first")
    return [first, FakeBackend(name="second")]


def served_on(rank: int, faulty: int) -> str:
    """Who serves on a rank where the first engine of the chain fails on the ``faulty`` one."""
    if faulty == 0:
        return "second"
    return "eager" if rank == 1 else "first"


def ddp(rank: int, fault: str | None, at: int | None, faulty: int = 1) -> Any:
    return ddp_through(rank, chain_with(fault, at, faulty=rank == faulty))


def ddp_through(rank: int, chain: list[Any]) -> Any:
    plain = DistributedDataParallel(Net(), bucket_cap_mb=1)
    wanted = train(plain, plain, rank)
    model = DistributedDataParallel(Net(), bucket_cap_mb=1)
    run = compiled(model, *chain)
    got = train(run, model, rank)
    for mine, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, theirs)
    return seen(), agreed(), [r.runtime.fallbacks for r in composer.reports()]


@pytest.mark.parametrize("faulty", [0, 1])
def test_ddp_ranks_follow_rank_zero_or_are_on_eager(both: Pair, faulty: int) -> None:
    """DDP cuts the model into a graph a bucket; one rank's first engine fails for each of them."""
    (zero, facts, _), (one, followed, _) = both.run(ddp, "raises", None, faulty)
    assert len(zero) == len(one) > 1
    assert {chosen for chosen, _ in zero} == {served_on(0, faulty)}
    assert {chosen for chosen, _ in one} == {served_on(1, faulty)}
    assert {each["leader"] for each in facts} == {0}
    if faulty == 0:
        assert {each["leader"] for each in followed} == {0}
        assert {attempts[0] for _, attempts in one} == {("first", "skipped", "policy")}
    else:
        assert set(followed) == {"no: rank 0 decided for first"}
        assert {attempts[0] for _, attempts in one} == {("first", "failed", "build_failed")}


def test_ddp_trains_on_onnxrt(both: Pair) -> None:
    """The inputs of each bucket's graph are torch's own fakes, not tensors that stay fake."""
    (zero, _, _), (one, _, _) = both.run(ddp_through, ["onnxrt"])
    assert len(zero) == len(one) > 1
    assert {chosen for chosen, _ in zero + one} == {"onnxrt"}


def test_ddp_goes_on_when_an_engine_fails_at_run_time_on_one_rank(both: Pair) -> None:
    """DDP reduces gradients outside of the graphs: no rank waits, and the numbers stay eager's."""
    (zero, _, fell), (one, _, fell_back) = both.run(ddp, "raises", 2)
    assert {chosen for chosen, _ in zero} == {"first"}
    assert {attempts[0] for _, attempts in one} == {("first", "failed", "raised_at_runtime")}
    assert (sum(fell), sum(fell_back)) == (0, len(one))


def sharded(module: Net) -> torch.nn.Module:
    """Dynamo breaks the graph at FSDP2's hooks, and compiles each block's ``forward``."""
    for block in module.blocks:
        fully_shard(block)
    return fully_shard(module)


def fsdp(rank: int, fault: str | None, at: int | None, verify: str, faulty: int = 1) -> Any:
    plain, model = sharded(Net()), sharded(Net())
    wanted = train(plain, plain, rank)
    run = compiled(model, *chain_with(fault, at, faulty=rank == faulty), verify=verify)
    got = train(run, model, rank)
    for mine, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, theirs)
    return seen(), agreed(), [r.runtime.fallbacks for r in composer.reports()]


@pytest.mark.parametrize("faulty", [0, 1])
@pytest.mark.parametrize("fault", ["raises", "wrong_value"])
def test_fsdp_ranks_follow_rank_zero_or_are_on_eager(both: Pair, fault: str, faulty: int) -> None:
    """FSDP2 gathers weights outside of the graphs. An engine may fail to build, or be wrong."""
    (zero, facts, _), (one, _, _) = both.run(fsdp, fault, None, "compile", faulty)
    assert len(zero) == len(one) > 1
    assert {chosen for chosen, _ in zero} == {served_on(0, faulty)}
    assert {chosen for chosen, _ in one} == {served_on(1, faulty)}
    assert {each["leader"] for each in facts} == {0}


def test_fsdp_goes_on_when_an_engine_fails_at_run_time_on_one_rank(both: Pair) -> None:
    """The captured graph answers; numbers stay eager's."""
    (zero, _, _), (one, _, fell_back) = both.run(fsdp, "raises", 2, "off")
    assert {chosen for chosen, _ in zero} == {"first"}
    assert sum(fell_back) >= 1
    assert {attempts[0] for _, attempts in one} == {("first", "failed", "raised_at_runtime")}


def timed(run: Any, *inputs: Any) -> float:
    started = time.monotonic()
    run(*inputs)
    return time.monotonic() - started


def alone(rank: int) -> Any:
    decision._GRACE = 0.5
    fault = "raises" if rank == 1 else None
    run = compiled(torch.sin, FakeBackend(fault, name="first"), FakeBackend(name="second"))
    if rank == 0:
        distributed.barrier()
    seconds = timed(run, torch.ones(3))
    if rank == 1:
        distributed.barrier()
    return seconds, seen(), agreed()


def test_rank_that_compiles_alone_leads_after_the_grace(both: Pair) -> None:
    """The other, which comes late, follows it at once, also if that is rank 0."""
    zero, one = both.run(alone)
    assert 0.5 <= one[0] < 20
    assert [chosen for chosen, _ in zero[1] + one[1]] == ["second", "second"]
    assert [each["leader"] for each in zero[2] + one[2]] == [1, 1]
    assert one[2][0]["seconds"] >= 0.5 > zero[2][0]["seconds"]


def uneven(rank: int) -> Any:
    decision._GRACE = 5.0
    model = DistributedDataParallel(Net(), bucket_cap_mb=1)
    run = compiled(model, FakeBackend(name="first"))
    started = time.monotonic()
    for rows in (4, 4, 4 - rank, 4):
        run(torch.ones(rows, 256)).square().mean().backward()
    return time.monotonic() - started, agreed()


def test_rank_with_a_smaller_last_batch_does_not_wait_long_for_the_others(both: Pair) -> None:
    """They are not compiling: they wait for its gradients."""
    zero, one = both.run(uneven)
    assert zero[0] < 45
    assert len(one[1]) > len(zero[1])
    assert one[1][-1]["leader"] == 1


def without_store(rank: int) -> Any:
    def gone(member: Any, prefix: str) -> Any:
        raise ConnectionError("connection reset by peer")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_torch.ranks.GroupMember, "store_below", gone)
        run = compiled(torch.sin, *chain_with("raises", None, faulty=rank == 1))
        run(torch.ones(3))
    return seen(), agreed()


def test_ranks_whose_store_fails_decide_each_for_itself(both: Pair) -> None:
    """The record says why."""
    (zero, facts), (one, _) = both.run(without_store)
    assert [chosen for chosen, _ in zero + one] == ["first", "second"]
    assert facts[0].startswith("no: the store of the default group failed: ConnectionError")


def differing(rank: int) -> Any:
    decision._GRACE = 5.0
    run = compiled(torch.sin, FakeBackend(name="first"), dynamic=False)
    seconds = sum(timed(run, torch.ones(2 + rank + 2 * size)) for size in range(3))
    return seconds, agreed()


def test_ranks_with_other_sizes_wait_no_longer_than_the_graces(both: Pair) -> None:
    """Each leads on graphs of its own."""
    for rank, (seconds, facts) in enumerate(both.run(differing)):
        assert seconds < 30
        assert [each["leader"] for each in facts] == [rank] * 3


def reduced(x: torch.Tensor) -> torch.Tensor:
    return collective.all_reduce(x.sin(), "sum", distributed.group.WORLD) + 1


def with_collective(rank: int, faulty: int, verify: str) -> Any:
    chain = chain_with("raises", None, faulty=rank == faulty)
    run = compiled(reduced, *chain, verify=verify)
    x = torch.full((3,), float(rank))
    wanted = torch.full((3,), 1.0).sin() + 1
    for _ in range(3):
        torch.testing.assert_close(run(x), wanted)
    return seen(), [a.engine.get("verified") for a in last().attempts]


@pytest.mark.parametrize("faulty", [0, 1])
@pytest.mark.parametrize("verify", ["off", "compile", "sample"])
def test_graph_that_waits_for_other_ranks_meets_them(both: Pair, verify: str, faulty: int) -> None:
    """It is not run by itself to be compared: the other rank would not take part."""
    (zero, checked), (one, _) = both.run(with_collective, faulty, verify)
    served = [chosen for chosen, _ in zero + one]
    assert served == [served_on(0, faulty), served_on(1, faulty)]
    assert verify == "off" or checked[-1].startswith("no: other ranks")


def summed(x: torch.Tensor) -> torch.Tensor:
    return collective.all_reduce(x.sin().sum(0), "sum", distributed.group.WORLD) + 1


def smaller_batch_on_one_rank(rank: int, engine: str) -> Any:
    composer.configure({"distributed": {"timeout": 0}})
    run = compiled(summed, engine, dynamic=False, min_coverage=0.0)
    with torch.no_grad():
        answers = [run(torch.full((4, 3), 1.0 + rank))]
        answers.append(run(torch.full((4 if rank == 0 else 2, 3), 1.0 + rank)))
        answers.append(run(torch.full((4, 3), 3.0 + rank)))
    one, two, three, four = torch.arange(1.0, 5.0).sin()
    wanted = (4 * (one + two) + 1, 4 * one + 2 * two + 1, 4 * (three + four) + 1)
    for answer, each in zip(answers, wanted, strict=True):
        torch.testing.assert_close(answer, each.expand(3))
    return [chosen for chosen, _ in seen()]


@pytest.mark.parametrize("engine", ["onnxrt", "openvino"])
def test_engine_is_not_tried_on_what_other_ranks_wait_for(both: Pair, engine: str) -> None:
    """The trial run of a rank that compiles alone would meet the other's next call."""
    assert both.run(smaller_batch_on_one_rank, engine) == [[engine], [engine, engine]]


def two_sums(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    world = distributed.group.WORLD
    return collective.all_reduce(x, "sum", world) + 1, collective.all_reduce(y, "sum", world) * 2


def in_one_collective(rank: int) -> Any:
    def bucketing(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        if rank == 0:
            raise RuntimeError("no such kernel")

        def run(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
            both = torch.cat([x, y])
            distributed.all_reduce(both)
            return [both[:3] + 1, both[3:] * 2]

        return run

    run = compiled(two_sums, bucketing, "aot_eager")
    ones = torch.ones(3)
    for answer, wanted in zip(run(ones, ones * rank), (3.0, 2.0), strict=True):
        torch.testing.assert_close(answer, torch.full((3,), wanted))
    return seen()


def test_engine_with_other_collectives_runs_on_no_rank_where_rank_zero_cannot_take_it(
    both: Pair,
) -> None:
    """It makes one of two: the rank without it would wait for the second for ever."""
    zero, one = both.run(in_one_collective)
    assert [chosen for chosen, _ in zero + one] == ["aot_eager", "aot_eager"]


def broken_collective(rank: int) -> Any:
    run = compiled(reduced, *chain_with("raises", 2, faulty=rank == 1))
    x = torch.full((3,), float(rank))
    run(x)
    if rank == 0:
        return ""
    try:
        run(x)
    except RuntimeError as error:
        return "".join(error.__notes__)
    return "no error"


def test_failure_within_a_collective_is_not_answered_for(both: Pair) -> None:
    """The engine may have begun it: a second one would meet the others' next."""
    assert "may have begun what other ranks wait for" in both.run(broken_collective)[1]


def in_own_group(rank: int) -> Any:
    groups = [distributed.new_group([0]), distributed.new_group([1])]
    keys: list[str] = []

    def spy(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        from composer.graphs.capture import read_request
        from composer.graphs.keys import with_key

        keys.append(with_key(read_request(gm, inputs), None, "", "").key_among_ranks)
        return gm.forward

    for group in (groups[rank], distributed.group.WORLD):
        torch.compiler.reset()
        torch.compile(lambda x, g=group: collective.all_reduce(x, "sum", g), backend=spy)(
            torch.ones(2)
        )
    return keys


def test_group_of_a_rank_is_no_part_of_what_ranks_know_a_graph_by(both: Pair) -> None:
    """Groups of tensor parallelism do the same work under other names."""
    zero, one = both.run(in_own_group)
    assert zero[0] == one[0]


def tensor_parallel(rank: int) -> Any:
    mesh = init_device_mesh("cpu", (2,))
    plain = Net()
    plan = {
        f"blocks.{i}.linear": ColwiseParallel() if i % 2 == 0 else RowwiseParallel()
        for i in range(4)
    }
    model = parallelize_module(Net(), mesh, plan)
    run = compiled(model, *chain_with("raises", None, faulty=rank == 0), verify="compile")
    wanted, got = train(plain, plain, 0), train(run, model, 0)
    for mine, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, theirs)
    return seen(), [r.attempts[-1].engine.get("verified") for r in composer.reports()]


def test_tensor_parallel_ranks_run_on_the_same_engine(both: Pair) -> None:
    """Collectives appear behind Dynamo, where operations on a ``DTensor`` are taken apart."""
    (zero, checked), (one, _) = both.run(tensor_parallel)
    assert [chosen for chosen, _ in zero + one] == ["second"] * (len(zero) + len(one))
    assert len(zero) == len(one) >= 1
    assert all(each.startswith("no: other ranks") for each in checked)


def isolated(rank: int) -> Any:
    run = compiled(reduced, FakeBackend(name="first"), isolate=True)
    run(torch.ones(3))
    return seen()


def test_graph_that_waits_for_other_ranks_is_not_built_in_a_child(both: Pair) -> None:
    """A child process is no rank. The leader is told so, and tells the other."""
    zero, one = both.run(isolated)
    assert [chosen for chosen, _ in zero + one] == ["eager", "eager"]
    assert ("first", "declined", "not_isolatable") in zero[0][1]
    assert ("first", "skipped", "policy") in one[0][1]


def choosing(rank: int, function: Any, timeout: float) -> Any:
    composer.configure({"distributed": {"timeout": timeout}})
    run = compiled(function, *chain_with(None, None, faulty=False), select="fastest")
    run(torch.full((3,), float(rank)))
    return [(a.backend, a.engine.get("timing")) for a in last().attempts]


def test_ranks_that_are_to_agree_do_not_measure(both: Pair) -> None:
    """Each would find another engine the fastest: the first serves, and the record says why."""
    for found in both.run(choosing, torch.sin, 60.0):
        ((name, timing),) = found
        assert name == "first"
        assert timing.startswith("no: all ranks are to take the same engine")


def test_rank_that_asks_nobody_measures_for_itself(both: Pair) -> None:
    """Where it waits for nobody; but no graph in which the other rank would have to take part."""
    for found in both.run(choosing, torch.sin, 0.0):
        assert len(found) == 2
        assert all("ms" in timing for _, timing in found)
    for found in both.run(choosing, reduced, 0.0):
        ((name, timing),) = found
        assert (name, timing[:20]) == ("first", "no: other ranks woul")


class Later(FakeBackend):
    """Cannot compile before it is told that it can."""

    can = False

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        if not self.can:
            raise RuntimeError("the driver is busy")
        return super().__call__(gm, example_inputs)


def sine(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


def same_sine(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


def after_a_reset(rank: int) -> list[str]:
    first = Later(name="first")
    chain = [first, FakeBackend(name="second")]
    first.can = rank == 1
    compiled(sine, *chain)(torch.ones(3))
    chosen = [last().chosen]
    first.can = True
    run = compiled(same_sine, *chain)
    run(torch.ones(3))
    chosen.append(last().chosen)
    for can in (True, False):
        torch.compiler.reset()
        first.can = can
        run(torch.ones(3))
        chosen.append(last().chosen)
    return chosen


def test_decision_of_the_ranks_ends_with_a_reset_of_torch(both: Pair) -> None:
    """It holds until then, also for another function with the same graph."""
    assert both.run(after_a_reset) == [["second", "second", "first", "second"]] * 2


def after_composers_reset(rank: int) -> list[str]:
    first = Later(name="first")
    chain = [first, FakeBackend(name="second")]
    chosen = []
    for function in (sine, same_sine):
        first.can = rank == 1 or function is same_sine
        compiled(function, *chain)(torch.ones(3))
        chosen.append(last().chosen)
        composer.reset()
    return chosen


def test_decision_of_the_ranks_ends_with_a_reset_of_composer(both: Pair) -> None:
    """Torch keeps what it has compiled, and another function has the same graph."""
    assert both.run(after_composers_reset) == [["second", "first"]] * 2
