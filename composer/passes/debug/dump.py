"""``COMPOSER_DUMP=folder`` writes each graph before and after every pass that changed it.

Each process writes to its own folder in it, so that ranks do not overwrite each other's files. A
file name begins with a number, so files sort in the order in which the passes ran. Graph, candidate
(``joint`` and ``post_grad`` run once for each), stage and pass follow. There are three files for
each pass: the graph before, the graph after, and the difference.
"""

from __future__ import annotations

import difflib
import functools
import itertools
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path

from composer import _torch
from composer.passes.base import GraphPass
from composer.passes.debug.render import as_python, as_table
from composer.passes.snapshot import Snapshot
from composer.system import control_flow, forks

log = logging.getLogger("composer")

_FORMATS = {"python": ("py", as_python), "tabular": ("txt", as_table)}


def folder() -> Folder | None:
    """Return the folder of this process; ``None`` if ``COMPOSER_DUMP`` is not set."""
    root = os.environ.get("COMPOSER_DUMP")
    return _folder(root, os.getpid()) if root else None


class Folder:
    """The dumps of one process. An error in writing is logged once, and never raised."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._numbers = itertools.count(1)
        self._complained = False
        self._lock = forks.lock()

    @functools.cached_property
    def path(self) -> Path:
        """The folder, created at the first access; it never existed before."""
        self._root.mkdir(parents=True, exist_ok=True)
        for name in _names():
            try:
                (self._root / name).mkdir()
            except FileExistsError:  # from another run or another machine
                continue
            return self._root / name
        raise AssertionError("names do not end")

    def write(self, each: GraphPass, candidate: str, before: Snapshot, after: Snapshot) -> None:
        """Write a graph from before and after a pass, and the difference.

        ``candidate`` is empty at the stages before all candidates.
        """
        try:
            with self._lock:
                self._write(each, candidate, before, after)
        except Exception as error:  # noqa: BLE001  # never the user's problem
            control_flow.pass_on(error)
            if not self._complained:
                log.warning("COMPOSER_DUMP: graphs cannot be written to %s: %r", self._root, error)
            self._complained = True

    def _write(self, each: GraphPass, candidate: str, before: Snapshot, after: Snapshot) -> None:
        graph = _torch.dynamo.compile_id() or "direct"
        within = f" of candidate {candidate}" if candidate else ""
        title = f"Graph {graph}{within}, stage {each.stage}, {{}} pass {each.name}."
        parts = (graph, candidate, str(each.stage), each.name)
        stem = "-".join((f"{next(self._numbers):04d}", *(_safe(p) for p in parts if p)))
        suffix, render = _FORMATS[_format()]
        texts = {
            f"{stem}-1-before.{suffix}": render(before, each.stage, title.format("before")),
            f"{stem}-2-after.{suffix}": render(after, each.stage, title.format("after")),
        }
        texts[f"{stem}-3.diff"] = _difference(texts)
        for name, text in texts.items():
            (self.path / name).write_text(text, encoding="utf-8")


@functools.cache
def _folder(root: str, process: int) -> Folder:  # a forked process has its own
    return Folder(Path(root).absolute())


def _names() -> Iterator[str]:
    rank = os.environ.get("RANK")
    own = f"rank{rank}-process{os.getpid()}" if rank else f"process{os.getpid()}"
    yield own
    yield from (f"{own}-{number}" for number in itertools.count(2))


def _format() -> str:
    wanted = os.environ.get("COMPOSER_DUMP_FORMAT") or "python"
    if wanted not in _FORMATS:
        raise ValueError(f"COMPOSER_DUMP_FORMAT is {wanted!r}, not one of {', '.join(_FORMATS)}")
    return wanted


def _safe(name: str) -> str:
    """Return a text that is valid and short enough in a file name: ``"0_0"`` for ``"0/0"``."""
    return re.sub(r"[^A-Za-z0-9_.]+", "_", name).strip("_")[-60:]


def _difference(texts: dict[str, str]) -> str:
    (was, before), (now, after) = texts.items()
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), was, now, lineterm="")
    return "\n".join((*lines, ""))
