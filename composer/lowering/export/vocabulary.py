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
from composer.build import current_build
from composer.lowering.export import artefacts
from composer.lowering.operators.translations import translator
from composer.system import forks


class Vocabulary:
    """The operators that can be translated, by their names in the exporter's registry.

    Args:
        known: The operators that the exporter itself translates.
        translated: ``known``, and the operators of composer's own translations.
    """

    def __init__(self, known: frozenset[str], translated: frozenset[str]) -> None:
        self.known = known
        self._translated = translated
        self._lock = forks.lock()
        self._decompositions: dict[Any, Callable[..., Any]] | None = None

    def translates(self, target: Any) -> bool:
        """True if there is a translation for a node's target."""
        return _torch.operators.registry_name(target) in self._translated

    @property
    def decompositions(self) -> dict[Any, Callable[..., Any]]:
        """The exporter's own table of decompositions, which takes a second to make."""
        with self._lock:
            if self._decompositions is None:
                self._decompositions = _torch.exporter.onnx_decompositions(self.known)
            return self._decompositions


@functools.cache
def vocabulary() -> Vocabulary:
    """Return the vocabulary of this process, from disk if it is there, else from the exporter.

    The first build that calls this decides if it is kept on disk.
    """
    models = current_build().artefacts
    key = artefacts.key_of("vocabulary", "")
    entry = artefacts.find(models, key)
    if entry is not None:
        return Vocabulary(frozenset(entry.facts["known"]), frozenset(entry.facts["translated"]))
    known, translated = translator().known, translator().translated
    if artefacts.is_enabled(models):
        facts = {"kind": "vocabulary", "known": sorted(known), "translated": sorted(translated)}
        artefacts.put(models, key, facts)
    return Vocabulary(known, translated)
