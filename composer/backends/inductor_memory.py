"""What passes did to a graph that Inductor now takes from its cache, without running them again."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from composer import _torch
from composer.records import PassRecord


def remember(key: str, records: Iterable[PassRecord]) -> None:
    """Keep the records beside Inductor's cache, so that they live as long as what they tell of.

    A directory that cannot be written to is no error: the next process knows less, no more.

    Args:
        key: A SHA-256 over the graph, the settings and the passes.
        records: What the passes did.
    """
    text = json.dumps([dataclasses.asdict(each) for each in records])
    path = _path(key)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "w") as file:
            file.write(text)
        Path(name).replace(path)


def recall(key: str) -> tuple[PassRecord, ...]:
    """The records kept for this key, with no time spent; none where nothing readable is kept."""
    try:
        kept = [PassRecord(**each) for each in json.loads(_path(key).read_text())]
    except (OSError, ValueError, TypeError):
        return ()
    return tuple(dataclasses.replace(each, seconds=0.0) for each in kept)


def _path(key: str) -> Path:
    return Path(_torch.inductor_cache_dir()) / "composer_passes" / f"{key}.json"
