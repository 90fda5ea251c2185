"""Saved functions: saves a graph that composer serves to torch's file, and loads it again.

``torch.compile(..., fullgraph=True).aot_compile(...)``, ``save_compiled_function`` and
``torch.compiler.load_compiled_function`` save a process Dynamo's tracing. torch saves the guards
and the code around the graph; composer saves the captured graph, and the mode and options it was
compiled with. The session of an engine cannot be saved, so the graph is compiled again at its first
call. The graph's key is the same as before. So the verdict and the ONNX model on disk are found.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch.fx

from composer import _torch
from composer.errors import OptionError
from composer.graphs import capture, written
from composer.policy.model import fields_of

Serve = Callable[..., Callable[..., Any]]


@dataclass(frozen=True, slots=True)
class _Recipe:
    """Everything that is needed to compile a graph again.

    Attributes:
        serve: Compiles a graph, given its inputs, mode and options. It is pickled by its name.
        graph: The graph as it was captured, with its symbols.
        model: The name of the model in reports.
        mode: ``torch.compile``'s mode.
        options: ``torch.compile``'s options, each pickled by itself.
        grad: Whether grad mode was on when the graph was captured.
        autocast: The devices for which autocast was on, with its dtype.
    """

    serve: Serve
    graph: bytes
    model: str
    mode: str | None
    options: Mapping[str, bytes]
    grad: bool
    autocast: tuple[tuple[str, torch.dtype], ...]


class Saved(_torch.files.SerializableCallable):  # type: ignore[misc]  # a class that torch may lack
    """A compiled graph that can be saved to a file; one that was loaded compiles at its first call.

    Args:
        recipe: How to compile the graph.
        served: What serves it; ``None`` where it was loaded from a file.
    """

    def __init__(self, recipe: _Recipe, served: Callable[..., Any] | None = None) -> None:
        self._recipe = recipe
        self._served = served

    @classmethod
    def of(
        cls,
        gm: torch.fx.GraphModule,
        served: Callable[..., Any],
        serve: Serve,
        mode: str | None,
        options: Mapping[str, Any] | None,
    ) -> Saved:
        """The graph that is being compiled, with the recipe for another process.

        Args:
            gm: The graph as Dynamo captured it.
            served: The compiled graph.
            serve: The function of a module that compiled it, and compiles it again after loading.
            mode: ``torch.compile``'s mode.
            options: ``torch.compile``'s options.

        Raises:
            OptionError: an option cannot be pickled, such as a function that cannot be imported.
            ValueError: inputs are views of the same memory, which cannot be saved.
        """
        recipe = _Recipe(
            serve=serve,
            graph=written.as_bytes(gm),
            model=capture.model_name(gm),
            mode=mode,
            options={name: _as_bytes(name, value) for name, value in fields_of(options).items()},
            grad=torch.is_grad_enabled(),
            autocast=tuple(_torch.modes.autocasts()),
        )
        return cls(recipe, served)

    def __call__(self, *args: Any) -> Any:
        """Call what serves the graph."""
        served = self._served
        if served is None:
            served = self._compiled(args)
        return served(*args)

    @classmethod
    def serialize_compile_artifacts(cls, fn: Saved) -> bytes:
        """Composer's part of the file."""
        return pickle.dumps(fn._recipe)

    @classmethod
    def deserialize_compile_artifacts(cls, data: bytes) -> Saved:
        """Load the graph; it is compiled at the first call.

        Files are pickles, so only trusted files may be loaded.
        """
        return cls(pickle.loads(data))

    def _compiled(self, args: Sequence[Any]) -> Callable[..., Any]:
        """Compile the graph for these inputs, unless another thread has just done so."""
        recipe = self._recipe
        with _torch.compiles.compiling():
            if self._served is None:
                gm = written.of_bytes(recipe.graph)
                capture.set_model_name(gm, recipe.model)
                options = {name: pickle.loads(value) for name, value in recipe.options.items()}
                with _as_captured(recipe), _torch.compiles.recaptured(gm, args):
                    inputs = _torch.symbols.with_symbols(gm, args)
                    self._served = recipe.serve(gm, inputs, recipe.mode, options)
            return self._served


@contextmanager
def _as_captured(recipe: _Recipe) -> Iterator[None]:
    """Restore grad mode and autocast as they were when the graph was captured."""
    with ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(recipe.grad))
        for device, dtype in recipe.autocast:
            stack.enter_context(torch.autocast(device, dtype))
        yield


def _as_bytes(name: str, value: Any) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception as error:  # pickle raises whatever an object's class does
        raise OptionError(f"option {name!r} cannot be written to a file: {error}") from error
