"""The file ``composer.lock``: facts on who serves which graph (:class:`Chosen`), exported to TOML.

It has the same bytes for the same graphs, and is to be kept in git. Where the policy has
``locked``, :meth:`composer.knowledge.facts.Knowledge.recall` looks at its facts only.
"""

from __future__ import annotations

import functools
import os
import shlex
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from composer.errors import LockError
from composer.knowledge.chosen import Chosen
from composer.policy import FormatVersion
from composer.policy.wording import mistakes_in
from composer.records import printable

LOCK_FILE = "composer.lock"

_OURS = "composer lock"
"""Text in the first line of every lock. PHP's Composer has a file of the same name."""


class Lock(BaseModel):
    """The content of the file.

    Attributes:
        version: The version of the format, 1.
        versions: The versions of torch, composer and the packages of the engines that serve; empty
            for a package that is not installed.
        graphs: The graphs by model, in the order in which they were compiled.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: FormatVersion
    versions: dict[str, str]
    graphs: tuple[Chosen, ...]

    def nearest(self, graph: Chosen) -> Chosen | None:
        """Return the entry of the same model and position, else the most similar of the model."""

        def likeness(other: Chosen) -> tuple[bool, int]:
            alike = other.parts.items() & graph.parts.items()
            return other.position == graph.position, len(alike)

        return max((g for g in self.graphs if g.model == graph.model), key=likeness, default=None)


def read(path: Path) -> Lock:
    """Read a lock from a file.

    Raises:
        LockError: the file is missing or is not TOML, or has wrong keys or values, all of which
            the error names.
    """
    try:
        known = path.stat()
    except OSError as error:
        raise LockError(path, f"cannot be read: {error.strerror}") from error
    return _parsed(path, known.st_mtime_ns, known.st_size)


@functools.lru_cache(maxsize=8)
def _parsed(path: Path, modified: int, size: int) -> Lock:
    """Read a lock; its time of change and size are arguments so that they are part of the key."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise LockError(path, f"cannot be read: {error}") from error
    try:
        lock = Lock.model_validate(table)
    except ValidationError as error:
        raise LockError(path, "is malformed", mistakes_in(error, Lock)) from None
    if ambiguous := list(_ambiguous(lock)):
        raise LockError(path, "is malformed", ambiguous)
    return lock


def _ambiguous(lock: Lock) -> Iterator[str]:
    """Yield what makes a lock ambiguous, such as two entries of a graph after a merge in git."""
    by_title: dict[str, Chosen] = {}
    by_parts: dict[frozenset[tuple[str, str]], Chosen] = {}
    for graph in lock.graphs:
        if not graph.engine:
            yield f"{graph.title} has no engine"
        namesake = by_title.setdefault(graph.title, graph)
        twin = by_parts.setdefault(frozenset(graph.parts.items()), graph)
        if namesake is not graph:
            engines = f"{namesake.engine}, and by {graph.engine}"
            yield f"{graph.title} stands there twice (served by {engines})"
        elif twin is not graph:
            yield f"{graph.title} is the same as {twin.title}"


def is_foreign(path: Path) -> bool:
    """Return True if a file is there that ``composer lock`` did not write.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            begin = file.read(4096)
    except FileNotFoundError:
        return False
    return bool(begin.strip()) and _OURS.encode() not in begin


def write(path: Path, lock: Lock, command: Sequence[str]) -> None:
    """Write a lock atomically.

    Args:
        path: The file. If it is a link, the link's target is written.
        lock: The lock.
        command: Arguments of ``composer lock``, for the comment in the first line.

    Raises:
        OSError: the file cannot be written.
    """
    path = path.resolve()
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        unfinished.write_text(_text(lock, command), encoding="utf-8", newline="\n")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _text(lock: Lock, command: Sequence[str]) -> str:
    import tomli_w  # not before it is needed

    table = lock.model_dump(exclude_defaults=True)
    table["graphs"] = [{**each, "inputs": list(each["inputs"])} for each in table["graphs"]]
    # TOML forbids control characters in comments.
    line = printable(shlex.join((*_OURS.split(), *command)))
    return f"# Written by `{line}`: the engine of each graph.\n{tomli_w.dumps(table)}"
