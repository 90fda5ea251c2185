"""``locked``: the lock says which candidate of the chain is tried for a graph."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

from composer import _torch, session
from composer.chain.candidates import ChainEntry, entries_of
from composer.chain.lock.difference import between, versions
from composer.chain.lock.observed import Observed, packages_of, server_of, versions_of
from composer.errors import LockError
from composer.knowledge import lock_file
from composer.knowledge.chosen import Chosen, for_lock, version_here
from composer.knowledge.fingerprint import Fingerprint
from composer.knowledge.lock_file import LOCK_FILE, Lock
from composer.policy import Candidate, Policy, sources
from composer.policy.resolution import Resolved
from composer.records import EAGER, GraphRequest
from composer.telemetry import jsonl


def hold(request: GraphRequest, resolved: Resolved) -> Resolved:
    """Return what holds for a graph, with the candidates that the lock leaves if ``locked``.

    The lock can only choose among the candidates of the chain, so it cannot name code to run.
    ``composer lock`` does not read the lock. Under ``composer lock --check``, a graph that is not
    in the lock is compiled as if unlocked.

    Raises:
        LockError: the lock is missing or malformed. Or the graph differs from the lock's entry, and
            ``locked`` is not ``"warn"``.
        TensorifyScalarRestartAnalysis: the graph takes floats that the lock's graph does not take.
            Dynamo starts anew.
    """
    observed: Observed | None = session.current().observed
    is_written = bool(os.environ.get(jsonl.PATH))  # to a file, of which a lock can be made
    if not resolved.policy.locked and observed is None and not is_written:
        return resolved
    rest = for_lock(request, resolved.policy, resolved.shared, versions_of(resolved.entries))
    resolved = dataclasses.replace(resolved, lock=rest)
    lock = None
    if observed is not None:
        lock = observed.lock
        # So that the engine that serves in the end is known when the program is over.
        resolved = _in_the_foreground(resolved)
    elif resolved.policy.locked:
        lock = lock_file.read(lock_path())
    if lock is None or not resolved.policy.locked:
        return resolved
    position = session.current().position(request.model, request.graph_key)
    graph = Chosen.of(request, rest, position)
    of = Fingerprint(request, (), graph.parts)
    known = session.current().knowledge.recall(Chosen, of, resolved.cache, only=lock.graphs)
    entry = known.fact
    warns = resolved.policy.locked == "warn"
    objection = _objection(lock, graph, entry, resolved.entries) if observed is None else None
    if objection and _has_fewer_inputs(lock, graph):
        _torch.floats.specialize_floats(request.gm)  # the lock has a capture without them
    if objection and not warns:
        raise objection
    if objection:
        rest = dataclasses.replace(rest, unlocked=str(objection))
        return dataclasses.replace(resolved, lock=rest)
    restricted = _restricted_to(entry, resolved.entries, others_follow=warns)
    if not restricted:
        return resolved
    return dataclasses.replace(_in_the_foreground(resolved, by="first"), entries=restricted)


def _in_the_foreground(resolved: Resolved, **changes: Any) -> Resolved:
    # The lock holds one engine for all sizes of a graph.
    alone = {"background": False, "ranges": 1, **changes}
    select = resolved.policy.select.model_copy(update=alone)
    policy = resolved.policy.model_copy(update={"select": select})
    return dataclasses.replace(resolved, policy=policy)


def lock_path() -> Path:
    """Return the lock's path: beside the policy file in force, else in the working directory."""
    policy = sources.file_in_force(session.current().configured)
    return (policy.parent if policy else Path.cwd()) / LOCK_FILE


def _objection(
    lock: Lock, graph: Chosen, same: Chosen | None, entries: tuple[ChainEntry, ...]
) -> LockError | None:
    """Return an error that names how a graph or versions differ from the lock; else ``None``.

    Args:
        lock: The lock.
        graph: The graph as it is here.
        same: The lock's entry of it; ``None`` if it has none.
        entries: The candidates of its chain.
    """
    path = lock_path()
    entry = same or lock.nearest(graph)
    if entry is None:
        return LockError(path, f"does not hold {graph.title}, nor any other of it")
    differences = [sentence for _, sentence in between(entry, graph)]
    engines = [each for each in entries if server_of(each) == entry.server]
    differences += versions(lock, {name: version_here(name) for name in packages_of(engines)})
    if same and not _restricted_to(same, entries):
        differences.append(f"{same.sentence()}, which it names, is not in the chain")
    if not differences:
        return None
    if same or entry.position == graph.position:
        return LockError(path, f"holds {entry.title} as another than it is here", differences)
    nearest = f"the nearest is graph {entry.position}"
    return LockError(path, f"does not hold {graph.title}; {nearest}", differences)


def _has_fewer_inputs(lock: Lock, graph: Chosen) -> bool:
    """Return True if the lock has a graph of this model with a part of these inputs."""
    known = [set(each.inputs) for each in lock.graphs if each.model == graph.model]
    return any(each < set(graph.inputs) for each in known)


def _restricted_to(
    entry: Chosen | None, entries: tuple[ChainEntry, ...], *, others_follow: bool = False
) -> tuple[ChainEntry, ...]:
    """Return the chain with all but the locked engine barred; empty if the chain lacks that engine.

    With ``others_follow`` the locked engine is tried first, and no other is barred.

    If the eager fallback is the locked engine, it is added to the chain: it can be the fastest
    without being in the chain.
    """
    if entry is None:
        return ()
    if entry.engine == EAGER and entry.server not in map(server_of, entries):
        entries = (*entries, *entries_of(Policy(chain=(Candidate(backend=EAGER),))))
    if entry.server not in map(server_of, entries):
        return ()
    if others_follow:
        return tuple(sorted(entries, key=lambda each: server_of(each) != entry.server))
    barred = f"{LOCK_FILE} says {entry.sentence()} for this graph"
    restricted = list(entries)
    for place, each in enumerate(entries):
        if server_of(each) != entry.server:
            restricted[place] = dataclasses.replace(each, barred=barred)
    return tuple(restricted)
