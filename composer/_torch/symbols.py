"""Sizes that are symbols."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
import torch.fx

recaptured_numbers: ContextVar[Mapping[Any, Any]] = ContextVar("numbers", default={})  # noqa: B039
"""The values of the symbols in the call for which a graph is compiled again."""


def hint(size: Any) -> Any:
    """The value a symbolic number has in the call that is compiled for; adds no guard.

    That is the first call, or the one for which a graph is compiled again. Anything else is given
    back as it is.
    """
    if not isinstance(size, torch.SymInt | torch.SymFloat):
        return size
    expression, numbers = size.node.expr, recaptured_numbers.get()
    if not numbers or not expression.free_symbols <= numbers.keys():
        return size.node.hint
    number = expression.subs(numbers)
    return int(number) if isinstance(size, torch.SymInt) else float(number)


def symbols(size: Any) -> frozenset[str]:
    """Names of the symbols in a size; none for a number. Asking adds no guard."""
    if not isinstance(size, torch.SymInt):
        return frozenset()
    return frozenset(map(str, size.node.expr.free_symbols))


def size_with(size: Any, values: Mapping[str, int]) -> int:
    """What a size is where its symbols have these values."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    given = {each: values[str(each)] for each in size.node.expr.free_symbols}
    return int(size.node.expr.subs(given))


def symbol_facts(size: torch.SymInt) -> dict[str, tuple[int | None, int | None, int | None]]:
    """For each symbol in a size: its value in the first call, and its bounds.

    The value is ``None`` for a size that only the data tells, a bound where there is none.
    """
    env = size.node.shape_env
    hints = env.backed_var_to_val if hasattr(env, "backed_var_to_val") else env.var_to_val
    facts: dict[str, tuple[int | None, int | None, int | None]] = {}
    for symbol in size.node.expr.free_symbols:
        known = env.var_to_range.get(symbol)
        low, top = map(_finite, (known.lower, known.upper)) if known else (0, None)
        value = hints.get(symbol)
        facts[str(symbol)] = (None if value is None else int(value), low, top)
    return facts


def is_same_size(a: Any, b: Any) -> bool:
    """Whether two sizes are equal for all that the graph's guards say; asking adds none."""
    if isinstance(a, torch.SymInt) and isinstance(b, torch.SymInt):
        return bool(a.node.expr == b.node.expr)
    return isinstance(a, int) and isinstance(b, int) and a == b


def depends_on_data(size: Any) -> bool:
    """Whether a size is known only once the graph runs; a question about it cannot be guarded."""
    if not isinstance(size, torch.SymInt):
        return False
    return any(value is None for value, _, _ in symbol_facts(size).values())


def least(size: Any) -> int | None:
    """The least that a size can be, by the bounds of its symbols; ``None`` where there is none."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    return _finite(size.node.shape_env.bound_sympy(size.node.expr).lower)


def _finite(bound: Any) -> int | None:
    return int(bound) if bound.is_Integer else None


def guards_on(values: Iterable[Any]) -> int:
    """How many guards stand on the sizes that these symbolic numbers, or tensors, have."""
    for value in values:
        for size in value.shape if isinstance(value, torch.Tensor) else (value,):
            if isinstance(size, torch.SymInt):
                return len(size.node.shape_env.guards)
    return 0


def with_symbols(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> list[Any]:
    """The inputs of a call as Dynamo passes them to a backend: symbols stand for numbers."""
    fakes = (node.meta.get("example_value") for node in gm.graph.find_nodes(op="placeholder"))
    pairs = zip(fakes, inputs, strict=True)
    return [fake if isinstance(fake, torch.SymInt) else value for fake, value in pairs]
