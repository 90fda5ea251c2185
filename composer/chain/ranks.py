"""The vote by which all ranks of ``torch.distributed`` take the same candidate for a graph.

The ranks vote through the key-value store of the default group. They use no collective: a rank may
compile a graph alone, or in another order than the others, and a collective would wait for them.

The decision on a candidate is one key of the store. It is written once (``compare_set``), and
holds for all ranks:

- The first rank that cannot take the candidate writes that the candidate is passed over.
- A rank that can take the candidate says so, and waits until all other ranks have said so. Then it
  writes that the candidate is taken.
- A rank also writes that the candidate is taken if it need not or cannot wait any longer: at the
  time limit; where the others compile graphs that this rank has not met, since they wait for it
  there; and where this rank compiles a function again and the others do not, since a collective of
  theirs may be waiting for this rank.

So all ranks come to the same candidate. A rank that comes late finds the decision. The eager
fallback needs no vote. A rank goes on alone only if it cannot take the candidate that the others
took without it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from composer import _torch, session
from composer.build import BuildFacts
from composer.errors import error_line, refuse
from composer.records import Reason, Status
from composer.system import control_flow

_IMPATIENCE = 4
"""The divisor of the time limit after each wait that was in vain, on any rank."""

_COMPANY = 5.0
"""Seconds within which a rank must begin to compile a function again after another one did."""

_SHORTEST, _LONGEST = 0.005, 1.0
"""Bounds of the seconds between two reads of the store. They grow with the wait and the ranks."""

T = TypeVar("T")

log = logging.getLogger("composer")


class Vote:
    """The vote of the ranks on one candidate. The base class is for a process without others.

    :meth:`open` and :meth:`accept` raise a ``Refusal`` (``skipped`` with ``policy``) if another
    rank could not take the candidate.
    """

    def open(self) -> None:
        """Check, before anything is built, that the candidate is not passed over already."""

    def accept(self, facts: BuildFacts) -> None:
        """Say that this rank can take the candidate, wait for the others, and add how they agreed.

        Args:
            facts: The facts of the attempt.
        """

    def refuse(self, why: str) -> None:
        """Say that this rank cannot take the candidate, with the reason for the others' records."""


NOBODY = Vote()
"""The vote of the only rank, and of a policy that asks no other ranks."""


Ballots = Callable[[int], Vote]
"""Gives the vote on the candidate at a place of the chain. The first place is 0."""


def among_ranks(
    graph: str, within: float, *, again: bool = False
) -> contextlib.AbstractContextManager[Ballots]:
    """Let the ranks of the default group vote on one graph, if there are other ranks.

    A decision ends with ``composer.reset()`` and with ``torch.compiler.reset()``.

    Args:
        graph: The graph's key, which is the same on all ranks.
        within: Seconds to wait for others, for the whole chain. With 0 they are not asked.
        again: True if the function was compiled before, for other inputs.
    """
    member = _torch.ranks.group_member() if within else None
    if member is None:
        return contextlib.nullcontext(lambda _: NOBODY)
    _torch.dynamo.at_next_reset(session.count_reset)
    return between(member, graph, within, again=again, resets=session.current().resets)


@contextlib.contextmanager
def between(
    member: _torch.ranks.GroupMember,
    graph: str,
    within: float,
    *,
    again: bool = False,
    resets: int = 0,
) -> Iterator[Ballots]:
    """Let this rank, a member of the group, and the others vote (see :func:`among_ranks`).

    A rank that votes on a graph again, and has counted more ``resets`` than at its last vote on it,
    begins another round. The ranks of one round decide without regard to earlier ones.
    """
    talk = _Agreement(member, graph, within, again=again, resets=resets)
    talk.attempt(talk.begin)
    try:
        yield lambda place: _Asked(talk, place)
    finally:
        talk.attempt(talk.end)


@dataclass(frozen=True, slots=True)
class _Fate:
    """The decision on a candidate.

    Attributes:
        taken: True if all ranks take the candidate; false if they pass it over.
        by: The rank that decided.
        why: The reason, if the candidate is passed over or not all ranks take part.
        without: The ranks that take no part.
    """

    taken: bool
    by: int
    why: str = ""
    without: tuple[int, ...] = ()

    def text(self) -> str:
        """The text that the store keeps."""
        return json.dumps([self.taken, self.by, self.why, self.without])

    @staticmethod
    def of(text: bytes) -> _Fate:
        """The decision that :meth:`text` wrote."""
        taken, by, why, without = json.loads(text)
        return _Fate(taken, by, why, tuple(without))


class _Agreement:
    """One rank's side of the vote on one graph.

    The keys of the store are below a prefix that has the number of ranks:

    - ``at/RANK`` is the graph that a rank compiles, or the last one that it compiled.
    - ``KEY/round/RANK`` is the round in which the rank has voted last on the graph with that key,
      and how many resets it had counted then. ``GRAPH`` is the key and the round.
    - ``GRAPH/here/RANK`` is there if the rank has met the graph.
    - ``GRAPH/PLACE`` is the decision on the candidate at a place of the chain.
    - ``GRAPH/PLACE/RANK`` is there if the rank can take that candidate.
    - ``missed`` counts the waits that were in vain; ``met`` is that count when all last agreed.
    """

    def __init__(
        self,
        member: _torch.ranks.GroupMember,
        graph: str,
        within: float,
        *,
        again: bool,
        resets: int,
    ) -> None:
        self.alone = ""
        self._broken = False
        self._member = member
        self._rank, self._world = member.rank, member.world
        self._others = sorted(set(range(member.world)) - {member.rank})
        self._graph = graph
        self._left = within
        self._again = again
        self._resets = resets
        self._began = time.monotonic()

    def begin(self) -> None:
        """Announce this rank, and read which graphs the others compile and how long to wait."""
        self._store = self._member.store_below(f"composer/{self._world}")
        self._graph = f"{self._graph}/{self._round()}"
        self._store.set(f"{self._graph}/here/{self._rank}", "-")
        if not self._has(f"{self._graph}/here/{self._rank}"):
            raise LookupError("it keeps nothing")
        at = self._read_all([f"at/{each}" for each in self._others])
        self._before = dict(zip(self._others, at, strict=True))
        self._turn = self._move("in")
        missed = self._store.add("missed", 0) - int(self._read("met") or 0)
        patience = float(_IMPATIENCE) ** -missed  # 0 in the end: a power of it would overflow
        self._left *= patience
        self._company = _COMPANY * patience

    def _round(self) -> int:
        """Return the number of this rank's round on the graph: 0, and one more after a reset."""
        own = f"{self._graph}/round/{self._rank}"
        last = self._read(own)
        number, resets = map(int, last.split()) if last else (0, self._resets)
        number += resets != self._resets
        self._store.set(own, f"{number} {self._resets}")
        return number

    def end(self) -> None:
        """Say that this rank is done with the graph."""
        if not self._broken:
            self._move("out")

    def fate(self, place: int) -> _Fate | None:
        """The decision on a candidate; ``None`` if there is none yet."""
        text = self._read(f"{self._graph}/{place}")
        return _Fate.of(text) if text else None

    def decide(self, place: int, fate: _Fate) -> _Fate:
        """Write the decision on a candidate; returns the earlier one if another rank wrote it."""
        written = self._store.compare_set(f"{self._graph}/{place}", "", fate.text())
        return _Fate.of(written)

    def passed_over(self, place: int, why: str) -> _Fate:
        """Write that the candidate is passed over, since this rank cannot take it."""
        return self.decide(place, _Fate(taken=False, by=self._rank, why=why))

    def taken(self, place: int) -> _Fate:
        """Say that this rank can take the candidate, and wait for the decision, or decide."""
        self._store.set(f"{self._graph}/{place}/{self._rank}", "-")
        started = time.monotonic()
        missing = list(self._others)
        while not (fate := self.fate(place)):
            missing = self._missing(place, missing)
            awaited = [r for r in missing if not self._is_elsewhere(r) and not self._stays(r)]
            waited = time.monotonic() - started
            if not awaited or waited >= self._left:
                fate = self._take(place, missing, late=bool(awaited))
                break
            pause = max(_SHORTEST * len(awaited), waited / 10)
            time.sleep(min(pause, _LONGEST, self._left - waited))
        self._left = max(0.0, self._left - (time.monotonic() - started))
        return fate

    def agreed(self, fate: _Fate, seconds: float) -> dict[str, Any]:
        """The facts for the attempt's record."""
        facts: dict[str, Any] = {"ranks": self._world - len(fate.without), "of": self._world}
        if fate.without:
            facts |= {"without": list(fate.without), "because": fate.why}
        return {**facts, "seconds": round(seconds, 3)}

    def ask(self, step: Callable[[], T]) -> T | None:
        """Return the result of a step; ``None`` once this rank decides alone."""
        return None if self.alone else self.attempt(step)

    def attempt(self, step: Callable[[], T]) -> T | None:
        """Return the result of a step. If the store fails, this rank decides alone from now on."""
        try:
            return step()
        except BaseException as error:  # noqa: BLE001  # recorded; agreement is never the user's problem
            control_flow.pass_on(error)
            self._broken = True
            self.alone = f"the store of the default group failed: {error_line(error)}"
            return None

    def _take(self, place: int, missing: list[int], *, late: bool) -> _Fate:
        if not missing:
            fate = self.decide(place, _Fate(taken=True, by=self._rank))
            self._store.set("met", str(self._store.add("missed", 0)))
            return fate
        names = ", ".join(map(str, missing))
        who, go_on, others = f"ranks {names}", "go on", "compile other graphs"
        if len(missing) == 1:
            who, go_on, others = f"rank {names}", "goes on", "compiles another graph"
        stay = any(map(self._stays, missing))
        if late:
            message = f"did not come within {self._left:.3g} s"
        elif stay:
            message = f"{go_on} with what was compiled before"
        else:
            message = others
        mine = _Fate(taken=True, by=self._rank, why=f"{who} {message}", without=tuple(missing))
        fate = self.decide(place, mine)
        if (late or stay) and fate == mine:
            self._store.add("missed", 1)
            level = logging.WARNING if late else logging.INFO
            log.log(level, "rank %d goes on without agreement: %s", self._rank, mine.why)
        return fate

    def _is_elsewhere(self, rank: int) -> bool:
        """True if a rank compiles, or has compiled since this one began, a graph unknown here.

        If it waits there, it waits for this rank, so this rank must not wait for it. Nor does this
        rank wait if the other has compiled as many graphs as this one, and the last of them is
        unknown here: the other is ahead, with other graphs.
        """
        at = self._read(f"at/{rank}")
        if not at:
            return False
        number, state, graph = at.decode().split()
        gone = state == "in" or at != self._before[rank] or int(number) >= self._turn
        return gone and not self._has(f"{graph}/here/{self._rank}")

    def _stays(self, rank: int) -> bool:
        """Return True if a rank keeps its earlier compile while this rank compiles again."""
        if not self._again or time.monotonic() - self._began < self._company:
            return False
        return not self._has(f"{self._graph}/here/{rank}")

    def _move(self, state: str) -> int:
        """Write that this rank enters (``in``) or leaves (``out``) the graph.

        Returns:
            The number of times that it has entered or left a graph.
        """
        number = int((self._read(f"at/{self._rank}") or b"0").split()[0]) + 1
        self._store.set(f"at/{self._rank}", f"{number} {state} {self._graph}")
        return number

    def _missing(self, place: int, ranks: Sequence[int]) -> list[int]:
        """The ranks that have not said yet that they can take a candidate.

        One request asks for all, because usually all have said so.
        """
        keys = {rank: f"{self._graph}/{place}/{rank}" for rank in ranks}
        if self._store.check(list(keys.values())):
            return []
        return [rank for rank, key in keys.items() if not self._has(key)]

    def _read_all(self, keys: Sequence[str]) -> list[bytes]:
        """The values of several keys, by two requests where the store is able to and has all."""
        if self._store.has_extended_api() and self._store.check(list(keys)):
            return list(map(bytes, self._store.multi_get(list(keys))))
        return list(map(self._read, keys))

    def _has(self, key: str) -> bool:
        return bool(self._store.check([key]))

    def _read(self, key: str) -> bytes:
        """A key's value; empty where there is none. ``get`` by itself would wait for one."""
        return bytes(self._store.get(key)) if self._has(key) else b""


class _Asked(Vote):
    """The vote on one candidate among several ranks."""

    def __init__(self, talk: _Agreement, place: int) -> None:
        self._talk = talk
        self._place = place

    def open(self) -> None:
        fate = self._talk.ask(lambda: self._talk.fate(self._place))
        if fate is not None:
            _skip_if_passed_over(fate)

    def accept(self, facts: BuildFacts) -> None:
        started = time.monotonic()
        fate = self._talk.ask(lambda: self._talk.taken(self._place))
        if fate is None:
            facts.extra["agreed"] = f"no: {self._talk.alone}"
            return
        _skip_if_passed_over(fate)
        facts.extra["agreed"] = self._talk.agreed(fate, time.monotonic() - started)

    def refuse(self, why: str) -> None:
        fate = self._talk.ask(lambda: self._talk.passed_over(self._place, why))
        if fate is not None and fate.taken:
            self._talk.alone = "the other ranks had taken a candidate that this one cannot take"


def _skip_if_passed_over(fate: _Fate) -> None:
    if not fate.taken:
        message = f"rank {fate.by} could not take it: {fate.why}"
        refuse(Status.SKIPPED, Reason.POLICY, message)
