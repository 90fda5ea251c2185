"""The artefact cache: what the lowering keeps on disk, so that another process need not make it.

There are three kinds: what the exporter can translate (:mod:`composer.lowering.export.vocabulary`),
the ONNX models of regions (:mod:`composer.lowering.export.onnx`), and which model a whole captured
graph becomes (:mod:`composer.lowering.export.whole`). The key of each is a digest of the text of
all that it was made from; what has no such text (:class:`composer.graphs.written.Unsayable`) is
made anew every time. No artefact holds the value of a weight or code, and nothing is ever
unpickled.
"""

from __future__ import annotations

import functools
import hashlib
import platform
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from composer import _torch
from composer.build import DEFAULT_GIB, Artefacts
from composer.system.disk import DiskCache, Entry
from composer.system.distribution import version_of

_PACKAGES = ("onnx", "onnx-ir", "onnxscript", "torchvision")
"""What the exporter consists of; where torchvision is installed it translates more operators."""

_IMPORTED = time.time()


def is_enabled(models: Artefacts) -> bool:
    """Whether artefacts are kept and looked for, by the policy and torch's switch for caches."""
    return models.keep_gib > 0 and not torch.compiler.config.force_disable_caches


def cache(gib: float = DEFAULT_GIB) -> DiskCache:
    """The disk cache that artefacts are kept in, up to so many GiB."""
    return DiskCache("onnx", limit=int(gib * (1 << 30)))


def find(models: Artefacts, key: str | None) -> Entry | None:
    """The entry of this key; ``None`` where there is none, or the cache is off."""
    return cache(models.keep_gib).get(key) if key and is_enabled(models) else None


def put(models: Artefacts, key: str, facts: Mapping[str, Any], blob: bytes | None = None) -> str:
    """Keep an entry. Returns why it cannot be kept; empty if it is."""
    kept = cache(models.keep_gib)
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
