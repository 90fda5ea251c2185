"""Lists the operators that can be translated to ONNX, and decompositions for the others.

Asking the exporter takes two seconds, mostly for imports. Its answer depends only on versions, and
not on the libraries of operators that a process has loaded. So the answer is kept on disk, and the
exporter is imported only to translate.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from composer import _torch
from composer.build import Artefacts
from composer.lowering.export import artefacts
from composer.lowering.operators import operators
from composer.lowering.operators.entry import Operator
from composer.lowering.operators.translations import translator
from composer.system import forks


class Vocabulary:
    """The operators that can be translated, by their names in the exporter's registry."""

    def __init__(self) -> None:
        self._lock = forks.lock()
        self._names: tuple[frozenset[str], frozenset[str]] | None = None
        self._decompositions: dict[Any, Callable[..., Any]] | None = None

    def learn(self, models: Artefacts) -> None:
        """Learn the operators, from disk if they are there, else from the exporter.

        The first build of the process that calls this decides if they are kept on disk.
        """
        if self._names is None:  # two threads learn the same
            self._names = _found_or_asked(models)

    def translates(self, target: Any) -> bool:
        """True if there is a translation for a node's target, by the exporter or by composer."""
        # The operators of some entries may have been loaded after the first answer.
        if operators().get(target, Operator()).translate:
            return True
        return _torch.operators.registry_name(target) in self._known_and_translated()[1]

    @property
    def decompositions(self) -> dict[Any, Callable[..., Any]]:
        """The exporter's own table of decompositions, which takes a second to make."""
        with self._lock:
            if self._decompositions is None:
                known, _ = self._known_and_translated()
                self._decompositions = _torch.exporter.onnx_decompositions(known)
            return self._decompositions

    def _known_and_translated(self) -> tuple[frozenset[str], frozenset[str]]:
        """Return the operators that the exporter translates, and these with composer's own."""
        if self._names is None:
            self.learn(Artefacts())
        assert self._names is not None
        return self._names


def _found_or_asked(models: Artefacts) -> tuple[frozenset[str], frozenset[str]]:
    key = artefacts.key_of("vocabulary", "")
    entry = artefacts.find(models, key)
    if entry is not None:
        return frozenset(entry.facts["known"]), frozenset(entry.facts["translated"])
    known, translated = translator().known, translator().translated
    if artefacts.is_enabled(models):
        facts = {"kind": "vocabulary", "known": sorted(known), "translated": sorted(translated)}
        artefacts.put(models, key, facts)
    return known, translated


@functools.cache
def vocabulary() -> Vocabulary:
    """Return the vocabulary of this process."""
    return Vocabulary()
