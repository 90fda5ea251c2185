"""A disk cache for one command, so that nothing is found or kept."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from composer.system.disk import CACHE_DIR


@contextmanager
def nothing_remembered() -> Iterator[None]:
    """Keep what composer writes to disk in a folder of its own, which is removed at the end."""
    before = os.environ.get(CACHE_DIR)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.environ[CACHE_DIR] = folder
        try:
            yield
        finally:
            os.environ.pop(CACHE_DIR)
            os.environ |= {CACHE_DIR: before} if before is not None else {}
