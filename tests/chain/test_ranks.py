"""How a leader decides for all ranks: threads in the place of ranks, on one key-value store."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from torch._dynamo.exc import TensorifyScalarRestartAnalysis
from torch.distributed import FileStore, HashStore, TCPStore

import composer
from composer import _torch
from composer.chain import ranks
from composer.chain.candidates import ChainEntry, entries_of
from composer.records import EAGER, Attempt, End, Outcome, Reason, Status
from composer.testing import FakeBackend

LONG = 20.0
GRACE = 0.3
NAMES = ("first", "second", "third")


@pytest.fixture(autouse=True)
def grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorter than in life, and longer than a rank of these tests takes to begin."""
    monkeypatch.setattr(ranks, "_GRACE", GRACE)


class Rank:
    """One rank. ``attempts`` are those of its last walk; ``agreed`` is in the last of them."""

    def __init__(self, store: Any, number: int, world: int) -> None:
        self.member = _torch.ranks.GroupMember(number, world, store)
        self.attempts: tuple[Attempt, ...] = ()
        self.agreed: Any = None
        self.waited = 0.0

    def walk(
        self,
        can: Sequence[bool],
        graph: str = "graph",
        within: float = LONG,
        build: float = 0.0,
        *,
        names: Sequence[str] = NAMES,
        resets: int = 0,
        error: BaseException | None = None,
    ) -> str:
        """Return who serves, if the rank can take these of the candidates."""
        chain = [FakeBackend(name=name) for name in names[: len(can)]]
        entries = entries_of(composer.Policy(chain=chain))
        started = time.monotonic()

        def walk_chain(entries: Sequence[ChainEntry]) -> Outcome:
            self.waited = time.monotonic() - started
            time.sleep(build)
            if error is not None:
                raise error
            return walked(entries, can)

        talk = ranks.Talk(self.member, graph, within, resets)
        outcome = talk.walk(entries, walk_chain)
        self.attempts = outcome.attempts
        self.agreed = outcome.attempts[-1].engine["agreed"]
        return outcome.chosen


def walked(entries: Sequence[ChainEntry], can: Sequence[bool]) -> Outcome:
    """The outcome of a walk in which the candidates are accepted that are not barred and able."""
    ends = []
    for entry, able in zip(entries, can, strict=True):
        name = entry.candidate.name
        if entry.barred:
            attempt = Attempt(name, Status.SKIPPED, Reason.POLICY, entry.barred, 0.0)
        elif not able:
            attempt = Attempt(name, Status.FAILED, Reason.BUILD_FAILED, "no such kernel", 0.0)
        else:
            attempt = Attempt(name, Status.SUCCEEDED, None, "", 0.0)
        ends.append(End(attempt, None))
        if attempt.accepted:
            break
    chosen = ends[-1].attempt.backend if ends[-1].attempt.accepted else EAGER
    return Outcome(tuple(ends), chosen, compiled=walked)


def group_of(count: int, store: Any = None) -> list[Rank]:
    store = HashStore() if store is None else store
    return [Rank(store, number, count) for number in range(count)]


def together(*works: Callable[[], Any]) -> list[Any]:
    """Each in a thread of its own."""
    with ThreadPoolExecutor(len(works)) as pool:
        return [each.result(60) for each in [pool.submit(work) for work in works]]


@pytest.mark.parametrize("able", list(itertools.product([True, False], repeat=4)))
def test_leader_s_choice_serves_wherever_it_can_be_taken(able: tuple[bool, ...]) -> None:
    """A rank that cannot take it is on eager, and has not tried what the leader passed over."""
    zero, one = group_of(2)
    leads, follows = able[:2], able[2:]
    wanted = next((name for name, can in zip(NAMES, leads, strict=False) if can), EAGER)
    taken = wanted == EAGER or follows[NAMES.index(wanted)]
    served = together(lambda: zero.walk(leads, build=0.02), lambda: one.walk(follows))
    assert served == [wanted, wanted if taken else EAGER]
    assert zero.agreed["leader"] == 0
    told = f"rank 0 decided for {wanted}"
    skipped = [each for each in one.attempts if each.status is Status.SKIPPED]
    assert {each.message for each in skipped} <= {told}
    assert one.agreed == f"no: {told}" if not taken else one.agreed["leader"] == 0


@pytest.mark.parametrize("kind", ["file", "tcp"])
def test_every_store_that_a_group_may_have_serves(kind: str, tmp_path: Path) -> None:
    """``init_process_group`` makes either, as it is told."""
    store = (
        FileStore(str(tmp_path / "store"), 2)
        if kind == "file"
        else TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    )
    zero, one = group_of(2, store)
    for graph, able in (("a", [False, True]), ("b", [True, True]), ("a", [True, True])):
        served = together(
            lambda g=graph, a=able: zero.walk(a, graph=g),
            lambda g=graph: one.walk([True, True], graph=g),
        )
        assert served == ["second" if graph == "a" else "first"] * 2
    assert one.walk([True], graph="c") == "first"
    assert one.agreed["leader"] == 1


def test_rank_zero_leads_at_once_and_a_late_rank_follows() -> None:
    """The late rank waits for nobody, also where it could take what the leader could not."""
    zero, one = group_of(2)
    assert zero.walk([False, True]) == "second"
    assert zero.waited < GRACE
    assert one.walk([True, True]) == "second"
    assert one.waited < GRACE
    assert one.agreed["leader"] == 0


def test_rank_that_compiles_alone_leads_after_the_grace_and_rank_zero_follows() -> None:
    """Each wait in vain makes the next of that rank shorter, however many there are."""
    zero, one = group_of(2)
    waits = []
    for number in range(600):
        assert one.walk([False, True], graph=f"own{number}") == "second"
        waits.append(one.waited)
    assert GRACE <= waits[0] < 2 * GRACE
    assert GRACE / 4 <= waits[1] < GRACE
    assert max(waits[5:]) < GRACE
    assert one.agreed["leader"] == 1
    assert zero.walk([True, True], graph="own0") == "second"
    assert zero.agreed["leader"] == 1


def test_follower_waits_for_a_slow_leader_within_the_limit() -> None:
    """Then eager serves, with the reason; what the leader decides later holds from then on."""
    zero, one = group_of(2)
    slow = lambda: zero.walk([True], build=0.6)  # noqa: E731
    served = together(slow, lambda: _later(one.walk, [True], within=0.2))
    assert served == ["first", EAGER]
    assert 0.2 <= one.waited < 0.6
    assert one.agreed == "no: rank 0 did not decide within 0.2 s"
    assert one.attempts[0].message == "rank 0 did not decide within 0.2 s"
    assert one.walk([True]) == "first"


def _later(work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    time.sleep(0.1)
    return work(*args, **kwargs)


def test_leader_that_raises_has_decided_for_eager() -> None:
    """Nobody waits for it, and it raises what it raised."""
    for error in (ValueError("a pass failed"), KeyboardInterrupt()):
        zero, one = group_of(2)
        with pytest.raises(type(error)):
            zero.walk([True], error=error)
        assert one.walk([True]) == EAGER
        assert one.waited < GRACE
        assert one.attempts[0].message == "rank 0 decided for eager"


def test_leader_whose_compile_begins_anew_decides_nothing() -> None:
    """Dynamo captures the function again on each rank, so each has to find out by itself."""
    zero, one = group_of(2)
    with pytest.raises(TensorifyScalarRestartAnalysis):
        zero.walk([True], error=TensorifyScalarRestartAnalysis())
    assert one.walk([False, True]) == "second"
    assert one.agreed == "no: rank 0 began its compile anew"


def test_candidate_of_another_name_is_not_taken_for_the_leader_s() -> None:
    """The chain of ``"auto"`` may differ where other engines are installed."""
    zero, one = group_of(2)
    assert zero.walk([True, True]) == "first"
    assert one.walk([True, True], names=["second", "first"]) == EAGER
    assert {each.message for each in one.attempts} == {"rank 0 decided for first"}


@pytest.mark.parametrize("resets", [(1, 1), (1, 5), (3, 2)])
def test_ranks_decide_anew_after_a_reset_however_many_each_has_counted(
    resets: tuple[int, int],
) -> None:
    """A decision holds until the ranks begin anew."""
    zero, one = group_of(2)
    for able in ([False, True], [True, True]):
        served = together(lambda a=able: zero.walk(a), lambda: one.walk([True, True]))
        assert served == ["second", "second"]
    for further in (0, 7):
        mine, theirs = resets[0] + further, resets[1] + further
        served = together(
            lambda mine=mine: zero.walk([True, True], resets=mine),
            lambda theirs=theirs: one.walk([True, True], resets=theirs),
        )
        assert served == ["first", "first"]


def test_rank_that_comes_after_a_reset_follows_the_newest_decision() -> None:
    """The decision from before the reset has ended, also for a rank that did not hear of it."""
    zero, one = group_of(2)
    assert zero.walk([True, True]) == "first"
    assert zero.walk([False, True], resets=1) == "second"
    assert one.walk([True, True], resets=1) == "second"
    assert together(
        lambda: zero.walk([True, True], resets=2), lambda: one.walk([True, True], resets=2)
    ) == ["first", "first"]


def test_rank_that_alone_was_reset_waits_no_longer_than_the_grace() -> None:
    """The others do not compile the graph again, and so none of them leads."""
    zero, one = group_of(2)
    assert together(lambda: zero.walk([True]), lambda: one.walk([True])) == ["first"] * 2
    assert one.walk([True], resets=1) == "first"
    assert GRACE <= one.waited < LONG / 4
    assert one.agreed["leader"] == 1


def test_ranks_with_the_same_graphs_in_another_order_take_the_same() -> None:
    """No rank waits for one that waits for it."""
    zero, one = group_of(2)

    def both(rank: Rank, *graphs: str) -> dict[str, str]:
        return {graph: rank.walk([rank is one, True], graph=graph) for graph in graphs}

    started = time.monotonic()
    first, second = together(lambda: both(zero, "a", "b"), lambda: both(one, "b", "a"))
    assert time.monotonic() - started < LONG / 2
    assert first == second


@pytest.mark.parametrize("seed", range(4))
def test_any_ranks_that_come_follow_one_of_them(seed: int) -> None:
    """Four ranks, six graphs, builds of any length, candidates that some cannot take."""
    dice = random.Random(seed)
    four = group_of(4)
    able = {(r, g): [dice.random() < 0.7 for _ in range(3)] for r in range(4) for g in range(6)}

    def work(number: int) -> list[str]:
        own = random.Random(seed * 10 + number)
        walks = (able[number, graph] for graph in range(6))
        return [
            four[number].walk(can, graph=f"g{graph}", build=own.random() * 0.05)
            for graph, can in enumerate(walks)
        ]

    for served in zip(*together(*(lambda n=n: work(n) for n in range(4))), strict=True):
        assert len({*served, EAGER}) <= 2
    assert max(each.waited for each in four) < LONG / 2


class Fails:
    """A store that fails from the call of a method on."""

    def __init__(self, at: str) -> None:
        self._store = HashStore()
        self._at = at

    def __getattr__(self, name: str) -> Any:
        if name == self._at:
            self._store = None
        if self._store is None:
            raise ConnectionError("connection reset by peer")
        return getattr(self._store, name)


@pytest.mark.parametrize("at", ["check", "set", "add", "compare_set"])
def test_store_that_fails_ends_the_talk_and_nothing_else(
    at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank that keeps it is gone, at whatever moment."""
    monkeypatch.setattr(_torch.ranks.GroupMember, "store_below", lambda member, _: member.store)
    rank = Rank(Fails(at), 0, 2)
    assert rank.walk([False, True]) == "second"
    assert rank.waited < GRACE
    assert rank.agreed.startswith("no: the store of the default group failed: ConnectionError")


def test_group_without_a_store_is_no_error() -> None:
    """Under MPI there is none."""
    assert Rank(None, 0, 2).walk([False, True]) == "second"


def test_leader_whose_store_fails_while_it_builds_serves_its_choice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others cannot be told, and the record says so."""
    rank = Rank(HashStore(), 0, 2)
    read = ranks.Talk._leader

    def led(talk: ranks.Talk) -> int:
        leader = read(talk)
        talk._store = None
        return leader

    monkeypatch.setattr(ranks.Talk, "_leader", led)
    assert rank.walk([False, True]) == "second"
    assert rank.agreed.startswith("no: the store of the default group failed: AttributeError")


def test_one_rank_asks_nobody() -> None:
    """Nor does any, with a limit of 0."""
    entries = entries_of(composer.Policy(chain=[FakeBackend(name="first")]))
    for within in (0.0, 5.0):
        outcome = ranks.walk_together("graph", entries, within, lambda held: walked(held, [True]))
        assert "agreed" not in outcome.attempts[0].engine
        assert not ranks.are_asked(within)
