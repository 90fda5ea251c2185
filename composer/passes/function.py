"""Makes a composer pass from a function, or from one of Inductor's kinds of pass."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch.fx

from composer import _torch
from composer.passes.base import GraphPass, PassResult, as_stage
from composer.passes.digests import Unstable, digest
from composer.records import Stage


@dataclass(frozen=True)
class FunctionPass(GraphPass):
    """A pass made from a callable that edits a graph module, or a graph, in place.

    It accepts functions of one argument, and Inductor's ``CustomGraphPass``,
    ``CustomInferenceAwareGraphPass``, ``CustomGraphModulePass`` and ``PatternMatcherPass``. A plain
    function receives the graph if its first parameter is annotated ``torch.fx.Graph``. Without an
    annotation it receives the graph if that parameter is named ``graph`` or ``g``. In all other
    cases it receives the graph module.

    Args:
        function: The callable. Its attribute ``keeps_numbers`` has the meaning that it has on a
            pass.
        stage: The stage at which it runs. The default is the callable's attribute ``stage``.
            Without that attribute it is ``post_grad`` for Inductor's kinds of pass, which are
            written for that stage, and ``aten`` for plain functions.
        runs_last: True if it runs after Inductor's own rewrites of its stage. The default is the
            callable's attribute ``runs_last``, or false.
        name: The recorded name; by default the qualified name of the function or its class.
        inference: The value that a ``CustomInferenceAwareGraphPass`` receives: true if the graph
            has no backward. At ``joint`` and ``post_grad`` composer sets it for each graph.

    Raises:
        OptionError: There is no such stage.
    """

    function: Callable[..., Any]
    stage: Stage | str | None = field(default=None, kw_only=True)  # type: ignore[misc,assignment]  # of each, not of the class
    runs_last: bool | None = field(default=None, kw_only=True)  # type: ignore[misc,assignment]  # likewise
    name: str = field(default="", kw_only=True)  # type: ignore[misc]  # likewise
    inference: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        function = self.function
        name = self.name or qualified_name(function)
        stage, runs_last = self.stage, self.runs_last
        if stage is None:
            stage = getattr(function, "stage", None)
        if runs_last is None:
            runs_last = getattr(function, "runs_last", False)
        stage = _usual_stage(function) if stage is None else as_stage(stage, name)
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "runs_last", bool(runs_last))
        object.__setattr__(self, "keeps_numbers", bool(getattr(function, "keeps_numbers", False)))
        object.__setattr__(self, "stage", stage)

    def run(self, gm: torch.fx.GraphModule) -> int | PassResult | None:
        """Call the function, and return its result if that is a valid result of a pass's ``run``.

        Other results, such as the list that torch's ``replace_pattern`` returns, become ``None``.

        Raises:
            TypeError: The function returned a new graph, and did not edit the given one in place.
        """
        if _torch.canonical.is_pattern_matcher_pass(self.function):
            return int(self.function.apply(gm))  # type: ignore[attr-defined]  # Inductor's class
        arguments: list[Any] = [gm.graph if _takes_graph(self.function) else gm]
        if isinstance(self.function, _torch.inductor.CustomInferenceAwareGraphPass):
            arguments = [gm.graph, self.inference]
        returned = self.function(*arguments)
        made = getattr(returned, "graph_module", returned)  # of torch's own PassResult
        graph = made.graph if isinstance(made, torch.fx.GraphModule) else made
        if isinstance(graph, torch.fx.Graph) and graph is not gm.graph:
            raise TypeError("it returned another graph; a pass edits the one that it is given")
        return returned if isinstance(returned, int | PassResult) else None

    def for_graph(self, *, inference: bool) -> GraphPass:
        """Return a copy that tells its function whether the graph has a backward."""
        return dataclasses.replace(self, inference=inference)

    def uuid(self) -> str | None:
        """Return a hash of the name, the stage and the function's own ``uuid()``.

        It is ``None`` for a plain function, as Inductor does it.
        """
        if not isinstance(self.function, _torch.inductor.CUSTOM_PASSES):
            return None
        own = self.function.uuid()
        if not own:
            return None
        try:
            return digest(self.name, str(self.stage), self.runs_last, own)
        except Unstable:
            return None


def _usual_stage(function: Callable[..., Any]) -> Stage:
    is_custom = isinstance(function, _torch.inductor.CUSTOM_PASSES)
    if is_custom or _torch.canonical.is_pattern_matcher_pass(function):
        return Stage.POST_GRAD
    return Stage.ATEN


def _takes_graph(function: Callable[..., Any]) -> bool:
    if isinstance(function, _torch.inductor.CUSTOM_PASSES):
        return isinstance(function, _torch.inductor.CustomGraphPass)
    try:
        first = next(iter(inspect.signature(function).parameters.values()))
    except (TypeError, ValueError, StopIteration):  # a builtin that does not say
        return False
    if first.annotation is not inspect.Parameter.empty:
        return first.annotation is torch.fx.Graph or str(first.annotation).endswith("Graph")
    return first.name in ("graph", "g")


def qualified_name(function: Callable[..., Any]) -> str:
    """Return a name such as ``"my_package.rewrites.fuse"``; for an object, that of its class."""
    named = _torch.dynamo.without_arguments(function)
    named = named if hasattr(named, "__qualname__") else type(named)
    return f"{named.__module__}.{named.__qualname__}"
