"""The entry of one operator: what composer knows about it in addition to the exporter.

Every module of this package has the entries of one family of operators. The package of an engine
may have more entries, for properties of that engine's kernels. These take precedence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx

from composer.graphs.nodes import tensors_of

Function = Callable[..., Any]
Rule = Callable[[torch.fx.Node], str | None]
"""Returns why a call must not be translated to ONNX; ``None`` if this rule does not forbid it."""


@dataclass(frozen=True, slots=True)
class Operator:
    """What composer knows of one operator.

    Attributes:
        decompose: A function with the operator's signature that writes a call as other operators.
            It returns ``NotImplemented`` for a call that it declines. Then the next decomposition
            is asked: composer's after an engine's, the exporter's after composer's.
        or_whole: True if a declined call stays as it is; the next decomposition is not asked.
        in_training: Used instead of ``decompose`` if a backward will be made.
        translate: The function that emits ONNX nodes for a call, used instead of the exporter's:
            ``"module:function"`` in :mod:`composer.lowering.operators.translations`.
        unsupported: Rules for calls that must not be translated although a translation exists.
    """

    decompose: Function | None = None
    or_whole: bool = field(default=False, kw_only=True)
    in_training: Function | None = field(default=None, kw_only=True)
    translate: str = field(default="", kw_only=True)
    unsupported: tuple[Rule, ...] = field(default=(), kw_only=True)


Operators = Mapping[Any, Operator]
"""Entries by operator. The entry of a packet, such as ``aten.max``, holds for all its overloads."""


def stays(*args: Any, **kwargs: Any) -> Any:
    """A decomposition that declines every call, which leaves it to the next entry."""
    return NotImplemented


def always(why: str) -> Rule:
    """The rule that no call of the operator may be translated."""
    return lambda node: why


def refuse_integers(why: str) -> Rule:
    """The rule that a call must not be translated if its results are integers."""
    return lambda node: why if all(map(is_integral, tensors_of(node))) else None


def numbers_of(node: torch.fx.Node) -> list[int | float]:
    """The Python numbers among the arguments of a call; a symbol is not one."""
    return [each for each in node.args if isinstance(each, int | float)]


def is_negative_zero(value: object) -> bool:
    """True for the number ``-0.0``, which compares equal to ``0.0``."""
    return isinstance(value, float) and value == 0 and math.copysign(1, value) < 0


def operands_of(node: torch.fx.Node) -> Iterator[torch.Tensor]:
    """The fake tensors that are the operands of a call."""
    for source in node.all_input_nodes:
        yield from tensors_of(source)


def is_integral(value: torch.Tensor) -> bool:
    """True for a tensor of integers; booleans are not integers here."""
    return not value.dtype.is_floating_point and value.dtype is not torch.bool
