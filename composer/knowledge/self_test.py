"""Whether an engine works with the installed versions, by tests of it on small graphs."""

from __future__ import annotations

from typing import ClassVar

from composer.knowledge.facts import Fact


class SelfTest(Fact):
    """The outcome of the tests of an engine. It does not depend on a graph or on options.

    Attributes:
        backend: The name of the engine.
        why: Why it does not work; empty if it does.
    """

    kind: ClassVar[str] = "selftests"
    noun: ClassVar[str] = "outcome of a test"
    depends_on: ClassVar[tuple[str, ...]] = ("identity", "machine", "device", "versions")
    limit: ClassVar[int] = 1 << 20
    outlives_reset: ClassVar[bool] = True

    backend: str
    why: str

    def sentence(self) -> str:
        """Return the engine and the outcome."""
        return f"{self.backend}  {self.why or 'works with the installed versions'}"
