"""What the user asks for: which engines in which order, and what happens when all refuse."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from composer.errors import OptionError
from composer.registry import did_you_mean

DEFAULT_CHAIN = ("tensorrt", "inductor", "onnxrt")

Mode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
"""The words that ``torch.compile(mode=...)`` takes."""


Share = Annotated[float, Field(ge=0.0, le=1.0)]


class Candidate(BaseModel):
    """One place in the chain.

    ``backend`` is a name that ``torch._dynamo.lookup_backend`` knows, one of composer's own,
    ``"module:function"``, or a callable ``(gm, example_inputs) -> callable``. ``options`` go to
    the engine; a callable receives them as the keyword ``options=``. ``min_coverage`` is the
    policy's own where it is not given.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    backend: str | Callable[..., Any]
    options: dict[str, Any] = Field(default_factory=dict)
    min_coverage: Share | None = None

    @property
    def name(self) -> str:
        """The backend as the chain spelled it; a callable's ``__name__``."""
        if isinstance(self.backend, str):
            return self.backend
        return getattr(self.backend, "__name__", None) or type(self.backend).__name__


class Policy(BaseModel):
    """How one model is compiled; ``torch.compile(options=...)`` takes every field.

    Attributes:
        chain: Candidates in the order in which they are tried. ``eager`` is always the floor.
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
        model: The model's name in reports; by default the class, or the function, compiled.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    chain: tuple[Candidate, ...] = tuple(Candidate(backend=name) for name in DEFAULT_CHAIN)
    strict: bool = False
    on_exhausted: Literal["eager", "raise"] = "eager"
    passes: tuple[Any, ...] = ()
    on_pass_error: Literal["skip", "raise"] = "skip"
    min_coverage: Share = 0.5
    model: str | None = None

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

    @field_validator("passes", mode="before")
    @classmethod
    def _listed(cls, passes: Any) -> Any:
        if not isinstance(passes, list | tuple):
            raise ValueError("passes is a list, such as ['fold_batch_norm']")
        return tuple(passes)

    @property
    def names_chain(self) -> bool:
        """Whether the user wrote the chain, rather than taking the default."""
        return "chain" in self.model_fields_set

    @property
    def key(self) -> str:
        """Text of all that decides how a graph is compiled; equal in every process."""
        chain = [(c.name, sorted(c.options.items()), c.min_coverage) for c in self.chain]
        return f"{chain} {self.strict} {self.on_exhausted} {self.min_coverage}"

    @property
    def layers(self) -> tuple[str, ...]:
        """The layers of the policy that spoke, in order."""
        return ("options",) if self.model_fields_set else ()


def resolve(mode: str | None = None, options: Mapping[str, Any] | None = None) -> Policy:
    """The policy in force for one graph.

    Args:
        mode: ``torch.compile``'s mode.
        options: ``torch.compile``'s options: fields of :class:`Policy`.

    Raises:
        OptionError: naming every unknown mode, key and value at once.
    """
    mistakes = []
    if mode is not None and mode not in get_args(Mode):
        accepted = ", ".join(get_args(Mode))
        guess = did_you_mean(mode, get_args(Mode))
        mistakes.append(f"unknown mode {mode!r}{guess} (accepted: {accepted})")
    try:
        policy = Policy.model_validate(dict(options or {}))
    except ValidationError as error:
        mistakes.extend(_explain(each) for each in error.errors())
    if mistakes:
        raise OptionError("; ".join(mistakes))
    return policy


def _explain(error: Any) -> str:
    """One of pydantic's errors in the user's terms: where, what, and what would be accepted."""
    *parents, key = error["loc"]
    where = _path(error["loc"])
    if error["type"] == "extra_forbidden":
        known = tuple((Candidate if "chain" in parents else Policy).model_fields)
        guess = did_you_mean(str(key), known)
        hint = "" if parents or guess else _engine_option_hint(str(key))
        return f"unknown option {where!r}{guess} (accepted: {', '.join(known)}){hint}"
    message = error["msg"].removeprefix("Value error, ")
    return f"option {where!r} is {error['input']!r}: {message}"


def _path(location: tuple[str | int, ...]) -> str:
    """``chain[0].options``, without the branches of unions that pydantic names as well."""
    parts = (f"[{p}]" if isinstance(p, int) else f".{p}" for p in location)
    return "".join(p for p in parts if p[1:] not in _UNION_BRANCHES).removeprefix(".")


_UNION_BRANCHES = frozenset({"str", "callable", "Candidate"})


def _engine_option_hint(key: str) -> str:
    candidate = {"backend": "inductor", "options": {key: ...}}
    return f"; an engine's own option stands in the chain: {candidate}".replace("Ellipsis", "...")
