"""The interface between composer and an engine.

An engine implements :class:`Backend`. It gets a :class:`~composer.build.BuildRequest` and returns a
:class:`~composer.build.Build`. It knows nothing of fallbacks: the chain handles them. Several
engines share the checks in the ``require_...`` functions.
"""

from __future__ import annotations

import importlib.util
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

from composer.build import Build, BuildFacts, BuildRequest, BuildTerms, current_build
from composer.errors import OptionError, refuse
from composer.graphs.comparison import requires_grad
from composer.graphs.nodes import value_of
from composer.passes import digests
from composer.records import GraphRequest, Int8, Reason, Status
from composer.registry import unknown_among
from composer.system.distribution import version_of

__all__ = [
    "Backend",
    "Build",
    "BuildFacts",
    "BuildRequest",
    "BuildTerms",
    "check_known",
    "current_build",
    "is_installed",
    "require_inference",
    "require_installed",
]


Dialect = Literal["torch", "aten", "any"]
"""What the calls of a graph are: functions of torch, operators of ATen, or either."""


class Backend(ABC):
    """One engine: it checks whether it can take a graph, and compiles the graph.

    :meth:`probe` and :meth:`build` run once per graph and candidate. They refuse a graph by raising
    :class:`~composer.errors.Refusal` with a reason (see :func:`composer.errors.refuse`). Any other
    exception counts as a failed attempt. The chain decides what happens next.
    """

    reads_example_inputs: ClassVar[bool] = True
    """True if the build reads or writes values of the example inputs; composer then passes copies.
    An engine that uses only shapes and dtypes sets it to ``False``, which saves the memory."""

    may_return_original: ClassVar[bool] = False
    """True if the engine may return the captured graph itself, and this counts as a success."""

    dialect: Dialect | None = "any"
    """The dialect of the graph that the build gets. ``"torch"`` is torch functions, methods and
    in-place operations, as Dynamo captures them. ``"aten"`` is one overload of ATen for each call.
    With ``"any"`` it gets the graph as the shared passes left it. composer declines a graph that it
    cannot hand over so. ``None``, for a function that does not say it: torch functions where they
    are to be had."""

    runs_shared_passes: ClassVar[bool] = False
    """True if the build itself runs the passes of the stages ``joint`` and ``post_grad``
    (``request.terms.late``). If ``False`` and there are such passes, composer runs AOTAutograd and
    gives the backend each functional graph, as if it were a captured graph."""

    writes_as_the_graph: ClassVar[bool] = False
    """True if the compiled graph writes only to inputs that the graph itself writes to, even when a
    call raises. If the graph writes to no input, calls then skip the check for such writes."""

    isolates_itself: ClassVar[bool] = False
    """True if the build itself can run its native part in a child process and use the artefact that
    the child made. The request's limits tell it to. ``isolate`` is then on by default. If
    ``False``, a sandbox builds the whole candidate and runs it once before the build here."""

    comes_with_torch: bool = False
    """True if the engine is torch's own. Any other engine may bring native code, which may end the
    process. So a sandbox tries it first where composer chooses the engine by measurement."""

    chooses_precision: ClassVar[bool] = False
    """True if the build itself applies the precision in the request's terms. If the graph has marks
    (:mod:`composer.graphs.low_precision`), the build computes the rest in float32. If ``False``,
    composer rewrites the graph where the policy wants ``bf16``."""

    gains_by_int8: ClassVar[Int8 | None] = None
    """What the engine computes faster in eight bits than in float32: ``"products"`` of 8-bit
    numbers, or products of few rows whose ``"weights"`` alone have eight bits. The policy's
    ``int8`` quantizes that. An engine with neither computes in float32."""

    has_self_test: ClassVar[bool] = False
    """True if composer tries the engine on small graphs before its first use with the installed
    versions (:mod:`composer.chain.selftest`). The engine has to compile a small graph in less than
    0.1 s."""

    packages: ClassVar[tuple[str, ...]] = ()
    """Names of the distributions that the engine consists of, besides torch."""

    def identity(self) -> str | None:
        """A text that changes when the engine changes; ``None`` if the engine cannot tell.

        Composer stores failures and verdicts under it, and stores nothing if it is ``None``. By
        default the text depends on the class, its source file, and the versions of ``packages``. If
        a function made the class, it also depends on the variables that the class closes over,
        since the function may make several classes. This method must not import the engine, which
        may not be needed at all.
        """
        kind = type(self)
        source = digests.source_of_class(kind, Backend)
        versions = [version_of(each) for each in self.packages]
        made = "<locals>" in kind.__qualname__
        held = digests.members_of_class(kind, Backend) if made else []
        try:
            return digests.digest(f"{kind.__module__}.{kind.__qualname__}", source, held, versions)
        except digests.Unstable:
            return None

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Check the candidate's options before anything is compiled.

        Raises:
            OptionError: an option is unknown or has an invalid value.
        """

    def probe(self, request: GraphRequest) -> None:
        """Refuse if the engine cannot work here or cannot take the graph.

        This takes less than 5 ms and imports nothing large.

        Raises:
            Refusal: usually ``unavailable``; the text says what would help.
        """

    def stricter(self, options: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return options with which the engine computes more as eager does.

        They are used after ``verify`` found numbers that are off, where the policy says ``retry``.

        Args:
            options: The candidate's options.

        Returns:
            ``None`` if the engine has no such setting, or if the options are as strict already.
        """
        return None

    @abstractmethod
    def build(self, request: BuildRequest) -> Build | Callable[..., Any]:
        """Compile the graph of the request.

        A plain callable is treated as a :class:`~composer.build.Build` without further information.

        Args:
            request: The graph, its inputs, and the terms of the build.
        """


def is_installed(module: str) -> bool:
    """True if a top-level module is imported already, or can be found. Imports nothing."""
    if sys.modules.get(module) is not None:
        return True
    return importlib.util.find_spec(module) is not None


def require_installed(modules: Sequence[str], remedy: str) -> None:
    """Refuse with ``not_installed`` unless every module can be found; imports none of them.

    Args:
        modules: Names of top-level modules.
        remedy: The command that installs them.

    Raises:
        Refusal: ``unavailable``; a module is missing.
    """
    missing = [name for name in modules if not is_installed(name)]
    if missing:
        what = f"{', '.join(missing)} not installed; {remedy}"
        refuse(Status.UNAVAILABLE, Reason.NOT_INSTALLED, what)


def require_inference(request: GraphRequest, remedy: str) -> None:
    """Refuse a graph with an output that requires grad, before anything is compiled.

    Args:
        request: The graph.
        remedy: The text of the refusal, which says what the engine runs instead.

    Raises:
        Refusal: ``declined``; the graph is for training and has such an output.
    """
    (returned,) = request.gm.graph.find_nodes(op="output")
    outputs = map(value_of, returned.all_input_nodes)
    if request.training and any(map(requires_grad, outputs)):
        refuse(Status.DECLINED, Reason.TRAINING_GRAPH, remedy)


def check_known(options: Mapping[str, Any], known: Sequence[str], backend: str) -> None:
    """Raise an ``OptionError`` that names every option outside ``known``."""
    mistakes = unknown_among(options, known, "unknown option")
    if mistakes:
        accepted = ", ".join(known) or "none"
        raise OptionError(f"backend {backend!r}: {mistakes} (accepted: {accepted})")
