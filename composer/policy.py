"""What the user asks for: which engines in which order, and what happens when all refuse.

A policy is merged from layers (:mod:`composer.layers`). Each layer is a :class:`Policy`, of which
only the fields that were set count.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue

from composer import _torch
from composer.build import Freeze
from composer.errors import OptionError
from composer.records import EAGER, GraphRequest
from composer.registry import did_you_mean, nearest
from composer.wording import Hinting, in_words

DEFAULT_CHAIN = ("tensorrt", "inductor", "onnxrt")

AUTO = "auto"
"""In a chain, stands for all of composer's engines that are installed and can serve the device."""

DYNAMO = "dynamo:"
"""The prefix of a name in a chain that is looked up in Dynamo's registry, never in composer's."""


def names_code(name: object) -> bool:
    """Return True if a name in a chain or a list of passes has the form ``module:name``."""
    return isinstance(name, str) and ":" in name and not name.startswith(DYNAMO)


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


class Candidate(BaseModel):
    """One entry of the chain. A limit that it does not give is the policy's."""

    model_config = FROZEN

    backend: str | Callable[..., Any]
    """One of composer's engines, the name of any other Dynamo backend, ``dynamo:NAME`` for the
    backend that Dynamo itself registers under a name, ``module:function``, or a callable."""

    options: dict[str, Any] = Field(default_factory=dict)
    """The options of the engine. A callable gets them as the keyword argument ``options``."""

    min_coverage: Share | None = None
    """The share of the graph's compute nodes that the engine has to take."""

    isolate: bool | None = None
    """True to build the engine in a child process first."""

    timeout: Seconds | None = None
    """The seconds that the engine may spend compiling."""

    memory_limit: MiB | None = None
    """The MiB of memory that the child process of the engine may take."""

    when: Match | None = None
    """The graphs for which the engine is tried. It is skipped for all others."""

    @field_validator("backend", mode="before")
    @classmethod
    def _check_backend(cls, backend: Any) -> Any:
        """Refuse other values with one sentence. Pydantic would give one for each type."""
        is_name = isinstance(backend, str) and bool(backend.strip())
        if not is_name and not callable(backend):
            table = {"backend": "onnxrt", "options": {}}
            raise ValueError(f"a candidate is a name, a callable or a table such as {table}")
        return backend

    @property
    def name(self) -> str:
        """The backend as the chain spells it. For a callable, this is its ``__name__``.

        A callable that is itself named ``eager`` gets the name of its module in front.
        """
        if isinstance(self.backend, str):
            return self.backend
        name = getattr(self.backend, "__name__", None) or type(self.backend).__name__
        return f"{self.backend.__module__}.{name}" if name == EAGER else name


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
    """The seconds that measuring one graph may take, besides a first call of each candidate. By
    default this is 15 % of the time that building the candidates took, between 1 s and 5 s."""

    background: bool = False
    """Under ``fastest``, True lets the first accepted candidate serve at once. The others are built
    and measured between the calls. It has no effect under ``strict``."""

    objective: Literal["latency", "amortised"] = "latency"
    """``latency`` compares the times of a call. ``amortised`` adds the build time of the candidate,
    divided by ``calls``."""

    calls: Calls = 10_000
    """The number of calls over which ``amortised`` spreads the build time."""


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


class Precision(Worded):
    """The precision of float32 matrix products and convolutions on the CPU."""

    mode: Literal["fp32", "bf16", "auto"] = "fp32"
    """``bf16`` is bfloat16. ``auto`` tries each engine in bfloat16 first, in inference. The engine
    is accepted in bfloat16 if its error on the first real inputs is at most ``max_error``."""

    max_error: Annotated[float, Field(gt=0.0), _NUMBER] = 0.01
    """The largest error that is accepted in bfloat16: the largest difference in a tensor, divided
    by the largest magnitude in it."""


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

    timeout: AtLeastZero = 60.0
    """Seconds that a rank waits for the one that leads, so that all use one engine for a graph.
    With 0, each rank decides for itself."""


class Policy(Hinting):
    """How one model is compiled; ``torch.compile(options=...)`` takes every field."""

    model_config = FROZEN

    chain: tuple[Candidate, ...] = tuple(Candidate(backend=name) for name in DEFAULT_CHAIN)
    """The candidates, in the order in which they are tried. ``eager`` always comes last."""

    select: Select = Select()
    """The candidate that serves a graph: the first that is accepted, or the fastest."""

    passes: tuple[Any, ...] = ()
    """The shared passes, in the order in which they run: names, ``module:Class``, or tables
    ``{ pass = ..., field = value }``. Code may also give objects of
    :class:`~composer.passes.GraphPass`, Inductor's custom passes, functions, and at most one
    ``CustomPartitionerFn``."""

    verify: Verify = Verify()
    """When a candidate's numbers are compared with eager's."""

    precision: Precision = Precision()
    """The precision of float32 matrix products and convolutions on the CPU."""

    strict: bool = False
    """True raises an error for the first candidate that is not accepted."""

    on_exhausted: Literal["eager", "raise"] = "eager"
    """If no candidate is accepted, ``eager`` runs the captured graph, and ``raise`` raises
    ``ChainExhausted``."""

    on_pass_error: Literal["skip", "raise"] = "skip"
    """If a pass fails, ``skip`` undoes and records it, and ``raise`` raises ``PassError``."""

    on_runtime_error: OnRuntimeError = OnRuntimeError()
    """What happens when an accepted engine raises at a call."""

    freeze: Freeze = "auto"
    """Which engines take weights in when grad mode is off. A changed weight is seen at the next
    call. ``auto``: engines that share the memory of the weights. ``true``: also Inductor, which
    folds weights into its code. ``false``: none; weights are inputs of every call."""

    min_coverage: Share = 0.5
    """The share of a graph's compute nodes that an engine has to take. Eager runs the rest."""

    timeout: Seconds | None = None
    """Seconds that a candidate may spend compiling, in a child process and in this process."""

    memory_limit: MiB | None = None
    """MiB of physical memory that a child process may take. An interpreter with torch takes 300."""

    isolate: bool = False
    """True builds each candidate in a child process first, and runs it once there. A candidate that
    crashes, exits or hangs is not built in this process."""

    model: str | None = None
    """The model's name in records and rules. By default it is the compiled class or function."""

    locked: bool = False
    """True takes the candidate for each graph from the file ``composer.lock``."""

    @field_validator("chain", mode="before")
    @classmethod
    def _check_chain(cls, chain: Any) -> Any:
        """Make a candidate without options of a bare name or callable."""
        if chain == AUTO:
            return ({"backend": AUTO},)
        if isinstance(chain, str) or not isinstance(chain, list | tuple):
            raise ValueError(f"a chain is a list such as ['onnxrt', 'inductor'], or {AUTO!r}")
        if not chain:
            raise ValueError("a chain needs a candidate; ['eager'] runs without an engine")
        is_table = (Candidate, Mapping)
        return tuple(each if isinstance(each, is_table) else {"backend": each} for each in chain)

    @field_validator("passes", mode="before")
    @classmethod
    def _check_passes(cls, passes: Any) -> Any:
        if not isinstance(passes, list | tuple):
            raise ValueError("passes is a list, such as ['fold_batch_norm']")
        return tuple(passes)

    @property
    def key(self) -> str:
        """A text of all settings that affect the compile of a graph; equal in every process.

        Keys of a table that its word turns off are left out.
        """
        chain = [(c.name, sorted(c.options.items()), c.min_coverage, c.when) for c in self.chain]
        limited: tuple[Policy | Candidate, ...] = (self, *self.chain)
        limits = [(each.isolate, each.timeout, each.memory_limit) for each in limited]
        answers = (self.strict, self.on_exhausted, self.on_pass_error, self.on_runtime_error.action)
        select = self.select.model_copy(update=_NOT_IN_KEY)
        parts = (
            *(chain, limits, answers, self.min_coverage, self.freeze),
            "" if select.by == "first" else select,
            "" if self.verify.when == "off" else self.verify,
            "" if self.precision.mode == "fp32" else self.precision,
        )
        return " ".join(map(str, parts))

    def terms(self, candidate: Candidate) -> str:
        """Return a text of the settings that decide if a candidate is accepted or wins.

        Its options and the limits of its build are not among them.
        """
        select = self.select.model_copy(update=_NOT_IN_KEY)
        verify = self.verify.model_copy(update={"every": Verify().every})
        parts = (
            *(candidate.when, candidate.min_coverage or self.min_coverage, self.freeze),
            *(select, verify, self.precision),
        )
        return " ".join(map(str, parts))

    @classmethod
    def hint_for(cls, key: str) -> str:
        """Return a hint what to write instead of an unknown key; empty if there is none."""
        if key in ("cache", "distributed"):
            return f"[{key}] is a table of its own in a policy file, or in composer.configure"
        if key in _torch.inductor.inductor_options():
            candidate = {"backend": "inductor", "options": {key: "..."}}
            return f"it is an option of Inductor, which stands in the chain: {candidate}"
        if nearest(key, cls.model_fields):
            return ""
        candidate = {"backend": "onnxrt", "options": {key: "..."}}
        return f"an option of an engine stands in the chain, such as {candidate}"


_NOT_IN_KEY = {"seconds": None, "background": False}
"""Keys of ``select`` that do not change what is compiled."""


def check_mode(mode: str | None) -> None:
    """Check that the installed torch knows a mode of ``torch.compile``.

    Raises:
        OptionError: it does not.
    """
    if mode is None:
        return
    known = _torch.inductor.modes()
    if mode not in known:
        guess = did_you_mean(mode, known)
        raise OptionError(f"unknown mode {mode!r}{guess} (accepted: {', '.join(known)})")


def fields_of(options: Any) -> dict[str, Any]:
    """Return the fields that ``options`` sets: a policy, a mapping, or ``None`` for no fields.

    Raises:
        OptionError: ``options`` has another type.
    """
    if options is None:
        return {}
    if isinstance(options, Policy):
        return {name: getattr(options, name) for name in options.model_fields_set}
    if isinstance(options, Mapping):
        return dict(options)
    what = "options are a mapping of fields of composer.Policy, such as {'chain': ['onnxrt']}"
    raise OptionError(f"{what}, or a composer.Policy, not {options!r}")


def copied(source: Any) -> Any:
    """Return a copy of a policy's source that later changes to its dicts and lists do not reach.

    Other values in it, such as passes and backends, are not copied.
    """
    if isinstance(source, BaseModel):
        fields = {name: copied(getattr(source, name)) for name in source.model_fields_set}
        return source.model_copy(update=fields)
    if isinstance(source, Mapping):
        return {key: copied(value) for key, value in source.items()}
    if isinstance(source, list):
        return [copied(value) for value in source]
    return tuple(map(copied, source)) if type(source) is tuple else source


def read_policy(fields: Mapping[str, Any] | Policy | None) -> Policy:
    """Return a policy of these fields, with dicts and lists of its own.

    Raises:
        OptionError: ``fields`` is no mapping, or keys or values are wrong. The error names all.
    """
    try:
        return Policy.model_validate(copied(fields_of(fields)))
    except ValidationError as error:
        mistakes = (in_words(each, Policy) for each in error.errors())
        raise OptionError("; ".join(mistakes)) from None
