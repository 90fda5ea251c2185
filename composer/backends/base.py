"""What an engine is to composer: a probe, a build, and nothing that knows of fallbacks.

:class:`Backend` is the contract. While it builds, an engine can tell the attempt under way what it
does (:func:`note`, :func:`covers`) and ask what it is allowed (:func:`limits_left`,
:func:`check_time`, :func:`precision`). The ``require_...`` functions refuse for many engines alike.
"""

from __future__ import annotations

import importlib.util
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import torch.fx

from composer.build import Clock, Precision, current_build, during
from composer.child import Limits
from composer.distribution import version_of
from composer.errors import OptionError, refuse
from composer.graphs.comparison import requires_grad
from composer.graphs.nodes import value_of
from composer.passes import fingerprint
from composer.records import GraphRequest, Reason, Status
from composer.registry import did_you_mean


class Backend(ABC):
    """One engine. It probes, it builds, it says no with a reason; the chain decides the rest.

    Both methods run once per graph and candidate. They say no by raising
    :class:`~composer.errors.Refusal` (see :func:`composer.errors.refuse`); any other exception is
    a failed attempt.
    """

    reads_example_inputs: ClassVar[bool] = True
    """Whether the build may run on, or write to, the example inputs' values. Then it is given
    copies; an engine that looks only at shapes and dtypes saves that memory by ``False``."""

    may_return_original: ClassVar[bool] = False
    """Whether running the captured graph as it is counts as this engine's work."""

    runs_shared_passes: ClassVar[bool] = False
    """Whether the build itself runs the passes of the stages ``joint`` and ``post_grad``
    (:func:`composer.passes.late.in_force`). For any other backend composer makes the AOT step, and
    gives it each functional graph as if captured; without such passes it is given the graph."""

    writes_as_the_graph: ClassVar[bool] = False
    """Whether what it compiles writes only to inputs that the graph itself writes to, even when it
    raises. For a graph that writes to none, calls are then spared the check for such writes."""

    isolates_itself: ClassVar[bool] = False
    """Whether the build itself runs its native part in a child process, where :func:`limits_left`
    says so, and uses the artefact that the child made. ``isolate`` is then on by default. For any
    other backend a child builds and runs the whole candidate as a rehearsal, and is thrown away."""

    chooses_precision: ClassVar[bool] = False
    """Whether the build itself computes in what :func:`precision` says, and of a graph with marks
    (:mod:`composer.graphs.low_precision`) the rest in float32. For any other backend the graph is
    rewritten where the policy wants ``bf16``."""

    has_self_test: ClassVar[bool] = False
    """Whether the engine is tried on small graphs before its first use with the installed versions
    (:mod:`composer.selftest`). It then compiles a small graph in less than 0.1 s."""

    packages: ClassVar[tuple[str, ...]] = ()
    """The distributions that the engine is made of, besides torch."""

    def identity(self) -> str | None:
        """Text that stays the same for as long as the engine will fail, or be fast, as before.

        Failures and verdicts are remembered by it. By default: the class, its source file, and the
        versions of ``packages``; of a class that a function made also what it closes over, which
        tells it from others that the function made. It must not import the engine, which may not be
        needed at all. ``None`` where an engine cannot tell; then nothing is remembered of it.
        """
        kind = type(self)
        source = fingerprint.source_of_class(kind, Backend)
        versions = [version_of(each) for each in self.packages]
        made = "<locals>" in kind.__qualname__
        held = fingerprint.members_of_class(kind, Backend) if made else []
        try:
            return fingerprint.digest(
                f"{kind.__module__}.{kind.__qualname__}", source, held, versions
            )
        except fingerprint.Unstable:
            return None

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Find the user's own mistakes before anything is tried.

        Raises:
            OptionError: an option is unknown or has a value it cannot take.
        """

    def probe(self, request: GraphRequest) -> None:
        """Say in under 5 ms, importing nothing heavy, that the engine cannot be here.

        Raises:
            Refusal: usually ``unavailable``, with what would help.
        """

    @abstractmethod
    def build(
        self,
        gm: torch.fx.GraphModule,
        example_inputs: list[Any],
        *,
        mode: str | None,
        options: Mapping[str, Any],
    ) -> object:
        """Compile ``gm`` and return a callable with its inputs and outputs.

        Args:
            gm: A clone that this build may change as it likes.
            example_inputs: The inputs of the first call; weights are the originals.
            mode: ``torch.compile``'s mode.
            options: The candidate's options, as the chain gave them.
        """


def note(coverage: float | None = None, *, keeps_nan: bool | None = None, **engine: Any) -> None:
    """Tell the attempt under way, if there is one, what the engine did.

    Args:
        coverage: Share of the graph's compute nodes that the engine took, 0.0 to 1.0; where it is
            less than the policy's ``min_coverage``, the chain declines what was built.
        keeps_nan: Whether the engine gives NaN wherever eager does. Under ``verify`` one that
            claims it is compared a second time, on inputs with a NaN.
        engine: Facts for the attempt's ``engine`` record.

    Raises:
        ValueError: ``coverage`` is no such share.
    """
    if coverage is not None and not 0 <= coverage <= 1:
        raise ValueError(f"coverage is a share, 0.0 to 1.0, not {coverage!r}")
    notes = current_build().notes
    if notes is None:
        return
    notes.engine.update(engine)
    if keeps_nan is not None:
        notes.keeps_nan = notes.engine["keeps_nan"] = keeps_nan
    if coverage is not None:
        notes.coverage = coverage


def covers(taken: int, total: int, left: Sequence[str] = ()) -> None:
    """Tell the attempt under way, if there is one, how much of one graph the engine takes.

    Args:
        taken: Compute nodes that the engine runs.
        total: Compute nodes of the graph.
        left: A line for each operator that it leaves to torch, with the reason.
    """
    notes = current_build().notes
    if notes is None:
        return
    notes.taken, notes.total = notes.taken + taken, notes.total + total
    notes.coverage = notes.taken / notes.total if notes.total else None
    notes.left += [line for line in left if line not in notes.left]
    if notes.left:
        notes.engine["left_to_torch"] = notes.left


@contextmanager
def within(limits: Limits) -> Iterator[None]:
    """Build within these limits; a build that ends later than ``timeout`` is refused as well."""
    with during(limits=limits, clock=Clock()):
        yield
        _refuse_late("finished", hint=_NOT_INTERRUPTED)


def precision() -> Precision:
    """What the build under way may compute in; for engines that choose it themselves."""
    return current_build().precision


def limits_left() -> Limits:
    """What is left of the limits, for engines that do a part of the build in a child process."""
    limits, clock = current_build().limits, current_build().clock
    if clock is None or limits.timeout is None:
        return limits
    return replace(limits, timeout=max(limits.timeout - clock.seconds, 1e-3))


def excuse(seconds: float) -> None:
    """Do not count so many seconds as compile time: a child process took them to start."""
    clock = current_build().clock
    if clock is not None:
        clock.excused += seconds


def check_time() -> None:
    """End the attempt under way if its ``timeout`` is over; engines ask between their steps.

    Nothing else interrupts a build: an exception from outside could strike within code of torch's
    that must not be interrupted.

    Raises:
        Refusal: ``timed_out``.
    """
    _refuse_late("was stopped")


_NOT_INTERRUPTED = "this engine cannot be interrupted, but in a child process (isolate = true)"


def _refuse_late(ended: str, hint: str = "") -> None:
    """Refuse a build whose time is over.

    Args:
        ended: What became of it: ``"finished"``, ``"was stopped"``.
        hint: What would end such a build in time, where no child process does.
    """
    limits, clock = current_build().limits, current_build().clock
    if clock is None or limits.timeout is None or clock.seconds <= limits.timeout:
        return
    what = f"{ended} after {clock.seconds:.3g} s, and timeout is {limits.timeout:g} s"
    told = what if limits.isolate or not hint else f"{what}; {hint}"
    refuse(Status.TIMED_OUT, Reason.TIMEOUT, told)


def is_installed(module: str) -> bool:
    """Whether a top-level module is imported already or can be found; imports nothing."""
    if sys.modules.get(module) is not None:
        return True
    return importlib.util.find_spec(module) is not None


def require_installed(modules: Sequence[str], remedy: str) -> None:
    """Refuse with ``not_installed`` unless every module can be found; imports none of them.

    Args:
        modules: Names of top-level modules.
        remedy: The command that installs them.
    """
    missing = [name for name in modules if not is_installed(name)]
    if missing:
        what = f"{', '.join(missing)} not installed; {remedy}"
        refuse(Status.UNAVAILABLE, Reason.NOT_INSTALLED, what)


def require_inference(request: GraphRequest, remedy: str) -> None:
    """Refuse a graph with an output that requires grad, before anything is compiled.

    Args:
        request: The graph.
        remedy: What the engine runs instead, for the message.

    Raises:
        Refusal: it is one.
    """
    (returned,) = request.gm.graph.find_nodes(op="output")
    known = map(value_of, returned.all_input_nodes)
    if request.training and any(map(requires_grad, known)):
        refuse(Status.DECLINED, Reason.TRAINING_GRAPH, remedy)


def check_known(options: Mapping[str, Any], known: Sequence[str], backend: str) -> None:
    """Raise an ``OptionError`` that names every option outside ``known``."""
    unknown = [name for name in options if name not in known]
    if unknown:
        named = "; ".join(f"unknown option {n!r}{did_you_mean(n, known)}" for n in unknown)
        raise OptionError(f"backend {backend!r}: {named} (accepted: {', '.join(known) or 'none'})")
