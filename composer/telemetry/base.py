"""What a sink is: where the records of compiled graphs go."""

from __future__ import annotations

from typing import Any

from composer.records import CompileReport


class Sink:
    """Takes the record of every compiled graph to where somebody reads it.

    A class of another package, registered as an entry point of the group ``composer.sinks``, needs
    no more than ``emit``; it is made once, without arguments, at the first compile. One that takes
    arguments is made by the user and given to :func:`composer.session.add_sink`. Whatever a sink
    raises is warned of once and goes no further. Compiles in several threads may call at once.
    """

    @classmethod
    def wanted(cls, name: str, named: frozenset[str]) -> bool:
        """Whether the environment asks for this sink, as it is at a compile.

        Args:
            name: What the sink is registered as.
            named: The names in ``COMPOSER_SINKS``.
        """
        return name in named

    def emit(self, record: dict[str, Any]) -> None:
        """Take a record: ``CompileReport.to_dict()``, a copy for this sink alone.

        Called when a graph was compiled, and again, with the same ``number``, when
        another engine took it over at run time.
        """
        raise NotImplementedError

    def follow(self, report: CompileReport) -> None:
        """Be shown a graph's live report, once, before the first ``emit`` for it.

        For sinks that read its ``runtime`` later. Keep a bounded number of them.
        """

    def close(self) -> None:
        """Write what is left: the process ends, or the environment no longer asks for the sink."""
