"""What a kind of fact has, and the one place where facts are looked up and kept.

A new kind of fact is one class in one file: see ``docs/explanation/reading-the-code.md``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, ClassVar, Generic, TypeVar

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError, field_validator

from composer.knowledge.fingerprint import Fingerprint
from composer.knowledge.shared_store import SharedStore
from composer.policy import Cache
from composer.system import forks
from composer.system.disk import DiskCache, this_process, warn_of

_DAY = 86_400.0

KEPT_FACTS = 10_000
"""How many facts are kept in memory. Beyond that the oldest is forgotten."""

_HERE = "the memory of this process"
"""The source of a fact that is kept nowhere else."""

_OF_LEARNING = {"learnt", "process"}
"""The fields that say when a fact was learnt, and by whom."""

_SKEW = 1.0
"""How many days the clock of another machine may be ahead. The age of a newer fact is unknown."""


def now() -> datetime:
    """Return the time at which a fact is learnt now."""
    return datetime.now(UTC)


class Fact(BaseModel):
    """Something that was learnt about candidates for a graph. A subclass is a kind of fact.

    Attributes:
        kind: The name of the kind, and of its folder on disk.
        noun: What one such fact is called.
        depends_on: The parts of the fingerprint that it depends on.
        limit: Bytes that all facts of the kind may take on disk; 0 keeps them in memory only.
        is_shared: True if machines share it, where the policy names a store.
        outlives_reset: True if :func:`composer.reset` does not forget it.
        learnt: When it was learnt.
        process: The process that learnt it (:func:`composer.system.disk.this_process`).
    """

    model_config = ConfigDict(frozen=True)

    kind: ClassVar[str]
    noun: ClassVar[str] = "fact"
    depends_on: ClassVar[tuple[str, ...]]
    limit: ClassVar[int] = 0
    is_shared: ClassVar[bool] = False
    outlives_reset: ClassVar[bool] = False

    learnt: AwareDatetime = Field(default_factory=now)
    process: str = Field(default_factory=this_process)

    @field_validator("*", mode="before")
    @classmethod
    def _can_be_written(cls, value: Any) -> Any:
        """Replace what no file can hold, such as parts of a path that is no text."""
        return value.encode(errors="replace").decode() if type(value) is str else value

    @classmethod
    def most_days(cls, settings: Cache) -> float:
        """Return for how many days facts of the kind hold at most; 0 keeps and finds none."""
        return math.inf

    def days(self, settings: Cache) -> float:
        """Return for how many days this fact holds."""
        return self.most_days(settings)

    def is_about(self, fingerprint: Fingerprint) -> bool:
        """Return False if it is about other candidates; somebody has renamed its file then."""
        return True

    def fits(self, fingerprint: Fingerprint) -> bool:
        """Return False if parts changed that only this fact depends on."""
        return True

    def sentence(self) -> str:
        """Return the fact in one line, for ``composer cache list``."""
        return self.kind

    @property
    def age(self) -> float:
        """Its age in seconds."""
        return (now() - self.learnt).total_seconds()

    @classmethod
    def cache(cls) -> DiskCache:
        """Return the disk cache of the kind."""
        return DiskCache(cls.kind, limit=cls.limit)


F = TypeVar("F", bound=Fact)


@dataclass(frozen=True, slots=True)
class Known(Generic[F]):
    """The answer to a question: a fact and where it was found, or neither.

    Attributes:
        fact: The fact; ``None`` if none is known that holds.
        source: The folder or the store that has it.
        trouble: Why the disk or the store could not be asked; empty if it could.
    """

    fact: F | None = None
    source: str = ""
    trouble: str = ""


class Knowledge:
    """All facts that this process knows or can find.

    They are looked up in memory, on disk, and in the store that machines share, in this order; or
    in ``composer.lock`` alone.

    Attributes:
        fills_store: True if facts that are found on disk go to a shared store that lacks them.
        unkept: By ``graph_key``, why the verdict on a graph is not kept; empty where it is.
    """

    def __init__(self) -> None:
        self.fills_store = False
        self.unkept: dict[str, str] = {}
        self._lock = forks.lock()
        self._memory: dict[tuple[str, str], Known[Any]] = {}
        self._stores: dict[str, SharedStore] = {}

    def successor(self) -> Knowledge:
        """Return what is still known after :func:`composer.reset`."""
        following = Knowledge()
        with self._lock:
            known = list(self._memory.items())
        following._memory = {
            at: each for at, each in known if each.fact and each.fact.outlives_reset
        }
        return following

    def recall(
        self,
        kind: type[F],
        fingerprint: Fingerprint,
        settings: Cache,
        *,
        only: Iterable[Fact] | None = None,
    ) -> Known[F]:
        """Return a fact that still holds, and where it was found.

        Args:
            kind: The kind of fact.
            fingerprint: What it is about.
            settings: What may be kept, and which store machines share.
            only: The facts of ``composer.lock``, where nothing else may be looked at.
        """
        if only is not None:
            facts = (each for each in only if isinstance(each, kind))
            return Known(next((each for each in facts if each.is_about(fingerprint)), None))
        key = fingerprint.key(kind.depends_on)
        if key is None or not kind.most_days(settings):
            return Known()
        mine = self._in_memory(kind, key)
        if mine.fact is not None and _holds(mine.fact, fingerprint, settings):
            return mine
        if not kind.limit or not fingerprint.outlives_process(kind.depends_on):
            return Known()
        own = self._on_disk(kind, key)
        if not _may_use(own, fingerprint, settings):
            own = Known(trouble=own.trouble)
        if own.fact is not None and kind.outlives_reset:
            self._remember(kind, key, own)
        store = self._store(kind, settings)
        if store is None:
            return own
        if own.fact is not None:
            if self.fills_store and store.get(key) is None:
                store.put(key, own.fact.model_dump_json(indent=1))
            return Known(own.fact, own.source, store.trouble or own.trouble)
        shared = _in_store(kind, store, key)
        if shared.fact is None or not _may_use(shared, fingerprint, settings):
            return Known(trouble=store.trouble or own.trouble)
        kind.cache().put(key, shared.fact.model_dump(mode="json"))
        return shared

    def learn(
        self,
        fact: F,
        fingerprint: Fingerprint,
        settings: Cache,
        *,
        only_here: bool = False,
        join: Callable[[F, F], F] | None = None,
    ) -> str:
        """Remember a fact.

        Args:
            fact: The fact.
            fingerprint: What it is about.
            settings: What may be kept, and which store machines share.
            only_here: True keeps it in the memory of this process.
            join: Makes one fact of a known one and this one; ``None`` if this one replaces it.

        Returns:
            Why it could not be kept beyond this process; empty if it could, or need not be.
        """
        key = fingerprint.key(fact.depends_on)
        if key is None:
            return "nobody knows what the engines are"
        kind = type(fact)

        def joined(found: Callable[[], Known[F]]) -> F:
            """Return what a place is to hold, where another process may have kept a fact since."""
            known = None if join is None else _valid(found(), fingerprint, settings)
            return fact if join is None or known is None else join(known, fact)

        mine = joined(lambda: self.recall(kind, fingerprint, settings))
        self._remember(kind, key, Known(mine, _HERE))
        if only_here or not fact.limit or not fingerprint.outlives_process(fact.depends_on):
            return ""
        own = fact.cache()
        on_disk = joined(lambda: self._on_disk(kind, key))
        source = str(own.path) if own.put(key, on_disk.model_dump(mode="json")) else _HERE
        trouble = own.trouble if source == _HERE else ""
        store = self._store(kind, settings)
        if store is not None:
            shared = joined(lambda: _in_store(kind, store, key))
            store.put(key, shared.model_dump_json(indent=1))
            trouble = store.trouble
        self._remember(kind, key, Known(mine, source, trouble))
        return trouble

    def forget(self, kind: type[Fact], fingerprint: Fingerprint) -> None:
        """Forget a fact that proved wrong. One in a shared store is left to be replaced."""
        key = fingerprint.key(kind.depends_on)
        if key is None:
            return
        with self._lock:
            self._memory.pop((kind.kind, key), None)
        if kind.limit:
            kind.cache().remove(key)

    def _remember(self, kind: type[Fact], key: str, known: Known[Any]) -> None:
        with self._lock:
            self._memory[kind.kind, key] = known
            if len(self._memory) > KEPT_FACTS:
                del self._memory[next(iter(self._memory))]

    def _in_memory(self, kind: type[F], key: str) -> Known[F]:
        """Return what this process has learnt, unless it was removed from the disk since.

        `composer cache clear` in another process does that.
        """
        mine = self._memory.get((kind.kind, key), Known())
        return mine if mine.source in ("", _HERE) or kind.cache().has(key) else Known()

    def _store(self, kind: type[Fact], settings: Cache) -> SharedStore | None:
        if not kind.is_shared or not settings.store:
            return None
        return self._stores.setdefault(settings.store, SharedStore(settings.store))

    def _on_disk(self, kind: type[F], key: str) -> Known[F]:
        own = kind.cache()
        entry = own.get(key)
        fact = _read(kind, str(own.path), None if entry is None else json.dumps(entry.facts))
        return Known(fact, str(own.path), own.trouble)


def _in_store(kind: type[F], store: SharedStore, key: str) -> Known[F]:
    return Known(_read(kind, store.name, store.get(key)), store.name)


def _may_use(known: Known[F], fingerprint: Fingerprint, settings: Cache) -> bool:
    """Return True if a fact was found that holds. What was learnt here before a reset does not."""
    fact = _valid(known, fingerprint, settings)
    return fact is not None and (fact.outlives_reset or fact.process != this_process())


def _valid(known: Known[F], fingerprint: Fingerprint, settings: Cache) -> F | None:
    """Return the fact that was found, if it is about these candidates and holds."""
    fact = known.fact
    if fact is None:
        return None
    if not fact.is_about(fingerprint):
        warn_of(f"{known.source!r} holds a {fact.noun} on another chain; it is not used")
        return None
    return fact if _holds(fact, fingerprint, settings) else None


def _holds(fact: Fact, fingerprint: Fingerprint, settings: Cache) -> bool:
    if math.isinf(fact.days(settings)):
        return fact.fits(fingerprint)  # a clock that was set back changes nothing
    days = fact.age / _DAY
    return -_SKEW < days <= fact.days(settings) and fact.fits(fingerprint)


def _read(kind: type[F], source: str, text: str | None) -> F | None:
    """Return the fact that a text of a shared store holds; warn once if it is none."""
    if text is None:
        return None
    try:
        fact = kind.model_validate_json(text)
        # The defaults are those of a fact that is learnt now.
        return fact if fact.model_fields_set >= _OF_LEARNING else None
    except ValidationError as error:
        first = error.errors()[0]
        message = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        warn_of(f"{source!r} holds what is no {kind.noun} ({message[:200]!r}); it is not used")
        return None
