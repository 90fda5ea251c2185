"""Sizes that are symbols."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, cast

import torch
import torch.fx

from composer._torch.names import optional
from composer._torch.sources import example_values

_LARGE_SIZE = 8192
"""The value that torch itself assumes for an unbacked size, where it has to choose."""


def hint(size: Any) -> Any:
    """The value of a symbolic number in the call that is compiled for. Asking adds no guard.

    That call is the first one, or the one for which a graph is compiled again. Any other value is
    returned as it is.
    """
    if not isinstance(size, torch.SymInt | torch.SymFloat):
        return size
    noted = _noted_numbers(size)  # values of sizes to which torch gives none
    if not noted and size.node.hint is not None:
        return size.node.hint
    return _with_numbers(size, noted)


def value_for_strides(size: Any) -> Any:
    """The value of a size or stride for comparing strides.

    It is that of :func:`hint`, but a large number for a size of an input that is marked as
    unbacked. In the first call such a size may be 0 or 1, and then two orders of memory cannot be
    told apart.
    """
    if not isinstance(size, torch.SymInt) or size.node.hint is not None:
        return hint(size)
    return _with_numbers(size, dict.fromkeys(size.node.shape_env.unbacked_inputs, _LARGE_SIZE))


def _with_numbers(size: torch.SymInt | torch.SymFloat, numbers: Mapping[Any, Any]) -> Any:
    """The value of a symbolic number for these values of symbols; other symbols keep their own.

    If a symbol has no value, it is torch's own hint, which may be ``None``.
    """
    expression, env = size.node.expr, size.node.shape_env
    if not expression.free_symbols <= {*numbers, *env.backed_var_to_val}:
        return size.node.hint
    number = expression.subs({**env.backed_var_to_val, **numbers})
    return int(number) if isinstance(size, torch.SymInt) else float(number)


@contextlib.contextmanager
def with_values(sizes: Iterable[torch.SymInt], values: Iterable[int]) -> Iterator[None]:
    """Make :func:`hint` return these values while a graph is compiled again for another call.

    ``sizes`` are symbols of that graph, so they have one shape environment. The caller must hold
    the compile lock, because the values hold for all threads.
    """
    pairs = list(zip(sizes, values, strict=True))
    noted = _noted_numbers(pairs[0][0]) if pairs else {}
    before = dict(noted)
    noted.update((size.node.expr, value) for size, value in pairs)
    try:
        yield
    finally:
        for size, _ in pairs:
            noted.pop(size.node.expr, None)
        noted.update(before)


def learn_sizes(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Note the values that unbacked sizes of inputs have in the call that is compiled for.

    These are the sizes marked by ``mark_unbacked``. Torch gives them no value, so that nothing can
    be guarded on them. :func:`hint` returns the noted values, for code that runs the graph on these
    inputs.
    """
    for fake, value in zip(example_values(gm), inputs, strict=True):
        if not isinstance(fake, torch.Tensor) or not isinstance(value, torch.Tensor):
            continue
        sizes: Iterable[tuple[Any, Any]] = zip(fake.shape, value.shape, strict=True)
        for size, number in sizes:
            if is_unbacked(size) and isinstance(number, int):
                _noted_numbers(size)[size.node.expr] = number


def _noted_numbers(size: torch.SymInt | torch.SymFloat) -> dict[Any, Any]:
    """The noted values, kept in the shape environment that the symbols belong to."""
    env: Any = size.node.shape_env
    return cast("dict[Any, Any]", vars(env).setdefault("_composer_numbers", {}))


def symbols(size: Any) -> frozenset[str]:
    """Names of the symbols in a size; none for a number. Asking adds no guard."""
    return frozenset(map(str, _free_symbols(size)))


def _free_symbols(size: Any) -> Set[Any]:
    return size.node.expr.free_symbols if isinstance(size, torch.SymInt) else frozenset()


def size_with(size: Any, values: Mapping[str, int]) -> int:
    """The value of a size for these values of its symbols."""
    replacements = {symbol: values[str(symbol)] for symbol in _free_symbols(size)}
    return int(size.node.expr.subs(replacements)) if replacements else int(size)


def symbol_facts(size: torch.SymInt) -> dict[str, tuple[int | None, int | None, int | None]]:
    """For each symbol in a size: its value in the first call, its lower bound and its upper bound.

    The value is ``None`` for an unbacked symbol. A bound is ``None`` if there is none; a symbol
    without a range is at least 0.
    """
    env = size.node.shape_env
    facts: dict[str, tuple[int | None, int | None, int | None]] = {}
    for symbol in size.node.expr.free_symbols:
        value = env.backed_var_to_val.get(symbol)
        known = env.var_to_range.get(symbol)
        low, top = map(_finite, (known.lower, known.upper)) if known else (0, None)
        facts[str(symbol)] = (None if value is None else int(value), low, top)
    return facts


def is_same_size(a: Any, b: Any) -> bool:
    """True if two sizes are equal by the guards that the graph has. Asking adds no guard."""
    if isinstance(a, torch.SymInt) and isinstance(b, torch.SymInt):
        return bool(a.node.expr == b.node.expr)
    return isinstance(a, int) and isinstance(b, int) and a == b


def is_unbacked(size: Any) -> bool:
    """True if torch has no value for a size, so that no question about it can be guarded.

    Such a size depends on data, or an input is marked so (``mark_unbacked``).
    """
    free = _free_symbols(size)
    return any(symbol not in size.node.shape_env.backed_var_to_val for symbol in free)


def depends_on_data(size: Any) -> bool:
    """True if a size is known only once the graph has run up to it."""
    if not isinstance(size, torch.SymInt):
        return False
    env = size.node.shape_env
    return not size.node.expr.free_symbols <= {*env.backed_var_to_val, *env.unbacked_inputs}


def may_be_empty(value: torch.Tensor) -> bool:
    """True if a tensor has no elements, or if that is not known.

    Asking adds a guard if torch has a value for the size. An unbacked size of an input is assumed
    not to be zero: composer leaves calls in which it is zero to eager.
    """
    return any(map(_may_be_zero, value.shape))


def _may_be_zero(size: Any) -> bool:
    return _lower_bound_is_zero(size) if is_unbacked(size) else bool(size == 0)


@optional(
    "taking operators that need an element, where a size of an input is marked as unbacked",
    "torch.utils._sympy.numbers:int_oo",
    *(f"torch.utils._sympy.value_ranges:{each}" for each in ("ValueRanges", "bound_sympy")),
    without=lambda size: True,
)
def _lower_bound_is_zero(size: torch.SymInt) -> bool:
    from torch.utils._sympy.numbers import int_oo
    from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

    env, inputs = size.node.shape_env, size.node.shape_env.unbacked_inputs
    ranges = {n: env.bound_sympy(n) for n in size.node.expr.free_symbols}
    ranges |= {n: ranges[n] & ValueRanges(1, int_oo) for n in ranges.keys() & inputs}
    return bool(bound_sympy(size.node.expr, ranges).lower < 1)


def least(size: Any) -> int | None:
    """The least value of a size, by the bounds of its symbols; ``None`` if there is no bound."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    return _finite(size.node.shape_env.bound_sympy(size.node.expr).lower)


def _finite(bound: Any) -> int | None:
    return int(bound) if bound.is_Integer else None


def guards_on(values: Iterable[Any]) -> int:
    """The number of guards on sizes in the compile that these tensors or numbers belong to."""
    symbolic = list(itertools.chain.from_iterable(map(symbolic_numbers, values)))
    return len(symbolic[0].node.shape_env.guards) if symbolic else 0


def without_guards(size: Any) -> contextlib.AbstractContextManager[None]:
    """Set no guards while a graph is made, in the compile that a symbolic size belongs to.

    It is for operators whose result is the same whichever way torch's questions are answered.
    """
    return cast("contextlib.AbstractContextManager[None]", size.node.shape_env.suppress_guards())


def symbolic_numbers(value: Any) -> list[Any]:
    """The symbolic numbers among the sizes of a tensor, or a number itself if it is symbolic."""
    numbers = value.shape if isinstance(value, torch.Tensor) else (value,)
    return [each for each in numbers if isinstance(each, torch.SymInt | torch.SymFloat)]


def with_symbols(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> list[Any]:
    """The inputs of a call as Dynamo passes them to a backend, with symbols in place of numbers."""
    pairs = zip(example_values(gm), inputs, strict=True)
    return [fake if isinstance(fake, torch.SymInt) else value for fake, value in pairs]
