"""Finds the differences between a program and the lock, and describes them for a person."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from composer.chain.lock.observed import Served
from composer.errors import first_line
from composer.knowledge.chosen import Chosen, LockedPass
from composer.knowledge.lock_file import Lock
from composer.records import spelled


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference between the lock and a program.

    Attributes:
        graph: The graph's title, ``"graph 0 of my_package.Net"``; empty if all are concerned.
        kind: ``version``, ``new``, ``gone``, ``engine``, or the part of the graph that changed.
        message: What the lock says, and what is the case here.
    """

    graph: str
    kind: str
    message: str

    def __str__(self) -> str:
        """Return the difference in one line."""
        return f"{self.graph}: {self.message}" if self.graph else self.message


def compare(lock: Lock, here: Sequence[Served]) -> list[Difference]:
    """Return all differences between the lock and a program.

    A graph that changed is compared with the lock's graph at the same position of the same model.

    Args:
        lock: The lock.
        here: The graphs that the program compiled, in order.
    """
    installed: dict[str, str] = {}
    for served in here:
        for packages in served.rest.versions.values():
            installed |= packages
    common = {name: installed[name] for name in lock.versions if name in installed}
    found = [Difference("", "version", sentence) for sentence in versions(lock, common)]
    parts = [each.chosen.parts for each in here]
    left = {each.title: each for each in lock.graphs if each.parts not in parts}
    for served in here:
        title = served.chosen.title
        same = next((each for each in lock.graphs if each.parts == served.chosen.parts), None)
        entry = same or left.pop(title, None)
        if entry is None:
            found.append(Difference(title, "new", "new; the lock does not hold it"))
        else:
            changes = _changes(entry, served)
            found += [Difference(title, kind, sentence) for kind, sentence in changes]
    gone = "gone; the lock holds it, and it was not compiled"
    return found + [Difference(title, "gone", gone) for title in left]


def _changes(entry: Chosen, served: Served) -> Iterator[tuple[str, str]]:
    """Yield the kinds of differences between a graph and its entry, each with a sentence."""
    yield from between(entry, served.chosen)
    if entry.server != served.chosen.server:
        yield "engine", _moved(entry, served)
    for other, sentence in served.apart:
        if other.server != entry.server:
            yield "engine", f"{sentence}; the lock says {entry.sentence()}"


def versions(lock: Lock, installed: Mapping[str, str]) -> Iterator[str]:
    """Yield a sentence for each package whose version is not the lock's."""
    for package, version in installed.items():
        then = lock.versions.get(package) or "not installed"
        now = version or "not installed"
        if then != now:
            yield f"{package} {then} in the lock, {now} here"


def between(locked: Chosen, here: Chosen) -> Iterator[tuple[str, str]]:
    """Yield the parts in which two graphs differ, each with a sentence about it."""
    for part in dict.fromkeys((*locked.parts, *here.parts)):
        if locked.parts.get(part) != here.parts.get(part):
            yield part, _changed(part, locked, here)


def _changed(part: str, locked: Chosen, here: Chosen) -> str:
    match part:
        case "inputs":
            return _inputs(locked.inputs, here.inputs)
        case "weights":
            return "weights changed: their number, shapes, dtypes, or what requires grad"
        case "operations" if locked.nodes == here.nodes:
            return f"operations changed (there are {here.nodes}, as in the lock)"
        case "operations":
            return f"operations changed: {locked.nodes} in the lock, {here.nodes} here"
        case "passes":
            return _passes(locked.passes, here.passes)
        case "policy":
            return _policy(locked.policy, here.policy)
    return f"{part} changed: {locked.parts.get(part)} -> {here.parts.get(part)}"


def _inputs(locked: Sequence[str], here: Sequence[str]) -> str:
    if locked == here:
        return "inputs changed: strides, or what requires grad"
    return f"inputs changed: {_without(locked, here)} -> {_without(here, locked)}"


def _without(inputs: Sequence[str], others: Sequence[str]) -> str:
    return ", ".join(each for each in inputs if each not in others) or "none"


def _passes(locked: Sequence[LockedPass], here: Sequence[LockedPass]) -> str:
    before, after = _spelled(locked), _spelled(here)
    if before != after:
        return f"passes changed: {before} -> {after}"
    edited = [new.name for old, new in zip(locked, here, strict=False) if old != new]
    return f"passes changed: the source of {', '.join(edited) or 'one of them'}"


def _spelled(passes: Sequence[LockedPass]) -> str:
    return ", ".join(spelled(each.name, each.parameters) for each in passes) or "none"


def _policy(locked: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    changed = []
    for name in dict.fromkeys((*locked, *here)):
        before, after = locked.get(name, "the default"), here.get(name, "the default")
        if before != after:
            changed.append(f"{name} = {before} -> {after}")
    return f"policy changed: {'; '.join(changed) or 'what it means to this composer'}"


def _moved(entry: Chosen, served: Served) -> str:
    """Return which engine serves the graph now, and why the locked one does not."""
    message = f"served by {served.chosen.sentence()}; the lock says {entry.sentence()}"
    tried = [each for each in served.report.attempts if each.backend == entry.engine]
    if not tried:
        return f"{message}, which was not tried"
    last = tried[-1]
    if last.accepted:
        return message
    why = f"{last.status} ({last.reason}): {first_line(last.message)}"
    return f"{message}: {entry.engine} was {why}"
