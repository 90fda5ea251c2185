"""What the user asks for: which engines in which order, and what happens when all refuse.

A policy is put together from layers, each a :class:`Policy` of which only the fields that were set
count. Where the layers come from is :mod:`composer.book`'s to know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
)

from composer import _torch
from composer.build import Freeze
from composer.errors import OptionError
from composer.records import FLOOR, GraphRequest
from composer.registry import did_you_mean

DEFAULT_CHAIN = ("tensorrt", "inductor", "onnxrt")


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
Days = Annotated[float, Field(ge=0.0, allow_inf_nan=False), _NUMBER]


class Match(BaseModel):
    """Which graphs something holds for; a key that is not given holds for all.

    ``model`` is a glob over the qualified name of the class, or function, whose frame is compiled,
    over that of what the program compiled (another, behind a graph break in a submodule), and over
    the name given as ``options={"model": ...}``. ``device`` is one over ``"cpu"``,
    ``"cuda:0"`` and ``"cuda"``, ``dtype`` one over ``"float32"``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str | None = None
    device: str | None = None
    dtype: str | None = None
    training: bool | None = None
    dynamic: bool | None = None

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
    """One place in the chain.

    ``backend`` is a name that ``torch._dynamo.lookup_backend`` knows, one of composer's own,
    ``"module:function"``, or a callable ``(gm, example_inputs) -> callable``. ``options`` go to
    the engine; a callable receives them as the keyword ``options=``. ``min_coverage`` is the
    policy's own where it is not given, and so are ``isolate``, ``timeout`` and ``memory_limit``.
    ``when`` has the keys of :class:`Match`: for other graphs the candidate is skipped.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    backend: str | Callable[..., Any]
    options: dict[str, Any] = Field(default_factory=dict)
    min_coverage: Share | None = None
    isolate: bool | None = None
    timeout: Seconds | None = None
    memory_limit: MiB | None = None
    when: Match | None = None

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

        That of a callable named as the floor is (``eager``) has its module's before it.
        """
        if isinstance(self.backend, str):
            return self.backend
        name = getattr(self.backend, "__name__", None) or type(self.backend).__name__
        return f"{self.backend.__module__}.{name}" if name == FLOOR else name


class Tolerance(BaseModel):
    """How far a number may be off: ``atol + rtol * max(|eager's|, rms of eager's)``.

    By default both are those of the dtype (:data:`composer.graphs.comparison.TOLERANCES`).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    rtol: Annotated[float, Field(ge=0.0), _NUMBER] | None = None
    atol: Annotated[float, Field(ge=0.0), _NUMBER] | None = None


Purpose = Literal["latency", "amortised", "memory"]


class Objective(BaseModel):
    """What the fastest is the fastest at.

    ``"latency"`` is the time of a call. ``"amortised"`` adds the seconds that building the
    candidate took, divided by the number of ``calls`` that are expected of it. ``"memory"`` is the
    least memory, among those that take no more than the share ``within`` longer than the fastest.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Purpose = "latency"
    calls: Calls = 10_000
    within: Share = 0.1

    def __str__(self) -> str:
        """What is part of a policy's key: as it was before there was ``within``."""
        within = f" within={self.within}" if self.kind == "memory" else ""
        return f"kind={self.kind!r} calls={self.calls}{within}"


class Policy(BaseModel):
    """How one model is compiled; ``torch.compile(options=...)`` takes every field.

    Attributes:
        chain: Candidates in the order in which they are tried. ``eager`` is always the floor.
        select: ``"first"`` takes the first candidate that is accepted; ``"fastest"`` measures all
            that are, and the captured graph's own forward, on the first real inputs.
        select_seconds: How long measuring one graph may take; ``None`` is 15 % of what building the
            candidates took, at least 1 s and at most 5 s, besides a first call of each.
        select_async: Under ``select = "fastest"`` the first candidate that is accepted serves at
            once, and the others are built and measured beside the calls. Under ``"first"``, under
            ``strict`` and for the objective ``"memory"`` it means nothing.
        objective: What is measured for.
        strict: Any candidate that is not accepted raises at once.
        on_exhausted: ``"eager"`` runs the captured graph's own forward when no candidate was
            accepted, ``"raise"`` gives :class:`~composer.errors.ChainExhausted`.
        passes: Shared passes in the order in which they run: names, ``"module:Class"``, tables
            ``{"pass": ..., field: value}``, :class:`~composer.passes.GraphPass` objects, Inductor's
            custom passes, functions, and at most one ``CustomPartitionerFn``.
        on_pass_error: ``"skip"`` rolls a failing pass back and records it, ``"raise"`` gives
            :class:`~composer.errors.PassError`.
        min_coverage: Share of a graph's compute nodes that an engine must really take, for engines
            that say how much they took; the rest runs as eager ATen.
        verify: ``"compile"`` compares a candidate with eager on the first real inputs before it is
            accepted: outputs, inputs and buffers afterwards and, in training, gradients.
            ``"sample"`` compares every ``sample_every``-th call as well, but for gradients.
            ``"off"`` does not.
        sample_every: A call in how many that is.
        tolerance: How far its numbers may be off.
        on_runtime_error: ``"fallback"`` lets the captured graph answer a call in which the engine
            raises, and the next candidate those that follow; ``"raise"`` lets the error through.
        retry_after: Calls of a graph after which an engine that failed at run time is compiled for
            it again, twice as many after each further failure; ``None`` leaves it in quarantine.
        isolate: Build each candidate in a child process first, and run it once there: one that
            crashes, exits or hangs is not built here.
        timeout: Seconds that a candidate may spend compiling, in the child and here.
        memory_limit: MiB of physical memory that the child may take, the 300 of an interpreter
            with torch included; without ``isolate`` it counts for engines alone that have a child
            of their own.
        remember_failures: Days for which a candidate that crashed, took too long or failed to build
            is not tried again on the same graph by any process; 0 remembers none, and looks for
            none. Under ``strict`` everything is tried.
        agree_within: Seconds that a rank of ``torch.distributed`` waits for the others, so that all
            take the same engine for the same graph; 0 does not ask them.
        remember_verdicts: Days for which ``select = "fastest"`` goes straight to the engine that
            was measured to be the fastest, in any process; 0 remembers none, and looks for none.
            Under ``strict`` everything is measured.
        verdict_store: The path, or any URL that ``fsspec`` knows, of a folder that machines share
            such verdicts by.
        model: The model's name in reports; by default the class, or the function, compiled.
        locked: The file ``composer.lock`` says which candidate of the chain serves each graph, and
            no other is tried; a graph that is not as it says is a
            :class:`~composer.errors.LockError`.
        precision: In what products and convolutions of float32 are computed on the CPU. ``"bf16"``
            is bfloat16; ``"auto"`` has each engine tried in it first, in inference, and taken if it
            is no further from eager than ``max_error`` on the first real inputs.
        max_error: How far what is computed in bfloat16 may be off: the largest error in a value
            over the largest number in it.
        keep_artefacts: GiB that the ONNX models which engines were built from may take on disk, so
            that the next process need not make them; 0 keeps none, and looks for none.
        freeze: Whether engines take weights in, where grad mode is off; a change of one is seen at
            the next call, and the engine made anew before it answers. ``"auto"``: those that share
            the weights' memory do. ``True``: Inductor folds them into its code as well. ``False``:
            all are inputs of every call. While grad mode is on they always are.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    chain: tuple[Candidate, ...] = tuple(Candidate(backend=name) for name in DEFAULT_CHAIN)
    select: Literal["first", "fastest"] = "first"
    select_seconds: Seconds | None = None
    select_async: bool = False
    objective: Objective = Objective()
    strict: bool = False
    on_exhausted: Literal["eager", "raise"] = "eager"
    passes: tuple[Any, ...] = ()
    on_pass_error: Literal["skip", "raise"] = "skip"
    min_coverage: Share = 0.5
    verify: Literal["off", "compile", "sample"] = "off"
    sample_every: Calls = 100
    tolerance: Tolerance = Tolerance()
    on_runtime_error: Literal["fallback", "raise"] = "fallback"
    retry_after: Calls | None = None
    isolate: bool = False
    timeout: Seconds | None = None
    memory_limit: MiB | None = None
    remember_failures: Days = 7.0
    agree_within: Annotated[float, Field(ge=0.0, allow_inf_nan=False), _NUMBER] = 60.0
    remember_verdicts: Days = 30.0
    verdict_store: str | None = None
    model: str | None = None
    locked: bool = False
    precision: Literal["fp32", "bf16", "auto"] = "fp32"
    max_error: Annotated[float, Field(gt=0.0), _NUMBER] = 0.01
    keep_artefacts: Annotated[float, Field(ge=0.0, allow_inf_nan=False), _NUMBER] = 2.0
    freeze: Freeze = "auto"

    @field_validator("chain", mode="before")
    @classmethod
    def _spell_out(cls, chain: Any) -> Any:
        """Let a bare name or callable stand for a candidate without options."""
        if isinstance(chain, str) or not isinstance(chain, list | tuple):
            raise ValueError("a chain is a list of backends, such as ['onnxrt', 'inductor']")
        if not chain:
            raise ValueError("a chain needs a candidate; ['eager'] runs without an engine")
        return tuple(
            each if isinstance(each, Candidate | Mapping) else {"backend": each} for each in chain
        )

    @field_validator("objective", mode="before", json_schema_input_type=Objective | Purpose)
    @classmethod
    def _of_a_word(cls, objective: Any) -> Any:
        """Let its kind stand for an objective."""
        return {"kind": objective} if isinstance(objective, str) else objective

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
        checks = f"{self.verify} {self.tolerance}" if self.verify != "off" else ""
        often = f" every {self.sample_every}" if self.verify == "sample" else ""
        limits = f" {self._limits}" if any(map(any, self._limits)) else ""
        choice = f" {self.select} {self.objective}" if self.select != "first" else ""
        low = f" {self.precision} {self.max_error}" if self.precision != "fp32" else ""
        baked = f" freeze={self.freeze}" if self.freeze != "auto" else ""
        answers = f"{self.on_pass_error} {self.on_runtime_error}"
        loud = f" {answers}" if "raise" in answers else ""
        rest = f"{checks}{often}{limits}{choice}{low}{baked}{loud}"
        return f"{chain} {self.strict} {self.on_exhausted} {self.min_coverage} {rest}"

    @property
    def _limits(self) -> list[tuple[float | None, ...]]:
        """Of the policy, then of each candidate: ``isolate``, ``timeout``, ``memory_limit``."""
        limited: tuple[Policy | Candidate, ...] = (self, *self.chain)
        return [(each.isolate, each.timeout, each.memory_limit) for each in limited]


@dataclass(frozen=True, slots=True)
class Layer:
    """A part of the policy and its name in reports; only the fields that were set count."""

    name: str
    policy: Policy


@dataclass(frozen=True, slots=True)
class Rules:
    """The policy in force for one graph, and the layers that spoke, in order.

    ``origins`` says for each field that was set by which layer.
    """

    policy: Policy
    layers: tuple[str, ...]
    origins: Mapping[str, str]

    @property
    def names_chain(self) -> bool:
        """Whether the user wrote the chain, rather than taking the default."""
        return "chain" in self.origins


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


def merge(layers: Iterable[Layer], engines: Mapping[str, Mapping[str, Any]]) -> Rules:
    """Put layers on top of each other, the last one first in line, field by field.

    Args:
        layers: From the most general to the most particular.
        engines: Options of engines by name, behind those that a candidate itself gives.
    """
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    spoke: list[str] = []
    for layer in layers:
        given = {name: getattr(layer.policy, name) for name in layer.policy.model_fields_set}
        values |= given
        origins |= dict.fromkeys(given, layer.name)
        spoke += [layer.name] if given else []
    policy = Policy().model_copy(update=values)
    chain = tuple(_with_options(each, engines) for each in policy.chain)
    return Rules(policy.model_copy(update={"chain": chain}), tuple(spoke), origins)


def _with_options(candidate: Candidate, engines: Mapping[str, Mapping[str, Any]]) -> Candidate:
    options = {**engines.get(candidate.name, {}), **candidate.options}
    return candidate.model_copy(update={"options": options})


def in_words(
    error: Any,
    root: type[BaseModel],
    tables: Mapping[str | int, type[BaseModel]] = MappingProxyType({}),
) -> str:
    """One of pydantic's errors in the user's terms: where, what, and what would be accepted.

    Args:
        error: One of ``ValidationError.errors()``.
        root: What was validated.
        tables: What stands in its tables, by the key that holds them.
    """
    *parents, key = error["loc"] or ("",)
    where = _path(error["loc"])
    if error["type"] == "extra_forbidden":
        kinds = _TABLES | dict(tables)
        held = next((kinds[p] for p in reversed(parents) if p in kinds), root)
        known = tuple(held.model_fields)
        guess = did_you_mean(str(key), known)
        hint = "" if parents or guess else _where_it_belongs(str(key), root, tables)
        return f"unknown option {where!r}{guess} (accepted: {', '.join(known)}){hint}"
    if error["type"] == "missing":
        return f"option {where!r} is missing"
    message = error["msg"].removeprefix("Value error, ").replace("a valid tuple", "a list")
    return f"option {where!r} is {error['input']!r}: {message}"


_TABLES: dict[str | int, type[BaseModel]] = {
    "chain": Candidate,
    "when": Match,
    "tolerance": Tolerance,
    "objective": Objective,
}
"""What stands in the tables of a policy, by the key that holds them."""


def _path(location: tuple[str | int, ...]) -> str:
    """``chain[0].options``."""
    parts = (f"[{p}]" if isinstance(p, int) else f".{p}" for p in location)
    return "".join(parts).removeprefix(".")


def _where_it_belongs(
    key: str, root: type[BaseModel], tables: Mapping[str | int, type[BaseModel]]
) -> str:
    """What to write instead of an unknown key at the top; nothing where nobody knows."""
    if table := next((name for name, held in tables.items() if key in held.model_fields), None):
        return f"; {key!r} is an option of the table {table!r}"
    if root is not Policy:
        return ""
    candidate = {"backend": "inductor", "options": {key: ...}}
    return f"; an engine's own option stands in the chain: {candidate}".replace("Ellipsis", "...")
