"""What an engine is to composer: a probe, a build, and nothing that knows of fallbacks.

:class:`Backend` is the contract; it is asked by a :class:`~composer.build.BuildRequest` and answers
by a :class:`~composer.build.Build`. The ``require_...`` functions refuse for many engines alike.
"""

from __future__ import annotations

import importlib.util
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from composer.build import Build, BuildFacts, BuildRequest, BuildTerms, current_build
from composer.errors import OptionError, refuse
from composer.graphs.comparison import requires_grad
from composer.graphs.nodes import value_of
from composer.passes import fingerprint
from composer.records import GraphRequest, Reason, Status
from composer.registry import did_you_mean
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
    (``request.terms.late``). For any other backend composer makes the AOT step, and
    gives it each functional graph as if captured; without such passes it is given the graph."""

    writes_as_the_graph: ClassVar[bool] = False
    """Whether what it compiles writes only to inputs that the graph itself writes to, even when it
    raises. For a graph that writes to none, calls are then spared the check for such writes."""

    isolates_itself: ClassVar[bool] = False
    """Whether the build itself runs its native part in a child process, where the request's limits
    say so, and uses the artefact that the child made. ``isolate`` is then on by default. For any
    other backend a sandbox builds the whole candidate and runs it once: a trial build."""

    chooses_precision: ClassVar[bool] = False
    """Whether the build itself computes in what the request's terms say, and of a graph with marks
    (:mod:`composer.graphs.low_precision`) the rest in float32. For any other backend the graph is
    rewritten where the policy wants ``bf16``."""

    has_self_test: ClassVar[bool] = False
    """Whether the engine is tried on small graphs before its first use with the installed versions
    (:mod:`composer.chain.selftest`). It then compiles a small graph in less than 0.1 s."""

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
    def build(self, request: BuildRequest) -> Build | Callable[..., Any]:
        """Compile the graph of the request.

        A callable by itself counts as a :class:`~composer.build.Build` that says nothing more.

        Args:
            request: The graph, its inputs, and what holds for the build.
        """


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
