"""The records that flow through a compile: what came in, what was tried, what is kept.

All are frozen; only :class:`Runtime` is live, because it counts calls after the compile. The text
under each field of a :class:`CompileReport` and of its parts documents that field, and is taken
over into the committed schema (``telemetry/record.schema.json``).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, cast
from weakref import WeakKeyDictionary

from pydantic import ConfigDict, GetCoreSchemaHandler, TypeAdapter, ValidationError
from pydantic_core import CoreSchema
from pydantic_core.core_schema import no_info_after_validator_function

from composer.errors import RecordError, error_line, first_line
from composer.system import forks

if TYPE_CHECKING:
    import torch

SCHEMA_VERSION = 1

_DOCUMENTED = ConfigDict(
    use_attribute_docstrings=True, json_schema_serialization_defaults_required=True
)


class Status(StrEnum):
    """What became of one candidate for one graph."""

    SUCCEEDED = "succeeded"
    NOT_CHOSEN = "not_chosen"
    DECLINED = "declined"
    UNAVAILABLE = "unavailable"
    FAILED = "failed"
    REJECTED = "rejected"
    TIMED_OUT = "timed_out"
    CRASHED = "crashed"
    SKIPPED = "skipped"


class Reason(StrEnum):
    """Why a candidate was not accepted: stable codes, explained in docs/reference/reasons.md."""

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
    ENGINE_INCOMPATIBLE = "engine_incompatible"
    POLICY = "policy"


EAGER = "eager"
"""What records call the captured graph's own forward, which serves where no candidate does."""


@dataclass(frozen=True, slots=True)
class GraphInput:
    """One input of a graph that is not a weight."""

    __pydantic_config__: ClassVar[ConfigDict] = _DOCUMENTED

    name: str
    """The placeholder's name."""
    kind: str
    """``tensor``, ``symbol`` (a dynamic size that Dynamo passes as an integer) or ``scalar``."""
    shape: tuple[int | str, ...] = ()
    """Sizes, and the names of symbols; empty for what is not a tensor, as the two below."""
    dtype: str = ""
    """Such as ``float32``."""
    device: str = ""
    """Such as ``cpu`` or ``cuda:0``."""


@dataclass(frozen=True, slots=True)
class GraphRequest:
    """One graph as Dynamo handed it over, with what every later step asks about it.

    Fields that a :class:`CompileReport` has as well are documented there.

    Attributes:
        gm: The graph; once the first passes have run, as they left it.
        example_inputs: Tensors and symbols of the first call, in the order of the placeholders.
        weights: Positions in ``example_inputs`` that hold parameters and buffers. A
            ``GraphModule`` that did not come from Dynamo may hold its weights as attributes.
        mode: ``torch.compile``'s mode.
        names: What policies match the model by, whatever they call it: the class, or the function,
            whose frame is compiled, and what the program compiled (empty where nobody knows).
        key_among_ranks: ``graph_key`` without what tells one rank of ``torch.distributed`` from
            another; empty in a process that is the only rank.
        rewritten_by: Names of the passes of the stages ``torch`` and ``aten`` that changed it.
        compared_passes: Names of the passes whose graph was compared with the one before them.
        alongside: Whether the program runs while this is compiled. The program may then change
            its weights at any time, so nothing may be restored to an earlier value.
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
    names: tuple[str, ...] = ()
    number: int = 0
    key_among_ranks: str = ""
    rewritten_by: tuple[str, ...] = ()
    compared_passes: frozenset[str] = frozenset()
    alongside: bool = False
    _made: WeakKeyDictionary[torch.fx.GraphModule, dict[str, Any]] = field(
        default_factory=WeakKeyDictionary, repr=False, compare=False
    )

    def made_of_graph(self) -> dict[str, Any]:
        """What was made of ``gm``, by a name, and is kept for the next candidate.

        Requests that are made of this one share it, whichever graph they have.
        """
        return self._made.setdefault(self.gm, {})


class Stage(StrEnum):
    """Which graph a pass is given; every stage reaches every engine of the chain and eager.

    ``TORCH`` is the graph as Dynamo captured it: torch functions, methods, in-place operations.
    ``ATEN`` is canonical ATen before autograd, one overload per call, what ``torch.export`` trains
    on. ``JOINT`` is the functional forward and backward in one graph, before they are partitioned
    (without a backward: the inference graph). ``POST_GRAD`` is functional ATen after that, a
    forward, a backward or an inference graph. ``PARTITIONER`` is where forward and backward are
    cut apart; a ``CustomPartitionerFn`` stands there.
    """

    TORCH = "torch"
    ATEN = "aten"
    JOINT = "joint"
    POST_GRAD = "post_grad"
    PARTITIONER = "partitioner"


BEFORE_AUTOGRAD = (Stage.TORCH, Stage.ATEN)
"""The stages that composer runs once, before every candidate; the others run within each."""


@dataclass(frozen=True, slots=True)
class PassRecord:
    """One shared pass run over one graph."""

    __pydantic_config__: ClassVar[ConfigDict] = _DOCUMENTED

    name: str
    """The pass's own name; the qualified name of a foreign one."""
    stage: str
    """Which form of the graph it saw: ``torch``, ``aten``, ``joint``, ``post_grad``, ..."""
    changed: bool = False
    """Whether it changed the graph."""
    matches: int | None = None
    """Places that were rewritten; null where the pass does not count them."""
    nodes_before: int = 0
    """Nodes of the graph before it, placeholders and output included."""
    nodes_after: int = 0
    """Nodes of the graph behind it."""
    seconds: float = 0.0
    """Wall-clock time of the pass and of the checks around it."""
    error: str = ""
    """The rule that the pass broke, and where; it was then rolled back."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One candidate tried on one graph."""

    __pydantic_config__: ClassVar[ConfigDict] = _DOCUMENTED

    backend: str
    """As the chain spelled it; a callable's ``__name__``."""
    status: Status
    """What became of it."""
    reason: Reason | None
    """Why it was not accepted; null if it was."""
    message: str
    """What the engine said, for a person."""
    seconds: float
    """Wall-clock time from the probe to the verdict."""
    coverage: float | None = None
    """Share of the graph's compute nodes that the engine took, 0.0 to 1.0; null if unsaid."""
    engine: dict[str, Any] = field(default_factory=dict)
    """What the engine says of itself: versions, providers, threads. Nothing is decided by it."""
    error_type: str = ""
    """Class of the exception that ended the attempt; empty for a plain no."""
    traceback: str = ""
    """Its traceback; empty for a plain no. Of a remembered failure it is that of its time."""
    options: dict[str, Any] = field(default_factory=dict)
    """The candidate's options, as the chain gave them."""
    precision: Literal["fp32", "bf16"] | None = None
    """What the policy had the graph computed in; null where that is the graph's own."""
    products_in_fp32: int = 0
    """In bf16: how many of the first products are in float32 all the same."""
    on_trial: bool = False
    """Whether it is no loss if it is not accepted: the same backend follows in fp32."""
    timing: dict[str, Any] | str | None = None
    """What was measured of it, or why nothing was; null where the policy does not measure."""

    def timed(self, timing: dict[str, Any] | str | None) -> Attempt:
        """The attempt with what was measured of it; it stands in ``engine`` as well."""
        engine = {name: said for name, said in self.engine.items() if name != "timing"}
        engine |= {"timing": timing} if timing else {}
        return dataclasses.replace(self, engine=engine, timing=timing)

    @property
    def accepted(self) -> bool:
        """Whether it succeeded. The last that did serves the graph, if any engine does."""
        return self.status is Status.SUCCEEDED

    @property
    def who(self) -> str:
        """The backend, and its precision where that is not the graph's own."""
        return f"{self.backend} in bf16" if self.precision == "bf16" else self.backend

    def sentence(self) -> str:
        """The attempt in one line, as warnings and errors quote it."""
        why = f" ({self.reason})" if self.reason else ""
        said = first_line(self.message) or self.error_type
        what = f": {said}" if said else ""
        return f"{self.who} {self.status}{why}{what}"


@dataclass(frozen=True, slots=True)
class Counters:
    """What happened since the compile, as it stood when it was read."""

    __pydantic_config__: ClassVar[ConfigDict] = _DOCUMENTED

    calls: int = 0
    """Calls of the compiled graph, from all threads."""
    fallbacks: int = 0
    """Calls, and backwards, that the eager fallback answered for the engine."""
    verified: int = 0
    """Calls that were compared with eager."""
    last_error: str = ""
    """The last error at run time."""
    seconds: float = 0.0
    """Host time within those calls, estimated: the first 16 are timed, then one in 16."""


class Runtime:
    """The :class:`Counters` of one graph, live.

    Counting a call takes about 30 ns and loses none between threads: the C iterator
    ``itertools.count`` steps atomically. Reading the count is itself a step of the iterator, so
    ``reads`` counts the steps that were no calls. On a GPU the seconds are those of the launches.
    A backward runs outside of the call, so its time is not included.
    """

    __slots__ = (
        "_lock",
        "_ticks",
        "fallbacks",
        "last_error",
        "reads",
        "seconds",
        "tick",
        "verified",
    )

    def __init__(self, start: Counters = Counters()) -> None:  # it is frozen
        self._lock = forks.lock()
        self._ticks = itertools.count(start.calls)
        self.reads = 0
        self.tick: Callable[[], int] = self._ticks.__next__
        self.fallbacks = start.fallbacks
        self.verified = start.verified
        self.last_error = start.last_error
        self.seconds = start.seconds

    def __repr__(self) -> str:
        return f"Runtime({self.read()})"

    def __reduce__(self) -> tuple[Callable[[Counters], Runtime], tuple[Counters]]:
        """A copy starts from the counters as they stand."""
        return Runtime, (self.read(),)

    @property
    def calls(self) -> int:
        """Calls of the compiled graph so far."""
        with self._lock:
            self.reads += 1
            return self.tick() - self.reads + 1

    def spent(self, seconds: float) -> None:
        """Add the time of one timed call, and of those that it stands for."""
        with self._lock:
            self.seconds += seconds

    def failed(self, error: BaseException, *, answered: bool = False) -> None:
        """Keep the error of a call, and count it if eager answered in the engine's place."""
        with self._lock:
            self.fallbacks += answered
            self.last_error = error_line(error)

    def compared(self) -> None:
        """Count a call that was compared with eager."""
        with self._lock:
            self.verified += 1

    def read(self) -> Counters:
        """The counters as they stand now."""
        return Counters(self.calls, self.fallbacks, self.verified, self.last_error, self.seconds)

    @classmethod
    def __get_pydantic_core_schema__(cls, _: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """In a record its runtime is a table of counters."""
        return no_info_after_validator_function(cls, handler(Counters))


class End(NamedTuple):
    """An attempt, and what ended it: ``None`` where it was accepted, or was slower."""

    attempt: Attempt
    error: BaseException | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """Where a walk along the chain ended.

    Attributes:
        ends: The attempts in the order in which they were made, each with what ended it.
        chosen: Who serves the graph, as the chain spelled it; ``eager`` for the eager fallback.
        compiled: What serves it.
        passes: The shared passes that ran within the candidate that serves, or within the eager
        fallback. bounds: How far what serves may be off eager's numbers
        (``graphs.comparison.Bounds``);
            ``None`` where the policy does not compare, and for the eager fallback.
        ranking: Where candidates were measured, the places in the chain of those that may serve,
            best first; ``None`` where nothing was measured.
    """

    ends: tuple[End, ...]
    chosen: str
    compiled: Callable[..., Any]
    passes: tuple[PassRecord, ...] = ()
    bounds: Any = None
    ranking: tuple[int, ...] | None = None

    @property
    def attempts(self) -> tuple[Attempt, ...]:
        """The records of the attempts."""
        return tuple(each.attempt for each in self.ends)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileReport:
    """The record of one compiled graph; :meth:`to_dict` is its JSON form."""

    __pydantic_config__: ClassVar[ConfigDict] = _DOCUMENTED

    schema: int = SCHEMA_VERSION
    """Version of this record's schema."""
    time: str
    """When the compile ended: UTC, ISO 8601, milliseconds."""
    number: int
    """Counts the graphs of a process from 1. No two have the same number, after a reset neither."""
    graph_id: str
    """Dynamo's compile id, such as ``0/0``; ``direct`` where a backend was called without it."""
    graph_key: str
    """SHA-256, equal in every process for the same graph, shapes, dtypes, passes and options."""
    model: str
    """Class or function whose frame is compiled, or the name the policy gives it."""
    device: str
    """The most common device of inputs and weights."""
    dtype: str
    """Their most common floating dtype; of all dtypes if none is floating; empty without any."""
    training: bool
    """Grad mode was on and an input or a weight requires grad."""
    dynamic: bool
    """Some size is a symbol."""
    nodes: int
    """Operations of the captured graph."""
    inputs: tuple[GraphInput, ...]
    """What is passed in at every call, weights left out."""
    policy: tuple[str, ...]
    """The layers of the policy that spoke, in order."""
    passes: tuple[PassRecord, ...] = ()
    """The shared passes in the order they ran: those that composer ran before every candidate
    (stages ``torch`` and ``aten``), then those within the candidate that serves the graph."""
    attempts: tuple[Attempt, ...]
    """The candidates in the order they were tried."""
    chosen: str
    """Who serves the graph, as the chain spelled it; ``eager`` for eager; empty where the
    policy asked for an error instead."""
    seconds: float
    """The whole time that composer took to compile."""
    runtime: Runtime = field(default_factory=Runtime, compare=False)
    """What happened since; live in the process, and as it stood in a record that was written."""

    @property
    def label(self) -> str:
        """Its number, with Dynamo's id as torch's logs have it: ``"3 [0/0]"``."""
        return f"{self.number} [{self.graph_id}]"

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, dicts, strings and numbers; the counters as they stand now."""
        return cast(dict[str, Any], plain(self))

    def to_json(self, indent: int | None = None) -> str:
        """:meth:`to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=indent)

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> CompileReport:
        """The record that :meth:`to_dict` made; fields that are not known here are left out.

        Raises:
            RecordError: it has another schema version, or fields are missing or malformed.
        """
        if record.get("schema") != SCHEMA_VERSION:
            raise RecordError(
                f"a record of schema {record.get('schema')!r}; this composer reads {SCHEMA_VERSION}"
            )
        try:
            return _adapter().validate_python(dict(record))
        except ValidationError as error:
            faults = (f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            raise RecordError(f"a record that cannot be read: {'; '.join(faults)}") from None


@dataclass(frozen=True, slots=True)
class WithoutGraph:
    """What was compiled through composer, and of which Dynamo captured no graph."""

    name: str
    """The class of the module, or the function, as in :attr:`CompileReport.model`."""
    reason: str
    """What Dynamo says, in one line."""
    file: str
    """Where it met that, in the user's code."""
    line: int
    """From 1."""
    given_up: bool
    """All of it runs as plain Python. Otherwise there may be graphs of what comes behind."""

    def __str__(self) -> str:
        """Name and place, and the reason below."""
        place = printable(f"{self.name}  ({self.file}:{self.line})")
        return f"{place}\n  {printable(self.reason)}"


@functools.cache
def _adapter() -> TypeAdapter[CompileReport]:
    """Made once: it takes 35 ms."""
    return TypeAdapter(CompileReport)


def plain(value: Any) -> Any:
    """Turn records, tuples and enums into what JSON knows; anything else into its ``str``."""
    if isinstance(value, Runtime):
        value = value.read()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [plain(item) for item in value]
    if isinstance(value, StrEnum):
        return value.value
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no such number, and an engine may say one of itself
    if value is None or isinstance(value, str | bool | int | float):
        return value
    return str(value)


def spelled(name: str, options: Mapping[str, Any]) -> str:
    """``"onnxrt(threads=2)"``."""
    given = ", ".join(f"{key}={value}" for key, value in options.items())
    return f"{name}({given})" if given else name


def printable(text: str) -> str:
    """A text on one line that moves no cursor: it may come from anybody's file."""
    return "".join(each if each.isprintable() else " " for each in text)
