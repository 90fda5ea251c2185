"""The part of a graph that a candidate computes in low precision, if not the whole."""

from __future__ import annotations

from typing import ClassVar

from composer.knowledge.facts import Fact
from composer.policy import Cache


class Part(Fact):
    """A candidate is exact enough in low precision if these products stay in float32.

    It is tried first the next time, and its numbers are compared again.

    Attributes:
        backend: The engine, as the chain spells it.
        wide: The places of the products that stay in float32, among all products of the graph.
    """

    kind: ClassVar[str] = "parts"
    noun: ClassVar[str] = "part in low precision"
    depends_on: ClassVar[tuple[str, ...]] = (
        *("graph", "engine", "options", "precision", "build", "terms"),
        *("machine", "settings", "versions"),
    )
    limit: ClassVar[int] = 1 << 20

    backend: str
    wide: tuple[int, ...]

    @classmethod
    def most_days(cls, settings: Cache) -> float:
        """Return the days of ``[cache] verdicts``."""
        return settings.verdicts

    def sentence(self) -> str:
        """Return the engine and the products."""
        return f"{self.backend}  products in float32: {', '.join(map(str, self.wide))}"
