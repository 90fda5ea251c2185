"""``locked = true``: the lock says which engine serves a graph, and no other is tried."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from composer import config, session
from composer.chain.candidates import ChainEntry, entries_of
from composer.chain.lock import file
from composer.chain.lock.describe import describe, readable, versions_for
from composer.chain.lock.difference import between, called, versions
from composer.chain.lock.file import LOCK_FILE, LockedGraph
from composer.chain.lock.witness import Witness, precision_of
from composer.errors import LockError
from composer.passes.resolve import SharedPasses
from composer.policy import Candidate, Policy
from composer.records import EAGER, GraphRequest


def hold(
    request: GraphRequest,
    policy: Policy,
    entries: tuple[ChainEntry, ...],
    shared: SharedPasses,
) -> tuple[Policy, tuple[ChainEntry, ...]]:
    """The policy and the chain; where the policy is ``locked``, narrowed to what the lock says.

    The lock chooses among the candidates of the chain; it names no code. ``composer lock`` does not
    read it. Under ``composer lock --check`` a graph that is not in it is compiled as if unlocked.

    Raises:
        LockError: the lock is missing or malformed, or the graph is not as it says.
    """
    witness: Witness | None = session.current().witness
    if not policy.locked and witness is None:
        return policy, entries
    graph = describe(request, policy, shared, _position(request))
    if witness is not None:
        witness.meet(graph, entries)
        policy = _in_the_foreground(policy)  # to see who serves in the end
        entry = witness.entry(graph) if policy.locked else None
    else:
        entry = _entry(graph, entries)
    held = _held_to(entry, entries) if entry else ()
    if not held:
        return policy, entries
    return _in_the_foreground(policy, by="first"), held


def _in_the_foreground(policy: Policy, **changes: Any) -> Policy:
    select = policy.select.model_copy(update={"background": False, **changes})
    return policy.model_copy(update={"select": select})


def lock_path() -> Path:
    """Where the lock is: beside the policy file in force, else in the working directory."""
    policy = config.file_in_force(session.current().configured)
    return (policy.parent if policy else Path.cwd()) / LOCK_FILE


def _position(request: GraphRequest) -> int:
    """How many other graphs of the model this process has compiled."""
    compiled = session.current().reports()
    keys = {each.graph_key for each in compiled if each.model == request.model}
    return len(keys - {request.graph_key})


def _entry(graph: LockedGraph, entries: tuple[ChainEntry, ...]) -> LockedGraph:
    """The lock's entry of this graph.

    Raises:
        LockError: naming everything in which graph or versions differ from the lock.
    """
    path = lock_path()
    lock = file.read(path)
    same = lock.entry(graph)
    entry = same or lock.nearest(graph)
    if entry is None:
        raise LockError(path, f"does not hold {graph.title}, nor any other of it")
    told = [message for _, message in between(entry, graph)]
    engine = next((each.backend for each in entries if _is(each, entry)), None)
    told += versions(lock, versions_for(engine))
    if same and not _held_to(same, entries):
        told.append(f"{called(same)}, which it names, is not in the chain")
    if not told:
        return entry
    if same or entry.position == graph.position:
        raise LockError(path, f"holds {entry.title} as another than it is here", told)
    nearest = f"the nearest is graph {entry.position}"
    raise LockError(path, f"does not hold {graph.title}; {nearest}", told)


def _held_to(entry: LockedGraph, entries: tuple[ChainEntry, ...]) -> tuple[ChainEntry, ...]:
    """The chain with all but the locked engine barred; empty where the chain does not have it.

    The eager fallback is added if it is the locked one: it can be the fastest without being in the
    chain.
    """
    if entry.engine == EAGER and not any(_is(each, entry) for each in entries):
        entries = (*entries, *entries_of(Policy(chain=(Candidate(backend=EAGER),))))
    if not any(_is(each, entry) for each in entries):
        return ()
    why = f"{LOCK_FILE} says {called(entry)} for this graph"
    return tuple(
        each if _is(each, entry) else dataclasses.replace(each, barred=why) for each in entries
    )


def _is(each: ChainEntry, entry: LockedGraph) -> bool:
    candidate = each.candidate
    return (candidate.name, readable(candidate.options), precision_of(each)) == entry.server
