"""The artefact cache: results of the lowering on disk, which other processes use again.

There are three kinds of artefacts: which operators the exporter can translate
(:mod:`composer.lowering.export.vocabulary`), the ONNX models of regions
(:mod:`composer.lowering.export.onnx`), and what a whole captured graph becomes
(:mod:`composer.lowering.export.whole`). The key of each is a digest of a text of everything that it
was made from. Without such a text (:class:`composer.graphs.written.Unsayable`) the artefact is made
again in every process. No artefact holds code or the value of a weight, and nothing is ever
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
"""The packages of the exporter. It translates more operators if torchvision is installed."""

ROOT = Path(__file__).parents[2]
"""The folder of composer's sources."""

_IMPORTED = time.time()


def is_enabled(models: Artefacts) -> bool:
    """True if the policy and torch's switch for caches allow to keep and find artefacts."""
    return models.keep_gib > 0 and not torch.compiler.config.force_disable_caches


def cache(gib: float = DEFAULT_GIB) -> DiskCache:
    """Return the disk cache for artefacts, which keeps up to ``gib`` GiB."""
    return DiskCache("onnx", limit=int(gib * (1 << 30)))


def find(models: Artefacts, key: str | None) -> Entry | None:
    """Return the entry of this key; ``None`` where there is none, or the cache is off."""
    return cache(models.keep_gib).get(key) if key and is_enabled(models) else None


def put(models: Artefacts, key: str, facts: Mapping[str, Any], blob: bytes | None = None) -> str:
    """Keep an entry. Returns why it cannot be kept; an empty string if it is kept."""
    kept = cache(models.keep_gib)
    return "" if kept.put(key, facts, blob) else kept.trouble


def key_of(kind: str, text: str) -> str:
    """Return the SHA-256 of a text and of everything else that the result depends on."""
    # They decide which bfloat16 calls are taken, and how products in eight bits are written.
    narrow = _torch.processor.multiplies_bf16(), _torch.processor.multiplies_int8()
    return hashlib.sha256(f"{kind}\n{environment()} {narrow}\n{text}".encode()).hexdigest()


@functools.cache
def environment() -> str:
    """Return a text that identifies composer's sources, torch, the exporter and the processor."""
    versions = {name: version_of(name) for name in _PACKAGES}
    built = torch.__version__, torch.version.git_version, platform.python_version()
    machine = platform.machine(), torch.backends.cpu.get_cpu_capability()
    return f"{_sources()} {built} {versions} {machine}"


def _sources() -> str:
    """Return the SHA-256 of all files of composer: each of them may affect the result.

    If a file was changed after the import, the result is a random text, which equals no other.
    """
    digest = hashlib.sha256()
    for path in sorted(ROOT.rglob("*.py")):
        if path.stat().st_mtime > _IMPORTED:
            return uuid.uuid4().hex
        digest.update(f"{path.relative_to(ROOT)}\n".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()
