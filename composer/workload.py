"""A model to measure and what to call it with, as a function of the user's makes them."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from composer.errors import OptionError


@dataclass(frozen=True, slots=True)
class Model:
    """A module, or a function, and the arguments of a call."""

    module: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Workload:
    """``module:factory`` and what the factory is called with.

    The factory returns ``(module, inputs)``, where ``inputs`` is a tensor, a tuple of arguments or
    a mapping of keyword arguments; or ``(module, args, kwargs)``.
    """

    target: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        """``"my_models:encoder(batch=8)"``."""
        given = ", ".join(f"{name}={value!r}" for name, value in self.arguments.items())
        return f"{self.target}({given})" if given else self.target

    def build(self) -> Model:
        """Import the factory and call it; what it raises is the user's to see.

        Raises:
            OptionError: there is no such function, or it returned something else.
        """
        made = _factory(self.target)(**self.arguments)
        match made:
            case (module, args, Mapping() as kwargs) if callable(module):
                return Model(module, _as_args(args), kwargs)
            case (module, Mapping() as kwargs) if callable(module):
                return Model(module, (), kwargs)
            case (module, inputs) if callable(module):
                return Model(module, _as_args(inputs))
        raise OptionError(
            f"{self} returned {type(made).__name__}; it is to return (module, inputs), where "
            "inputs is a tensor, a tuple or a mapping, or (module, args, kwargs)"
        )


def _as_args(inputs: Any) -> tuple[Any, ...]:
    if isinstance(inputs, tuple | list):
        return tuple(inputs)
    if isinstance(inputs, torch.Tensor):
        return (inputs,)
    raise OptionError(f"inputs are {type(inputs).__name__}, not a tensor, a tuple or a mapping")


def _factory(target: str) -> Callable[..., Any]:
    if ":" not in target:
        raise OptionError(f"{target!r} names no function; write it as module:function")
    try:
        found = pkgutil.resolve_name(target)
    except (ImportError, AttributeError, ValueError) as error:
        raise OptionError(f"{target!r} cannot be imported: {error}") from error
    if not callable(found):
        raise OptionError(f"{target!r} is {type(found).__name__}, not a function")
    return found  # type: ignore[no-any-return]  # callable() does not tell mypy
