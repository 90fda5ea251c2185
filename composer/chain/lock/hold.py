"""``locked = true``: only the engine that the lock names for a graph is tried."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from composer import session
from composer.chain.candidates import ChainEntry, entries_of
from composer.chain.lock.difference import between, versions
from composer.chain.lock.observed import Observed, packages_of, server_of
from composer.errors import LockError
from composer.knowledge import lock_file
from composer.knowledge.chosen import Chosen
from composer.knowledge.fingerprint import Fingerprint
from composer.knowledge.lock_file import LOCK_FILE, Lock
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
    here = session.current()
    observed: Observed | None = here.observed
    policy = resolved.policy
    entries = resolved.entries
    if not policy.locked and observed is None:
        return resolved
    position = here.position(request.model, request.graph_key)
    graph = Chosen.of(request, policy, resolved.shared, position)
    lock = lock_file.read(lock_path()) if observed is None else observed.lock
    entry = None
    if lock is not None and policy.locked:
        of = Fingerprint(request, (), graph.parts)
        entry = here.knowledge.recall(Chosen, of, resolved.cache, only=lock.graphs).fact
    held = _held_to(entry, entries)
    if observed is not None:
        observed.meet(request.number, graph, entries)
        policy = _in_the_foreground(policy)  # so that the engine that serves in the end is known
    elif lock is not None:
        _refuse_differences(lock, graph, entry, entries)
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


def _refuse_differences(
    lock: Lock, graph: Chosen, same: Chosen | None, entries: tuple[ChainEntry, ...]
) -> None:
    """Refuse a graph that is not as the lock has it.

    Args:
        lock: The lock.
        graph: The graph as it is here.
        same: The lock's entry of it; ``None`` if it has none.
        entries: The candidates of its chain.

    Raises:
        LockError: the graph or versions differ from the lock; the error names each difference.
    """
    path = lock_path()
    entry = same or lock.nearest(graph)
    if entry is None:
        raise LockError(path, f"does not hold {graph.title}, nor any other of it")
    differences = [sentence for _, sentence in between(entry, graph)]
    engines = [each for each in entries if server_of(each) == entry.server]
    differences += versions(lock, packages_of(engines))
    if same and not _held_to(same, entries):
        differences.append(f"{same.sentence()}, which it names, is not in the chain")
    if not differences:
        return
    if same or entry.position == graph.position:
        raise LockError(path, f"holds {entry.title} as another than it is here", differences)
    nearest = f"the nearest is graph {entry.position}"
    raise LockError(path, f"does not hold {graph.title}; {nearest}", differences)


def _held_to(entry: Chosen | None, entries: tuple[ChainEntry, ...]) -> tuple[ChainEntry, ...]:
    """Return the chain with all but the locked engine barred; empty if the chain lacks that engine.

    If the eager fallback is the locked engine, it is added to the chain: it can be the fastest
    without being in the chain.
    """
    if entry is None:
        return ()
    if entry.engine == EAGER and entry.server not in map(server_of, entries):
        entries = (*entries, *entries_of(Policy(chain=(Candidate(backend=EAGER),))))
    if entry.server not in map(server_of, entries):
        return ()
    barred = f"{LOCK_FILE} says {entry.sentence()} for this graph"
    held = list(entries)
    for place, each in enumerate(entries):
        if server_of(each) != entry.server:
            held[place] = dataclasses.replace(each, barred=barred)
    return tuple(held)
