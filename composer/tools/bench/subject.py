"""Wraps a model and one call of it as one graph, so that code that times graphs can time models.

The graph has one node that calls the model as a module. It does not show how many graphs Dynamo
makes of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from composer import _torch
from composer.errors import OptionError
from composer.graphs import capture
from composer.records import GraphRequest

Model = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Subject:
    """A function or a module, and the arguments of one call."""

    model: Model
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The qualified name that policies match by."""
        named = type(self.model) if isinstance(self.model, torch.nn.Module) else self.model
        return f"{named.__module__}.{getattr(named, '__qualname__', type(named).__qualname__)}"

    def call(self, model: Model) -> Any:
        """Call the model, or its compiled form, with the arguments."""
        return model(*self.args, **self.kwargs)

    def flat(self, model: Model) -> Callable[..., tuple[Any, ...]]:
        """Return the model as a function from flat inputs to flat outputs."""
        _, nested = _torch.tensors.flatten((self.args, dict(self.kwargs)))

        def run(*leaves: Any) -> tuple[Any, ...]:
            args, kwargs = nested(leaves)
            return tuple(_torch.tensors.flatten(model(*args, **kwargs))[0])

        return run

    def request(self) -> GraphRequest:
        """Return the call as a graph of one operation, in the current grad mode."""
        leaves, _ = _torch.tensors.flatten((self.args, dict(self.kwargs)))
        graph = torch.fx.Graph()
        inputs = tuple(graph.placeholder(f"input_{i}") for i in range(len(leaves)))
        graph.output(graph.call_module("whole", inputs))
        root = torch.nn.Module()
        root.add_module("whole", _Flat(self.model, self.flat(self.model)))
        return capture.read_request(torch.fx.GraphModule(root, graph), leaves)


class _Flat(torch.nn.Module):
    """Holds the model, so that its parameters and buffers are found."""

    def __init__(self, model: Model, run: Callable[..., tuple[Any, ...]]) -> None:
        super().__init__()
        self.model = model
        self.run = run

    def forward(self, *leaves: Any) -> tuple[Any, ...]:
        return self.run(*leaves)


def subject_of(made: Any, maker: str) -> Subject:
    """Return the subject that a factory made: ``(model, inputs)`` or ``(model, args, kwargs)``.

    ``inputs`` is a tuple or list of positional arguments, a mapping of arguments by name, or the
    only argument.

    Args:
        made: The return value of the factory.
        maker: The factory's name, for the error.

    Raises:
        OptionError: ``made`` has neither form.
    """
    parts = tuple(made) if isinstance(made, tuple | list) else ()
    if len(parts) not in (2, 3) or not callable(parts[0]):
        raise OptionError(
            f"{maker} gave {_kind(made)}; it has to return (module, inputs) or "
            "(module, args, kwargs)"
        )
    if len(parts) == 2:
        return _of_inputs(*parts)
    model, args, kwargs = parts
    if not isinstance(args, tuple | list) or not isinstance(kwargs, Mapping):
        raise OptionError(
            f"{maker} gave {_kind(made)}; in (module, args, kwargs) args is a tuple and kwargs "
            "a mapping"
        )
    return Subject(model, tuple(args), dict(kwargs))


def _of_inputs(model: Model, inputs: Any) -> Subject:
    if isinstance(inputs, Mapping):
        return Subject(model, (), dict(inputs))
    if isinstance(inputs, tuple | list):
        return Subject(model, tuple(inputs), {})
    return Subject(model, (inputs,), {})


def _kind(made: Any) -> str:
    """``"a tuple of Net, Tensor"``."""
    if not isinstance(made, tuple | list):
        return f"a {type(made).__name__}"
    names = ", ".join(type(each).__name__ for each in made)
    return f"a {type(made).__name__} of {names or 'nothing'}"
