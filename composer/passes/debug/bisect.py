"""Finds the pass that changed the numbers, and which of its matches did it."""

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
    """The first pass that makes the numbers differ from eager's.

    Attributes:
        name: The name of the pass.
        stage: Its stage.
        match: The first match that changes the numbers. It counts from 0, in the order in which the
            pass takes matches from :meth:`~composer.passes.GraphPass.chosen`. ``None`` if the pass
            does not use that method.
        matches: The number of all its matches; ``None`` in the same case.
        absolute: The largest absolute error of the first value that differs.
        relative: The largest relative error of that value.
        message: The name of that value, and how it differs.
    """

    name: str
    stage: str
    match: int | None
    matches: int | None
    absolute: float
    relative: float
    message: str

    def __str__(self) -> str:
        """Return the result as one sentence."""
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

    It compares with eager: the outputs, the inputs and the module's tensors after the run, and the
    gradients if inputs or parameters require grad. Every run gets copies of the inputs. After it
    the random state and the module's tensors are restored. The function is compiled about
    ``log2(passes) + log2(matches) + 4`` times. ``torch.compiler.reset()`` is called before each
    compile and at the end.

    Args:
        fn: A function or module that is not compiled.
        args: Its inputs.
        passes: The passes, as in a policy. They are searched in the order in which they run: by
            stage, then as listed.
        kwargs: Its keyword inputs.
        tolerance: ``{"rtol": ..., "atol": ...}``; the default is that of ``torch.testing`` for each
            dtype.
        options: Further fields of the policy. The default chain is ``["eager"]``.

    Returns:
        The culprit; ``None`` if all passes together keep the numbers.

    Raises:
        BisectError: Two runs in eager do not agree, or the chain without passes does not agree with
            eager.
        UnknownNameError, OptionError: An entry of ``passes`` is wrong.
    """
    shared = shared_passes(passes)
    given: list[Any] = list(shared.passes)
    if shared.partitioner:
        given.append(shared.partitioner)
    stages = list(Stage)
    ordered = tuple(sorted(given, key=lambda each: stages.index(_stage(each))))
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
        """Return how the numbers with the first ``count`` passes differ from eager's."""
        return self._deviation(self.passes[:count])

    def _deviation(self, passes: Sequence[Any]) -> Deviation | None:
        options = {**self.options, "passes": list(passes)}
        got = self.program.run(functools.partial(compiled_anew, options=options))
        return deviation(got, self.eager, self.tolerance)

    def culprit(self) -> Culprit | None:
        """Search for the culprit."""
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
        """Return which match of pass number ``count`` changes the numbers, and of how many."""
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
        """Return the deviation if all passes with the name of ``each`` share one match limit."""
        passes = list(self.passes[:count])
        for i, other in enumerate(passes):
            if isinstance(other, GraphPass) and other.name == each.name:
                passes[i] = other.limited(limit)
        return self._deviation(passes)


def _first_bad(good: int, bad: int, is_bad: Callable[[int], bool]) -> int:
    """Return the smallest bad number, by bisection between a good and a bad one."""
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (good, middle) if is_bad(middle) else (middle, bad)
    return bad
