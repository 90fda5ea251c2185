"""The base class of sinks. A sink receives the records of compiled graphs."""

from __future__ import annotations

from typing import Any

from composer.records import CompileReport


class Sink:
    """Receives the record of every compiled graph.

    A class of another package is registered as an entry point of the group ``composer.sinks``. It
    needs only the method ``emit``. composer makes it once, without arguments, at the first compile.
    If a sink takes arguments, the user makes it and passes it to
    :func:`composer.session.add_sink`.

    If a sink raises, composer warns once and goes on. Compiles in several threads may call a sink
    at the same time.
    """

    @classmethod
    def wanted(cls, name: str, named: frozenset[str]) -> bool:
        """Return true if the environment asks for this sink; called at a compile.

        Args:
            name: The name under which the sink is registered.
            named: The names in ``COMPOSER_SINKS``.
        """
        return name in named

    def emit(self, record: dict[str, Any]) -> None:
        """Receive a record.

        It is called after the compile of a graph. It is called again with the same ``number`` when
        another engine takes the graph over at run time.

        Args:
            record: The result of ``CompileReport.to_dict()``. Each sink gets its own copy.
        """
        raise NotImplementedError

    def follow(self, report: CompileReport) -> None:
        """Receive a graph's live report, once, before the first ``emit`` for that graph.

        It is for sinks that read its ``runtime`` later. A sink should keep only a bounded number of
        reports.
        """

    def close(self) -> None:
        """Write remaining data.

        It is called when the process ends, or when the environment no longer asks for the sink.
        """
