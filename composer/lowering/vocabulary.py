"""What ONNX can say: which operators are translated, and what the others are written out as.

To ask the exporter takes two seconds, most of them imports. Its answer is the same for the same
versions, so it is kept on disk; the exporter is only imported to translate.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from composer import _torch
from composer.lowering import keeping
from composer.lowering.translations import translator


class Vocabulary:
    """The words of the exporter and of our own translations.

    Args:
        known: What the exporter itself translates.
        translated: What is translated with ours.
    """

    def __init__(self, known: frozenset[str], translated: frozenset[str]) -> None:
        self.known = known
        self._translated = translated

    def translates(self, target: Any) -> bool:
        """Whether there is a translation for a node's target."""
        return _torch.word_of(target) in self._translated

    @functools.cached_property
    def decompositions(self) -> dict[Any, Callable[..., Any]]:
        """The exporter's own table of what to write out."""
        return _torch.onnx_decompositions(self.known)


@functools.cache
def vocabulary() -> Vocabulary:
    """That of this process: from disk where it is kept, else from the exporter."""
    key = keeping.key_of("vocabulary", "")
    entry = keeping.find(key)
    if entry is not None:
        return Vocabulary(frozenset(entry.facts["known"]), frozenset(entry.facts["translated"]))
    known, translated = translator().known, translator().translated
    if keeping.keeps():
        facts = {"kind": "vocabulary", "known": sorted(known), "translated": sorted(translated)}
        keeping.put(key, facts)
    return Vocabulary(known, translated)
