"""The tables in a policy: conditions on graphs, words with details, settings of the process."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    field_validator,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue

from composer.graphs.comparison import Bounds
from composer.records import GraphRequest, LowPrecision


def _refuse_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("Input should be a number")
    return value


_NUMBER = BeforeValidator(_refuse_bool)
"""Refuses ``True``, which Pydantic would read as the number 1."""


def _check_version(version: Any) -> Any:
    if type(version) is not int:  # True and 1.0 are equal to 1
        raise ValueError("the version of the format is the whole number 1")
    return version


FormatVersion = Annotated[Literal[1], BeforeValidator(_check_version)]
"""The version of the format of a file that a person may edit."""

Share = Annotated[float, Field(ge=0.0, le=1.0), _NUMBER]
Seconds = Annotated[float, Field(gt=0.0, allow_inf_nan=False), _NUMBER]
MiB = Annotated[int, Field(gt=0), _NUMBER]
Calls = Annotated[int, Field(ge=1), _NUMBER]
AtLeastZero = Annotated[float, Field(ge=0.0, allow_inf_nan=False), _NUMBER]

FROZEN = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)
"""The configuration of every table of a policy file. The schema takes its texts from docstrings."""


class Match(BaseModel):
    """A condition on graphs. A graph must match every key that is given."""

    model_config = FROZEN

    model: str | None = None
    """A glob that must match one of the model's names: the class or function whose frame Dynamo
    traces, the one that the program compiled, or the field ``model`` of the policy."""

    device: str | None = None
    """A glob that must match the device: ``cpu``, ``cuda``, ``cuda:0``."""

    dtype: str | None = None
    """A glob that must match the most common floating dtype of inputs and weights, such as
    ``float32``."""

    training: bool | None = None
    """True for graphs compiled in grad mode of which an input or a weight requires grad."""

    dynamic: bool | None = None
    """True for graphs with a symbolic size."""

    def holds(self, graph: Facts) -> bool:
        """Return True if the graph matches every key that is given."""
        kind = graph.device.partition(":")[0]
        return (
            _matches(self.model, graph.model, *graph.names)
            and _matches(self.device, graph.device, kind)
            and _matches(self.dtype, graph.dtype)
            and self.training in (None, graph.training)
            and self.dynamic in (None, graph.dynamic)
        )

    def __str__(self) -> str:
        """The keys that are given, such as ``"device = 'cuda', training = False"``."""
        given = self.model_dump(exclude_none=True)
        return ", ".join(f"{key} = {value!r}" for key, value in given.items())


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts of a graph that policies match. ``names`` are further names of its model."""

    model: str
    device: str
    dtype: str
    training: bool
    dynamic: bool
    names: tuple[str, ...] = ()

    @staticmethod
    def of(request: GraphRequest) -> Facts:
        """Return the facts of a captured graph."""
        return Facts(
            **{each.name: getattr(request, each.name) for each in dataclasses.fields(Facts)}
        )


def _matches(glob: str | None, *texts: str) -> bool:
    return glob is None or any(fnmatchcase(text, glob) for text in texts if text)


class Worded(BaseModel):
    """A field of the policy that is one word, or a table whose first key is that word.

    It compares equal to the word if all its other keys have their default values.
    """

    model_config = FROZEN

    @model_validator(mode="before")
    @classmethod
    def _table_of_word(cls, value: Any) -> Any:
        if isinstance(value, Mapping | cls):
            return value
        words = cls.words()
        if not isinstance(value, str) or value not in words:
            *others, last = map(repr, words)
            accepted = f"{', '.join(others)} or {last}"
            keys = ", ".join(cls.model_fields)
            raise ValueError(f"Input should be {accepted}, or a table of {keys}")
        return {cls.first_key(): value}

    @classmethod
    def first_key(cls) -> str:
        """Return the key whose value is the word."""
        return next(iter(cls.model_fields))

    @classmethod
    def words(cls) -> tuple[str, ...]:
        """Return the words that may stand in place of a table."""
        return get_args(cls.model_fields[cls.first_key()].annotation)

    @property
    def word(self) -> str:
        """The value of the first key."""
        return str(getattr(self, self.first_key()))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, str):
            return self.word == other and super().__eq__(type(self)(**{self.first_key(): other}))
        return super().__eq__(other)

    def __hash__(self) -> int:
        return hash(self.word)

    @property
    def spelled(self) -> str | dict[str, Any]:
        """The word, or a table of the keys that differ from their defaults, as a file has it."""
        if self == self.word:
            return self.word
        return {self.first_key(): self.word} | self.model_dump(exclude_defaults=True)

    @property
    def if_not_usual(self) -> str:
        """The text of the table; empty if its word is the default."""
        return "" if self.word == type(self)().word else str(self)

    def __str__(self) -> str:
        return str(self.spelled)

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: Any, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Return a schema that accepts a word or the table."""
        schema = handler(core_schema)
        table = handler.resolve_ref_schema(schema)
        copy = dict(table)
        table.clear()
        table["anyOf"] = [{"type": "string", "enum": list(cls.words())}, copy]
        return schema


class Select(Worded):
    """How the engine that serves a graph is selected."""

    by: Literal["first", "fastest"] = "first"
    """``first`` takes the first candidate that is accepted. ``fastest`` measures eager and all
    accepted candidates on the first real inputs, and keeps the fastest."""

    seconds: Seconds | None = None
    """The seconds that measuring one graph may take, first calls included. By default this is 15 %
    of the time that building the candidates took, between 1 s and 5 s, or 30 s in the background,
    and a first call of each candidate does not count."""

    background: bool = False
    """True lets eager answer from the first call on, while a child process builds and measures the
    candidates. The choice takes over between two calls. It has no effect under ``strict``."""

    objective: Literal["latency", "amortised"] = "latency"
    """``latency`` compares the times of a call. ``amortised`` adds the build time of the candidate,
    divided by ``calls``."""

    calls: Calls = 10_000
    """The number of calls over which ``amortised`` spreads the build time."""

    ranges: Calls = 1
    """The number of engines that a graph with dynamic sizes may keep under ``fastest``, each for a
    range of sizes. With 1, the sizes of the first call decide for all. It is 1 under ``strict``."""


class Verify(Worded):
    """When a candidate's numbers are compared with eager's, and how closely.

    A number may differ by ``atol + rtol * max(|eager's|, rms of eager's)``.
    """

    when: Literal["off", "compile", "sample"] = "off"
    """``compile`` compares a candidate on the first real inputs, before it is accepted: outputs,
    written inputs, buffers and, in training, gradients. ``sample`` also compares later calls,
    without their gradients. The default is ``compile`` where composer chooses the engine, which
    is under ``select = "fastest"`` or ``chain = "auto"``, and ``off`` elsewhere."""

    every: Calls = 100
    """Under ``sample``, one call in this many is compared."""

    rtol: AtLeastZero | None = None
    """The relative tolerance. The default depends on the dtype."""

    atol: AtLeastZero | None = None
    """The absolute tolerance. The default depends on the dtype."""

    retry: bool = False
    """True has an engine whose numbers are off built once more with stricter settings, if it has
    such settings: ONNX Runtime with fewer rewrites, OpenVINO for accuracy, Inductor without
    fusion."""

    @property
    def bounds(self) -> Bounds:
        """How far numbers may be off."""
        return Bounds(self.rtol, self.atol)


class Precision(Worded):
    """The precision of float32 matrix products and convolutions on the CPU."""

    mode: Literal["fp32", "bf16", "int8", "auto"] = "fp32"
    """``bf16`` is bfloat16. ``int8`` quantizes products with a weight, for engines with kernels for
    eight bits. ``auto`` tries each engine in the precisions of ``allow`` first, in inference. The
    engine is accepted if its error on the first real inputs is at most ``max_error``."""

    max_error: Annotated[float, Field(gt=0.0), _NUMBER] = 0.01
    """The largest error that is accepted in low precision: the largest difference in a tensor,
    divided by the largest magnitude in it."""

    allow: Annotated[tuple[LowPrecision, ...], Field(min_length=1)] = ("bf16",)
    """The precisions that ``auto`` tries, in this order. ``int8`` is tried only under
    ``select = "fastest"``, which keeps it if it is measured to be faster."""

    @field_validator("allow")
    @classmethod
    def _check_each_once(cls, allow: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(allow)) < len(allow):
            raise ValueError("Input should name each precision once")
        return allow


class OnRuntimeError(Worded):
    """What happens when an accepted engine raises at a call."""

    action: Literal["fallback", "raise"] = "fallback"
    """``fallback`` lets the captured graph answer that call. The next candidate serves the calls
    that follow. ``raise`` lets the error reach the caller."""

    retry_after: Calls | None = None
    """The number of calls after which the engine is compiled again for the graph. The number
    doubles after each further failure. By default the engine stays in quarantine."""


class Cache(BaseModel):
    """What processes share on disk."""

    model_config = FROZEN

    failures: AtLeastZero = 7.0
    """Days for which no process tries a candidate again on a graph for which it crashed, timed out
    or failed to build. 0 keeps no failures. Under ``strict``, every candidate is tried."""

    verdicts: AtLeastZero = 30.0
    """Days for which ``select = "fastest"`` uses the engine that a process has measured to be the
    fastest, without measuring again. 0 keeps no verdicts. ``strict`` always measures."""

    artefacts: AtLeastZero = 2.0
    """GiB that exported ONNX models may take on disk. 0 keeps none."""

    store: str | None = None
    """The folder through which machines share verdicts: a path or any URL of ``fsspec``."""


class Distributed(BaseModel):
    """How the ranks of ``torch.distributed`` come to the same engine."""

    model_config = FROZEN

    timeout: AtLeastZero = 300.0
    """Seconds that a rank waits for the one that leads, so that all use one engine for a graph.
    With 0, each rank decides for itself."""
