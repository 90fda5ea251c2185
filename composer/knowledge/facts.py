"""What a kind of fact has, and the one place where facts are looked up and kept.

A new kind of fact is one class in one file: see ``docs/explanation/reading-the-code.md``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import ClassVar, Generic, TypeVar

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from composer.knowledge.fingerprint import Fingerprint
from composer.knowledge.shared_store import SharedStore
from composer.policy import Cache
from composer.system import forks
from composer.system.disk import DiskCache, this_process, warn_of

_DAY = 86_400.0

_SKEW = 1.0
"""How many days the clock of another machine may be ahead. The age of a newer fact is unknown."""


def _now() -> datetime:
    return datetime.now(UTC)


class Fact(BaseModel):
    """Something that was learnt about candidates for a graph. A subclass is a kind of fact.

    Attributes:
        kind: The name of the kind, and of its folder on disk.
        noun: What one such fact is called.
        parts: The parts of the fingerprint that it depends on.
        limit: Bytes that all facts of the kind may take on disk; 0 keeps them in memory only.
        is_shared: True if machines share it, where the policy names a store.
        outlives_reset: True if :func:`composer.reset` does not forget it.
        learnt: When it was learnt.
        process: The process that learnt it (:func:`composer.system.disk.this_process`).
    """

    model_config = ConfigDict(frozen=True)

    kind: ClassVar[str]
    noun: ClassVar[str] = "fact"
    parts: ClassVar[tuple[str, ...]]
    limit: ClassVar[int] = 0
    is_shared: ClassVar[bool] = False
    outlives_reset: ClassVar[bool] = False

    learnt: AwareDatetime = Field(default_factory=_now)
    process: str = Field(default_factory=this_process)

    @classmethod
    def most_days(cls, settings: Cache) -> float:
        """Return for how many days facts of the kind hold at most; 0 keeps and finds none."""
        return float("inf")

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
        return (_now() - self.learnt).total_seconds()

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

    They are looked up in memory, on disk, and in the store that machines share, in this order.

    Attributes:
        fills_store: True if facts that are found on disk go to a shared store that lacks them.
        unkept: By ``graph_key``, why the verdict on a graph is not kept; empty where it is.
    """

    def __init__(self) -> None:
        self.fills_store = False
        self.unkept: dict[str, str] = {}
        self._lock = forks.lock()
        self._memory: dict[tuple[str, str], tuple[Fact, bool]] = {}
        """The facts that this process has learnt, each with whether it is on disk as well."""
        self._stores: dict[str, SharedStore] = {}

    def successor(self) -> Knowledge:
        """Return what is still known after :func:`composer.reset`."""
        following = Knowledge()
        with self._lock:
            known = list(self._memory.items())
        lasting = {at: (fact, kept) for at, (fact, kept) in known if fact.outlives_reset}
        following._memory = lasting
        return following

    def recall(self, kind: type[F], fingerprint: Fingerprint, settings: Cache) -> Known[F]:
        """Return a fact that still holds, and where it was found."""
        if not kind.most_days(settings):
            return Known()
        key = fingerprint.key(kind.parts)
        if key is None:
            return Known()
        mine, is_on_disk = self._memory.get((kind.kind, key), (None, False))
        # `composer cache clear` removes facts on disk, and so they are no longer known here.
        is_kept = not is_on_disk or kind.cache().has(key)
        if isinstance(mine, kind) and is_kept and _holds(mine, fingerprint, settings):
            return Known(mine, str(kind.cache().path))
        if not kind.limit or not fingerprint.outlives_process(kind.parts):
            return Known()
        known = self._on_disk(kind, key)
        if not _may_use(known, fingerprint, settings):
            known = Known(trouble=known.trouble)
        store = self._store(settings) if kind.is_shared else None
        if store is None:
            return known
        if known.fact is None:
            shared = Known(_read(kind, store.name, store.get(key)), store.name)
            if shared.fact is not None and _may_use(shared, fingerprint, settings):
                kind.cache().put(key, shared.fact.model_dump(mode="json"))
                return shared
        elif self.fills_store and store.get(key) is None:
            store.put(key, known.fact.model_dump_json(indent=1))
        return Known(known.fact, known.source, store.trouble or known.trouble)

    def learn(self, fact: Fact, fingerprint: Fingerprint, settings: Cache) -> str:
        """Remember a fact. Return why it could not be kept beyond this process; else nothing."""
        key = fingerprint.key(fact.parts)
        if key is None:
            return "nobody knows what the engines are"
        with self._lock:
            self._memory[fact.kind, key] = fact, False
        if not fact.limit or not fingerprint.outlives_process(fact.parts):
            return ""
        own = fact.cache()
        is_kept = own.put(key, fact.model_dump(mode="json"))
        with self._lock:
            self._memory[fact.kind, key] = fact, is_kept
        trouble = "" if is_kept else own.trouble
        store = self._store(settings) if fact.is_shared else None
        if store is None:
            return trouble
        store.put(key, fact.model_dump_json(indent=1))
        return store.trouble

    def forget(self, kind: type[Fact], fingerprint: Fingerprint) -> None:
        """Forget a fact that proved wrong. One in a shared store is left to be replaced."""
        key = fingerprint.key(kind.parts)
        if key is None:
            return
        with self._lock:
            self._memory.pop((kind.kind, key), None)
        if kind.limit:
            kind.cache().remove(key)

    def _store(self, settings: Cache) -> SharedStore | None:
        if not settings.store:
            return None
        return self._stores.setdefault(settings.store, SharedStore(settings.store))

    def _on_disk(self, kind: type[F], key: str) -> Known[F]:
        own = kind.cache()
        entry = own.get(key)
        fact = _read(kind, str(own.path), None if entry is None else json.dumps(entry.facts))
        return Known(fact, str(own.path), own.trouble)


def _may_use(known: Known[F], fingerprint: Fingerprint, settings: Cache) -> bool:
    """Return True if a fact was found that holds. What was learnt here before a reset does not."""
    fact = known.fact
    if fact is None:
        return False
    if not fact.is_about(fingerprint):
        warn_of(f"{known.source!r} holds a {fact.noun} on another chain; it is not used")
        return False
    is_forgotten = fact.process == this_process() and not fact.outlives_reset
    return not is_forgotten and _holds(fact, fingerprint, settings)


def _holds(fact: Fact, fingerprint: Fingerprint, settings: Cache) -> bool:
    days = fact.age / _DAY
    return -_SKEW < days <= fact.days(settings) and fact.fits(fingerprint)


def _read(kind: type[F], source: str, text: str | None) -> F | None:
    """Return the fact that a text of a shared store holds; warn once if it is none."""
    if text is None:
        return None
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        message = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        warn_of(f"{source!r} holds what is no {kind.noun} ({message[:200]!r}); it is not used")
        return None
