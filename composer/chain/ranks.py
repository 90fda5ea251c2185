"""The leader's decision, by which all ranks of ``torch.distributed`` use the same candidate.

For each graph one rank leads: rank 0 at once, another rank if none leads after a short wait. The
leader walks its chain as if it were alone, and writes which candidate serves. The other ranks wait
for that, and try this candidate only. If a rank cannot take it, eager serves there.

The ranks talk through the key-value store of the default group. They use no collective: a rank may
compile a graph alone, or in another order than the others, and a collective would wait for them.
A leader waits for nobody, so ranks never wait for each other.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from composer import _torch, session
from composer.chain.candidates import ChainEntry
from composer.errors import error_line
from composer.records import EAGER, Outcome
from composer.system import control_flow

_GRACE = 5.0
"""Seconds that a rank waits for another to lead: a quarter of it after each such wait in vain."""

_SHORTEST, _LONGEST = 0.005, 1.0
"""Bounds of the seconds between two reads of the store. They grow with the wait."""

Walk = Callable[[Sequence[ChainEntry]], Outcome]
"""Tries the candidates of a chain."""

T = TypeVar("T")

log = logging.getLogger("composer")


def are_asked(within: float) -> bool:
    """Return True if there are other ranks, and the policy gives them time to decide together."""
    return within > 0 and _torch.ranks.world_size() > 1


def walk_together(graph: str, entries: Sequence[ChainEntry], within: float, walk: Walk) -> Outcome:
    """Walk the chain so that all ranks use the same candidate, until one of the two resets.

    Args:
        graph: The graph's key, which is the same on all ranks.
        entries: The chain.
        within: Seconds to wait for the leader's decision. With 0 this rank decides for itself.
        walk: Tries the candidates of the chain that it is given.
    """
    member = _torch.ranks.group_member() if within else None
    if member is None:
        return walk(entries)
    _torch.dynamo.at_next_reset(session.count_reset)
    return Talk(member, graph, within, session.current().resets).walk(entries, walk)


@dataclass(frozen=True, slots=True)
class _Decision:
    """What a leader decided, or that it has not decided.

    Attributes:
        leader: The rank that leads.
        place: The only place in the chain that may be tried; -1 for none, ``None`` for all.
        name: The name of the candidate that serves; empty if nothing was decided.
        why: The decision as a sentence.
    """

    leader: int
    place: int | None
    name: str
    why: str

    def held(self, entries: Sequence[ChainEntry]) -> list[ChainEntry]:
        """Return the chain with all but the candidate that serves barred."""
        held = list(entries)
        for place, each in enumerate(entries):
            # Chains may differ, if the machines of the ranks have other engines installed.
            serves = place == self.place and each.candidate.name == self.name
            if not serves and self.place is not None:
                held[place] = dataclasses.replace(each, barred=each.barred or self.why)
        return held


@dataclass
class Talk:
    """One rank's side of the decision on one graph.

    The keys of the store are below a prefix that has the number of ranks:

    - ``vain/RANK`` counts how often the rank waited in vain for another to lead.
    - ``KEY/round/RANK`` is the round in which the rank last compiled the graph with that key, and
      how many resets it had counted then. ``GRAPH`` is the key and the round.
    - ``KEY/round`` is the newest of these rounds, in which a rank begins that has not compiled the
      graph yet: the decisions of older rounds have ended.
    - ``GRAPH/leader`` is the rank that leads, and ``GRAPH/decision`` is its decision.
    """

    member: _torch.ranks.GroupMember
    graph: str
    within: float
    resets: int = 0

    def walk(self, entries: Sequence[ChainEntry], walk: Walk) -> Outcome:
        """Lead or follow. If the store fails, walk the chain as if there were no other ranks."""
        started = time.monotonic()
        decision, trouble = self._tried(self._decision)
        seconds = round(time.monotonic() - started, 3)
        if trouble:
            return _noted(walk(entries), trouble)
        if decision is None:
            return self._lead(entries, walk, seconds)
        outcome = walk(decision.held(entries))
        if outcome.chosen != decision.name:
            return _noted(outcome, f"no: {decision.why}")
        return _noted(outcome, {"leader": decision.leader, "seconds": seconds})

    def _begin_round(self) -> None:
        """Open the store, and find the round: the newest, and one more if it was reset since."""
        self._store = self.member.store_below(f"composer/{self.member.world}")
        own = f"{self.graph}/round/{self.member.rank}"
        newest = int(self._read(f"{self.graph}/round") or 0)
        last = self._read(own)
        number, resets = map(int, last.split()) if last else (newest, self.resets)
        number += resets != self.resets
        self._store.set(own, f"{number} {self.resets}")
        if number > newest:
            self._store.set(f"{self.graph}/round", str(number))
        self.graph = f"{self.graph}/{number}"

    def _decision(self) -> _Decision | None:
        """Return the leader's decision; ``None`` if this rank leads."""
        self._begin_round()
        decided = f"{self.graph}/decision"
        text = self._read(decided)
        if not text:
            leader = self._leader()
            if leader == self.member.rank:
                return None
            text = self._awaited(decided, self.within)
        if text:
            return _Decision(*json.loads(text))
        why = f"rank {leader} did not decide within {self.within:g} s"
        log.warning("rank %d runs a graph on eager: %s", self.member.rank, why)
        return _Decision(leader, -1, "", why)

    def _leader(self) -> int:
        """Return the rank that leads: this one, if no other does after a short wait."""
        rank = self.member.rank
        leads = f"{self.graph}/leader"
        grace = _GRACE * 0.25 ** self._store.add(f"vain/{rank}", 0)
        if rank and not self._awaited(leads, min(grace, self.within)):
            self._store.add(f"vain/{rank}", 1)
        return int(self._store.compare_set(leads, "", str(rank)))

    def _lead(self, entries: Sequence[ChainEntry], walk: Walk, seconds: float) -> Outcome:
        """Walk the chain, and write the decision, so that no rank waits for it in vain."""
        rank = self.member.rank
        decision = _Decision(rank, -1, EAGER, f"rank {rank} decided for {EAGER}")
        try:
            outcome = walk(entries)
            if outcome.ends[-1].attempt.accepted:
                why = f"rank {rank} decided for {outcome.chosen}"
                decision = _Decision(rank, len(outcome.ends) - 1, outcome.chosen, why)
        except _torch.dynamo.DYNAMO_CONTROL_FLOW:
            # Dynamo captures the function again, on each rank for itself.
            decision = _Decision(rank, None, "", f"rank {rank} began its compile anew")
            raise
        finally:
            text = json.dumps(dataclasses.astuple(decision))
            decided = f"{self.graph}/decision"
            _, trouble = self._tried(lambda: self._store.compare_set(decided, "", text))
        return _noted(outcome, trouble or {"leader": rank, "seconds": seconds})

    def _tried(self, step: Callable[[], T]) -> tuple[T | None, str]:
        """Return the result of a step; if the store fails, a sentence that says so."""
        try:
            return step(), ""
        except BaseException as error:  # noqa: BLE001  # recorded; it is never the user's problem
            control_flow.pass_on(error)
            return None, f"no: the store of the default group failed: {error_line(error)}"

    def _awaited(self, key: str, seconds: float) -> bytes:
        """Return the value of a key as soon as it is there; empty after so many seconds."""
        deadline = time.monotonic() + seconds
        pause = _SHORTEST
        # The store's own ``wait`` keeps other threads from it, and cannot be interrupted.
        while not (value := self._read(key)) and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(pause, left))
            pause = min(1.1 * pause, _LONGEST)
        return value

    def _read(self, key: str) -> bytes:
        """Return a key's value; empty if there is none. ``get`` by itself would wait for one."""
        return bytes(self._store.get(key)) if self._store.check([key]) else b""


def _noted(outcome: Outcome, agreed: str | dict[str, Any]) -> Outcome:
    """Return the outcome with a fact on the ranks in its last attempt, which serves if any does."""
    *before, last = outcome.ends
    engine = last.attempt.engine | {"agreed": agreed}
    end = last._replace(attempt=dataclasses.replace(last.attempt, engine=engine))
    return dataclasses.replace(outcome, ends=(*before, end))
