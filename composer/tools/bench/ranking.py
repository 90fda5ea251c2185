"""Measures how fast each engine, and composer's own choice, runs a whole model.

Each candidate compiles the model by itself, as ``verify = "compile"`` has it, and so does composer
with the whole chain and ``select = "fastest"``. Calls of the model, eager's among them, are then
timed as :mod:`composer.chain.select` times engines: in turns, until it is clear who is ahead.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from composer import _torch
from composer.backends import BACKENDS, is_here
from composer.chain import select
from composer.chain.candidates import entries_of
from composer.chain.select.rules import times_as_fast
from composer.errors import (
    MISTAKES,
    FallbackWarning,
    OptionError,
    RankingError,
    error_line,
    unwrapped,
)
from composer.graphs import clones
from composer.graphs.comparison import devices
from composer.policy import Candidate, read_policy, sources
from composer.records import Attempt, CompileReport, GraphRequest, Reason, Status, plain, spelled
from composer.system import control_flow
from composer.system.memory import free_memory
from composer.telemetry.report import ENOUGH_ROUNDS, attempts_of, ratio_text
from composer.tools.bench.subject import Subject
from composer.tools.explain import collecting, compiled_beside

EAGER = "eager"
COMPOSER = "composer, fastest"

UNDER_LOAD = "Other programs were using the cores: measure again when the machine is idle."

TOO_FEW_ROUNDS = (
    f"There was no time for {ENOUGH_ROUNDS} rounds of each, so it is not clear which is the "
    "fastest. Give more --seconds."
)

ModelCall = Callable[..., tuple[Any, ...]]

_SETTINGS: dict[str, Any] = {"verify": "compile", "locked": False}
_WHOLE = _SETTINGS | {"select": {"by": "fastest", "background": False}}
_ALONE = _SETTINGS | {"select": {"by": "first", "background": False}, "on_runtime_error": "raise"}
"""The settings of one candidate; eager must not be timed in its place."""

_WRONG = {
    *(Reason.OUTPUT_MISMATCH, Reason.MUTATED_INPUTS),
    *(Reason.NON_FINITE, Reason.NUMERIC_MISMATCH),
}
"""Reasons to refuse an engine for what it computed."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """The speed of one participant relative to another, over the rounds that both took part in.

    Attributes:
        median: The median of the ratios of the single rounds.
        p25: The lower quartile of these ratios.
        p75: The upper quartile of these ratios.
        rounds: How many rounds there were.
    """

    median: float
    p25: float
    p75: float
    rounds: int

    def __str__(self) -> str:
        """``"1.14 (0.92-1.20)"``; ``"about 1.1"`` where there were too few rounds for a spread."""
        return ratio_text(self.median, self.rounds, (self.p25, self.p75))


@dataclass(frozen=True, slots=True)
class Standing:
    """The result for one way to run the model.

    Attributes:
        label: The name in tables: a candidate's, ``eager`` or ``composer, fastest``.
        candidate: The candidate as a chain holds it; ``None`` for the other two.
        graphs: How many graphs Dynamo made of the model.
        served: How many graphs each engine serves; ``eager`` counts those without an engine.
        seconds: Seconds of the first call, compiling included.
        error: The largest relative error against eager, of the graphs that were compared.
        refusals: Why it does not serve the other graphs, a sentence each.
        wrong: True if a graph was refused because its numbers were wrong.
        turns: Seconds of a call, one for each round that it took part in.
        models: The names by which policies match those graphs.
    """

    label: str
    candidate: Candidate | None = None
    graphs: int = 0
    served: Mapping[str, int] = field(default_factory=dict)
    seconds: float | None = None
    error: float | None = None
    refusals: tuple[str, ...] = ()
    wrong: bool = False
    turns: tuple[float, ...] = ()
    models: tuple[str, ...] = ()

    @property
    def engines(self) -> tuple[str, ...]:
        """The engines that serve a graph."""
        return tuple(name for name in self.served if name != EAGER)

    @property
    def ms(self) -> float | None:
        """Milliseconds of a call, the median of its rounds; ``None`` if it was not measured."""
        return statistics.median(self.turns) * 1e3 if self.turns else None

    @property
    def is_usable(self) -> bool:
        """True if it was measured, and its numbers were right."""
        return self.ms is not None and not self.wrong

    def of_graphs(self, graphs: Sequence[CompileReport]) -> Standing:
        """Return this standing with what the reports of its graphs say."""
        attempts = list(attempts_of(graphs))
        refused = [attempt for attempt in attempts if _is_refused(attempt)]
        checks = [each.engine.get("verified", {}) for each in attempts if each.accepted]
        errors = [check["max_relative_error"] for check in checks if "max_relative_error" in check]
        return dataclasses.replace(
            self,
            graphs=len(graphs),
            served=Counter(graph.chosen for graph in graphs if graph.chosen),
            error=max(errors, default=None),
            refusals=tuple(dict.fromkeys(attempt.sentence() for attempt in refused)),
            wrong=any(attempt.reason in _WRONG for attempt in refused),
            models=tuple(dict.fromkeys(graph.model for graph in graphs)),
        )

    def refused(self, why: str) -> Standing:
        """Return this standing with one more refusal."""
        return dataclasses.replace(self, refusals=(*self.refusals, why))

    def over(self, other: Standing) -> Ratio | None:
        """Return the speed relative to another; ``None`` if either was not measured."""
        mine, theirs = self._common_rounds(other)
        if not mine:
            return None
        return Ratio(*times_as_fast(mine, theirs), rounds=len(mine))

    def is_surely_ahead_of(self, other: Standing, margin: float) -> bool:
        """Return True if it is faster by more than ``margin``, and chance can be ruled out."""
        return select.surely_ahead(*self._common_rounds(other), margin)

    def _common_rounds(self, other: Standing) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return the times of both, only of the rounds that both took part in."""
        rounds = min(len(self.turns), len(other.turns))
        return self.turns[:rounds], other.turns[:rounds]

    def to_dict(self) -> dict[str, Any]:
        """Return a dict for JSON, with ``None`` for unknown values."""
        return {
            "label": self.label,
            "graphs": self.graphs,
            "served": dict(self.served),
            "first_call_seconds": self.seconds,
            "max_relative_error": self.error,
            "refusals": list(self.refusals),
            "wrong": self.wrong,
            "ms": self.ms,
            "rounds": len(self.turns),
        }


def _is_refused(attempt: Attempt) -> bool:
    if attempt.tentative:
        return False
    return attempt.status not in (Status.SUCCEEDED, Status.NOT_CHOSEN)


@dataclass(frozen=True, slots=True)
class Ranking:
    """The results for one model: eager first, then the candidates as given, then composer.

    ``under_load`` is True if other programs kept taking the cores during the measurement.
    """

    model: str
    device: str
    training: bool
    standings: tuple[Standing, ...]
    under_load: bool = False

    @property
    def eager(self) -> Standing:
        """The model as it is."""
        return self.standings[0]

    @property
    def doubt(self) -> str:
        """Why these figures are not reliable, in a sentence; empty if they are."""
        if self.under_load:
            return UNDER_LOAD
        rounds = [len(each.turns) for each in self.standings if each.turns]
        if min(rounds, default=0) < ENOUGH_ROUNDS:
            return TOO_FEW_ROUNDS
        return ""

    @property
    def composer(self) -> Standing:
        """The whole chain, with ``select = "fastest"``."""
        return self.standings[-1]

    @property
    def candidates(self) -> tuple[Standing, ...]:
        """Each candidate by itself."""
        return self.standings[1:-1]

    @property
    def models(self) -> tuple[str, ...]:
        """The names by which policies match the model's graphs; usually the model's name only.

        A graph is named after its frame. That is a module within the model if Dynamo gave up on
        the model's own frame, and the function behind a ``functools.partial``.
        """
        names = dict.fromkeys(name for each in self.standings for name in each.models)
        return tuple(names) or (self.model,)

    def to_dict(self) -> dict[str, Any]:
        """Return a dict for JSON, with each participant's ratio to eager."""
        rows = []
        for each in self.standings:
            ratio = each.over(self.eager)
            rows.append(each.to_dict() | {"eager_over_this": plain(ratio)})
        return {
            "model": self.model,
            "device": self.device,
            "training": self.training,
            "under_load": self.under_load,
            "standings": rows,
        }


def rank(
    subject: Subject,
    chain: Sequence[Any] = (),
    *,
    training: bool = False,
    seconds: float = 10.0,
    remember: bool = False,
    show: Callable[[str], object] = str,
) -> Ranking:
    """Compile a model by each candidate and by composer, and time all against eager.

    All other settings come from the policy in force. Inputs, buffers, gradients and the random
    state are left as they were.

    Args:
        subject: The model and the arguments of a call.
        chain: Candidates as in a policy's chain; by default all engines available here.
        training: Time forward and backward, with gradients; otherwise calls without gradients.
        seconds: How long timing may take; builds are not counted.
        remember: Keep the verdict of composer's own choice for programs with the same chain.
        show: Told of each step as it begins.

    Raises:
        OptionError: a candidate has an option that its engine does not know, there is no candidate
            besides eager, or the policy in force is malformed.
        UnknownNameError: a candidate's name, or one in the policy, is nearly a known one.
        RankingError: the model writes to its inputs, or there was no time for two calls of each.
        Exception: whatever the model itself raises.
    """
    with torch.set_grad_enabled(training):
        request = subject.request()
        candidates = _chain(chain, request)
        with torch.random.fork_rng(devices=devices(request.example_inputs)):
            _refuse_writes(subject, request)
            ways: list[_Way] = [(Standing(EAGER), subject.flat(subject.model))]
            for candidate in candidates:
                name = spelled(candidate.name, candidate.options)
                options = {"chain": [candidate], **_ALONE}
                show(f"building {name}")
                ways.append(_compiled(Standing(name, candidate), subject, request, options))
            whole = {"chain": candidates, **_WHOLE}
            show(f"building {COMPOSER}")
            ways.append(_compiled(Standing(COMPOSER), subject, request, whole, remember=remember))
            show(f"timing, up to {seconds:g} s")
            standings, under_load = _timed(ways, request, seconds)
    return Ranking(subject.name, request.device, request.training, standings, under_load)


def engines_here(request: GraphRequest) -> list[Candidate]:
    """Return the engines that accept such a graph here, Inductor with freezing among them."""
    candidates = []
    for name in BACKENDS.names():
        if name == EAGER or not is_here(name, request):
            continue
        candidates.append(Candidate(backend=name))
        if name == "inductor" and not request.training:
            candidates.append(Candidate(backend=name, options={"freezing": True}))
    return candidates


def _chain(given: Sequence[Any], request: GraphRequest) -> list[Candidate]:
    if not given:
        return engines_here(request)
    policy = read_policy({"chain": list(given)})
    entries_of(policy)  # mistakes in it, before anything is compiled
    engines = [each for each in policy.chain if each.name != EAGER]
    if not engines:
        raise OptionError("the chain names no engine beside eager: there is nothing to compare")
    return engines


def _refuse_writes(subject: Subject, request: GraphRequest) -> None:
    """Run the model once, and refuse it if it writes to its inputs.

    Each call of such a model would be timed on other numbers.
    """
    given = _torch.tensors.tensors_among(request.example_inputs)
    tensors = [each for each in given if not each.is_inference()]
    before = [each._version for each in tensors]
    buffers = clones.Buffers(request)
    try:
        subject.call(subject.model)
    finally:
        buffers.restore()
    if before != [each._version for each in tensors]:
        raise RankingError(f"{subject.name} writes to its inputs, so its calls are not alike")


_Way = tuple[Standing, ModelCall | None]
"""A way to run the model; the callable is ``None`` if it cannot be timed."""


def _compiled(
    standing: Standing,
    subject: Subject,
    request: GraphRequest,
    options: Mapping[str, Any],
    *,
    remember: bool = False,
) -> _Way:
    """Compile the model and call it once; the callable is ``None`` if no graph has an engine."""
    compiled = compiled_beside(subject.model, options=options)
    buffers = clones.Buffers(request)
    started = time.perf_counter()
    forgetting = sources.using({"cache": {"verdicts": 0}})  # a shared store has those of other runs
    cache = contextlib.nullcontext() if remember else forgetting
    with cache, collecting(threading.get_ident()) as collected, warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)  # the standing says as much
        try:
            error = _error_of_call(subject, compiled)
        finally:
            buffers.restore()
    seconds = time.perf_counter() - started
    free_memory()
    standing = standing.of_graphs(collected.explanation.graphs)
    if error:
        return standing.refused(error), None
    standing = dataclasses.replace(standing, seconds=seconds)
    is_eager = standing.candidate is not None and not standing.engines
    return standing, None if is_eager else subject.flat(compiled)


def _error_of_call(subject: Subject, compiled: Callable[..., Any]) -> str:
    """Call the compiled model; return its error in one line, but raise a mistake of the user."""
    try:
        subject.call(compiled)
    except BaseException as raised:  # noqa: BLE001  # recorded: this way to run the model failed
        control_flow.pass_on(raised)
        mistake = unwrapped(raised)
        if isinstance(mistake, MISTAKES):
            raise mistake from None
        return error_line(raised)
    return ""


def _timed(
    ways: Sequence[_Way], request: GraphRequest, seconds: float
) -> tuple[tuple[Standing, ...], bool]:
    """Return the standings with their times, and True if there was a load.

    Composer's standing is the first in order, so that it stays in at a tie.
    """
    standings = [standing for standing, _ in ways]
    runs = [(place, run) for place, (_, run) in enumerate(ways) if run is not None]
    runs.reverse()  # eager, the first way, is the eager fallback and has to be the last
    participants = [select.Participant(standings[place].label, run) for place, run in runs]
    budget = select.Budget(seconds, least_rounds=ENOUGH_ROUNDS)
    result = select.measure(participants, request, budget)
    if result.winner is None:
        raise RankingError(f"nothing could be timed: {result.why}")
    for i, (place, _) in enumerate(runs):
        standing = standings[place]
        if i in result.timings:
            standings[place] = dataclasses.replace(standing, turns=result.timings[i].samples)
        else:
            why = f"raised when it was timed: {error_line(result.errors[i])}"
            standings[place] = standing.refused(why)
    return tuple(standings), result.under_load
