"""The policies of many models, as a file or ``composer.configure`` gives them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from composer.policy.match import Match
from composer.policy.model import Policy
from composer.policy.tables import FROZEN, Cache, Distributed, FormatVersion
from composer.policy.wording import Hinting


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
