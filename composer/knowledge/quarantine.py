"""A candidate failed, or gave wrong numbers, when it ran for a graph in this process."""

from __future__ import annotations

from typing import ClassVar

from pydantic import ConfigDict

from composer.knowledge.facts import Fact


class Quarantined(Fact):
    """The candidate is not tried on the graph again, until it is released or after a reset.

    Attributes:
        held: The object that stands in the chain. It is kept alive, so that no other object gets
            its address.
    """

    model_config = ConfigDict(frozen=True, arbitrary_types_allowed=True)

    kind: ClassVar[str] = "quarantine"
    depends_on: ClassVar[tuple[str, ...]] = ("compile", "candidate", "options", "precision")

    held: object
