"""The fingerprint of an attempt: all that a fact about it may depend on, in named parts.

A kind of fact names the parts that it depends on (:class:`composer.knowledge.facts.Fact`). Nothing
else makes a key. So a change of one part forgets the facts that depend on it, and no others.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from composer import _torch
from composer.backends.base import Backend
from composer.errors import Refusal, error_line
from composer.graphs.keys import without_address
from composer.passes.function import qualified_name
from composer.records import GraphRequest
from composer.system import control_flow, distribution, hardware
from composer.system.disk import digest_of, warn_of
from composer.system.distribution import version_of


@dataclass(frozen=True, slots=True)
class CandidateParts:
    """The parts of a fingerprint that are a candidate's.

    Attributes:
        name: The engine, as the chain spells it.
        backend: The engine.
        in_chain: The object that stands in the chain, if it is no name. Different callables may
            have the same name, such as those that one function makes.
        options: The options of the candidate, as text.
        precision: The precision; empty if the policy asks for none.
        limits: The limits of its build, as text.
        build: The other settings of its build, as text: ``freeze`` and ``min_coverage``.
        terms: The fields of the policy that decide if it is accepted or wins, as text.
    """

    name: str
    backend: Backend
    in_chain: object
    options: str
    precision: str
    limits: str
    build: str
    terms: str


def _settings() -> list[Any]:
    return [
        torch.get_num_threads(),
        _torch.modes.float32_precision(),
        torch.are_deterministic_algorithms_enabled(),
    ]


@dataclass(frozen=True)
class Fingerprint:
    """All that a fact about candidates for a graph may depend on.

    A part is computed when a fact needs it, since an engine's identity takes a moment.

    Attributes:
        request: The graph.
        candidates: The candidate, or the candidates of a chain.
        settings: The settings of the process that the speed and the numbers of engines depend on,
            as they were when the fingerprint was made. An engine may change them.
        named_parts: The graph, its policy and its passes as ``composer.lock`` shows them, equal on
            all ranks (:func:`composer.graphs.keys.parts_of`); ``None`` if nobody asks for them.
    """

    request: GraphRequest
    candidates: tuple[CandidateParts, ...]
    named_parts: Mapping[str, str] | None = None
    settings: list[Any] = field(default_factory=_settings)

    @property
    def graph(self) -> str:
        """The graph, its shapes and surroundings, and the shared passes."""
        return self.request.graph_digest

    @property
    def compile(self) -> str:
        """The graph, and every setting of the policy (``graph_key``)."""
        return self.request.graph_key

    @property
    def candidate(self) -> list[str]:
        """The candidates by name and options, with the addresses of objects in this process."""
        return [f"{_name_here(each)} {each.options}" for each in self.candidates]

    @functools.cached_property
    def engine(self) -> list[list[str]] | None:
        """The engines: the name and the identity of each, which has the versions of its packages.

        ``None`` if an engine has no identity.
        """
        if not all(self._identities):
            return None
        return [
            [each.name, own] for each, own in zip(self.candidates, self._identities, strict=True)
        ]

    @property
    def identity(self) -> list[str]:
        """The engines, by identity alone. One without identity is known by its class."""
        named = zip(self.candidates, self._identities, strict=True)
        return [own or qualified_name(type(each.backend)) for each, own in named]

    @functools.cached_property
    def _identities(self) -> list[str]:
        return list(map(_identity, self.candidates))

    @property
    def options(self) -> list[Any]:
        """The mode of ``torch.compile``, and the options of the candidates."""
        return [self.request.mode, *(without_address(each.options) for each in self.candidates)]

    @property
    def limits(self) -> list[str]:
        """The limits of each candidate's build."""
        return [each.limits for each in self.candidates]

    @property
    def machine(self) -> tuple[str, ...]:
        """The processor and, for a graph on a GPU, that GPU and its driver."""
        return hardware.describe(self.request.device)

    @property
    def device(self) -> str:
        """The kind of device: ``"cpu"``, ``"cuda"``."""
        return self.request.device.partition(":")[0]

    @property
    def versions(self) -> list[str]:
        """The versions of composer, torch and Python. Those of an engine are in its identity."""
        return [version_of(distribution.NAME), torch.__version__, platform.python_version()]

    def key(self, parts: Sequence[str]) -> str | None:
        """Return the SHA-256 of these parts; ``None`` if one of them is not known."""
        known = {name: self._part(name) for name in parts}
        return None if None in known.values() else digest_of(known)

    def _part(self, name: str) -> Any:
        if name in ("precision", "build", "terms"):
            return [getattr(each, name) for each in self.candidates]
        return getattr(self, name)

    def outlives_process(self, parts: Sequence[str]) -> bool:
        """Return True if these parts mean the same in every process."""
        if "candidate" in parts:
            return False
        return "identity" not in parts or all(self._identities)


def _name_here(each: CandidateParts) -> str:
    """Return the name of a candidate in this process."""
    if isinstance(each.in_chain, str):
        return each.name
    # A bound method is made anew each time.
    given = getattr(each.in_chain, "__self__", each.in_chain)
    return f"{each.name} at {id(given):#x}"


def _identity(each: CandidateParts) -> str:
    """Return the identity of an engine; empty if it has none.

    A name that nobody here registers is known by the reason. If an engine cannot tell because of
    a fault of its own, a warning says so.
    """
    try:
        return each.backend.identity() or ""
    except Refusal as refusal:
        return f"{refusal.status} {refusal.reason}"
    except Exception as error:  # noqa: BLE001  # an engine's fault is told of, and nothing is kept
        control_flow.pass_on(error)
        why = error_line(error)
        warn_of(f"nothing is kept, since nobody knows what the engines are: {why}")
        return ""
