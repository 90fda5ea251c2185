"""The stages that run within each candidate: ``joint``, the partitioner and ``post_grad``."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch.fx

from composer import _torch
from composer.errors import PassError, class_and_text
from composer.passes.function import qualified_name
from composer.passes.pipeline import Pipeline
from composer.passes.resolve import SharedPasses
from composer.passes.snapshot import Snapshot
from composer.records import PassRecord, Stage
from composer.system import control_flow

_LATE = (Stage.JOINT, Stage.POST_GRAD)

Partitioner = Callable[..., tuple[torch.fx.GraphModule, torch.fx.GraphModule]]


class LatePasses:
    """Runs the shared passes for one candidate, on each of AOTAutograd's graphs."""

    def __init__(self, shared: SharedPasses | None = None, candidate: str = "") -> None:
        self.shared = shared or SharedPasses()
        self.candidate = candidate
        self._records: dict[tuple[Stage, bool], list[PassRecord]] = {}

    @property
    def records(self) -> tuple[PassRecord, ...]:
        """One record for each pass that ran; the forward and the backward graph are summed."""
        return tuple(record for group in self._records.values() for record in group)

    def rewrites(self, stage: Stage) -> bool:
        """True if there is a pass of this stage."""
        return bool(self.shared.at(stage))

    def run(
        self, stage: Stage, gm: torch.fx.GraphModule, *, inference: bool, last: bool = False
    ) -> None:
        """Run the passes of one stage over ``gm``, in place.

        Args:
            stage: ``joint`` or ``post_grad``.
            gm: One of AOTAutograd's graphs.
            inference: True if it has no backward.
            last: True to run the passes that come after the engine's own rewrites, false for those
                that come before.

        Raises:
            PassError: A pass failed, and the policy says ``on_pass_error = "raise"``.
        """
        passes = self.shared.at(stage, last=last)
        if not passes:
            return
        pipeline = Pipeline(self.shared.on_error, self.candidate)
        try:
            with _torch.fakes.unset_fake_temporarily():
                pipeline.run(gm, [each.for_graph(inference=inference) for each in passes])
        finally:
            self._keep(stage, pipeline.records, last=last)

    def fail(self, error: BaseException) -> None:
        """Record that AOTAutograd made no graph for these passes.

        Raises:
            PassError: The policy says ``on_pass_error = "raise"``.
        """
        self._records.clear()
        for stage in _LATE:
            pipeline = Pipeline(self.shared.on_error)
            pipeline.fail(self.shared.at(stage), "stage", error)
            self._keep(stage, pipeline.records)

    def ran_all(self) -> bool:
        """True if every pass ran.

        If there are no passes, it is true if the partitioner ran.
        """
        runs = itertools.product(_LATE, (False, True))
        expected = {(stage, last) for stage, last in runs if self.shared.at(stage, last=last)}
        if not expected:
            expected = {(Stage.PARTITIONER, False)}
        return expected <= self._records.keys()

    def complete(self, remembered: Iterable[PassRecord]) -> None:
        """Add the remembered records of stages that did not run.

        They do not run if Inductor takes the graph from its cache.
        """
        ran = {stage for stage, _ in self._records}
        for record in remembered:
            if record.stage not in ran:
                self._records.setdefault((Stage(record.stage), False), []).append(record)

    def _keep(self, stage: Stage, records: list[PassRecord], *, last: bool = False) -> None:
        """Add the records to those of the other graph; a pass that raises ends its run early."""
        before = self._records.get((stage, last), [])
        sums = list(map(_added, before, records))
        rest = max(before, records, key=len)[len(sums) :]
        self._records[stage, last] = [*sums, *rest]

    def partition(
        self, usual: Partitioner, gm: torch.fx.GraphModule, inputs: Sequence[Any], **kwargs: Any
    ) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
        """Partition a joint graph into forward and backward.

        It uses the policy's partitioner, and ``usual`` if there is none or if that one fails.

        Raises:
            PassError: The partitioner failed, and the policy says ``on_pass_error = "raise"``.
        """
        partitioner = self.shared.partitioner
        if partitioner is None:
            return usual(gm, inputs, **kwargs)
        started, before = time.perf_counter(), Snapshot.of(gm)
        name, error = qualified_name(partitioner), ""
        try:
            forward, backward = partitioner(gm, inputs, **kwargs)
        except BaseException as fault:
            control_flow.pass_on(fault)
            failure = PassError(name, "raises", class_and_text(fault))
            if self.shared.on_error == "raise":
                raise failure from fault
            error = str(failure)
            before.restore(gm)
            forward, backward = usual(gm, inputs, **kwargs)
        record = PassRecord(
            name=name,
            stage=str(Stage.PARTITIONER),
            changed=not error,
            nodes_before=len(before.lines),
            nodes_after=len(forward.graph.nodes) + len(backward.graph.nodes),
            seconds=time.perf_counter() - started,
            error=error,
        )
        self._keep(Stage.PARTITIONER, [record])
        return forward, backward


def _added(first: PassRecord, second: PassRecord) -> PassRecord:
    matches = None
    if first.matches is not None and second.matches is not None:
        matches = first.matches + second.matches
    return dataclasses.replace(
        first,
        changed=first.changed or second.changed,
        matches=matches,
        nodes_before=first.nodes_before + second.nodes_before,
        nodes_after=first.nodes_after + second.nodes_after,
        seconds=first.seconds + second.seconds,
        error=first.error or second.error,
    )
