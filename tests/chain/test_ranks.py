"""How ranks agree on a candidate: threads in the place of ranks, on one key-value store."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import FileStore, HashStore, TCPStore

from composer import _torch
from composer.build import BuildFacts
from composer.chain import ranks
from composer.errors import Refusal

LONG = 20.0


class Rank:
    """One rank; ``facts`` is what the attempt at its last candidate noted."""

    def __init__(self, store: Any, number: int, world: int) -> None:
        self.member = _torch.ranks.GroupMember(number, world, store)
        self.facts: Any = None
        self.said: list[str] = []
        self.waited = 0.0

    def walk(
        self,
        can: Sequence[bool],
        graph: str = "graph",
        within: float = LONG,
        build: float = 0.0,
        *,
        again: bool = False,
        resets: int = 0,
    ) -> int:
        """The place of the candidate taken; -1 for the eager fallback."""
        started = time.monotonic()
        votes_of = ranks.between(self.member, graph, within, again=again, resets=resets)
        with votes_of as votes:
            for place, able in enumerate(can):
                facts = BuildFacts()
                try:
                    votes(place).open()
                    time.sleep(build)
                    if not able:
                        votes(place).refuse("no such kernel")
                        continue
                    votes(place).accept(facts)
                except Refusal as refusal:
                    self.said.append(str(refusal))
                    continue
                finally:
                    self.facts = facts.extra.get("agreed")
                    self.waited = time.monotonic() - started
                return place
        return -1


def group_of(count: int, store: Any = None) -> list[Rank]:
    store = HashStore() if store is None else store
    return [Rank(store, number, count) for number in range(count)]


def together(*works: Callable[[], Any]) -> list[Any]:
    """Each in a thread of its own."""
    with ThreadPoolExecutor(len(works)) as pool:
        return [each.result(60) for each in [pool.submit(work) for work in works]]


@pytest.mark.parametrize("able", list(itertools.product([True, False], repeat=4)))
def test_first_candidate_that_all_can_take_is_taken_by_all(able: tuple[bool, ...]) -> None:
    """Whoever cannot take one, and whenever the others come to it."""
    zero, one = group_of(2)
    wanted = next((i for i in (0, 1) if able[i] and able[i + 2]), -1)
    places = together(lambda: zero.walk(able[:2]), lambda: one.walk(able[2:], build=0.01))
    assert places == [wanted, wanted]


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
        places = together(
            lambda g=graph, a=able: zero.walk(a, graph=g),
            lambda g=graph: one.walk([True, True], graph=g),
        )
        assert places == [int(graph == "a")] * 2
    alone = Rank(store, 0, 2)
    alone.walk([True], graph="c", within=0.2)
    assert alone.facts["without"] == [1]


def test_refusal_of_another_rank_is_told_with_its_reason() -> None:
    """The rank that could have taken the candidate says who could not."""
    zero, one = group_of(2)
    together(lambda: zero.walk([True, True]), lambda: one.walk([False, True]))
    assert zero.said == ["rank 1 could not take it: no such kernel"]
    assert zero.facts.pop("seconds") < LONG / 2
    assert zero.facts == {"ranks": 2, "of": 2}


def test_candidate_that_another_rank_refused_is_not_built() -> None:
    """A rank that comes later does not pay for it."""
    zero, one = group_of(2)
    both = together(lambda: one.walk([False, True]), lambda: _later(zero.walk, [True, True]))
    assert both == [1, 1]
    assert zero.said
    assert zero.waited < LONG / 2


def _later(work: Callable[..., Any], *args: Any) -> Any:
    time.sleep(0.2)
    return work(*args)


def test_rank_that_never_comes_is_waited_for_within_the_limit() -> None:
    """Then the first that this rank can take is taken; who was missing is said."""
    zero, _ = group_of(2)
    assert zero.walk([False, True, True], within=0.3) == 1
    assert 0.3 <= zero.waited < 2
    assert zero.facts["ranks"] == 1
    assert zero.facts["without"] == [1]
    assert zero.facts["because"] == "rank 1 did not come within 0.3 s"


def test_rank_that_comes_late_takes_what_was_decided() -> None:
    """Also a candidate behind one that it could have taken itself; nobody is waited for again."""
    zero, one = group_of(2)
    assert zero.walk([False, True], within=0.2) == 1
    assert one.walk([True, True]) == 1
    assert one.waited < 1
    assert one.facts["without"] == [1]


@pytest.mark.parametrize("resets", [(1, 1), (1, 5), (3, 2)])
def test_ranks_decide_anew_after_a_reset_however_many_each_has_counted(
    resets: tuple[int, int],
) -> None:
    """A decision holds until the ranks begin anew."""
    zero, one = group_of(2)
    assert together(lambda: zero.walk([True, True]), lambda: one.walk([False, True])) == [1, 1]
    assert together(lambda: zero.walk([True, True]), lambda: one.walk([True, True])) == [1, 1]
    for further in (0, 7):
        mine, theirs = resets[0] + further, resets[1] + further
        places = together(
            lambda mine=mine: zero.walk([True, True], resets=mine),
            lambda theirs=theirs: one.walk([True, True], resets=theirs),
        )
        assert places == [0, 0]


def test_rank_that_comes_late_and_cannot_goes_on_alone() -> None:
    """It waits for nobody, and says so."""
    zero, one = group_of(2)
    assert zero.walk([True, True], within=0.2) == 0
    assert one.walk([False, True]) == 1
    assert one.waited < 1
    assert one.facts == "no: the other ranks had taken a candidate that this one cannot take"


def test_rank_that_went_on_alone_is_not_taken_to_be_still_busy() -> None:
    """A third one waits for it at the next graph as for any other."""
    zero, one, two = group_of(3)
    zero.walk([True], within=0.1)
    one.walk([False, True])
    two.walk([True])
    two.walk([True], graph="another", within=1.6)  # a quarter of it: there was a wait in vain
    assert two.waited >= 0.4
    assert two.facts["because"] == "ranks 0, 1 did not come within 0.4 s"


def test_rank_that_is_ahead_with_other_graphs_is_not_waited_for() -> None:
    """It has come through as many graphs, and the last of them is none of this rank's."""
    zero, one = group_of(2)
    zero.walk([True], graph="own", within=0.1)
    one.walk([True], graph="another", within=60)
    assert one.waited < 1
    assert one.facts["because"] == "rank 0 compiles another graph"


@pytest.fixture
def company(monkeypatch: pytest.MonkeyPatch) -> float:
    """Seconds within which the others have to begin to compile again."""
    monkeypatch.setattr(ranks, "_COMPANY", 0.3)
    return 0.3


def test_rank_that_compiles_again_alone_waits_for_nobody_s_collective(company: float) -> None:
    """Its last batch was smaller; the others wait for its gradients, not to compile."""
    zero, one = group_of(2)
    assert together(lambda: zero.walk([True]), lambda: one.walk([True])) == [0, 0]
    assert one.walk([True], graph="smaller", again=True) == 0
    assert company <= one.waited < LONG / 4
    assert one.facts["because"] == "rank 0 goes on with what was compiled before"


def test_ranks_that_compile_again_together_wait_for_the_slowest_build(company: float) -> None:
    """However long it takes, once it has begun."""
    zero, one = group_of(2)
    quick = lambda: zero.walk([True, True], again=True)  # noqa: E731
    slow = lambda: one.walk([False, True], build=3 * company, again=True)  # noqa: E731
    assert together(quick, slow) == [1, 1]
    assert zero.facts["ranks"] == 2


def test_each_wait_in_vain_makes_the_next_shorter_on_every_rank() -> None:
    """A program whose ranks compile each for itself does not pay the limit for every graph."""
    zero, one = group_of(2)
    waits = []
    for number, rank in enumerate((zero, zero, one, one)):
        rank.walk([True], graph=f"own {number}".replace(" ", "_"), within=0.8)
        waits.append(rank.waited)
    assert waits[0] >= 0.8
    assert 0.2 <= waits[1] < 0.7
    assert max(waits[2:]) < 0.5
    assert sum(waits) < 0.8 * 4 / 3 + 0.6


def test_patience_that_is_at_its_end_is_no_error() -> None:
    """However often a rank waited in vain."""
    zero, _ = group_of(2)
    for number in range(600):
        zero.walk([True], graph=f"own{number}", within=0.0001)
    facts = BuildFacts()
    with ranks.between(zero.member, "last", 60.0) as votes:
        votes(0).accept(facts)
    assert facts.extra["agreed"]["ranks"] == 1


def test_agreement_of_all_restores_patience() -> None:
    """The ranks are known to come again."""
    zero, one = group_of(2)
    for number in range(3):
        zero.walk([True], graph=f"own{number}", within=0.1)
    longer = LONG * ranks._IMPATIENCE**3  # which comes to LONG, after three waits in vain
    meets = [lambda rank=rank: rank.walk([True], within=longer) for rank in (zero, one)]
    assert together(*meets) == [0, 0]
    zero.walk([True], graph="another", within=0.3)
    assert zero.waited >= 0.3


def test_ranks_with_different_graphs_do_not_wait_for_each_other() -> None:
    """Sizes differ between ranks: each is busy where the other has not been."""
    zero, one = group_of(2)
    works = [lambda r=r, g=g: r.walk([True], graph=g) for r, g in ((zero, "a"), (one, "b"))]
    assert together(*works) == [0, 0]
    assert max(zero.waited, one.waited) < LONG / 4
    assert {zero.facts["because"], one.facts["because"]} == {
        "rank 1 compiles another graph",
        "rank 0 compiles another graph",
    }


def test_ranks_with_the_same_graphs_in_another_order_take_the_same() -> None:
    """Neither waits for the other to come to its graph; what one decided binds the other."""
    zero, one = group_of(2)

    def both(rank: Rank, *graphs: str) -> dict[str, int]:
        return {graph: rank.walk([rank is one, True], graph=graph) for graph in graphs}

    started = time.monotonic()
    first, second = together(lambda: both(zero, "a", "b"), lambda: both(one, "b", "a"))
    assert time.monotonic() - started < LONG / 2
    assert first["a"] == second["a"] == 1


def test_ranks_that_share_a_graph_agree_while_others_are_busy_elsewhere() -> None:
    """Two stages of a pipeline, of two ranks each."""
    four = group_of(4)
    able = ([True, True], [False, True], [True], [True])
    graphs = ("left", "left", "right", "right")
    works = [
        lambda r=r, c=c, g=g, s=s: r.walk(c, graph=g, build=s)
        for r, c, g, s in zip(four, able, graphs, (0, 0.3, 0.1, 0.1), strict=True)
    ]
    assert together(*works) == [1, 1, 0, 0]
    assert max(each.waited for each in four) < LONG / 2


@pytest.mark.parametrize("seed", range(4))
def test_any_ranks_that_come_take_the_same(seed: int) -> None:
    """Four ranks, six graphs, builds of any length, candidates that some cannot take."""
    dice = random.Random(seed)
    four = group_of(4)
    able = {(r, g): [dice.random() < 0.7 for _ in range(3)] for r in range(4) for g in range(6)}

    def work(number: int) -> list[int]:
        own = random.Random(seed * 10 + number)
        walks = (able[number, graph] for graph in range(6))
        return [
            four[number].walk(can, graph=f"g{graph}", build=own.random() * 0.05)
            for graph, can in enumerate(walks)
        ]

    chosen = together(*(lambda n=n: work(n) for n in range(4)))
    assert chosen[0] == chosen[1] == chosen[2] == chosen[3]


def test_store_that_fails_ends_the_talk_and_nothing_else() -> None:
    """The rank that keeps it is gone, or there is none, as under MPI."""

    class Gone:
        def __getattr__(self, name: str) -> Any:
            raise ConnectionError("connection reset by peer")

    for store in (Gone(), None):
        rank = Rank(store, 0, 2)
        assert rank.walk([False, True]) == 1
        assert rank.waited < 1
        assert rank.facts.startswith("no: the store of the default group failed: ")


def test_one_rank_asks_nobody() -> None:
    """Nor does any, with a limit of 0."""
    for within in (0.0, 5.0):
        with ranks.among_ranks("graph", within) as votes:
            assert votes(0) is ranks.NOBODY
