"""Which pass changed the numbers, and which of its matches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from composer import _torch
from composer.errors import BisectError
from composer.graphs.comparison import Values
from composer.passes.base import GraphPass, MatchLimit
from composer.passes.debug.compare import Deviation, Program, compiled_anew, deviation
from composer.passes.function import qualified_name
from composer.passes.resolve import shared_passes
from composer.records import Stage


@dataclass(frozen=True, slots=True)
class Culprit:
    """The first pass with which the numbers are no longer those of eager.

    ``match`` is the first match of it that does so, counted from 0 in the order in which the pass
    takes them from :meth:`~composer.passes.GraphPass.chosen`, of ``matches`` in all; both are
    ``None`` for a pass that does not take them from there. ``absolute`` and ``relative`` are the
    largest errors of the first value that is off; ``message`` says which, and how.
    """

    name: str
    stage: str
    match: int | None
    matches: int | None
    absolute: float
    relative: float
    message: str

    def __str__(self) -> str:
        """What a person reads."""
        which = "" if self.match is None else f", from match {self.match} of {self.matches} on"
        return f"pass {self.name!r} (stage {self.stage}) changes the numbers{which}: {self.message}"


def bisect(
    fn: Callable[..., Any],
    args: Sequence[Any],
    *,
    passes: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    tolerance: Mapping[str, float] | None = None,
    options: Mapping[str, Any] | None = None,
) -> Culprit | None:
    """Find the first pass, and its first match, that changes what a function computes.

    Compared with eager are outputs, inputs and the module's tensors afterwards, and gradients
    where inputs or parameters require grad. Inputs are copied, the random state and the module's
    tensors restored, for every run. The function is compiled about ``log2(passes) +
    log2(matches) + 4`` times; ``torch.compiler.reset()`` is called before each and at the end.

    Args:
        fn: A function or module, not compiled.
        args: Its inputs.
        passes: As in a policy. Searched in the order in which they run: by stage, then as listed.
        kwargs: Its keyword inputs.
        tolerance: ``{"rtol": ..., "atol": ...}``; by default those of ``torch.testing`` for each
            dtype.
        options: Further fields of the policy; the chain is ``["eager"]`` where it is not given.

    Returns:
        The culprit; ``None`` where all passes together keep the numbers.

    Raises:
        BisectError: two runs in eager do not agree, or the chain without passes and eager.
        UnknownNameError, OptionError: a slip in ``passes``.
    """
    shared = shared_passes(passes)
    given = [*shared.passes, *([shared.partitioner] if shared.partitioner else [])]
    ordered = tuple(sorted(given, key=_position))
    program = Program(fn, args, kwargs or {})
    eager = program.run()
    itself = deviation(program.run(), eager, tolerance)
    if itself is not None:
        raise BisectError(f"two runs in eager do not agree: {itself}")
    chosen = {"chain": ["eager"], "locked": False, **(options or {})}
    search = _Search(program, ordered, tolerance, chosen, eager)
    try:
        with _torch.inductor.fresh_compiles():
            return search.culprit()
    finally:
        torch.compiler.reset()


def _position(each: Any) -> int:
    return list(Stage).index(_stage(each))


def _stage(each: Any) -> Stage:
    return Stage(each.stage) if isinstance(each, GraphPass) else Stage.PARTITIONER


@dataclass(frozen=True, slots=True)
class _Search:
    program: Program
    passes: tuple[Any, ...]
    tolerance: Mapping[str, float] | None
    options: Mapping[str, Any]
    eager: Values

    def deviation(self, count: int) -> Deviation | None:
        """How the numbers of the first so many passes differ from eager's."""
        return self._deviation(self.passes[:count])

    def _deviation(self, passes: Sequence[Any]) -> Deviation | None:
        options = {**self.options, "passes": list(passes)}
        got = self.program.run(functools.partial(compiled_anew, options=options))
        return deviation(got, self.eager, self.tolerance)

    def culprit(self) -> Culprit | None:
        """The end of the search."""
        alone = self.deviation(0)
        if alone is not None:
            chain = self.options["chain"]
            raise BisectError(f"without any pass, under chain {chain} already, {alone}")
        found = self.deviation(len(self.passes))
        if found is None:
            return None
        count = _first_bad(0, len(self.passes), lambda n: self.deviation(n) is not None)
        each, found = self.passes[count - 1], self.deviation(count) or found
        match, matches = self._match(count, each) if isinstance(each, GraphPass) else (None, None)
        name = each.name if isinstance(each, GraphPass) else qualified_name(each)
        sizes = found.absolute, found.relative
        return Culprit(name, str(_stage(each)), match, matches, *sizes, str(found))

    def _match(self, count: int, each: GraphPass) -> tuple[int | None, int | None]:
        """Which match of the last of so many passes changes the numbers, and of how many."""
        every, earlier = MatchLimit(), MatchLimit()
        self._limited(count, each, every)
        self._limited(count - 1, each, earlier)  # passes with the same name before it
        if every.taken == earlier.taken or self._differs(count, each, earlier.taken):
            return None, None
        bad = _first_bad(earlier.taken, every.taken, lambda n: self._differs(count, each, n))
        return bad - earlier.taken - 1, every.taken - earlier.taken

    def _differs(self, count: int, each: GraphPass, matches: int) -> bool:
        return self._limited(count, each, MatchLimit(matches)) is not None

    def _limited(self, count: int, each: GraphPass, limit: MatchLimit) -> Deviation | None:
        """The deviation where one limit holds for all passes of a name."""
        return self._deviation(
            [
                other.limited(limit)
                if isinstance(other, GraphPass) and other.name == each.name
                else other
                for other in self.passes[:count]
            ]
        )


def _first_bad(good: int, bad: int, is_bad: Callable[[int], bool]) -> int:
    """Halve what lies between a number known to be good and one known to be bad."""
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (good, middle) if is_bad(middle) else (middle, bad)
    return bad
