"""Store what the passes did to a graph, for when Inductor takes the graph from its cache.

Inductor then does not run the passes, so they make no new record.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path

from composer import _torch
from composer.records import PassRecord
from composer.system.disk import DiskCache

_LIMIT = 64 << 20

FORMAT = 3
"""The version of the keys of records. Increase it whenever ``graph_key`` changes. It is part of
Inductor's key, so Inductor's cache never returns a graph whose record cannot be found."""


def remember(key: str, records: Iterable[PassRecord]) -> None:
    """Store the records of a graph key. If they cannot be stored, only later reports lack them."""
    _cache().put(key, {"passes": [dataclasses.asdict(each) for each in records]})


def recall(key: str) -> tuple[PassRecord, ...]:
    """The records stored for this key, with their times set to zero; empty if there are none."""
    entry = _cache().get(key)
    kept = entry.facts["passes"] if entry else ()
    return tuple(dataclasses.replace(PassRecord(**each), seconds=0.0) for each in kept)


def _cache() -> DiskCache:
    """A cache beside Inductor's own, so that records live as long as the cached graphs."""
    root = Path(_torch.inductor.inductor_cache_dir())
    return DiskCache("composer_passes", limit=_LIMIT, root=root)
