"""The safety of policy files that were only found: what they may not say."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from composer.errors import OptionError
from composer.policy.model import PolicyBook, names_code

_WORD = re.compile(r"(-O\w|[\w.,+][\w.,+-]*)?")
"""Matches plain words, which are safe as the value of an engine's option. Other text may be a
command to run (Inductor's ``cpp.cxx``), a compiler's flag (``-Ifolder``), a library to load or a
file to write."""

_OF_FILES = re.compile(r"(cxx|dir|directory|home|root|paths?|library|libs|output)$", re.IGNORECASE)
"""Matches names of options whose value is a program, a library or a file, even if it is a plain
word: Inductor's ``cpp.cxx``, ``cuda.cuda_cxx``, ``cuda.cutlass_dir``, ``rocm.rocm_home``,
``xpu.oneapi_root``, ``trace.debug_dir`` and others, and ONNX Runtime's
``session.optimized_model_filepath``."""


def refuse_as_found(book: PolicyBook, path: Path) -> None:
    """Refuse a file that was only found, if it has settings that only the user may ask for."""
    settings = [f"may not {setting}" for setting in for_the_user_to_say(book, path.parent)]
    if settings:
        raise OptionError(
            f"{path} was found only because it lies in the working directory, so it "
            f"{'; and it '.join(settings)}. "
            "To have it all the same, point at it by COMPOSER_CONFIG or composer.configure"
        )


def for_the_user_to_say(book: PolicyBook, folder: Path) -> Iterator[str]:
    """Yield the settings of a book that could run code or reach outside of composer.

    These are code to import, programs and files given to engines, a place to send verdicts to, and
    one to write graphs to.
    """
    names: list[Any] = []
    engines: list[tuple[str, dict[str, Any]]] = []
    for policy in (book.defaults, *book.models):
        names += [candidate.backend for candidate in policy.chain]
        names += [each.get("pass") if isinstance(each, Mapping) else each for each in policy.passes]
        engines += [(candidate.name, candidate.options) for candidate in policy.chain]
    code = [str(name) for name in names if names_code(name)]
    if code:
        yield f"import code: {', '.join(code)} (an entry point gives it a name)"
    files: list[str] = []
    for engine, options in (*engines, *book.backends.items()):
        for option, value in options.items():
            if _names_a_file(option, value, folder):
                files.append(f"{engine} {option}")
    if files:
        yield f"tell engines of programs and files: {', '.join(files)}"
    if any(policy.repro for policy in (book.defaults, *book.models)):
        yield "say where folders of graphs are written: repro (COMPOSER_DUMP says it)"
    if book.cache.store:
        yield "say where verdicts are sent: [cache] store (COMPOSER_VERDICT_STORE says it)"


def _names_a_file(option: str, value: Any, folder: Path) -> bool:
    """Return True if an option's text may name a file: by option, by form, or because it exists."""
    if isinstance(value, Mapping):
        return any(_names_a_file(name, each, folder) for name, each in value.items())
    if isinstance(value, list):
        return any(_names_a_file(option, each, folder) for each in value)
    if not isinstance(value, str) or not value:
        return False
    is_plain = _WORD.fullmatch(value) and not _OF_FILES.search(option)
    return not is_plain or (folder / value).exists()
