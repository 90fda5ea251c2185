"""What the user asks for: which engines in which order, and what happens when all refuse.

A policy is put together from layers (:mod:`composer.layers`), each a :class:`Policy` of which only
the fields that were set count.
"""

from __future__ import annotations

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
"""In a chain: every engine of composer's that is installed and can serve the graph's device."""


def _no_truth_value(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("Input should be a number")
    return value


_NUMBER = BeforeValidator(_no_truth_value)
"""Pydantic would take ``True`` for a second, or for all of a graph."""


def _the_whole_number(version: Any) -> Any:
    if type(version) is not int:  # True and 1.0 are equal to 1
        raise ValueError("the version of the format is the whole number 1")
    return version


FormatVersion = Annotated[Literal[1], BeforeValidator(_the_whole_number)]
"""Of a file that a person may edit."""

Share = Annotated[float, Field(ge=0.0, le=1.0), _NUMBER]
Seconds = Annotated[float, Field(gt=0.0, allow_inf_nan=False), _NUMBER]
MiB = Annotated[int, Field(gt=0), _NUMBER]
Calls = Annotated[int, Field(ge=1), _NUMBER]
AtLeastZero = Annotated[float, Field(ge=0.0, allow_inf_nan=False), _NUMBER]

FROZEN = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)
"""What all tables of a policy file have in common; docstrings are the schema's descriptions."""


class Match(BaseModel):
    """Which graphs something holds for; a key that is not given holds for all."""

    model_config = FROZEN

    model: str | None = None
    """A glob over the name of the class or function that is compiled: the one whose frame Dynamo
    traces, the one that the program compiled, and the name given by the field ``model``."""

    device: str | None = None
    """A glob over the device: ``cpu``, ``cuda``, ``cuda:0``."""

    dtype: str | None = None
    """A glob over the most common floating dtype of inputs and weights, such as ``float32``."""

    training: bool | None = None
    """Whether grad mode is on and an input or a weight requires grad."""

    dynamic: bool | None = None
    """Whether some size is a symbol."""

    def holds(self, graph: Facts) -> bool:
        """Whether it does for this graph."""
        kind = graph.device.partition(":")[0]
        return (
            _matches(self.model, graph.model, *graph.names)
            and _matches(self.device, graph.device, kind)
            and _matches(self.dtype, graph.dtype)
            and self.training in (None, graph.training)
            and self.dynamic in (None, graph.dynamic)
        )

    def __str__(self) -> str:
        """``"device = 'cuda', training = False"``."""
        given = self.model_dump(exclude_none=True)
        return ", ".join(f"{key} = {value!r}" for key, value in given.items())


@dataclass(frozen=True, slots=True)
class Facts:
    """What policies match by. ``names`` are others for the model; empty ones stand for none."""

    model: str
    device: str
    dtype: str
    training: bool
    dynamic: bool
    names: tuple[str, ...] = ()

    @staticmethod
    def of(request: GraphRequest) -> Facts:
        """Those of a captured graph."""
        return Facts(
            model=request.model,
            device=request.device,
            dtype=request.dtype,
            training=request.training,
            dynamic=request.dynamic,
            names=request.names,
        )


def _matches(glob: str | None, *texts: str) -> bool:
    return glob is None or any(fnmatchcase(text, glob) for text in texts if text)


class Candidate(BaseModel):
    """One place in the chain. A limit that is not given is the policy's own."""

    model_config = FROZEN

    backend: str | Callable[..., Any]
    """An engine of composer's, the name of any other Dynamo backend, ``dynamo:NAME`` for what
    Dynamo itself has by a name, ``module:function``, or a callable."""

    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the engine; a callable is given them as the keyword ``options=``."""

    min_coverage: Share | None = None
    """The share of the graph's compute nodes that the engine has to take."""

    isolate: bool | None = None
    """Whether a child process builds it first."""

    timeout: Seconds | None = None
    """Seconds that it may spend compiling."""

    memory_limit: MiB | None = None
    """MiB of memory that its child process may take."""

    when: Match | None = None
    """For which graphs it is tried; for others it is skipped."""

    @field_validator("backend", mode="before")
    @classmethod
    def _named(cls, backend: Any) -> Any:
        """Else there were a sentence for each kind that a value is not of."""
        if not (backend.strip() if isinstance(backend, str) else callable(backend)):
            table = {"backend": "onnxrt", "options": {}}
            raise ValueError(f"a candidate is a name, a callable or a table such as {table}")
        return backend

    @property
    def name(self) -> str:
        """The backend as the chain spelled it; a callable's ``__name__``.

        That of a callable named as the eager fallback is (``eager``) has its module's before it.
        """
        if isinstance(self.backend, str):
            return self.backend
        name = getattr(self.backend, "__name__", None) or type(self.backend).__name__
        return f"{self.backend.__module__}.{name}" if name == EAGER else name


class Worded(BaseModel):
    """A field of the policy that is one word, or a table whose first key is that word.

    It is equal to a word where no other key has another value than the default.
    """

    model_config = FROZEN

    @model_validator(mode="before")
    @classmethod
    def _of_a_word(cls, given: Any) -> Any:
        if isinstance(given, Mapping | cls):
            return given
        words = cls.words()
        if not isinstance(given, str) or given not in words:
            *others, last = map(repr, words)
            told = f"Input should be {', '.join(others)} or {last}"
            raise ValueError(f"{told}, or a table of {', '.join(cls.model_fields)}")
        return {cls.first_key(): given}

    @classmethod
    def first_key(cls) -> str:
        """The key that a word stands for."""
        return next(iter(cls.model_fields))

    @classmethod
    def words(cls) -> tuple[str, ...]:
        """What may stand for a table."""
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
        """The word, or the table of the keys that are not as usual, as a file would have it."""
        if self == self.word:
            return self.word
        return {self.first_key(): self.word} | self.model_dump(exclude_defaults=True)

    def __str__(self) -> str:
        return str(self.spelled)

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: Any, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """That of a word, or of the table."""
        made = handler(core_schema)
        table = handler.resolve_ref_schema(made)
        copy = dict(table)
        table.clear()
        table["anyOf"] = [{"type": "string", "enum": list(cls.words())}, copy]
        return made


class Select(Worded):
    """Who serves a graph."""

    by: Literal["first", "fastest"] = "first"
    """``first`` takes the first candidate that is accepted. ``fastest`` measures all that are
    accepted, and eager, on the first real inputs, and keeps the fastest."""

    seconds: Seconds | None = None
    """How long measuring one graph may take. By default it is 15 % of the seconds that building
    the candidates took, at least 1 s and at most 5 s, besides a first call of each."""

    background: bool = False
    """Under ``fastest`` the first candidate that is accepted serves at once, and the others are
    built and measured beside the calls. It does not hold under ``strict``, nor for ``memory``."""

    objective: Literal["latency", "amortised", "memory"] = "latency"
    """``latency`` compares the times of a call. ``amortised`` adds to each the seconds of the
    candidate's build, divided by ``calls``. ``memory`` takes the candidate of the least memory
    among those that take at most the share ``within`` longer than the fastest."""

    calls: Calls = 10_000
    """Over how many calls ``amortised`` spreads the seconds of a build."""

    within: Share = 0.1
    """By which share a candidate may be slower than the fastest under ``memory``."""


class Verify(Worded):
    """Whether, and how closely, a candidate's numbers are compared with eager's.

    A number may be off by ``atol + rtol * max(|eager's|, rms of eager's)``.
    """

    when: Literal["off", "compile", "sample"] = "off"
    """``compile`` compares outputs, written inputs and buffers and, in training, gradients on the
    first real inputs before a candidate is accepted. ``sample`` compares calls later as well, but
    for their gradients."""

    every: Calls = 100
    """Under ``sample``, a call in how many is compared."""

    rtol: AtLeastZero | None = None
    """The relative tolerance; by default that of the dtype."""

    atol: AtLeastZero | None = None
    """The absolute tolerance; by default that of the dtype."""


class Precision(Worded):
    """What products and convolutions of float32 are computed in on the CPU."""

    mode: Literal["fp32", "bf16", "auto"] = "fp32"
    """``bf16`` is bfloat16. ``auto`` tries each engine in bfloat16 first, in inference, and takes
    it so if it is no further from eager than ``max_error`` on the first real inputs."""

    max_error: Annotated[float, Field(gt=0.0), _NUMBER] = 0.01
    """How far what is computed in bfloat16 may be off: the largest error in a value over the
    largest number in it."""


class OnRuntimeError(Worded):
    """What happens when an accepted engine raises at a call."""

    action: Literal["fallback", "raise"] = "fallback"
    """``fallback`` lets the captured graph answer that call, and the next candidate those that
    follow. ``raise`` lets the error through."""

    retry_after: Calls | None = None
    """After how many calls of the graph the engine is compiled for it again, twice as many after
    each further failure. By default it stays in quarantine."""


class Cache(BaseModel):
    """What a process keeps on disk for the next ones, and looks for there."""

    model_config = FROZEN

    failures: AtLeastZero = 7.0
    """Days for which a candidate that crashed, took too long or failed to build is not tried again
    on the same graph by any process; 0 keeps none. Under ``strict`` everything is tried."""

    verdicts: AtLeastZero = 30.0
    """Days for which ``select = "fastest"`` goes straight to the engine that was measured to be the
    fastest, in any process; 0 keeps none. Under ``strict`` everything is measured."""

    artefacts: AtLeastZero = 2.0
    """GiB that the ONNX models which engines were built from may take; 0 keeps none."""

    store: str | None = None
    """The path, or any URL that ``fsspec`` knows, of a folder by which machines share verdicts."""


class Distributed(BaseModel):
    """How the ranks of ``torch.distributed`` come to take the same engine."""

    model_config = FROZEN

    timeout: AtLeastZero = 60.0
    """Seconds that a rank waits for the others, so that all take the same engine for the same
    graph; 0 does not ask them."""


class Policy(Hinting):
    """How one model is compiled; ``torch.compile(options=...)`` takes every field."""

    model_config = FROZEN

    chain: tuple[Candidate, ...] = tuple(Candidate(backend=name) for name in DEFAULT_CHAIN)
    """The candidates in the order in which they are tried; ``eager`` is always the last resort."""

    select: Select = Select()
    """Who serves a graph: the first candidate that is accepted, or the fastest."""

    passes: tuple[Any, ...] = ()
    """The shared passes in the order in which they run: names, ``module:Class``, or tables
    ``{ pass = ..., field = value }``; in code also objects of :class:`~composer.passes.GraphPass`,
    Inductor's custom passes, functions, and at most one ``CustomPartitionerFn``."""

    verify: Verify = Verify()
    """Whether a candidate's numbers are compared with eager's."""

    precision: Precision = Precision()
    """What products and convolutions of float32 are computed in on the CPU."""

    strict: bool = False
    """Any candidate that is not accepted raises at once."""

    on_exhausted: Literal["eager", "raise"] = "eager"
    """``eager`` runs the captured graph itself where no candidate is accepted; ``raise`` gives
    ``ChainExhausted``."""

    on_pass_error: Literal["skip", "raise"] = "skip"
    """``skip`` rolls a failing pass back and records it; ``raise`` gives ``PassError``."""

    on_runtime_error: OnRuntimeError = OnRuntimeError()
    """What happens when an accepted engine raises at a call."""

    freeze: Freeze = "auto"
    """Whether engines take weights in where grad mode is off; a change of one is seen at the next
    call. ``auto``: those that share the weights' memory do. ``true``: Inductor folds them into its
    code as well. ``false``: all are inputs of every call."""

    min_coverage: Share = 0.5
    """The share of a graph's compute nodes that an engine has to take; the rest runs as eager."""

    timeout: Seconds | None = None
    """Seconds that a candidate may spend compiling, in a child process and here."""

    memory_limit: MiB | None = None
    """MiB of physical memory that a child process may take, the 300 of an interpreter with torch
    included."""

    isolate: bool = False
    """Build each candidate in a child process first, and run it once there: one that crashes, exits
    or hangs is not built here."""

    model: str | None = None
    """The model's name in records and rules; by default the class or function that is compiled."""

    locked: bool = False
    """The file ``composer.lock`` says which candidate of the chain serves each graph."""

    @field_validator("chain", mode="before")
    @classmethod
    def _spell_out(cls, chain: Any) -> Any:
        """Let a bare name or callable stand for a candidate without options."""
        if chain == AUTO:
            return ({"backend": AUTO},)
        if isinstance(chain, str) or not isinstance(chain, list | tuple):
            raise ValueError(f"a chain is a list such as ['onnxrt', 'inductor'], or {AUTO!r}")
        if not chain:
            raise ValueError("a chain needs a candidate; ['eager'] runs without an engine")
        return tuple(
            each if isinstance(each, Candidate | Mapping) else {"backend": each} for each in chain
        )

    @field_validator("passes", mode="before")
    @classmethod
    def _listed(cls, passes: Any) -> Any:
        if not isinstance(passes, list | tuple):
            raise ValueError("passes is a list, such as ['fold_batch_norm']")
        return tuple(passes)

    @property
    def key(self) -> str:
        """Text of all that decides how a graph is compiled and served; equal in every process."""
        chain = [(c.name, sorted(c.options.items()), c.min_coverage, c.when) for c in self.chain]
        limited: tuple[Policy | Candidate, ...] = (self, *self.chain)
        limits = [(each.isolate, each.timeout, each.memory_limit) for each in limited]
        answers = (self.strict, self.on_exhausted, self.on_pass_error, self.on_runtime_error.action)
        parts = (
            *(chain, limits, answers, self.min_coverage, self.freeze),
            "" if self.select.by == "first" else self.select.model_copy(update=_DECIDE_NOTHING),
            "" if self.verify.when == "off" else self.verify,
            "" if self.precision.mode == "fp32" else self.precision,
        )
        return " ".join(map(str, parts))

    @classmethod
    def hint_for(cls, key: str) -> str:
        """What to write instead of an unknown key; empty where nobody knows."""
        if key in NOW:
            return f"it is now {NOW[key]}"
        if key in ("cache", "distributed"):
            return f"[{key}] is a table of its own in a policy file, or in composer.configure"
        if key in _torch.inductor.inductor_options():
            candidate = {"backend": "inductor", "options": {key: "..."}}
            return f"it is an option of Inductor, which stands in the chain: {candidate}"
        if nearest(key, cls.model_fields):
            return ""
        candidate = {"backend": "onnxrt", "options": {key: "..."}}
        return f"an option of an engine stands in the chain, such as {candidate}"


_DECIDE_NOTHING = {"seconds": None, "background": False}
"""How long measuring may take, and when it is done, make no other graph."""


def check_mode(mode: str | None) -> None:
    """Know ``torch.compile``'s modes, as the installed torch has them.

    Raises:
        OptionError: the mode is none of them.
    """
    known = () if mode is None else _torch.inductor.modes()
    if mode is not None and mode not in known:
        guess = did_you_mean(mode, known)
        raise OptionError(f"unknown mode {mode!r}{guess} (accepted: {', '.join(known)})")


def fields_of(given: Any) -> dict[str, Any]:
    """The fields that ``options=`` or another mapping sets, or a policy; ``None`` sets nothing.

    Raises:
        OptionError: it is none of these.
    """
    if given is None:
        return {}
    if isinstance(given, Policy):
        return {name: getattr(given, name) for name in given.model_fields_set}
    if isinstance(given, Mapping):
        return dict(given)
    what = "options are a mapping of fields of composer.Policy, such as {'chain': ['onnxrt']}"
    raise OptionError(f"{what}, or a composer.Policy, not {given!r}")


def owned(value: Any) -> Any:
    """A copy of the dicts and lists in a policy's source, so that later changes do not reach it.

    What they hold besides, such as passes and backends, is not copied.
    """
    if isinstance(value, BaseModel):
        given = {name: owned(getattr(value, name)) for name in value.model_fields_set}
        return value.model_copy(update=given)
    if isinstance(value, Mapping):
        return {key: owned(each) for key, each in value.items()}
    if isinstance(value, list):
        return [owned(each) for each in value]
    return tuple(map(owned, value)) if type(value) is tuple else value


def read_policy(fields: Mapping[str, Any] | Policy | None) -> Policy:
    """A policy of these fields, with dicts and lists of its own.

    Raises:
        OptionError: it is no mapping, or naming every unknown key and value at once.
    """
    given = owned(fields_of(fields))
    try:
        return Policy.model_validate(given)
    except ValidationError as error:
        mistakes = (in_words(each, Policy) for each in error.errors())
        raise OptionError("; ".join(mistakes)) from None


NOW = {
    "select_seconds": "'seconds' in the table 'select'",
    "select_async": "'background' in the table 'select'",
    "objective": "'objective' in the table 'select'",
    "sample_every": "'every' in the table 'verify'",
    "tolerance": "'rtol' and 'atol' in the table 'verify'",
    "max_error": "'max_error' in the table 'precision'",
    "retry_after": "'retry_after' in the table 'on_runtime_error'",
    "remember_failures": "'failures' in the table [cache] of a policy file",
    "remember_verdicts": "'verdicts' in the table [cache] of a policy file",
    "keep_artefacts": "'artefacts' in the table [cache] of a policy file",
    "verdict_store": "'store' in the table [cache] of a policy file",
    "agree_within": "'timeout' in the table [distributed] of a policy file",
}
"""Where fields of earlier policies stand now."""
