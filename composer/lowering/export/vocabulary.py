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

_KEY = "vocabulary"


class Vocabulary:
    """The operators that can be translated, by their names in the exporter's registry."""

    def __init__(self) -> None:
        self._lock = forks.lock()
        self._names: tuple[frozenset[str], frozenset[str]] | None = None
        self._is_kept = False
        self._decompositions: dict[Any, Callable[..., Any]] | None = None

    def learn(self, models: Artefacts) -> None:
        """Learn the operators, from disk if they are there, else from the exporter.

        The first build that may keep artefacts keeps them on disk. A self-test may not.
        """
        if self._names is None:  # two threads learn the same
            found = _found(models)
            self._is_kept = found is not None
            self._names = found or (translator().known, translator().translated)
        if not self._is_kept and artefacts.is_enabled(models):
            self._is_kept = True
            _keep(models, *self._names)

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


def _found(models: Artefacts) -> tuple[frozenset[str], frozenset[str]] | None:
    """Return the operators that are kept on disk; ``None`` if none are."""
    entry = artefacts.find(models, artefacts.key_of(_KEY, ""))
    if entry is None:
        return None
    return frozenset(entry.facts["known"]), frozenset(entry.facts["translated"])


def _keep(models: Artefacts, known: frozenset[str], translated: frozenset[str]) -> None:
    facts = {"kind": _KEY, "known": sorted(known), "translated": sorted(translated)}
    artefacts.put(models, artefacts.key_of(_KEY, ""), facts)


@functools.cache
def vocabulary() -> Vocabulary:
    """Return the vocabulary of this process."""
    return Vocabulary()
