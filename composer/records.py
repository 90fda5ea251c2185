"""The records that flow through a compile: what came in, what was tried, what is kept.

All are frozen; only :class:`Runtime` is live, because it counts calls after the compile. Field by
field this is version 1 of the record's schema.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch

SCHEMA_VERSION = 1


class Status(StrEnum):
    """What became of one candidate for one graph."""

    SUCCEEDED = "succeeded"
    DECLINED = "declined"
    UNAVAILABLE = "unavailable"
    FAILED = "failed"
    REJECTED = "rejected"
    TIMED_OUT = "timed_out"
    CRASHED = "crashed"
    SKIPPED = "skipped"


class Reason(StrEnum):
    """Why a candidate was not accepted: stable codes, each explained in docs/reasons.md."""

    NOT_INSTALLED = "not_installed"
    NO_DEVICE = "no_device"
    DRIVER_MISSING = "driver_missing"
    NOT_REGISTERED = "not_registered"
    TRAINING_GRAPH = "training_graph"
    DYNAMIC_SHAPE = "dynamic_shape"
    UNSUPPORTED_OP = "unsupported_op"
    UNSUPPORTED_DTYPE = "unsupported_dtype"
    EXPORT_FAILED = "export_failed"
    BUILD_FAILED = "build_failed"
    OUT_OF_MEMORY = "out_of_memory"
    TIMEOUT = "timeout"
    CRASHED = "crashed"
    RETURNED_ORIGINAL = "returned_original"
    LOW_COVERAGE = "low_coverage"
    WRONG_PROVIDER = "wrong_provider"
    NUMERIC_MISMATCH = "numeric_mismatch"
    NON_FINITE = "non_finite"
    OUTPUT_MISMATCH = "output_mismatch"
    MUTATED_INPUTS = "mutated_inputs"
    NOT_ISOLATABLE = "not_isolatable"
    SLOWER = "slower"
    RAISED_AT_RUNTIME = "raised_at_runtime"
    QUARANTINED = "quarantined"
    KNOWN_FAILURE = "known_failure"
    POLICY = "policy"


@dataclass(frozen=True, slots=True)
class GraphInput:
    """One input of a graph that is not a weight.

    ``kind`` is ``tensor``, ``symbol`` (a dynamic size that Dynamo passes as an integer) or
    ``scalar``. ``shape`` holds integers and the names of symbols; it and ``dtype`` and ``device``
    are empty for what is not a tensor.
    """

    name: str
    kind: str
    shape: tuple[int | str, ...] = ()
    dtype: str = ""
    device: str = ""


@dataclass(frozen=True, slots=True)
class GraphRequest:
    """One graph as Dynamo handed it over, with what every later step asks about it.

    ``weights`` are the positions in ``example_inputs`` that hold parameters and buffers. A
    ``GraphModule`` that did not come from Dynamo may hold its weights as attributes instead.
    """

    gm: torch.fx.GraphModule
    example_inputs: tuple[Any, ...]
    weights: frozenset[int]
    graph_id: str
    graph_key: str
    model: str
    device: str
    dtype: str
    training: bool
    dynamic: bool
    nodes: int
    inputs: tuple[GraphInput, ...]
    mode: str | None = None


@dataclass(frozen=True, slots=True)
class PassRecord:
    """One shared pass run over one graph.

    ``stage`` is the name of the stage. ``matches`` counts the places that were rewritten, ``None``
    where the pass does not say. Nodes are those of the graph, placeholders and output included.
    ``error`` names the rule that the pass broke, and where; the pass was then rolled back.
    """

    name: str
    stage: str
    changed: bool = False
    matches: int | None = None
    nodes_before: int = 0
    nodes_after: int = 0
    seconds: float = 0.0
    error: str = ""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One candidate tried on one graph.

    ``seconds`` is the wall-clock time from the probe to the verdict. ``coverage`` is the share of
    the graph's compute nodes that the engine took (0.0 to 1.0), ``None`` where it does not say.
    ``engine`` is what the engine says of itself. ``error_type`` and ``traceback`` are those of the
    exception that ended the attempt, empty where there was none.
    """

    backend: str
    status: Status
    reason: Reason | None
    message: str
    seconds: float
    coverage: float | None = None
    engine: dict[str, Any] = field(default_factory=dict)
    error_type: str = ""
    traceback: str = ""

    @property
    def accepted(self) -> bool:
        """Whether this candidate serves the graph."""
        return self.status is Status.SUCCEEDED

    def sentence(self) -> str:
        """The attempt in one line, as warnings and errors quote it."""
        why = f" ({self.reason})" if self.reason else ""
        said = first_line(self.message) or self.error_type
        what = f": {said}" if said else ""
        return f"{self.backend} {self.status}{why}{what}"


class Runtime:
    """What happened since the compile; every value is live.

    ``calls`` counts the calls of the compiled graph, ``fallbacks`` those that the floor answered
    for the engine, ``verified`` those that were compared with eager; ``last_error`` is the last
    error at run time. Counting one call takes about 30 ns and loses none between threads: the C
    iterator ``itertools.count`` steps atomically, and a read takes back the step it costs.
    """

    __slots__ = ("_lock", "_reads", "_ticks", "fallbacks", "last_error", "tick", "verified")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ticks = itertools.count()
        self._reads = 0
        self.tick: Callable[[], int] = self._ticks.__next__
        self.fallbacks = 0
        self.verified = 0
        self.last_error = ""

    @property
    def calls(self) -> int:
        """Calls of the compiled graph so far."""
        with self._lock:
            self._reads += 1
            return self.tick() - self._reads + 1

    def to_dict(self) -> dict[str, Any]:
        """The counters as they stand now."""
        return {
            "calls": self.calls,
            "fallbacks": self.fallbacks,
            "verified": self.verified,
            "last_error": self.last_error,
        }


@dataclass(frozen=True, slots=True)
class Outcome:
    """Where a walk along the chain ended.

    ``passes`` are the shared passes that ran within the candidate that was accepted, or the floor.
    ``errors`` are the exceptions behind the attempts that were not accepted; they live only as
    long as the compile, since their tracebacks hold the graph and its tensors.
    """

    attempts: tuple[Attempt, ...]
    errors: tuple[Exception, ...]
    chosen: str
    compiled: Callable[..., Any]
    passes: tuple[PassRecord, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileReport:
    """The record of one compiled graph; ``to_dict`` is its JSON form.

    ``time`` is UTC in ISO 8601. ``graph_id`` is Dynamo's compile id (``"0/0"``), ``"direct"``
    where a backend was called without Dynamo. ``graph_key`` is a SHA-256 that is equal in every
    process for the same graph, shapes, dtypes and options. ``nodes`` counts the operations of the
    captured graph. ``policy`` lists the layers of the policy that spoke. ``passes`` are the
    shared passes in the order they ran: those of the stages ``torch`` and ``aten``, then those
    that ran within the candidate that serves the graph. ``chosen`` is the backend's name as the
    chain spelled it, ``"eager"`` for the floor, and empty where the policy asked for an error
    instead. ``seconds`` is the whole time that composer took.
    """

    schema: int = SCHEMA_VERSION
    time: str
    graph_id: str
    graph_key: str
    model: str
    device: str
    dtype: str
    training: bool
    dynamic: bool
    nodes: int
    inputs: tuple[GraphInput, ...]
    policy: tuple[str, ...]
    passes: tuple[PassRecord, ...] = ()
    attempts: tuple[Attempt, ...]
    chosen: str
    seconds: float
    runtime: Runtime = field(default_factory=Runtime, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, dicts, strings and numbers; the counters as they stand now."""
        record: dict[str, Any] = {}
        for each in dataclasses.fields(self):
            value = getattr(self, each.name)
            record[each.name] = value.to_dict() if isinstance(value, Runtime) else plain(value)
        return record

    def to_json(self, indent: int | None = None) -> str:
        """:meth:`to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=indent)


def plain(value: Any) -> Any:
    """Turn records, tuples and enums into what JSON knows; anything else into its ``str``."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [plain(item) for item in value]
    if isinstance(value, StrEnum):
        return value.value
    if value is None or isinstance(value, str | bool | int | float):
        return value
    return str(value)


def first_line(text: str) -> str:
    """The first line of ``text`` that says something."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")
