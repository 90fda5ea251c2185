"""Backends of others that hand their work to torch or Inductor, and do not say so.

The chain would count that as the backend's success. :data:`_BACKENDS` says of each of them how it
is made to raise instead, and how its engines are found in what it returns.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Iterator, Mapping
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
    """What composer knows of one backend.

    Attributes:
        name: Of the backend, or of its package.
        options: Options by which it raises where it would else return the graph itself.
        raising: Given the terms of a build, makes the context within which it raises where it would
            else have another backend compile.
        is_engine: Whether a module of a graph, by its name and itself, is one of its engines.
            ``None`` where its engines are no modules.
        gave_up: Attribute of its engines that is true once torch runs their part of the graph.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    raising: Callable[[BuildTerms], contextlib.AbstractContextManager[None]] = lambda _: (
        contextlib.nullcontext()
    )
    is_engine: Callable[[str, torch.nn.Module], bool] | None = None
    gave_up: str = ""

    def compiled_by(self, function: Callable[..., Any], request: BuildRequest) -> Any:
        """Have the backend compile a graph, and refuse what its engines have no part in.

        Args:
            function: The backend.
            request: What it is asked. The candidate's options go over :attr:`options`.

        Raises:
            Refusal: ``rejected`` with ``returned_original``.
            Exception: whatever the backend raised before it handed the graph over.
        """
        asked = {**self.options, **request.options}
        may_write = writes.may_write(request.gm)
        with self.raising(request.terms):
            options = {"options": asked} if asked else {}
            compiled = function(request.gm, request.example_inputs, **options)
        graphs = _graphs_within(compiled)
        if self.is_engine is None or not graphs:
            return compiled
        if not self._engines(graphs):
            what = f"{self.name} returned a graph with no engine inside"
            refuse(Status.REJECTED, Reason.RETURNED_ORIGINAL, what)
        if not self.gave_up:
            return compiled
        return functools.partial(self._run, compiled, graphs, may_write)

    def _engines(self, graphs: list[torch.fx.GraphModule]) -> list[torch.nn.Module]:
        named = (each for graph in graphs for each in graph.named_modules())
        return [each for name, each in named if self.is_engine and self.is_engine(name, each)]

    def _run(
        self,
        compiled: Callable[..., Any],
        graphs: list[torch.fx.GraphModule],
        may_write: bool,
        *args: Any,
    ) -> Any:
        """Call what was compiled; raise where torch does the work of an engine.

        A call that may have written to its inputs cannot be answered by anybody else, so it stands,
        and the next one raises.

        Raises:
            RuntimeError: an engine gave up.
        """
        self._require_engines_at_work(graphs)
        outputs = compiled(*args)
        if not may_write:
            self._require_engines_at_work(graphs)
        return outputs

    def _require_engines_at_work(self, graphs: list[torch.fx.GraphModule]) -> None:
        parts = (each for graph in graphs for each in graph.children())
        if any(getattr(each, self.gave_up, False) for each in parts):
            what = f"an engine of {self.name} raised, and torch ran its part of the graph"
            raise RuntimeError(f"{what}; the package's log at level DEBUG has its error")


@contextlib.contextmanager
def _openvino_raises(terms: BuildTerms) -> Iterator[None]:
    """Have the openvino package (2026.4.1) raise its own error.

    Its backend catches that, and returns what ``compile_fx`` of Inductor makes of the graph.
    """
    module: Any = sys.modules.get("openvino.frontend.pytorch.torchdynamo.backend")
    usual, outer = getattr(module, "compile_fx", None), sys.exception()
    if usual is None:
        untold = "cannot be told for this version of openvino"
        terms.facts.extra["handed_to_inductor"] = untold
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
    """The graphs that a callable runs, as far as functions hold them as variables."""
    found: list[torch.fx.GraphModule] = []
    seen: dict[int, object] = {}
    waiting = [compiled]
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen[id(each)] = each
        if isinstance(each, torch.fx.GraphModule):
            found.append(each)
        elif isinstance(each, types.MethodType):
            waiting.append(each.__self__)
        elif isinstance(each, functools.partial):
            waiting += [each.func, *each.args]
        elif isinstance(each, types.FunctionType):
            waiting += _variables_of(each)
    return found


def _variables_of(function: types.FunctionType) -> Iterator[object]:
    """What a function closes over, but for variables that have no value yet."""
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):
            yield cell.cell_contents


def _is_of_tensorrt(_: str, module: torch.nn.Module) -> bool:
    """``PythonTorchTensorRTModule``, ``TorchTensorRTModule``."""
    kind = type(module)
    return kind.__module__.partition(".")[0] == "torch_tensorrt" or "TensorRT" in kind.__name__


def _is_of_openvino(name: str, _: torch.nn.Module) -> bool:
    """The package itself (2026.4.1) knows the parts that it compiles by this name."""
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
"""By the module that a backend is written in, or by the first part of its name."""


def foreign(function: Callable[..., Any]) -> Foreign | None:
    """What is known of a backend; ``None`` where it is not known to hand its work over."""
    module = str(getattr(function, "__module__", ""))
    return _BACKENDS.get(module) or _BACKENDS.get(module.partition(".")[0])
