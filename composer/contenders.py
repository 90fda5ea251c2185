"""The candidates of a policy's chain, each with its engine and what is asked of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from composer import child, session
from composer.backends import find_backend
from composer.backends.base import Backend, Precision, note
from composer.errors import OptionError, UnknownNameError, refuse
from composer.graphs.comparison import Bounds, Share
from composer.lowering import keeping
from composer.lowering.freeze import Freeze
from composer.policy import Candidate, Facts, Policy
from composer.precision import Narrow, Stays, narrow
from composer.records import Attempt, GraphRequest, Reason, Status
from composer.store import failures


@dataclass(frozen=True, slots=True)
class Contender:
    """A candidate, the engine it stands for, and what is asked of it.

    ``min_coverage`` is the share of the graph that it has to take, ``bounds`` how far its numbers
    may be off eager's; ``None`` where they are not compared. ``limits`` are those of its build,
    ``remembered`` the days for which its failures are, and ``kept`` the GiB that what it can keep
    may take on disk. ``freeze`` says whether it takes weights in. ``barred`` says why it is not to
    be tried at all. ``precision`` is what it is to compute in, where the policy says so, and
    ``on_trial`` whether it serves only if its numbers hold: the same candidate in fp32 comes next.
    """

    candidate: Candidate
    backend: Backend
    min_coverage: float
    bounds: Bounds | None = None
    limits: child.Limits = child.NONE
    remembered: float = 0.0
    kept: float = keeping.GIB
    freeze: Freeze = "auto"
    barred: str = ""
    precision: Precision | None = None
    on_trial: bool = False

    @property
    def key(self) -> str:
        """What tells it from the others of a chain: name, options, and its precision."""
        candidate = self.candidate
        given = f" with {sorted(candidate.options.items())}" if candidate.options else ""
        return f"{candidate.name}{given}{' in bf16' if self.precision == 'bf16' else ''}"

    def skip(self, request: GraphRequest) -> None:
        """Refuse a graph for which the policy does not want the candidate, or not any more.

        Raises:
            Refusal: ``skipped``.
        """
        if self.barred:
            refuse(Status.SKIPPED, Reason.POLICY, self.barred)
        when = self.candidate.when
        if when is not None and not when.holds(Facts.of(request)):
            what = f"the policy wants it only when {when}"
            refuse(Status.SKIPPED, Reason.POLICY, what)
        if session.current().is_quarantined(request.graph_key, self.key):
            what = "it failed at run time for this graph, earlier in this process"
            refuse(Status.SKIPPED, Reason.QUARANTINED, what)

    def remember(self, request: GraphRequest, attempt: Attempt, error: Exception) -> None:
        """Keep what is not to be paid for again, where the policy wants that."""
        if self.remembered and failures.is_dear(attempt, error):
            failures.remember(self._failure_key(request), request, attempt)

    def recall(self, request: GraphRequest) -> None:
        """Refuse what is known to fail.

        Raises:
            Refusal: ``skipped`` with ``known_failure``.
        """
        if self.remembered and not self.backend.may_return_original:
            failures.refuse_known(self._failure_key(request), self.remembered)

    def _failure_key(self, request: GraphRequest) -> str | None:
        facts = self.candidate, self.backend, self.limits, self.precision
        return failures.key_of(request, *facts)

    def narrowed(self, request: GraphRequest) -> Narrow | None:
        """The graph in bfloat16, where that is what it is to compute in.

        Raises:
            Refusal: ``skipped``: there is nothing to be tried.
        """
        if self.precision != "bf16":
            if self.precision is not None:
                note(precision=self.precision)
            return None
        try:
            rounds = not self.backend.chooses_precision
            found = narrow(request, on_trial=self.on_trial, round_weights=rounds)
        except Stays as stays:
            if self.on_trial:
                refuse(Status.SKIPPED, Reason.POLICY, f"not tried in bf16: {stays}")
            note(precision="fp32", not_in_bf16=str(stays))
            return None
        note(precision="bf16", products_in_bf16=found.products)
        return found


def resolve(rules: Policy) -> tuple[Contender, ...]:
    """Find the engine behind every name, and every slip in them, before anything is tried.

    Raises:
        UnknownNameError: naming every name that is nearly a known one.
        OptionError: naming every option that its engine does not know.
    """
    contenders: list[Contender] = []
    bounds = bounds_of(rules) if rules.verify != "off" else None
    mistakes: list[UnknownNameError | OptionError] = []
    for candidate in rules.chain:
        least = rules.min_coverage if candidate.min_coverage is None else candidate.min_coverage
        try:
            backend = find_backend(candidate.backend)
            backend.check_options(candidate.options)
        except (UnknownNameError, OptionError) as mistake:
            mistakes.append(mistake)
        else:
            limits = _limits(candidate, rules, backend)
            days = 0.0 if rules.strict else rules.remember_failures
            kept = rules.keep_artefacts
            each = Contender(candidate, backend, least, bounds, limits, days, kept, rules.freeze)
            contenders += _in_each_precision(each, rules)
    if mistakes:
        raise type(mistakes[0])("; ".join(str(mistake) for mistake in mistakes))
    return tuple(contenders)


def _in_each_precision(contender: Contender, rules: Policy) -> Iterator[Contender]:
    """As it is; in bf16; or the one behind the other, where the numbers are to decide."""
    if rules.precision == "fp32" or contender.backend.may_return_original:
        yield contender
        return
    on_trial = rules.precision == "auto"
    bounds = Share(share=rules.max_error) if on_trial or contender.bounds else None
    yield replace(contender, bounds=bounds, precision="bf16", on_trial=on_trial)
    if on_trial:
        yield replace(contender, precision="fp32")


def _limits(candidate: Candidate, rules: Policy, backend: Backend) -> child.Limits:
    """The candidate's own, the policy's where it has none, the engine's where nobody said."""
    isolates = rules.isolate if "isolate" in rules.model_fields_set else backend.isolates_itself
    return child.Limits(
        isolates if candidate.isolate is None else candidate.isolate,
        rules.timeout if candidate.timeout is None else candidate.timeout,
        rules.memory_limit if candidate.memory_limit is None else candidate.memory_limit,
    )


def bounds_of(rules: Policy) -> Bounds:
    """How far the policy lets numbers be off."""
    return Bounds(rules.tolerance.rtol, rules.tolerance.atol)
