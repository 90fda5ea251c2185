"""The records that flow through a compile: the graph, the attempts, and the report.

All are frozen, except :class:`Runtime`, which counts calls after the compile. The docstrings of the
fields of :class:`CompileReport` and its parts are also the texts of the committed schema
(``telemetry/record.schema.json``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
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

LowPrecision = Literal["bf16", "int8"]
Int8 = Literal["products", "weights"]
"""The precisions below float32 that the policy may ask for: bfloat16, and eight bits."""

_DOCUMENTED = ConfigDict(
    use_attribute_docstrings=True, json_schema_serialization_defaults_required=True
)


class Status(StrEnum):
    """The result of one attempt: one candidate for one graph."""

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
"""The name in records of the captured graph's own forward, which serves if no candidate does."""


@dataclass(frozen=True, slots=True)
class GraphInput:
    """One input of a graph that is not a weight."""

    __pydantic_config__: ClassVar[ConfigDict] = _DOCUMENTED

    name: str
    """The placeholder's name."""
    kind: str
    """``tensor``, ``symbol`` (a dynamic size that Dynamo passes as an integer) or ``scalar``."""
    shape: tuple[int | str, ...] = ()
    """The sizes; a symbolic size is its name. Empty if the input is not a tensor."""
    dtype: str = ""
    """The dtype, such as ``float32``. Empty if the input is not a tensor."""
    device: str = ""
    """The device, such as ``cpu`` or ``cuda:0``. Empty if the input is not a tensor."""


@dataclass(frozen=True, slots=True)
class GraphRequest:
    """One graph as Dynamo captured it, and the facts about it that later steps need.

    :class:`CompileReport` documents the fields that it has as well.

    Attributes:
        gm: The graph. After the first passes have run, it is their result.
        torch_gm: A graph of torch functions with the same numbers, for engines that take no other.
            It is ``gm``, or the graph as it was before the passes of the stage ``aten``. ``None``
            if one of these changed the graph and does not declare ``keeps_numbers``.
        example_inputs: Tensors and symbols of the first call, in the order of the placeholders.
        weights: Positions in ``example_inputs`` that hold parameters and buffers. A
            ``GraphModule`` that did not come from Dynamo may hold its weights as attributes.
        mode: ``torch.compile``'s mode.
        names: Names that policies match the model by, besides ``model``: the class or function
            whose frame is compiled, and the one that the program compiled (empty if unknown).
        graph_digest: SHA-256 of the graph, its surroundings and the shared passes: ``graph_key``
            without the settings of the policy.
        key_among_ranks: ``graph_key`` without the parts that differ between the ranks of
            ``torch.distributed``. Empty in a process that is the only rank.
        rewritten_by: Names of the passes of the stages ``torch`` and ``aten`` that changed it.
        compared_passes: Names of the passes whose graph was compared with the one before them.
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
    torch_gm: torch.fx.GraphModule | None = None
    mode: str | None = None
    names: tuple[str, ...] = ()
    number: int = 0
    graph_digest: str = ""
    key_among_ranks: str = ""
    rewritten_by: tuple[str, ...] = ()
    compared_passes: frozenset[str] = frozenset()
    _made: WeakKeyDictionary[torch.fx.GraphModule, dict[str, Any]] = field(
        default_factory=WeakKeyDictionary, repr=False, compare=False
    )

    def made_of_graph(self) -> dict[str, Any]:
        """Return a table of results made from ``gm``, which later candidates may use again.

        Copies of this request (``dataclasses.replace``) share the tables, one for each graph.
        """
        return self._made.setdefault(self.gm, {})


class Stage(StrEnum):
    """The form of the graph that a pass gets. Each stage holds for every engine and for eager.

    ``TORCH`` is the graph as Dynamo captured it: torch functions, methods, in-place operations.
    ``ATEN`` is canonical ATen before autograd, one overload per call, as ``torch.export`` makes it
    for training. ``JOINT`` is functional ATen: forward and backward in one graph, or an inference
    graph. ``POST_GRAD`` is functional ATen after the partitioner: a forward, a backward or an
    inference graph. ``PARTITIONER`` is the step that separates forward and backward; a
    ``CustomPartitionerFn`` replaces it.
    """

    TORCH = "torch"
    ATEN = "aten"
    JOINT = "joint"
    POST_GRAD = "post_grad"
    PARTITIONER = "partitioner"


BEFORE_AUTOGRAD = (Stage.TORCH, Stage.ATEN)
"""The stages that composer runs once, before all candidates. The others run in each candidate."""


@dataclass(frozen=True, slots=True)
class PassRecord:
    """One shared pass run over one graph."""

    __pydantic_config__: ClassVar[ConfigDict] = _DOCUMENTED

    name: str
    """The name of the pass. For a foreign pass, its qualified name."""
    stage: str
    """The form of the graph that it got: ``torch``, ``aten``, ``joint``, ``post_grad``, ..."""
    changed: bool = False
    """True if it changed the graph."""
    matches: int | None = None
    """The number of places that it rewrote; null if the pass does not count them."""
    nodes_before: int = 0
    """Nodes of the graph before the pass, placeholders and output included."""
    nodes_after: int = 0
    """Nodes of the graph after the pass."""
    seconds: float = 0.0
    """Wall-clock time of the pass and of the checks around it."""
    error: str = ""
    """The rule that the pass broke, and where. The pass was then undone."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One candidate tried on one graph."""

    __pydantic_config__: ClassVar[ConfigDict] = _DOCUMENTED

    backend: str
    """The name of the engine as the chain spells it. For a callable, its ``__name__``."""
    status: Status
    """The result of the attempt."""
    reason: Reason | None
    """The reason why the candidate was not accepted; null if it was."""
    message: str
    """A sentence of the engine or of composer, for a person."""
    seconds: float
    """Wall-clock time from the probe to the result."""
    coverage: float | None = None
    """Share of the graph's work that the engine took, 0.0 to 1.0; null if unknown."""
    engine: dict[str, Any] = field(default_factory=dict)
    """Facts from the engine: versions, providers, threads. They are not used to decide anything."""
    error_type: str = ""
    """Class of the exception that ended the attempt; empty if the engine only refused."""
    traceback: str = ""
    """Traceback of that exception. For a remembered failure, it is from the process that failed."""
    options: dict[str, Any] = field(default_factory=dict)
    """The candidate's options, as the chain gives them."""
    precision: Literal["fp32", "bf16", "int8"] | None = None
    """The precision that the policy asks for; null if it is the graph's own."""
    products_in_fp32: int = 0
    """In bf16 or int8: the number of products that stay in float32."""
    tentative: bool = False
    """True if a refusal needs no warning, because the same backend follows in fp32."""
    timing: dict[str, Any] | str | None = None
    """The measured times, or the reason why there are none; null if the policy does not measure."""

    @staticmethod
    def of(written: Mapping[str, Any]) -> Attempt:
        """Return the attempt that :func:`plain` has written."""
        return _attempts().validate_python(written)

    def timed(self, timing: dict[str, Any] | str | None) -> Attempt:
        """Return the attempt with its measured times, which are also put into ``engine``."""
        engine = dict(self.engine)
        engine.pop("timing", None)
        if timing:
            engine["timing"] = timing
        return dataclasses.replace(self, engine=engine, timing=timing)

    def raised(self, status: Status, reason: Reason, message: str, error: BaseException) -> Attempt:
        """Return an attempt that was accepted, and that an exception has ended since."""
        return dataclasses.replace(
            self,
            status=status,
            reason=reason,
            message=message,
            error_type=type(error).__name__,
            traceback="".join(traceback.format_exception(error)),
        )

    @property
    def accepted(self) -> bool:
        """True if it succeeded. The last attempt that did serves the graph, if any engine does."""
        return self.status is Status.SUCCEEDED

    @property
    def who(self) -> str:
        """The backend, and its precision if that is not the graph's own."""
        return in_precision(self.backend, self.precision)

    def sentence(self) -> str:
        """The attempt in one line, as warnings and errors quote it."""
        reason = f" ({self.reason})" if self.reason else ""
        message = first_line(self.message) or self.error_type
        colon = ": " if message else ""
        return f"{self.who} {self.status}{reason}{colon}{message}"


@dataclass(frozen=True, slots=True)
class Counters:
    """The counters of a graph since its compile, at the time when they were read."""

    __pydantic_config__: ClassVar[ConfigDict] = _DOCUMENTED

    calls: int = 0
    """Calls of the compiled graph, from all threads."""
    fallbacks: int = 0
    """Calls and backwards that the eager fallback answered because the engine failed."""
    verified: int = 0
    """Calls that were compared with eager."""
    last_error: str = ""
    """The last error at run time; empty if there was none."""
    seconds: float = 0.0
    """Estimated host time of all calls. The first 16 calls are timed, then one in 16."""
    waits: int = 0
    """How often a call waited for a choice, or for an engine, after the compile."""
    waited: float = 0.0
    """How long these calls waited, in seconds."""
    under_way: str = ""
    """What was being built or measured in the background; empty if nothing was."""


class Runtime:
    """Counts the calls of one graph; :meth:`read` returns the :class:`Counters`.

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
        "under_way",
        "verified",
        "waited",
        "waits",
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
        self.waits = start.waits
        self.waited = start.waited
        self.under_way = start.under_way

    def __repr__(self) -> str:
        return f"Runtime({self.read()})"

    def __reduce__(self) -> tuple[Callable[[Counters], Runtime], tuple[Counters]]:
        """Pickle the present counters; a copy counts on from them."""
        return Runtime, (self.read(),)

    @property
    def calls(self) -> int:
        """Calls of the compiled graph so far."""
        with self._lock:
            self.reads += 1
            return self.tick() - self.reads + 1

    def spent(self, seconds: float) -> None:
        """Add the time of one timed call, multiplied by the number of calls that it represents."""
        with self._lock:
            self.seconds += seconds

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Count a call that waits for a choice or for an engine, and the time of this context."""
        began = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self.waits += 1
                self.waited += time.perf_counter() - began

    def failed(self, error: BaseException, *, answered: bool = False) -> None:
        """Keep the error of a call, and count a fallback if eager ``answered`` the call."""
        with self._lock:
            self.fallbacks += answered
            self.last_error = error_line(error)

    def compared(self) -> None:
        """Count a call that was compared with eager."""
        with self._lock:
            self.verified += 1

    def read(self) -> Counters:
        """Return the present counters."""
        others = (getattr(self, each.name) for each in dataclasses.fields(Counters)[1:])
        return Counters(self.calls, *others)

    @classmethod
    def __get_pydantic_core_schema__(cls, _: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the schema of :class:`Counters`, which a record has in place of this object."""
        return no_info_after_validator_function(cls, handler(Counters))


@dataclass(frozen=True, slots=True)
class LateCompile:
    """A compile that came when its function had settled."""

    __pydantic_config__: ClassVar[ConfigDict] = _DOCUMENTED

    calls: int
    """Calls of the function's graphs since the last of them was compiled."""
    seconds: float
    """Seconds since then."""

    def __str__(self) -> str:
        """A text such as ``"after 1,204 calls and 83 s without a new graph"``."""
        return f"after {self.calls:,} calls and {self.seconds:,.0f} s without a new graph"


@dataclass(frozen=True, slots=True)
class ForLock:
    """What ``composer.lock`` holds of a graph and no other field of its record has."""

    __pydantic_config__: ClassVar[ConfigDict] = _DOCUMENTED

    parts: dict[str, str]
    """What identifies the graph, in named parts. Each is a text or a digest."""
    passes: tuple[dict[str, Any], ...]
    """The shared passes that the policy names, in order: name, parameters and fingerprint."""
    policy: dict[str, Any]
    """The fields of the policy that decide how the graph is compiled and are not the default."""
    versions: dict[str, dict[str, str]]
    """For each candidate, and for eager, the versions of its packages, of torch and of composer.
    The version of a package that is not installed is empty."""
    unlocked: str = ""
    """Under ``locked = "warn"``, why the lock does not decide who serves the graph; empty if it
    does, or if the policy has another value."""


class End(NamedTuple):
    """An attempt, and its error; ``None`` if it was accepted, or was only slower."""

    attempt: Attempt
    error: BaseException | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of walking the chain for one graph.

    Attributes:
        ends: The attempts with their errors, in the order in which they were made.
        chosen: The engine that serves the graph, as the chain spells it, or ``eager``.
        compiled: The callable that serves the graph.
        passes: The shared passes that ran within the candidate that serves, or within eager.
        bounds: How far the numbers of ``compiled`` may be from eager's
            (``graphs.comparison.Bounds``). ``None`` if the policy does not compare, and for eager.
        ranking: If candidates were measured, the places in the chain of those that may serve,
            best first; else ``None``.
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


@dataclass(frozen=True, slots=True)
class SizeRange:
    """A range of sizes of a graph's calls, and the engine that serves it."""

    __pydantic_config__: ClassVar[ConfigDict] = _DOCUMENTED

    least: int
    """The least size: the product of the graph's dynamic sizes."""
    chosen: str
    """The engine that serves the calls from this size on, up to the next range."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileReport:
    """The record of one compiled graph; :meth:`to_dict` is its JSON form."""

    __pydantic_config__: ClassVar[ConfigDict] = _DOCUMENTED

    schema: int = SCHEMA_VERSION
    """Version of this record's schema."""
    time: str
    """When the compile ended: UTC, ISO 8601, milliseconds."""
    number: int
    """The number of the graph in its process, from 1. ``composer.reset`` does not start anew."""
    graph_id: str
    """Dynamo's compile id, such as ``0/0``; ``direct`` if a backend was called without Dynamo."""
    graph_key: str
    """SHA-256, equal in every process for the same graph, shapes, dtypes, passes and options."""
    model: str
    """The class or function whose frame is compiled, or the name that the policy gives it."""
    device: str
    """The most common device of inputs and weights."""
    dtype: str
    """The most common floating dtype of inputs and weights, or the most common dtype if none is
    floating; empty if there are no tensors."""
    training: bool
    """True if grad mode was on and an input or a weight requires grad."""
    dynamic: bool
    """True if a size is symbolic."""
    nodes: int
    """The number of operations of the captured graph."""
    inputs: tuple[GraphInput, ...]
    """The inputs of every call, without the weights."""
    policy: tuple[str, ...]
    """The layers of the policy that set a field, in order."""
    passes: tuple[PassRecord, ...] = ()
    """The shared passes in the order in which they ran: first those before all candidates (stages
    ``torch`` and ``aten``), then those within the candidate that serves the graph."""
    attempts: tuple[Attempt, ...]
    """The attempts in the order in which they were made."""
    chosen: str
    """The engine that serves the graph, as the chain spells it, or ``eager``; empty if the policy
    asked for an error instead. With ``ranges``, the one that was chosen first."""
    ranges: tuple[SizeRange, ...] = ()
    """The engines by the sizes of calls, if there is one for each range of sizes."""
    seconds: float
    """The whole time that composer took to compile, in seconds."""
    waited: float | None = None
    """The time that the call waited, in seconds: from the start of Dynamo's capture to the end of
    composer's compile; null if torch does not tell."""
    recompiled: str = ""
    """Dynamo's reason, if it compiled the same code before; empty if not, or if it gives none."""
    late: LateCompile | None = None
    """How late the compile came, if its function had settled; else null."""
    dumped: str = ""
    """The folder in which ``COMPOSER_DUMP`` keeps the graph, or why it was not written; empty
    without that variable."""
    lock: ForLock | None = None
    """What ``composer.lock`` would hold of the graph besides. It is null unless records are written
    to a file (``COMPOSER_TELEMETRY``), the policy is ``locked``, or ``composer lock`` runs."""
    runtime: Runtime = field(default_factory=Runtime, compare=False)
    """The counters since the compile. They are live in the process; a written record has their
    values at that time."""

    @property
    def label(self) -> str:
        """The number of the graph and Dynamo's id in the form of torch's logs: ``"3 [0/0]"``."""
        return f"{self.number} [{self.graph_id}]"

    def to_dict(self) -> dict[str, Any]:
        """Return the record as lists, dicts, strings and numbers, with the present counters."""
        return cast(dict[str, Any], plain(self))

    def to_json(self, indent: int | None = None) -> str:
        """Return :meth:`to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=indent)

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> CompileReport:
        """Return the report from a record that :meth:`to_dict` made; unknown fields are ignored.

        Raises:
            RecordError: the schema version is another, or fields are missing or malformed.
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
    """A function or module compiled through composer of which Dynamo captured no graph."""

    name: str
    """The class of the module, or the function, as in :attr:`CompileReport.model`."""
    reason: str
    """Dynamo's reason, in one line."""
    file: str
    """The file of the user's code to which the reason applies."""
    line: int
    """The line in that file, from 1."""
    given_up: bool
    """True if all of it runs as plain Python. If False, code after this line may have graphs."""

    def __str__(self) -> str:
        """The name and the place, and the reason on a second line."""
        place = printable(f"{self.name}  ({self.file}:{self.line})")
        return f"{place}\n  {printable(self.reason)}"


@functools.cache
def _adapter() -> TypeAdapter[CompileReport]:
    """Return the adapter, which is made once because that takes 35 ms."""
    return TypeAdapter(CompileReport)


@functools.cache
def _attempts() -> TypeAdapter[Attempt]:
    """Return the adapter of attempts, which is made once."""
    return TypeAdapter(Attempt)


def plain(value: Any) -> Any:
    """Return records, tuples and enums as JSON types, and any other value as its ``str``."""
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
    """Return an engine's name with its options: ``"onnxrt(threads=2)"``."""
    values = ", ".join(f"{key}={value}" for key, value in options.items())
    return f"{name}({values})" if values else name


def in_precision(name: str, precision: str | None) -> str:
    """Return an engine's name with its precision, ``"onnxrt in bf16"``; float32 is not named."""
    return name if precision in (None, "", "fp32") else f"{name} in {precision}"


def printable(text: str) -> str:
    """Return a text with control characters replaced: a file may hold terminal commands."""
    return "".join(each if each.isprintable() else " " for each in text)
