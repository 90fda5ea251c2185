"""The distribution that composer is installed by, and others that write to the same folder."""

from __future__ import annotations

import functools
import platform
import re
from importlib.metadata import PackageNotFoundError, version

NAME = "torch-compile-composer"
"""The distribution's name. ``torch-composer`` on the package index is another project."""

VERIFIED = {
    "python": ("3.11", "3.13"),
    "torch": ("2.11", "2.15"),
    "onnx": ("1.20", "1.23"),
    "onnxscript": ("0.7", "0.7"),
    "onnxruntime": ("1.31", "1.32"),
    "openvino": ("2026.4", "2026.4"),
}
"""The oldest and the newest release of each package with which composer's tests passed."""

_SAME_FOLDER = ("composer", "mosaicml")
"""Distributions on the package index that install a top-level folder ``composer/`` of their own."""


def install(extra: str) -> str:
    """The command that installs composer with an extra.

    Args:
        extra: The extra's name in ``pyproject.toml``.
    """
    return f"pip install '{NAME}[{extra}]'"


def outside_verified() -> list[str]:
    """A sentence for each installed package that is older or newer than what was verified."""
    sentences = []
    for name, (oldest, newest) in VERIFIED.items():
        here = platform.python_version() if name == "python" else version_of(name)
        if here and not _release(oldest) <= _release(here) <= _release(newest):
            why = f"is not among the verified versions, {oldest} to {newest}"
            sentences.append(f"{name} {here} {why}")
    return sentences


def _release(text: str) -> tuple[int, ...]:
    """The first two numbers of a version, such as (2, 13) for ``2.13.0+cpu``."""
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])


@functools.cache
def conflict() -> str:
    """A sentence with the remedy if another package writes to composer's folder; else empty."""
    there = [name for name in _SAME_FOLDER if version_of(name)]
    if not there:
        return ""
    names = " and ".join(there)
    return (
        f"the package {names} is installed here, too. It puts files of its own into the folder "
        f"'composer', so either may fail. Use separate environments, or run: pip uninstall "
        f"{' '.join(there)}; pip install --force-reinstall --no-deps {NAME}"
    )


@functools.cache
def version_of(name: str) -> str:
    """The version of an installed distribution; empty where it is not installed.

    Args:
        name: The distribution's name.
    """
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
