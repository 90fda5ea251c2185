"""Checks an engine against the contract of a backend, for the tests of the engine's author."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from composer.errors import MISTAKES, BackendCheckError, CandidateError, causes, error_line
from composer.passes.base import GraphPass
from composer.passes.debug.compare import Program, deviation
from composer.passes.debug.examples import programs
from composer.policy import Candidate, Policy
from composer.records import Attempt, CompileReport, Reason, Status
from composer.system import control_flow
from composer.testing.expectation import expect

_PROGRAMS = ("elementwise", "attention", "in_place")
_UNKNOWN = "no_engine_has_this_option"
_CHILD_SECONDS = 300.0
_TOLERANCE = {"rtol": 1e-3, "atol": 1e-4}
_ALONE: dict[str, Any] = {"strict": True, "verify": "compile", "on_runtime_error": "raise"}
_ALONE |= {"min_coverage": 0.0, "locked": False, "precision": "fp32"}
_ALONE |= {"select": {"by": "first", "background": False}}
_RULES: dict[Reason | None, str] = {
    Reason.RETURNED_ORIGINAL: "work",
    Reason.WRONG_PROVIDER: "work",
    Reason.MUTATED_INPUTS: "inputs",
    Reason.NUMERIC_MISMATCH: "numbers",
    Reason.NON_FINITE: "numbers",
    Reason.OUTPUT_MISMATCH: "numbers",
    Reason.RAISED_AT_RUNTIME: "calls",
}
"""The rule that is broken if an attempt ends with the reason, whatever the step of the check."""
_PERILS = {Status.CRASHED, Status.TIMED_OUT, Reason.OUT_OF_MEMORY}
"""The results in the child process that end the check, so that they do not happen in this one."""
_WHERE = {
    "process": "in a second process",
    "builds": "without grad",
    "dialect": "with a graph of ATen",
    "dynamic": "with dynamic sizes",
    "training": "in training",
}


class _LeavesATen(GraphPass):
    """Adds an operation that nobody reads: it is dropped, and the graph stays one of ATen."""

    def run(self, gm: torch.fx.GraphModule) -> None:
        """Add it, for the first input that is a tensor."""
        for node in gm.graph.find_nodes(op="placeholder"):
            if isinstance(node.meta["val"], torch.Tensor):
                with gm.graph.inserting_after(node):
                    gm.graph.call_function(torch.ops.aten.alias.default, (node,))
                return


@dataclass(frozen=True, slots=True)
class BackendCheck:
    """The result of :func:`check_backend` for an engine that breaks no rule.

    Attributes:
        name: The engine's name in reports.
        graphs: How many graphs it served.
        declined: What it declined and why, a sentence each. Declining breaks no rule.
    """

    name: str
    graphs: int
    declined: tuple[str, ...]

    def __str__(self) -> str:
        """Return the result as text."""
        says = f"backend {self.name!r} breaks no rule: it served {self.graphs} graphs"
        return "\n".join((says, *(f"- {each}" for each in self.declined)))


def check_backend(
    candidate: Any,
    fn: Callable[..., Any] | None = None,
    args: Sequence[Any] = (),
    *,
    kwargs: Mapping[str, Any] | None = None,
    tolerance: Mapping[str, float] | None = None,
) -> BackendCheck:
    """Check an engine against the contract of a backend, rule by rule.

    The engine runs through ``torch.compile``, alone in a chain. It runs first in a child process,
    so that a crash or a hang does not end the test. Then it runs here without grad, with a graph of
    ATen, with dynamic sizes and in training. ``torch.compiler.reset()`` is called before each
    compile and at the end. The rules are

    - ``process``: the engine builds and runs in a second process without ending the process;
    - ``serves``: it is available, and serves at least one graph;
    - ``builds``, ``dialect``, ``dynamic``, ``training``: no build fails; a graph may be declined;
    - ``work``: the engine does the work itself;
    - ``numbers``: outputs and gradients are eager's, at the first call and at later ones;
    - ``inputs``: inputs and weights are the same after a call as with eager;
    - ``calls``: no call raises;
    - ``options``: an option that the engine does not know is refused.

    Args:
        candidate: A candidate as in a chain: a name, a callable, or a table with ``options`` and
            limits.
        fn: A function or module that the engine is meant for; by default three small programs.
        args: Inputs of ``fn``.
        kwargs: Keyword inputs of ``fn``.
        tolerance: ``{"rtol": ..., "atol": ...}`` for all calls after the first. The first is
            verified as with the policy's ``verify = "compile"``.

    Returns:
        The number of graphs that the engine served, and what it declined.

    Raises:
        BackendCheckError: rules are broken; the error names each one.
        OptionError, UnknownNameError: ``candidate`` is not the name of an engine.
    """
    (entry,) = Policy(chain=(candidate,)).chain
    if fn is None:
        tried = [program for name, program in programs() if name in _PROGRAMS]
    else:
        tried = [Program(fn, args, kwargs or {})]
    contract = _Contract(entry, tolerance or _TOLERANCE)
    try:
        if contract.survives(tried[0]):
            contract.here(tried)
    finally:
        torch.compiler.reset()
    return contract.verdict()


class _Contract:
    """The check of one engine, with the results so far."""

    def __init__(self, entry: Candidate, tolerance: Mapping[str, float]) -> None:
        self._entry = entry
        self._tolerance = tolerance
        self._graphs = 0
        self._declined: list[str] = []
        self._broken: dict[str, str] = {}

    def survives(self, program: Program) -> bool:
        """Build and run in a child process; return True if it is safe to go on in this one."""
        timeout = self._entry.timeout or _CHILD_SECONDS
        with torch.no_grad():
            refused = self._try("process", [program], isolate=True, timeout=timeout)
        return refused is None or not _PERILS & {refused.status, refused.reason}

    def here(self, tried: Sequence[Program]) -> None:
        """Try the programs here: without grad, in ATen, with dynamic sizes, in training."""
        for program in tried:
            with torch.no_grad():
                other = program.changed(lambda value: value * 0.5 + 0.25)
                if self._try("builds", [program, other]) is not None:
                    continue
                self._try("dialect", [program], passes=[_LeavesATen()])
                grown = program.changed(_doubled)
                if _runs(grown):
                    self._try("dynamic", [program, grown], dynamic=True)
            self._try("training", [program.training()])
        if self._graphs:
            self._refuses_unknown_options(tried[0])
        elif not self._broken:
            self._broken["serves"] = "; ".join(self._declined)

    def verdict(self) -> BackendCheck:
        """Return the result of the check, or raise an error that names the broken rules."""
        name, broken = self._entry.name, self._broken
        if len(broken) > 1 and not self._graphs:
            broken.pop("process", None)  # it fails there for what it fails for here
        if broken:
            raise BackendCheckError(name, broken)
        return BackendCheck(name, self._graphs, tuple(dict.fromkeys(self._declined)))

    def _try(
        self,
        rule: str,
        inputs: Sequence[Program],
        dynamic: bool | None = None,
        passes: Sequence[GraphPass] = (),
        **settings: Any,
    ) -> Attempt | None:
        """Compile one function, run it on inputs in turn, and compare with eager.

        The result is the attempt, if it was not accepted.
        """
        wanted = [each.run() for each in inputs]
        try:
            with expect() as reports:
                run = self._compiled(inputs[0], dynamic, passes, **settings)
                got = [each.run(lambda _: run) for each in inputs]
        except BaseException as error:  # noqa: BLE001  # becomes the rule that was broken
            control_flow.pass_on(error)
            return self._note(rule, error)
        self._count(reports)
        for values, expected in zip(got, wanted, strict=True):
            off = deviation(values, expected, self._tolerance)
            if off is not None:
                broken = "inputs" if off.value.endswith(" afterwards") else "numbers"
                self._broken.setdefault(broken, f"{off}, {_WHERE[rule]}")
        return None

    def _compiled(
        self,
        program: Program,
        dynamic: bool | None = None,
        passes: Sequence[GraphPass] = (),
        **settings: Any,
    ) -> Any:
        """Compile a program with the engine alone, with other settings of the candidate."""
        chain = [self._entry.model_copy(update=settings)]
        options = {**_ALONE, "chain": chain, "passes": [*passes]}
        torch.compiler.reset()
        return torch.compile(program.fn, backend="composer", options=options, dynamic=dynamic)

    def _count(self, reports: Sequence[CompileReport]) -> None:
        """Count the graphs that the engine served; a switch of the environment may prevent some."""
        served = [each.chosen == self._entry.name for each in reports]
        self._graphs += sum(served)
        if not all(served) or not served:
            self._broken["serves"] = "a graph was not given to it, or eager serves in its place"

    def _note(self, rule: str, error: BaseException) -> Attempt | None:
        chain = tuple(causes(error))
        attempt = next((e.attempt for e in chain if isinstance(e, CandidateError)), None)
        if any(isinstance(each, MISTAKES) for each in chain):
            raise error
        if attempt is None:
            self._broken.setdefault("calls", f"{error_line(error)}, {_WHERE[rule]}")
        elif attempt.status is Status.DECLINED:
            self._declined.append(f"{attempt.sentence()}, {_WHERE[rule]}")
        else:
            broken = _broken_rule(rule, attempt)
            self._broken.setdefault(broken, f"{attempt.sentence()}, {_WHERE[rule]}")
        return attempt

    def _refuses_unknown_options(self, program: Program) -> None:
        run = self._compiled(program, options={**self._entry.options, _UNKNOWN: 1})
        try:
            with torch.no_grad():
                program.run(lambda _: run)
        except BaseException as error:  # noqa: BLE001  # any refusal will do
            control_flow.pass_on(error)
        else:
            self._broken["options"] = f"it took the option {_UNKNOWN!r}, and did not say no"


def _broken_rule(tried: str, attempt: Attempt) -> str:
    """Return the rule that a failed attempt breaks, of a try for another rule."""
    if attempt.status is Status.UNAVAILABLE:
        return "serves"
    if tried == "process":
        return tried
    return _RULES.get(attempt.reason, tried)


def _runs(program: Program) -> bool:
    """Return True if eager accepts these inputs: the sizes of some inputs may have to agree."""
    try:
        program.run()
    except (RuntimeError, ValueError, IndexError):
        return False
    return True


def _doubled(value: torch.Tensor) -> torch.Tensor:
    if not value.dim():
        return value
    return torch.cat([value, value])
