"""Backends of other packages that silently pass their work to torch or Inductor.

The chain would count such a fallback as a success of the backend. :data:`_BACKENDS` says how to
make each of these backends raise instead, and how to find its engines in the compiled graph.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx

from composer import _torch
from composer.backends.base import BuildRequest, BuildTerms
from composer.errors import refuse
from composer.graphs import writes
from composer.records import Reason, Status


@dataclass(frozen=True, slots=True)
class Foreign:
    """A backend that may fall back silently, and how composer detects the fallback.

    Attributes:
        name: The name of the backend or its package.
        options: Options that make the backend raise instead of returning the graph itself.
        raising: Takes the terms of a build and returns a context manager. Inside the context the
            backend raises instead of letting another backend compile.
        is_engine: Takes the name of a module in a graph, and the module. Returns ``True`` if it is
            one of the backend's engines. ``None`` if the engines are not modules.
        gave_up: Name of an attribute of the engines. It is true once torch runs the engine's part
            of the graph. Empty if there is no such attribute.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    raising: Callable[[BuildTerms], AbstractContextManager[object]] = contextlib.nullcontext
    is_engine: Callable[[str, torch.nn.Module], bool] | None = None
    gave_up: str = ""

    def compiled_by(self, function: Callable[..., Any], request: BuildRequest) -> Any:
        """Let the backend compile a graph, and refuse a result without any of its engines.

        Args:
            function: The backend.
            request: The request. The candidate's options take precedence over :attr:`options`.

        Returns:
            The compiled graph. If :attr:`gave_up` is set, its calls raise once an engine gave up.

        Raises:
            Refusal: ``rejected`` with ``returned_original``.
            Exception: the backend's own error, which it would hide by its fallback.
        """
        asked = {**self.options, **request.options}
        may_write = writes.may_write(request.gm)
        with self.raising(request.terms):
            options = {"options": asked} if asked else {}
            compiled = function(request.gm, request.example_inputs, **options)
        graphs = _graphs_within(compiled)
        if self.is_engine is None or not graphs:
            return compiled
        modules = itertools.chain.from_iterable(graph.named_modules() for graph in graphs)
        if not any(itertools.starmap(self.is_engine, modules)):
            what = f"{self.name} returned a graph with no engine inside"
            refuse(Status.REJECTED, Reason.RETURNED_ORIGINAL, what)
        if not self.gave_up:
            return compiled
        return functools.partial(self._run, compiled, graphs, may_write)

    def _run(
        self,
        compiled: Callable[..., Any],
        graphs: list[torch.fx.GraphModule],
        may_write: bool,
        *args: Any,
    ) -> Any:
        """Call the compiled graph; raise if torch does the work of an engine.

        If the call may have written to its inputs, no other candidate can repeat it. So its result
        is returned, and the next call raises.

        Raises:
            RuntimeError: an engine gave up.
        """
        self._require_engines_at_work(graphs)
        outputs = compiled(*args)
        if not may_write:
            self._require_engines_at_work(graphs)
        return outputs

    def _require_engines_at_work(self, graphs: list[torch.fx.GraphModule]) -> None:
        parts = itertools.chain.from_iterable(graph.children() for graph in graphs)
        if any(getattr(part, self.gave_up, False) for part in parts):
            what = f"an engine of {self.name} raised, and torch ran its part of the graph"
            raise RuntimeError(f"{what}; the package's log at level DEBUG has its error")


@contextlib.contextmanager
def _openvino_raises(terms: BuildTerms) -> Iterator[None]:
    """Make the backend of the openvino package raise its own error.

    In openvino 2026.4.1 the backend catches the error and calls ``compile_fx`` of Inductor instead.
    Inside this context, ``compile_fx`` raises the error again.
    """
    module: Any = sys.modules.get("openvino.frontend.pytorch.torchdynamo.backend")
    usual, outer = getattr(module, "compile_fx", None), sys.exception()
    if usual is None:
        terms.facts.extra["handed_to_inductor"] = "cannot be told for this version of openvino"
        yield
        return

    def compile_fx(*_: Any, **__: Any) -> None:
        error = sys.exception()
        if error is not None and error is not outer:
            raise error
        what = "openvino had Inductor compile the graph"
        refuse(Status.REJECTED, Reason.RETURNED_ORIGINAL, what)

    module.compile_fx = compile_fx
    try:
        yield
    finally:
        module.compile_fx = usual


def _graphs_within(compiled: object) -> list[torch.fx.GraphModule]:
    """The graphs that a callable runs, found through closures, bound methods and partials."""
    seen: dict[int, object] = {}
    waiting = [compiled]
    while waiting:
        held = waiting.pop()
        if id(held) not in seen:
            seen[id(held)] = held
            waiting += _held_by(held)
    return [held for held in seen.values() if isinstance(held, torch.fx.GraphModule)]


def _held_by(function: object) -> Iterator[object]:
    """What a method, partial or function may call; variables without a value are skipped."""
    if isinstance(function, types.MethodType):
        yield function.__self__
    elif isinstance(function, functools.partial):
        yield from (function.func, *function.args)
    elif isinstance(function, types.FunctionType):
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):
                yield cell.cell_contents


def _is_of_tensorrt(_: str, module: torch.nn.Module) -> bool:
    """True for ``PythonTorchTensorRTModule`` and ``TorchTensorRTModule``."""
    kind = type(module)
    return kind.__module__.partition(".")[0] == "torch_tensorrt" or "TensorRT" in kind.__name__


def _is_of_openvino(name: str, _: torch.nn.Module) -> bool:
    """True for a part that openvino compiles: openvino 2026.4.1 itself finds them by this name."""
    return name.startswith("fused_") and "." not in name


_BACKENDS = {
    "torch_tensorrt": Foreign(
        "torch_tensorrt",
        options={"pass_through_build_failures": True},
        is_engine=_is_of_tensorrt,
    ),
    "openvino": Foreign(
        "openvino", raising=_openvino_raises, is_engine=_is_of_openvino, gave_up="perm_fallback"
    ),
    _torch.inductor.CUDAGRAPHS: Foreign(
        "cudagraphs", raising=lambda _: _torch.inductor.cudagraphs_or_error()
    ),
}
"""The backends by their full module name, or by its first part."""


def foreign(function: Callable[..., Any]) -> Foreign | None:
    """The entry for a backend; ``None`` if the backend is not known to fall back silently."""
    module = str(getattr(function, "__module__", ""))
    return _BACKENDS.get(module) or _BACKENDS.get(module.partition(".")[0])
