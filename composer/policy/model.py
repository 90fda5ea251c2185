"""What the user asks for: which engines in which order, and what happens when all refuse.

A policy is merged from layers (:mod:`composer.policy.resolution`). Each layer is a
:class:`Policy`, of which only the fields that were set count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    BaseModel,
    Field,
    ValidationError,
    field_validator,
)

from composer import _torch
from composer.build import Freeze
from composer.errors import OptionError
from composer.policy.tables import (
    FROZEN,
    Cache,
    Distributed,
    FormatVersion,
    Match,
    MiB,
    OnRuntimeError,
    Precision,
    Seconds,
    Select,
    Share,
    Verify,
)
from composer.policy.wording import Hinting, mistakes_in
from composer.records import EAGER
from composer.registry import nearest

DEFAULT_CHAIN = ("tensorrt", "inductor", "onnxrt")

AUTO = "auto"
"""In a chain, stands for all of composer's engines that are installed and can serve the device."""

DYNAMO = "dynamo:"
"""The prefix of a name in a chain that is looked up in Dynamo's registry, never in composer's."""


def names_code(name: object) -> bool:
    """Return True if a name in a chain or a list of passes has the form ``module:name``."""
    return isinstance(name, str) and ":" in name and not name.startswith(DYNAMO)


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

    locked: Literal[False, True, "raise", "warn"] = False
    """``raise`` (or true) takes the candidate for each graph from the file ``composer.lock``, and
    raises ``LockError`` for a graph that the file does not know. ``warn`` compiles such a graph as
    if there were no lock, with a warning. It tries the file's candidate first, and then the rest of
    the chain."""

    repro: str | None = None
    """A folder. For each engine that goes wrong on a graph, a folder in it shows that to others."""

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
            *(chain, limits, answers, self.min_coverage, self.freeze, select.if_not_usual),
            *(self.verify.if_not_usual, self.precision.if_not_usual),
        )
        return " ".join(map(str, parts))

    def terms(self, candidate: Candidate) -> str:
        """Return a text of the settings that decide if a candidate is accepted or wins.

        Its options, and the settings and limits of its build, are not among them.
        """
        select = self.select.model_copy(update=_NOT_IN_KEY)
        verify = self.verify.model_copy(update={"every": Verify().every})
        tables = (select, verify, self.precision)
        return " ".join((str(candidate.when), *(each.if_not_usual for each in tables)))

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


class Rule(Policy):
    """The fields of a policy, for the graphs that ``match``."""

    match: Match = Match()
    """Which graphs the rule holds for; a key that is not given holds for all."""


class PolicyBook(Hinting):
    """Policies of many models: what a policy file holds, and what ``composer.configure`` takes."""

    model_config = FROZEN

    version: FormatVersion = 1
    """The version of the format."""

    defaults: Policy = Policy()
    """The policy of every graph."""

    models: tuple[Rule, ...] = ()
    """Policies of the graphs that match, field by field, later ones over earlier."""

    backends: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Options of engines, by name, where a candidate gives none of its own."""

    cache: Cache = Cache()
    """What the process keeps on disk for the next ones."""

    distributed: Distributed = Distributed()
    """How long the ranks of ``torch.distributed`` wait for one another."""

    @field_validator("models", mode="before")
    @classmethod
    def _a_list(cls, models: Any) -> Any:
        if isinstance(models, Mapping):
            raise ValueError("each rule is a table of a list: write [[models]], not [models]")
        return models

    @classmethod
    def hint_for(cls, key: str) -> str:
        """Return a hint what to write instead of an unknown key; empty if there is none."""
        return f"{key!r} is an option of the table 'defaults'" if key in Policy.model_fields else ""


Source = PolicyBook | Policy | Mapping[str, Any] | str | Path | None
"""A book, a policy for every graph, a mapping shaped like the TOML, a file's path, or nothing."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A partial policy and its name in reports; only the fields that were set count."""

    name: str
    policy: Policy


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
        raise OptionError("; ".join(mistakes_in(error, Policy))) from None
