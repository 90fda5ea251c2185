"""``COMPOSER_DUMP=folder``: each graph before and after every pass that changed it, as files.

Each process writes to a folder of its own within it, so that no rank overwrites another's. Files
sort in the order of events: number, graph, candidate (``joint`` and ``post_grad`` run once for
each), stage, pass, and then the graph before, the graph after, and their difference.
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
    """Where this process writes to; ``None`` where ``COMPOSER_DUMP`` is not set."""
    root = os.environ.get("COMPOSER_DUMP")
    return _folder(root, os.getpid()) if root else None


class Folder:
    """The dumps of one process; what cannot be written is logged once and never raises."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._numbers = itertools.count(1)
        self._complained = False
        self._lock = forks.lock()

    @functools.cached_property
    def path(self) -> Path:
        """Made when first asked for; never one that was there before."""
        self._root.mkdir(parents=True, exist_ok=True)
        for name in _names():
            try:
                (self._root / name).mkdir()
            except FileExistsError:  # another run's, or another machine's
                continue
            return self._root / name
        raise AssertionError("names do not end")

    def write(self, each: GraphPass, candidate: str, before: Snapshot, after: Snapshot) -> None:
        """Write a graph as it was before a pass and as the pass left it, and the difference."""
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
    """``"0_0"`` for ``"0/0"``: fit for a file's name everywhere, and not too long for one."""
    return re.sub(r"[^A-Za-z0-9_.]+", "_", name).strip("_")[-60:]


def _difference(texts: dict[str, str]) -> str:
    (was, before), (now, after) = texts.items()
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), was, now, lineterm="")
    return "\n".join((*lines, ""))
