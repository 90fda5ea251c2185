"""The alarm for compiles that come when a function had settled, so that a call waits unawares.

A function has settled when its graphs were called 100 times, and 60 seconds went by, since the last
of them was compiled. Before that, a program meets its shapes and modes for the first time. A
function is a code object that Dynamo compiles. So a program that compiles another model, however
late, raises no alarm.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from composer.records import CompileReport, LateCompile, Runtime
from composer.system import forks

SETTLED_CALLS = 100
"""Calls of a function's graphs after which it has settled, if :data:`SETTLED_SECONDS` are over."""

SETTLED_SECONDS = 60.0
"""Seconds since a function's last new graph, in which a program usually meets all its shapes."""

KEPT_FUNCTIONS = 1000


@dataclass(slots=True)
class _Function:
    """What is known of a function: its graphs, and its last compile (seconds, calls until then)."""

    compiled: float = 0.0
    calls_before: int = 0
    graphs: list[Runtime] = field(default_factory=list)

    def calls(self) -> int:
        return sum(graph.calls for graph in self.graphs)


class LateCompiles:
    """Follows the functions of which Dynamo gives graphs; the newest 1,000 are kept.

    Args:
        clock: Returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._lock = forks.lock()
        self._functions: OrderedDict[tuple[str, str], _Function] = OrderedDict()
        self.clock = clock

    def judge(self, graph_id: str, model: str) -> LateCompile | None:
        """Return how late a compile is; ``None`` if its function is new, or has not settled.

        Args:
            graph_id: Dynamo's id of the compile.
            model: The model's name.
        """
        with self._lock:
            function = self._functions.get(_key(graph_id, model))
            if function is None or _is_first(graph_id):
                return None
            calls = function.calls() - function.calls_before
            seconds = self.clock() - function.compiled
        if calls < SETTLED_CALLS or seconds < SETTLED_SECONDS:
            return None
        return LateCompile(calls, seconds)

    def follow(self, report: CompileReport) -> None:
        """Count the calls of a new graph as its function's."""
        key = _key(report.graph_id, report.model)
        with self._lock:
            if _is_first(report.graph_id):
                self._functions.pop(key, None)
            function = self._functions.setdefault(key, _Function())
            self._functions.move_to_end(key)
            function.graphs.append(report.runtime)
            function.calls_before = function.calls()
            function.compiled = self.clock()
            if len(self._functions) > KEPT_FUNCTIONS:
                self._functions.popitem(last=False)


def _key(graph_id: str, model: str) -> tuple[str, str]:
    """Return the code object's number in Dynamo, and the model. ``0/1`` is the second of ``0``."""
    return graph_id.rpartition("/")[0], model


def _is_first(graph_id: str) -> bool:
    """Return True for the first compile of a code object since ``torch.compiler.reset()``.

    Dynamo may begin it anew: ``0/0_1``. Without Dynamo, each compile is a first one: ``direct``.
    """
    return graph_id.rpartition("/")[2].partition("_")[0] in ("0", "direct")
