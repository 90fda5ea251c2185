"""The artefacts that the lowering keeps on disk, so that another process need not make them again.

There are three kinds: what the exporter can translate (:mod:`composer.lowering.vocabulary`), the
ONNX models of regions (:mod:`composer.lowering.onnx`), and which model a whole captured graph
becomes (:mod:`composer.lowering.whole`). The key of each is a digest of the text of all that it was
made from; what has no such text (:class:`composer.lowering.texts.Unsayable`) is made anew every
time. No artefact holds the value of a weight or code, and nothing is ever unpickled.
"""

from __future__ import annotations

import functools
import hashlib
import platform
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from composer import _torch
from composer.distribution import version_of
from composer.store.disk import Entry, Shelf

DEFAULT_GIB = 2.0
"""How much is kept where no policy says otherwise."""

_PACKAGES = ("onnx", "onnx-ir", "onnxscript", "torchvision")
"""What the exporter consists of; where torchvision is installed it translates more operators."""

_IMPORTED = time.time()


@dataclass
class Tally:
    """What became of the models of one attempt.

    Attributes:
        reused: How many were found on disk.
        kept: How many were made, and stored on disk.
        lost: Why each of the others could not be stored.
        whole: Whether the captured graph's model was found, so that AOTAutograd was skipped.
    """

    reused: int = 0
    kept: int = 0
    lost: list[str] = field(default_factory=list)
    whole: bool = False

    def __str__(self) -> str:
        """``"graph reused"``, ``"model reused"``, ``"1 of 3 models reused"``, ``"kept"``, ...

        Empty where no model was asked for: another engine of the chain had it made.
        """
        total = self.reused + self.kept + len(self.lost)
        if self.whole:
            return "graph reused"
        if self.reused == total == 1:
            return "model reused"
        if self.reused:
            return f"{self.reused} of {total} models reused"
        if self.lost:
            return f"not kept: {'; '.join(dict.fromkeys(self.lost))}"
        return "kept" if self.kept else ""


_gib: ContextVar[float] = ContextVar("composer_keep_artefacts", default=DEFAULT_GIB)
_tally: ContextVar[Tally | None] = ContextVar("composer_artefacts", default=None)


@contextmanager
def keeping(gib: float) -> Iterator[None]:
    """Let builds keep this many GiB on disk; with 0 they keep nothing and look for nothing."""
    token = _gib.set(gib)
    try:
        yield
    finally:
        _gib.reset(token)


@contextmanager
def counting() -> Iterator[Tally]:
    """Count what becomes of the models of one build."""
    tally = Tally()
    token = _tally.set(tally)
    try:
        yield tally
    finally:
        _tally.reset(token)


def tally() -> Tally:
    """The count of the build under way."""
    return _tally.get() or Tally()


def keeps() -> bool:
    """Whether anything is kept and looked for: by policy, and by torch's switch for all caches."""
    return _gib.get() > 0 and not torch.compiler.config.force_disable_caches


def shelf() -> Shelf:
    """Where it is kept."""
    return Shelf("onnx", limit=int((_gib.get() or DEFAULT_GIB) * (1 << 30)))


def find(key: str | None) -> Entry | None:
    """What was kept under this key; ``None`` where nothing is, or nothing is to be looked for."""
    return shelf().get(key) if key and keeps() else None


def put(key: str, facts: Mapping[str, Any], blob: bytes | None = None) -> str:
    """Keep an entry. Returns why it cannot be kept; empty if it is."""
    kept = shelf()
    return "" if kept.put(key, facts, blob) else kept.trouble


def key_of(kind: str, text: str) -> str:
    """SHA-256 of a text and of all else that decides what becomes of it."""
    halves = _torch.processor.multiplies_bf16()  # decides what of a graph in bfloat16 is taken
    return hashlib.sha256(f"{kind}\n{environment()} {halves}\n{text}".encode()).hexdigest()


@functools.cache
def environment() -> str:
    """What the lowering is made of: composer's own sources, torch, the exporter, the processor."""
    versions = {name: version_of(name) for name in _PACKAGES}
    built = torch.__version__, torch.version.git_version, platform.python_version()
    machine = platform.machine(), torch.backends.cpu.get_cpu_capability()
    return f"{_sources()} {built} {versions} {machine}"


def _sources() -> str:
    """SHA-256 over every file of composer: any of them may have a part in what is made.

    A random text, equal to no other, where a file was changed after it was imported.
    """
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        if path.stat().st_mtime > _IMPORTED:
            return uuid.uuid4().hex
        digest.update(f"{path.relative_to(root)}\n".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()
