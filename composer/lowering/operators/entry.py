"""The entry of one operator: all that composer knows of it beyond what the exporter does.

Every module of this package has the entries of one family of operators. An engine has entries of
its own for what is true of its kernels alone: they stand in its package, and go first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx

from composer.graphs.nodes import tensors_of

Function = Callable[..., Any]
Rule = Callable[[torch.fx.Node], str | None]
"""Says why a call must not be translated to ONNX; ``None`` if this rule knows of no reason."""

MOST_ADDED = 2**22
"""Elements of a tensor that eager does not make."""

WIDE = (torch.float32, torch.float64)
"""Dtypes that torch computes in as they are; halves it may widen in between."""


@dataclass(frozen=True, slots=True)
class Operator:
    """What composer knows of one operator.

    Attributes:
        decompose: Has the operator's signature, and writes a call out in other operators. It
            returns ``NotImplemented`` for a call that it leaves to the next entry: to composer's
            behind an engine's, to the exporter's decomposition behind composer's.
        or_whole: Such a call is left as it is instead.
        in_training: Stands in the place of ``decompose`` where a backward will be made.
        translate: The function that emits ONNX nodes for a call, in the place of the exporter's:
            ``"module:function"`` of :mod:`composer.lowering.operators.translations`.
        unsupported: Why a call must not be translated, though there is a translation.
    """

    decompose: Function | None = None
    or_whole: bool = field(default=False, kw_only=True)
    in_training: Function | None = field(default=None, kw_only=True)
    translate: str = field(default="", kw_only=True)
    unsupported: tuple[Rule, ...] = field(default=(), kw_only=True)


Operators = Mapping[Any, Operator]
"""Entries by operator. One of a packet, as ``aten.max``, holds for all of its overloads."""


def stays(*args: Any, **kwargs: Any) -> Any:
    """Leave every call to the next entry."""
    return NotImplemented


def always(why: str) -> Rule:
    """The rule that no call may be translated."""
    return lambda node: why


def of_integers(why: str) -> Rule:
    """The rule that no call may be translated that gives integers."""
    return lambda node: why if all(map(is_integral, tensors_of(node))) else None


def operands_of(node: torch.fx.Node) -> Iterator[torch.Tensor]:
    """The fake tensors that a call is given."""
    for source in node.all_input_nodes:
        yield from tensors_of(source)


def is_integral(value: torch.Tensor) -> bool:
    """Whether it holds integers; truth values are none."""
    return not value.dtype.is_floating_point and value.dtype is not torch.bool
