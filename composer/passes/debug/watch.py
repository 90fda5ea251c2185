"""Observes a pass while it runs within a compile, for :func:`composer.passes.check`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch.fx

from composer.errors import PassError, class_and_text
from composer.graphs.clones import clone_graph
from composer.passes.base import GraphPass, MatchLimit
from composer.passes.metadata import key_at
from composer.passes.snapshot import Snapshot
from composer.system import control_flow


@dataclass
class Findings:
    """The observations of a pass so far.

    Attributes:
        graphs: The number of graphs on which it ran.
        changed: The number of graphs that it changed.
        matches: The number of matches that it returned.
        taken: The number of matches that it took from ``self.chosen(...)``.
        errors: The first error for each rule.
        advice: The sentences of advice, without repetition.
    """

    graphs: int = 0
    changed: int = 0
    matches: int = 0
    taken: int = 0
    errors: dict[str, PassError] = field(default_factory=dict)
    advice: dict[str, None] = field(default_factory=dict)

    def broke(self, error: PassError) -> None:
        """Add the error if it is the first one for its rule."""
        self.errors.setdefault(error.rule, error)

    def advise(self, sentence: str) -> None:
        """Add the advice."""
        self.advice.setdefault(sentence)


@dataclass(frozen=True)
class Watched(GraphPass):
    """Runs the pass under its own name, and compares the graph before and after it."""

    inner: GraphPass
    findings: Findings

    def __post_init__(self) -> None:
        for name in ("name", "stage", "eliminates_dead_code"):
            object.__setattr__(self, name, getattr(self.inner, name))

    def for_graph(self, *, inference: bool) -> GraphPass:
        """Return an observer of ``inner.for_graph``."""
        return dataclasses.replace(self, inner=self.inner.for_graph(inference=inference))

    def run(self, gm: torch.fx.GraphModule) -> Any:
        """Run the pass, and note what it did. Returns the result of the pass."""
        before = Snapshot.of(gm)
        limit = MatchLimit()
        returned = self.inner.limited(limit).run(gm)
        matches = getattr(returned, "matches", returned)
        count = matches if isinstance(matches, int) else 0
        changed = before.differs(gm)
        self.findings.graphs += 1
        self.findings.changed += changed
        self.findings.matches += count
        self.findings.taken += limit.taken
        if count and not changed:
            self.findings.advise(f"it says {count} matches where it changed nothing")
        key = key_at(self.stage)
        new = [node for node in gm.graph.nodes if node not in before.lines]
        if any(key not in node.meta for node in new):
            self.findings.advise(f"its new nodes have no meta[{key!r}]; composer computes them")
        return returned


@dataclass(frozen=True)
class Again(Watched):
    """Runs the pass a second time, on a copy of the graph that the first run left."""

    def run(self, gm: torch.fx.GraphModule) -> int:
        """Add advice if the second run changes the copy or raises. ``gm`` itself never changes."""
        twin = clone_graph(gm)
        before = Snapshot.of(twin)
        try:
            self.inner.run(twin)
        except BaseException as error:  # noqa: BLE001  # becomes advice
            control_flow.pass_on(error)
            self.findings.advise(f"a second run raises {class_and_text(error)}")
            return 0
        if before.differs(twin):
            self.findings.advise("a second run changes the graph once more")
        return 0
