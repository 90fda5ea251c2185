"""Runs passes in the given order, checks the rules after each, and records what each did."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

import torch.fx

from composer import _torch
from composer.errors import PassError, Refusal, class_and_text, text_of
from composer.passes.base import GraphPass, PassResult
from composer.passes.debug import dump
from composer.passes.invariants import Broken, Interface, enforce
from composer.passes.purity import eliminate_dead_code
from composer.passes.snapshot import Snapshot
from composer.records import PassRecord
from composer.system import control_flow

OnError = Literal["skip", "raise"]

Check = Callable[[GraphPass, Snapshot, torch.fx.GraphModule], None]
"""A function of a pass, the graph before it, and the graph after it. It raises ``Refusal`` if the
pass declares ``keeps_numbers`` and the numbers differ."""


@dataclass
class Pipeline:
    """Runs passes over one graph after the other, and records what each did.

    Attributes:
        on_error: ``"skip"`` rolls a failed pass back and goes on, ``"raise"`` raises.
        candidate: The candidate that the graph is made for; empty before all candidates.
        check: Compares numbers; called after each pass that changed the graph.
        records: One record for each run of a pass, in order.
    """

    on_error: OnError = "skip"
    candidate: str = ""
    check: Check | None = None
    records: list[PassRecord] = field(default_factory=list)

    def run(self, gm: torch.fx.GraphModule, passes: Iterable[GraphPass]) -> bool:
        """Run the passes over ``gm``, in place. Returns true if a pass changed it.

        Raises:
            PassError: A pass failed, and ``on_error`` is ``"raise"``.
        """
        changed: list[str] = []
        snapshot: Snapshot | None = None
        folder = dump.folder()
        for each in passes:
            snapshot = snapshot or Snapshot.of(gm)
            record, error = _run_one(gm, each, snapshot, changed, self.check)
            self.records.append(record)
            if error is not None and self.on_error == "raise":
                raise error
            if record.changed:
                changed.append(each.name)
                if folder is not None:
                    folder.write(each, self.candidate, snapshot, Snapshot.of(gm))
            if record.changed or error is not None:  # rolling back makes new nodes
                snapshot = None
        return bool(changed)

    def fail(self, passes: Iterable[GraphPass], rule: str, error: BaseException) -> None:
        """Record that these passes had no graph to run on.

        Raises:
            PassError: ``on_error`` is ``"raise"``.
        """
        for each in passes:
            failure = PassError(each.name, rule, class_and_text(error))
            self.records.append(PassRecord(each.name, str(each.stage), error=str(failure)))
            if self.on_error == "raise":
                raise failure from error


def _run_one(
    gm: torch.fx.GraphModule,
    each: GraphPass,
    before: Snapshot,
    earlier: list[str],
    check: Check | None,
) -> tuple[PassRecord, PassError | None]:
    started = time.perf_counter()
    nodes = len(before.lines)
    promised = Interface.of(gm, each.stage)
    error: PassError | None = None
    try:
        result = _rewrite(gm, each, before, promised)
        if result.changed and check is not None:
            _hold(gm, each, before, check)
    except Broken as broken:
        before.restore(gm)
        error = PassError(each.name, broken.rule, str(broken), broken.node, earlier)
        error.__cause__ = broken.__cause__ or broken
        result = PassResult(changed=False, matches=None)
    record = PassRecord(
        name=each.name,
        stage=str(each.stage),
        changed=result.changed,
        matches=result.matches,
        nodes_before=nodes,
        nodes_after=len(gm.graph.nodes),
        seconds=time.perf_counter() - started,
        error=str(error or ""),
    )
    return record, error


def _hold(gm: torch.fx.GraphModule, each: GraphPass, before: Snapshot, check: Check) -> None:
    try:
        check(each, before, gm)
    except Refusal as wrong:
        raise Broken("numbers", "", text_of(wrong)) from wrong


def _rewrite(
    gm: torch.fx.GraphModule, each: GraphPass, before: Snapshot, promised: Interface
) -> PassResult:
    try:
        with _torch.modes.restored_modes():  # it may run the graph
            returned = each.run(gm)
    except BaseException as error:
        control_flow.pass_on(error)
        raise Broken("raises", "", class_and_text(error)) from error
    matches = returned.matches if isinstance(returned, PassResult) else returned
    if not isinstance(matches, int | None):
        raise Broken("raises", "", f"run returned {matches!r}, not a count, a PassResult or None")
    if isinstance(matches, bool):  # it says if something changed, and is not a count
        matches = None
    if not before.differs(gm):
        return PassResult(changed=False, matches=matches)
    enforce(gm, each.stage, before, promised)
    if each.eliminates_dead_code:
        eliminate_dead_code(gm)
    gm.recompile()
    return PassResult(changed=True, matches=matches)
