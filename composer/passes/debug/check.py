"""Tests the rules for a pass; authors run it on their own passes."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from composer import _torch
from composer.errors import PassCheckError, PassError, causes, text_of
from composer.passes.base import GraphPass
from composer.passes.debug.compare import Program, compiled_anew, deviation
from composer.passes.debug.declaration import examine
from composer.passes.debug.examples import programs
from composer.passes.debug.watch import Again, Findings, Watched
from composer.passes.function import FunctionPass
from composer.passes.resolve import shared_passes
from composer.system import control_flow


@dataclass(frozen=True, slots=True)
class PassCheck:
    """The result of :func:`check` for a pass that breaks no rule.

    Attributes:
        name: The name of the pass.
        stage: Its stage.
        graphs: The number of graphs on which it ran.
        matches: The number of places that it rewrote, on all graphs.
        advice: Sentences about what is not an error but could be better.
    """

    name: str
    stage: str
    graphs: int
    matches: int
    advice: tuple[str, ...]

    def __str__(self) -> str:
        """Return the result as text, with one line for each advice."""
        says = f"pass {self.name!r} (stage {self.stage}) breaks no rule"
        counts = f"{self.matches} matches on {self.graphs} graphs"
        return "\n".join((f"{says}: {counts}", *(f"- advice: {each}" for each in self.advice)))


def check(
    my_pass: Any,
    fn: Callable[..., Any] | None = None,
    args: Sequence[Any] = (),
    *,
    kwargs: Mapping[str, Any] | None = None,
    tolerance: Mapping[str, float] | None = None,
    changes_numbers: bool = False,
) -> PassCheck:
    """Check a pass against every rule of :class:`~composer.passes.GraphPass`.

    Each program is compiled with the pass under chain ``["aot_eager"]``, without grad and in
    training. ``torch.compiler.reset()`` is called before each compile and at the end.

    Args:
        my_pass: A pass, its class, or any other entry of a policy's ``passes`` except a
            partitioner.
        fn: A function or module that the pass is meant for; by default several small programs.
        args: Its inputs.
        kwargs: Its keyword inputs.
        tolerance: ``{"rtol": ..., "atol": ...}``; the default is that of ``torch.testing`` for each
            dtype.
        changes_numbers: True if the pass is meant to change numbers. Outputs and gradients are then
            not compared with eager's.

    Returns:
        Counts of graphs and matches, with advice.

    Raises:
        PassCheckError: The pass breaks rules; the message names each of them.
        UnknownNameError, OptionError: ``my_pass`` is not a pass.
    """
    (each,) = shared_passes([my_pass]).passes
    given = programs()
    if fn is not None:
        title = getattr(fn, "__qualname__", type(fn).__qualname__)
        given = iter([(title, Program(fn, args, kwargs or {}))])
    findings = Findings()
    examine(each, findings)
    try:
        for title, program in given:
            one = _PassOnProgram(each, findings, title, tolerance, compares=not changes_numbers)
            with torch.no_grad():
                one.compiled(program)
            one.compiled(program.training())
            one.direct(program)
    finally:
        torch.compiler.reset()
    return _verdict(each, findings)


def _verdict(each: GraphPass, findings: Findings) -> PassCheck:
    if findings.errors:
        lines = [f"pass {each.name!r} breaks the rules: {', '.join(findings.errors)}"]
        for error in findings.errors.values():
            notes = getattr(error, "__notes__", ())
            lines.append("- " + ", ".join((str(error), *notes)))
        raise PassCheckError("\n".join(lines), list(findings.errors.values()))
    if not findings.changed:
        findings.advise("it changed no graph here; give check a program that it is meant for")
    elif not findings.taken and not isinstance(each, FunctionPass):
        findings.advise("it does not iterate over self.chosen(...); bisect cannot find its match")
    advice = tuple(findings.advice)
    return PassCheck(each.name, str(each.stage), findings.graphs, findings.matches, advice)


@dataclass(frozen=True, slots=True)
class _PassOnProgram:
    """One pass on one program."""

    each: GraphPass
    findings: Findings
    title: str
    tolerance: Mapping[str, float] | None
    compares: bool

    def options(self) -> dict[str, Any]:
        """Return options that compile with the pass, and raise if it breaks a rule."""
        passes = [Watched(self.each, self.findings), Again(self.each, self.findings)]
        return {**_ALONE, "passes": passes, "on_pass_error": "raise"}

    def compiled(self, program: Program) -> None:
        """Compile the program with the pass, run it, and compare with eager."""
        eager = program.run()
        where = f"on {self.title}" + (" in training" if torch.is_grad_enabled() else "")
        try:
            got = program.run(functools.partial(compiled_anew, options=self.options()))
        except BaseException as error:  # noqa: BLE001  # becomes the rule that was broken
            control_flow.pass_on(error)
            alone = functools.partial(program.run, functools.partial(compiled_anew, options=_ALONE))
            self._broke(error, where, alone)
            return
        off = deviation(got, eager, self.tolerance) if self.compares else None
        if off is not None:
            self.findings.broke(PassError(self.each.name, "numbers", f"{off}, {where}"))

    def direct(self, program: Program) -> None:
        """Run the pass on a graph that holds its weights, and check that it does not change them.

        Such a graph comes from a call of composer without Dynamo.
        """
        if not isinstance(program.fn, torch.nn.Module):
            return
        try:
            gm = torch.fx.symbolic_trace(copy.deepcopy(program.fn))
        except Exception:  # noqa: BLE001  # only Dynamo can trace it, as the other methods do
            return
        code, state = gm.code, _copied(gm)
        compose: Any = _torch.dynamo.lookup_backend("composer")
        inputs = list(program.args)
        try:
            compose(gm, inputs, options=self.options())
        except BaseException as error:  # noqa: BLE001  # likewise
            control_flow.pass_on(error)
            alone = functools.partial(compose, gm, inputs, options=_ALONE)
            self._broke(error, f"on {self.title}, called without Dynamo", alone)
        if gm.code != code:
            what = f"it changed the captured graph of {self.title}"
            self.findings.broke(PassError(self.each.name, "captured_graph", what))
        off = deviation(_copied(gm), state, _EXACTLY)
        if off is not None:
            self.findings.broke(PassError(self.each.name, "weights", f"{off}, on {self.title}"))

    def _broke(self, error: BaseException, where: str, alone: Callable[[], Any]) -> None:
        """Note the broken rule.

        If the error is not a ``PassError``, the program is compiled without the pass. An error
        there is the program's own, and is raised.
        """
        found = next((each for each in causes(error) if isinstance(each, PassError)), None)
        if found is None:
            alone()
            found = PassError(self.each.name, "compiles", f"{text_of(error)}, {where}")
            found.__cause__ = error
        else:
            found.add_note(where)
        self.findings.broke(found)


_ALONE = {"chain": ["aot_eager"], "strict": True, "locked": False}
_EXACTLY = {"rtol": 0.0, "atol": 0.0}


def _copied(gm: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in gm.state_dict().items()}
