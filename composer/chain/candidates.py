"""The candidates of a policy's chain, each with its engine and its settings."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

from composer import session
from composer.backends import find_backend, installed_for, refuse_slip
from composer.backends.base import Backend
from composer.build import BuildFacts, Freeze, Precision
from composer.errors import refuse
from composer.graphs.comparison import Bounds, LowPrecisionBounds
from composer.knowledge.failure import Failure, is_expensive
from composer.knowledge.fingerprint import CandidateParts, Fingerprint
from composer.knowledge.quarantine import Quarantined
from composer.passes.resolve import SharedPasses, shared_passes
from composer.policy import Cache, Candidate, Facts, Policy
from composer.policy.resolution import Finders, all_of
from composer.records import Attempt, GraphRequest, LowPrecision, Reason, Status
from composer.system import subprocesses

T = TypeVar("T")

NO_GAIN = "the engine has no kernels that are faster in eight bits"
"""Why an engine is not given a graph with quantized products."""

_AT_CHOICE: dict[LowPrecision, float] = {"bf16": 1.0, "int8": 0.8}
"""The share of ``max_error`` that ``auto`` allows on the first inputs. The scale of eight bits
follows the largest number of the inputs, so their error differs from call to call."""


@dataclass(frozen=True, slots=True)
class ChainEntry:
    """A candidate of the policy, the engine that its name stands for, and its settings.

    Attributes:
        candidate: The entry of the policy's chain.
        backend: The engine.
        min_coverage: Share of the graph's work that the engine has to take.
        bounds: How far its numbers may be off eager's; ``None`` if they are not compared.
        limits: The limits of its build, and whether a child process builds it first.
        cache: The settings of what is kept on disk. Under ``strict`` no failures are.
        terms: The settings that decide if it is accepted or wins, as text.
        freeze: True if the engine may compile weights in as constants.
        barred: Why it must not be tried; empty if it may be.
        precision: The precision of the candidate; ``None`` if the policy asks for none.
        tentative: True if it serves only if its numbers hold. The same candidate in fp32 is next.
        in_sandbox: True if this process is a sandbox, or a sandbox has run it on this graph.
        told: In the sandbox of ``isolate``, the precision that the engine is asked for. The graph
            is rewritten to the candidate's precision already.
        stays_here: True if the policy says that no sandbox is to build it (``isolate = false``).
        retries: True if the engine is built once more, with stricter settings, if its numbers are
            off.
        bounds_in_low: ``bounds`` for a graph that was rewritten to low precision. A graph without a
            product of float32 is not rewritten, and has ``bounds`` even in bf16.
        bounds_at_choice: ``bounds_in_low`` for the first inputs.
    """

    candidate: Candidate
    backend: Backend
    min_coverage: float
    bounds: Bounds | None
    limits: subprocesses.Limits
    cache: Cache
    terms: str
    freeze: Freeze
    barred: str = ""
    precision: Precision | None = None
    tentative: bool = False
    in_sandbox: bool = False
    told: Precision | None = None
    stays_here: bool = False
    retries: bool = False
    bounds_in_low: LowPrecisionBounds | None = None
    bounds_at_choice: LowPrecisionBounds | None = None

    @property
    def parts(self) -> CandidateParts:
        """What identifies the candidate, for a fingerprint."""
        return CandidateParts(
            name=self.candidate.name,
            backend=self.backend,
            in_chain=self.candidate.backend,
            options=str(sorted(self.candidate.options.items())),
            precision=self.precision or "",
            limits=str(self.limits),
            build=f"{self.freeze} {self.min_coverage}",
            terms=self.terms,
        )

    @property
    def low(self) -> LowPrecision | None:
        """The precision of the candidate, if that is below float32."""
        return None if self.precision == "fp32" else self.precision

    @property
    def stricter(self) -> ChainEntry | None:
        """The candidate with stricter settings; ``None`` if it has none, or must not use them."""
        if not self.retries or self.low is not None:
            return None
        options = self.backend.stricter(self.candidate.options)
        if options is None:
            return None
        return replace(self, candidate=self.candidate.model_copy(update={"options": options}))

    @property
    def is_torchs(self) -> bool:
        """True if the engine comes with torch. It is trusted to leave the process as it is."""
        return self.backend.comes_with_torch or self.is_fallback

    @property
    def is_fallback(self) -> bool:
        """True if it runs the captured graph as it is (``eager``)."""
        return self.backend.may_return_original

    def skip(self, fingerprint: Fingerprint) -> None:
        """Refuse if the policy bars the candidate, or it is in quarantine for this graph.

        Raises:
            Refusal: ``skipped``.
        """
        if self.barred:
            refuse(Status.SKIPPED, Reason.POLICY, self.barred)
        when = self.candidate.when
        if when is not None and not when.holds(Facts.of(fingerprint.request)):
            message = f"the policy wants it only when {when}"
            refuse(Status.SKIPPED, Reason.POLICY, message)
        if session.current().knowledge.recall(Quarantined, fingerprint, self.cache).fact:
            message = "it failed at run time for this graph, earlier in this process"
            refuse(Status.SKIPPED, Reason.QUARANTINED, message)

    def recall(self, fingerprint: Fingerprint, facts: BuildFacts) -> None:
        """Refuse a candidate that failed on this graph earlier.

        Raises:
            Refusal: ``skipped`` with ``known_failure``.
        """
        if self.is_fallback:
            return
        known = session.current().knowledge.recall(Failure, fingerprint, self.cache)
        if known.trouble:
            facts.extra["failures"] = known.trouble
        if known.fact is not None:
            raise known.fact.refusal()

    def learn(self, fingerprint: Fingerprint, attempt: Attempt, error: BaseException) -> str:
        """Remember a failure that was expensive; return why it could not be kept on disk."""
        if not self.cache.failures or not is_expensive(attempt, error):
            return ""
        failure = Failure.of(fingerprint.request, attempt)
        return session.current().knowledge.learn(failure, fingerprint, self.cache)


def entries_of(policy: Policy, cache: Cache | None = None) -> tuple[ChainEntry, ...]:
    """Return the chain with the engine of every name; find mistakes before anything is tried.

    Args:
        policy: The policy that has the chain.
        cache: The settings of what is kept on disk; ``None`` for the defaults.

    Raises:
        UnknownNameError: names look like misspellings; the error names all of them.
        OptionError: engines do not know some options; the error names all of them.
    """
    cache = cache or Cache()
    if policy.strict:
        cache = cache.model_copy(update={"failures": 0.0, "verdicts": 0.0})
    steps = (functools.partial(_entries, each, policy, cache) for each in policy.chain)
    return tuple(itertools.chain.from_iterable(all_of(*steps)))


def _entries(candidate: Candidate, policy: Policy, cache: Cache) -> Iterator[ChainEntry]:
    """Return a candidate's entry, or several of them (:func:`_in_each_precision`)."""
    backend = find_backend(candidate.backend)
    backend.check_options(candidate.options)
    entry = ChainEntry(
        candidate=candidate,
        backend=backend,
        min_coverage=_own_or(policy.min_coverage, candidate.min_coverage),
        bounds=policy.verify.bounds if policy.verify.when != "off" else None,
        limits=_limits(candidate, policy, backend),
        cache=cache,
        terms=policy.terms(candidate),
        freeze=policy.freeze,
        retries=policy.verify.retry,
        stays_here=_is_written(candidate, policy)
        and not _limits(candidate, policy, backend).isolate,
    )
    return _in_each_precision(entry, policy)


def finders_for(request: GraphRequest) -> Finders:
    """Return the functions that find what a policy names, for one graph."""
    installed = functools.partial(installed_for, request)
    return Finders(refuse_slip, entries_of, shared_passes, installed)


ONLY_TABLES = Finders(refuse_slip, lambda *_: (), lambda *_: SharedPasses())
"""Finders for a look at a policy, which checks the names of tables of options and nothing else."""


def _in_each_precision(entry: ChainEntry, policy: Policy) -> Iterator[ChainEntry]:
    """The entry as it is, in low precision, or (``auto``) in each that is allowed and in fp32."""
    precision = policy.precision
    if precision.mode == "fp32" or entry.is_fallback:
        yield entry
        return
    bounds = LowPrecisionBounds(share=precision.max_error)
    if precision.mode != "auto":
        compared = None if entry.bounds is None else bounds
        low = replace(entry, bounds_in_low=compared, bounds_at_choice=compared)
        yield replace(low, precision=precision.mode)
        return
    tentative = replace(entry, tentative=True, bounds_in_low=bounds)
    for each in precision.allow:
        barred = _why_not_tried(each, entry.backend, policy)
        narrower = replace(bounds, share=bounds.share * _AT_CHOICE[each])
        yield replace(tentative, precision=each, barred=barred, bounds_at_choice=narrower)
    yield replace(entry, precision="fp32")


def _why_not_tried(precision: LowPrecision, backend: Backend, policy: Policy) -> str:
    """Return why ``auto`` does not try an engine in a precision; empty if it does."""
    if precision == "bf16":
        return ""
    if not backend.gains_by_int8:
        return f"not tried in int8: {NO_GAIN}"
    if policy.select.by == "fastest":
        return ""
    # Whether eight bits are faster depends on the processor, and on the sizes of the products.
    return 'not tried in int8: only select = "fastest" finds out whether it is faster'


def _is_written(candidate: Candidate, policy: Policy) -> bool:
    """Return True if the policy says ``isolate``, one way or the other."""
    return candidate.isolate is not None or "isolate" in policy.model_fields_set


def _limits(candidate: Candidate, policy: Policy, backend: Backend) -> subprocesses.Limits:
    """Return the candidate's own limits, else the policy's, else the engine's for ``isolate``."""
    isolates = policy.isolate if "isolate" in policy.model_fields_set else backend.isolates_itself
    return subprocesses.Limits(
        _own_or(isolates, candidate.isolate),
        _own_or(policy.timeout, candidate.timeout),
        _own_or(policy.memory_limit, candidate.memory_limit),
    )


def _own_or(usual: T, own: T | None) -> T:
    return usual if own is None else own
