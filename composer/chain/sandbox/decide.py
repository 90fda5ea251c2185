"""Decides in a sandbox which candidate is to serve a graph, before any is built in the program."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from composer import _torch, session
from composer.chain import select
from composer.chain.candidates import ChainEntry
from composer.chain.sandbox import parcel
from composer.chain.select.choice import Tried
from composer.chain.select.decision import Decision
from composer.errors import Refusal, SandboxRefusal, error_line, refuse, text_of
from composer.knowledge.fingerprint import Fingerprint
from composer.passes.resolve import SharedPasses
from composer.records import Attempt, GraphRequest, Reason, Status, plain
from composer.system import control_flow, memory, subprocesses
from composer.system.subprocesses import NONE, Limits

MEASURING = -1
"""The step of a sandbox in which all candidates are measured."""

_FOREIGN = (Reason.NOT_ISOLATABLE, Reason.NOT_REGISTERED)
"""Reasons that a candidate may have in a sandbox alone."""

_COPIES = 3
"""A sandbox takes about so many times the memory of the graph's tensors: engines keep copies."""

_BESIDES = 1 << 30
"""Bytes that a sandbox takes besides."""


@dataclass(frozen=True, slots=True)
class Undecided:
    """There is no decision.

    Attributes:
        why: The reason, as a sentence.
        ended: The records of candidates that have ended a sandbox, by their places.
    """

    why: str
    ended: Mapping[int, Attempt] = field(default_factory=dict)

    @property
    def refused(self) -> dict[int, Tried]:
        """The candidates that have ended a sandbox, as they are refused here."""
        ended = self.ended.items()
        return {place: Tried(each, None, parcel.refusal_of(each)) for place, each in ended}


def decide(
    request: GraphRequest,
    entries: Sequence[ChainEntry],
    shared: SharedPasses,
    benchmark: select.Benchmark | None,
    *,
    strict: bool = False,
    beside: Mapping[str, Any] | None = None,
    is_wanted: Callable[[], bool] = lambda: True,
    show: Callable[[str], object] = str,
) -> Decision | Undecided:
    """Try the candidates of a chain in a sandbox, and measure them there.

    A candidate that ends the sandbox or exceeds its limits there is ``crashed`` or ``timed_out``,
    and another sandbox goes on without it. It finds the artefacts of the first.

    Args:
        request: The graph, as the passes of the stages ``torch`` and ``aten`` left it.
        entries: The chain.
        shared: The passes of the later stages.
        benchmark: How to find the fastest; ``None`` for the first that is accepted.
        strict: End with the first candidate that is not accepted.
        beside: If the program runs meanwhile, so that the sandbox is to stand back, the
            surroundings of the call that the inputs are from.
        is_wanted: Asked again and again; when it says False, the sandbox is ended.
        show: Told of each step as it begins, besides the progress of the session.

    Returns:
        The decision; or why there is none: something cannot be sent, or there was trouble that is
        no candidate's.

    Raises:
        Unwanted: ``is_wanted`` said False.
    """
    settings = {"benchmark": benchmark, "strict": strict, "beside": beside is not None}
    deciding = _Deciding(request, list(entries), shared, settings, beside, is_wanted, show)
    try:
        return deciding.decide()
    except subprocesses.Unwanted:
        raise
    except Exception as error:  # noqa: BLE001  # told of
        control_flow.pass_on(error)
        why = text_of(error) if isinstance(error, Refusal) else error_line(error)
        return Undecided(why, deciding.ended)


def _require_memory(request: GraphRequest) -> None:
    """Refuse if there is not enough memory for a second process with this graph."""
    available = memory.available_memory()
    passed = _torch.tensors.tensors_among(request.example_inputs)
    tensors = [*passed, *request.gm.parameters(), *request.gm.buffers()]
    needed = _COPIES * sum(each.nbytes for each in tensors) + _BESIDES
    if available is not None and available < needed:
        least, most = needed >> 20, available >> 20
        message = f"a child process may take {least} MiB of memory, and {most} MiB are available"
        refuse(Status.DECLINED, Reason.NOT_ISOLATABLE, message)


@dataclass
class _Deciding:
    """A decision that is being made. Its other attributes are arguments of :func:`decide`.

    Attributes:
        entries: The chain. Candidates that have ended a sandbox are barred.
        settings: The settings of the decision, for the sandbox.
        ended: The records of candidates that have ended a sandbox, by their places.
        place: The candidate that is tried now, or :data:`MEASURING`; ``None`` for none yet.
        began: When that began.
        tried: The records of the candidates that the present sandbox has tried.
        shown: Shows in the progress what is done now.
    """

    request: GraphRequest
    entries: list[ChainEntry]
    shared: SharedPasses
    settings: Mapping[str, Any]
    beside: Mapping[str, Any] | None
    is_wanted: Callable[[], bool]
    show: Callable[[str], object]
    ended: dict[int, Attempt] = field(default_factory=dict)
    place: int | None = None
    began: float = 0.0
    tried: list[Attempt] = field(default_factory=list)
    shown: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def decide(self) -> Decision:
        """Ask sandboxes, each without the candidates that have ended the last.

        Raises:
            Exception: there is no decision.
        """
        if any(each.stays_here for each in self.entries):
            refuse(Status.DECLINED, Reason.NOT_ISOLATABLE, "the policy says isolate = false")
        _require_memory(self.request)
        while True:
            try:
                answer = self._ask()
            except SandboxRefusal as refusal:
                if refusal.by_others or self.place is None:
                    raise
                if self.place == MEASURING:
                    return self._unmeasured(refusal)
                self._bar(refusal)
            else:
                attempts = parcel.attempts_of(answer)
                decision = self._decided(attempts, answer["ranking"], lasts=answer["lasts"])
                return dataclasses.replace(decision, cpu_seconds=answer["cpu_seconds"])

    def _ask(self) -> dict[str, Any]:
        """Return the answer of a sandbox to the chain as it is now."""
        with parcel.Memory() as memory_of_tensors, self.shown:
            case = parcel.case(self.request, self.entries, self.shared, self.settings, self.beside)
            payload = parcel.pack(case, memory_of_tensors)
            return subprocesses.ask(
                parcel.WORK,
                payload,
                NONE,
                heard=self._hear,
                is_wanted=self.is_wanted,
                stands_back=self.beside is not None,
            )

    def _hear(self, place: int, tried: Sequence[dict[str, Any]]) -> Limits:
        """Note a step of the sandbox; return its limits."""
        if place != self.place:
            self.began = time.perf_counter()
        self.place = place
        self.tried = parcel.attempts_of({"attempts": tried})
        if place == MEASURING:
            self._show("measuring, in a child process")
            return NONE
        entry = self.entries[place]
        of_all = f"{place + 1} of {len(self.entries)}"
        self._show(f"{entry.candidate.name}, {of_all}, in a child process")
        memory_limit = entry.limits.memory if entry.limits.isolate else None
        return dataclasses.replace(entry.limits, memory=memory_limit)

    def _show(self, what: str) -> None:
        self.shown.close()
        self.shown.enter_context(session.current().progress.step(self.request, what))
        self.show(what)

    def _bar(self, refusal: SandboxRefusal) -> None:
        """Note that the candidate which was tried has ended the sandbox, and try it no more.

        A build that took too long beside the program may be in time without it.
        """
        assert self.place is not None
        entry = self.entries[self.place]
        attempt = Attempt(
            entry.candidate.name,
            refusal.status,
            refusal.reason,
            text_of(refusal),
            time.perf_counter() - self.began,
            engine={"precision": entry.precision} if entry.precision else {},
            traceback=refusal.traceback,
            options=plain(dict(entry.candidate.options)),
            precision=entry.precision,
            tentative=entry.tentative,
        )
        if not (self.beside is not None and refusal.status is Status.TIMED_OUT):
            entry.learn(Fingerprint(self.request, (entry.parts,)), attempt, refusal)
        self.ended[self.place] = attempt
        self.entries[self.place] = dataclasses.replace(entry, barred=text_of(refusal))
        self.place = None

    def _decided(
        self, attempts: Sequence[Attempt], ranking: Sequence[int], *, lasts: bool
    ) -> Decision:
        """Return the decision.

        Raises:
            Refusal: a candidate is not known in the sandbox, and is known here.
        """
        for entry, attempt in zip(self.entries, attempts, strict=False):
            if attempt.reason in _FOREIGN and _is_known_here(entry, self.request):
                raise parcel.refusal_of(attempt)
        own = (self.ended.get(place, each) for place, each in enumerate(attempts))
        return Decision(tuple(own), tuple(ranking), lasts)

    def _unmeasured(self, refusal: SandboxRefusal) -> Decision:
        """Return the decision for the order of the chain, if the measurement ended the sandbox."""
        why = f"no: when they were measured, {text_of(refusal)}"
        attempts = [each.timed(why) if each.accepted else each for each in self.tried]
        places = [place for place, each in enumerate(attempts) if each.accepted]
        return self._decided(attempts, places, lasts=False)


def _is_known_here(entry: ChainEntry, request: GraphRequest) -> bool:
    """Return True if this process finds the engine."""
    try:
        entry.backend.probe(request)
    except Refusal as refusal:
        return refusal.reason not in _FOREIGN
    return True
