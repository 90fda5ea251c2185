"""Keeps the results of ``select = "fastest"``, so that the next process uses the winner directly.

A verdict (:mod:`composer.chain.select.verdict`) is a JSON object that a person can read: who won,
everyone's times, when, and on what machine. It is kept in the disk cache and, where the policy
names one, in a :class:`~composer.chain.select.shared_store.SharedStore`, which others can write to.
So nothing in it is trusted: it is checked when it is read, it can only choose among the candidates
of the chain, and the one it chooses is proven and verified like any other.

How long verdicts are kept:

- not at all, if an engine took no part that may take part the next time: one in quarantine, or one
  for which memory was short or the disk full;
- as long as failures, if a candidate failed, took too long, crashed, or seems to have written to
  weights, which may have been the program's doing: it gets another chance;
- a day at most, if other programs kept taking the cores and another candidate was close: it may
  well win on a quieter machine; or if there was time for two calls only of one that was close;
- otherwise for the days of ``[cache] verdicts``. The verdict of a benchmark in which an engine
  was missing does not outlive that: the versions of its packages and the machine are part of the
  key.
"""

from __future__ import annotations

import itertools
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import torch
from pydantic import ValidationError

from composer import _torch, session
from composer.backends.base import Backend
from composer.chain.candidates import ChainEntry
from composer.chain.select.shared_store import SharedStore
from composer.chain.select.verdict import Verdict, clipped, figures_of, record_of
from composer.errors import Refusal, SandboxRefusal, causes, error_line
from composer.policy import Cache, Policy
from composer.records import EAGER, GraphRequest, Outcome, Reason
from composer.system import control_flow, distribution, hardware
from composer.system.disk import DiskCache, digest_of, this_process, warn_of
from composer.system.distribution import version_of

_LIMIT = 32 << 20
_DAY = 86_400.0
_PASSING = (Reason.QUARANTINED, Reason.OUT_OF_MEMORY)
_DAYS_IF_UNSURE = 1.0
_LEAST_SECONDS = 1.0
"""The least seconds of a benchmark, if the policy does not say."""

_SKEW = 1.0
"""How many days another machine's clock may be ahead."""


def cache() -> DiskCache:
    """The disk cache that verdicts are kept in."""
    return DiskCache("verdicts", limit=_LIMIT)


@dataclass(frozen=True, slots=True)
class Terms:
    """How the policy wants verdicts remembered.

    Attributes:
        cache: The settings of what is kept on disk, and of the shared store.
        seconds: How long a benchmark may take at least. An unsure result that was found in less
            time is not used.
    """

    cache: Cache
    seconds: float

    @staticmethod
    def of(policy: Policy, cache: Cache) -> Terms | None:
        """Return the policy's terms; ``None`` if verdicts are neither kept nor looked for."""
        if policy.strict or not cache.verdicts:
            return None
        seconds = policy.select.seconds
        return Terms(cache, _LEAST_SECONDS if seconds is None else seconds)

    def days_of(self, verdict: Verdict) -> float:
        """Return for how many days a verdict holds."""
        days = [self.cache.verdicts]
        if verdict.has_failures:
            days.append(self.cache.failures)
        # A load may slow one engine down fifty times and another not at all: no lead is a sure one.
        if verdict.under_load or verdict.has_too_few_rounds:
            days.append(_DAYS_IF_UNSURE)
        return min(days)


@dataclass(frozen=True, slots=True)
class Recalled:
    """A verdict, and where it was found."""

    verdict: Verdict
    source: str


class VerdictCache:
    """Keeps and recalls the verdict on one graph and one chain.

    Args:
        request: The graph.
        entries: The chain.
        terms: How the policy wants verdicts remembered.
        key: The result of :func:`key_of`.
    """

    def __init__(
        self, request: GraphRequest, entries: Sequence[ChainEntry], terms: Terms, key: str
    ) -> None:
        self._request, self._entries, self._terms, self._key = request, entries, terms, key
        self._store = SharedStore(terms.cache.store) if terms.cache.store else None
        self._session = session.current()

    def recall(self) -> Recalled | None:
        """Return a verdict that still holds: the user's own, else the shared one, else ``None``."""
        trouble = ""
        recalled = self._own()
        if recalled is None:
            recalled = self._shared()
            if recalled is None:
                return None
            cache().put(self._key, recalled.verdict.model_dump(mode="json"))
        elif self._session.fills_store and self._shared() is None:
            trouble = self._share(recalled.verdict)
        self._note(trouble)
        return recalled

    def _own(self) -> Recalled | None:
        own = cache()
        entry = own.get(self._key)
        return self._read(str(own.path), json.dumps(entry.facts)) if entry else None

    def _shared(self) -> Recalled | None:
        if self._store is None:
            return None
        text = self._store.get(self._key)
        return None if text is None else self._read(self._store.name, text)

    def keep(self, outcome: Outcome) -> None:
        """Remember the outcome of a benchmark, unless it would probably differ the next time.

        If :func:`composer.reset` was called since, this process does not remember it.
        """
        if not _deserves_it(outcome):
            self._note("some candidate may well be measured the next time that was not now")
            return
        verdict, own = self._verdict(outcome), cache()
        self._session.verdicts.add(self._key)
        is_kept = own.put(self._key, verdict.model_dump(mode="json"))
        if self._store is not None:
            self._note(self._share(verdict))
        else:
            self._note("" if is_kept else own.trouble)

    def _share(self, verdict: Verdict) -> str:
        """Put a verdict into the shared store, if any; return why that failed, else nothing."""
        if self._store is None:
            return ""
        self._store.put(verdict.key, verdict.model_dump_json(indent=1))
        return self._store.trouble

    def _note(self, trouble: str) -> None:
        self._session.unkept[self._request.graph_key] = trouble

    def forget(self) -> None:
        """Remove a verdict whose winner was not accepted; a shared one is left to be replaced."""
        cache().remove(self._key)
        self._session.verdicts.discard(self._key)

    def _read(self, source: str, text: str) -> Recalled | None:
        """Return the verdict in ``text``, if it can be used; warn once if it is not a verdict."""
        try:
            verdict = Verdict.model_validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            message = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
            warn_of(f"{source!r} holds what is no verdict ({message[:200]!r}); it is not used")
            return None
        names = [each.candidate.name for each in self._entries]
        if not verdict.fits(self._key, names):
            warn_of(f"{source!r} holds a verdict on another chain; it is not used")
            return None
        return Recalled(verdict, source) if self._holds(verdict) else None

    def _holds(self, verdict: Verdict) -> bool:
        here = session.current()
        if verdict.process == this_process() and self._key not in here.verdicts:
            return False  # composer.reset() has come since
        serves = EAGER if verdict.winner is None else self._entries[verdict.winner].key
        if here.is_quarantined(self._request.graph_key, serves):
            return False
        if verdict.has_too_few_rounds and self._terms.seconds > verdict.seconds:
            return False
        days = (datetime.now(UTC) - verdict.measured).total_seconds() / _DAY
        return -_SKEW < days < self._terms.days_of(verdict)

    def _verdict(self, outcome: Outcome) -> Verdict:
        request = self._request
        packages = {name for each in self._entries for name in each.backend.packages}
        named = {name: version_of(name) for name in (*sorted(packages), distribution.NAME)}
        return Verdict.model_construct(
            key=self._key,
            measured=datetime.now(UTC),
            chosen=outcome.chosen,
            ranking=outcome.ranking or (),
            candidates=tuple(map(record_of, outcome.attempts)),
            model=clipped(request.model),
            graph_key=request.graph_key,
            device=request.device,
            machine=hardware.describe(request.device),
            threads=torch.get_num_threads(),
            versions={
                "torch": torch.__version__,
                "python": platform.python_version(),
                **{name: version for name, version in named.items() if version},
            },
            process=this_process(),
            select_seconds=self._terms.seconds,
        )


def key_of(request: GraphRequest, entries: Sequence[ChainEntry]) -> str | None:
    """Return the SHA-256 of everything that a verdict depends on.

    Args:
        request: The graph; its key covers shapes, passes, options and the policy's settings.
        entries: The chain.

    Returns:
        ``None`` if an engine has no :meth:`~composer.backends.base.Backend.identity`.
    """
    try:
        identities = [_identity(each.backend) for each in entries]
        if None in identities:
            return None
        names = (each.candidate.name for each in entries)
        return _digest(request, list(zip(names, identities, strict=True)))
    except Exception as error:  # noqa: BLE001  # an engine's slip, say: told of, nothing is remembered
        control_flow.pass_on(error)
        why = error_line(error)
        warn_of(f"no verdict is kept, since nobody knows what the engines are: {why}")
        return None


def _digest(request: GraphRequest, identities: Sequence[tuple[str, str | None]]) -> str:
    facts = {
        "graph": request.graph_key,
        "engines": identities,
        "machine": hardware.describe(request.device),
        "threads": torch.get_num_threads(),
        "float32": _torch.modes.float32_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "versions": [
            version_of(distribution.NAME),
            torch.__version__,
            platform.python_version(),
        ],
    }
    return digest_of(facts)


def sentence(facts: Mapping[str, Any]) -> str:
    """Return a kept verdict in one line: the winner, the model, and the times of all."""
    try:
        verdict = Verdict.model_validate(facts)
    except ValidationError:
        return "no verdict"
    times = [f"{each.who} {each.milliseconds:.3g} ms" for each in verdict.timed]
    return "  ".join((verdict.best.who, verdict.model, verdict.device, f"of {', '.join(times)}"))


def _identity(backend: Backend) -> str | None:
    try:
        return backend.identity()
    except Refusal as refusal:  # a name that nobody here registers
        return f"{refusal.status} {refusal.reason}"


def _deserves_it(outcome: Outcome) -> bool:
    """Return True if a candidate was measured, and none was left out for a temporary cause."""
    if any(each.reason in _PASSING for each in outcome.attempts):
        return False
    errors = itertools.chain.from_iterable(causes(end.error) for end in outcome.ends)
    if any(map(_is_over_soon, errors)):
        return False
    return any(map(figures_of, outcome.attempts))


def _is_over_soon(error: BaseException) -> bool:
    """Return True if the cause is temporary: a full disk, too many open files, a child ended.

    A file that is missing, such as a compiler, stays missing.
    """
    if isinstance(error, SandboxRefusal):
        return error.by_others
    return isinstance(error, OSError) and not isinstance(error, FileNotFoundError)
