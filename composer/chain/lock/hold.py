"""``locked = true``: only the engine that the lock names for a graph is tried."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

from composer import session
from composer.chain.candidates import ChainEntry, entries_of
from composer.chain.lock.difference import between, called, versions
from composer.chain.lock.observed import Witness, server_of
from composer.errors import LockError
from composer.knowledge import lock_file
from composer.knowledge.chosen import describe, versions_with
from composer.knowledge.lock_file import LOCK_FILE, LockedGraph
from composer.policy import Candidate, Policy, sources
from composer.policy.resolution import Resolved
from composer.records import EAGER, GraphRequest


def hold(request: GraphRequest, resolved: Resolved) -> Resolved:
    """Return what holds for a graph; if ``locked``, the chain is narrowed to the lock's engine.

    The lock can only choose among the candidates of the chain, so it cannot name code to run.
    ``composer lock`` does not read the lock. Under ``composer lock --check``, a graph that is not
    in the lock is compiled as if unlocked.

    Raises:
        LockError: the lock is missing or malformed, or the graph differs from the lock's entry.
    """
    witness: Witness | None = session.current().witness
    policy = resolved.policy
    entries = resolved.entries
    if not policy.locked and witness is None:
        return resolved
    position = session.current().position(request.model, request.graph_key)
    graph = describe(request, policy, resolved.shared, position)
    if witness is None:
        held = _held_to(_entry(graph, entries), entries)
    else:
        witness.meet(graph, entries)
        policy = _in_the_foreground(policy)  # so that the engine that serves in the end is known
        entry = witness.entry(graph) if policy.locked else None
        held = _held_to(entry, entries) if entry else ()
    if held:
        policy = _in_the_foreground(policy, by="first")
    return dataclasses.replace(resolved, policy=policy, entries=held or entries)


def _in_the_foreground(policy: Policy, **changes: Any) -> Policy:
    select = policy.select.model_copy(update={"background": False, **changes})
    return policy.model_copy(update={"select": select})


def lock_path() -> Path:
    """Return the lock's path: beside the policy file in force, else in the working directory."""
    policy = sources.file_in_force(session.current().configured)
    return (policy.parent if policy else Path.cwd()) / LOCK_FILE


def _entry(graph: LockedGraph, entries: tuple[ChainEntry, ...]) -> LockedGraph:
    """Return the lock's entry of this graph.

    Raises:
        LockError: the graph or versions differ from the lock; the error names each difference.
    """
    path = lock_path()
    lock = lock_file.read(path)
    same = lock.entry(graph)
    entry = same or lock.nearest(graph)
    if entry is None:
        raise LockError(path, f"does not hold {graph.title}, nor any other of it")
    differences = [sentence for _, sentence in between(entry, graph)]
    engines = [each.backend for each in entries if server_of(each) == entry.server]
    packages = itertools.chain.from_iterable(engine.packages for engine in engines)
    differences += versions(lock, versions_with(packages))
    if same and not _held_to(same, entries):
        differences.append(f"{called(same)}, which it names, is not in the chain")
    if not differences:
        return entry
    if same or entry.position == graph.position:
        raise LockError(path, f"holds {entry.title} as another than it is here", differences)
    nearest = f"the nearest is graph {entry.position}"
    raise LockError(path, f"does not hold {graph.title}; {nearest}", differences)


def _held_to(entry: LockedGraph, entries: tuple[ChainEntry, ...]) -> tuple[ChainEntry, ...]:
    """Return the chain with all but the locked engine barred; empty if the chain lacks that engine.

    If the eager fallback is the locked engine, it is added to the chain: it can be the fastest
    without being in the chain.
    """
    if entry.engine == EAGER and entry.server not in map(server_of, entries):
        entries = (*entries, *entries_of(Policy(chain=(Candidate(backend=EAGER),))))
    if entry.server not in map(server_of, entries):
        return ()
    barred = f"{LOCK_FILE} says {called(entry)} for this graph"
    held = list(entries)
    for place, each in enumerate(entries):
        if server_of(each) != entry.server:
            held[place] = dataclasses.replace(each, barred=barred)
    return tuple(held)
