"""Records of the passes within graphs that Inductor has cached, for when it does not run them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path

from composer import _torch
from composer.records import PassRecord
from composer.system.disk import DiskCache

_LIMIT = 64 << 20

FORMAT = 3
"""Of the keys that records are kept under. It is part of Inductor's key, so that no graph is served
whose records nobody finds: counted up whenever ``graph_key`` says a graph otherwise."""


def remember(key: str, records: Iterable[PassRecord]) -> None:
    """Keep the records; where they cannot be, the next process knows less, no more.

    Args:
        key: A SHA-256 over the graph, the settings and the passes.
        records: What the passes did.
    """
    _cache().put(key, {"passes": [dataclasses.asdict(each) for each in records]})


def recall(key: str) -> tuple[PassRecord, ...]:
    """The records kept for this key, with no time spent; none where none are kept."""
    entry = _cache().get(key)
    kept = entry.facts["passes"] if entry else ()
    return tuple(dataclasses.replace(PassRecord(**each), seconds=0.0) for each in kept)


def _cache() -> DiskCache:
    """Beside Inductor's cache, so that the records live as long as what they tell of."""
    root = Path(_torch.inductor.inductor_cache_dir())
    return DiskCache("composer_passes", limit=_LIMIT, root=root)
