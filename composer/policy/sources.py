"""Where policies come from: files, ``composer.configure`` and ``composer.using``."""

from __future__ import annotations

import functools
import os
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from composer.errors import OptionError
from composer.policy.found import refuse_as_found
from composer.policy.model import Policy, PolicyBook, Source, copied, read_policy
from composer.policy.switches import is_disabled
from composer.policy.wording import Location, in_words

CONFIG_FILE = "composer.toml"
PROJECT_FILE = "pyproject.toml"


def read(source: Source) -> PolicyBook:
    """Return the book of a source, as a copy; an empty book for ``None``.

    Raises:
        OptionError: ``source`` has another type, a file is missing or is not TOML, or keys or
            values are wrong, all of which the error names.
    """
    if source is None:
        return PolicyBook()
    if isinstance(source, PolicyBook):
        return cast(PolicyBook, copied(source))
    if isinstance(source, Policy):
        return PolicyBook(defaults=copied(source))
    if isinstance(source, Mapping):
        return _validated(copied(source), "")
    if isinstance(source, str | Path):
        return _read_file(Path(source).absolute())
    what = "a policy is a PolicyBook, a Policy, a mapping shaped like the TOML, or a file's path"
    raise OptionError(f"{what}, not {source!r}")


def _read_file(path: Path) -> PolicyBook:
    try:
        known = path.stat()
    except OSError as error:
        raise OptionError(f"policy file {str(path)!r} cannot be read: {error.strerror}") from error
    return _parsed(path, known.st_mtime_ns, known.st_size)


@functools.lru_cache(maxsize=32)
def _parsed(path: Path, modified: int, size: int) -> PolicyBook:
    """Read a file; its time of change and size are arguments so that they are part of the key."""
    return _validated(table_in(path, load(path)), f"{path}: ")


def table_in(path: Path, content: dict[str, Any]) -> dict[str, Any]:
    """Return the table of a policy file: all of it, or ``[tool.composer]`` of a ``pyproject.toml``.

    Raises:
        OptionError: there is no such table.
    """
    if path.name != PROJECT_FILE:
        return content
    table = _table_of_project(content)
    if table is None:
        raise OptionError(f"{path} has no table [tool.composer]")
    if not isinstance(table, dict):
        raise OptionError(f"{path}: [tool.composer] is one table, not {table!r}")
    return table


def _table_of_project(table: Mapping[str, Any]) -> Any:
    """Return composer's table of a ``pyproject.toml``; ``None`` if there is none."""
    tools = table.get("tool", {})
    return tools.get("composer") if isinstance(tools, dict) else None


def load(path: Path, what: str = "policy file") -> dict[str, Any]:
    """Return the content of a TOML file.

    Raises:
        OptionError: ``what`` the file is, and why it cannot be read.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise OptionError(f"{what} {str(path)!r} cannot be read: {error}") from error


def _validated(table: Mapping[str, Any], where: str) -> PolicyBook:
    book, wrong = validated(table)
    if book is None:
        raise OptionError("; ".join(f"{where}{told}" for _, told in wrong))
    return book


def validated(
    table: Mapping[str, Any],
) -> tuple[PolicyBook | None, list[tuple[Location, str]]]:
    """Return the book of a table, or ``None`` and each mistake with its place."""
    try:
        return PolicyBook.model_validate(dict(table)), []
    except ValidationError as error:
        return None, [(each["loc"], in_words(each, PolicyBook)) for each in error.errors()]


def file_in_working_directory() -> Path | None:
    """The policy file of the working directory, if there is one."""
    own = Path(CONFIG_FILE)
    if own.is_file():
        return own.absolute()
    project = Path(PROJECT_FILE)
    if not project.is_file() or _table_of_project(load(project.absolute())) is None:
        return None
    return project.absolute()


def file_in_force(configured: Source) -> Path | None:
    """Return the file that the policy of this process comes from; ``None`` if it is not a file.

    Args:
        configured: The argument of ``composer.configure``.
    """
    named = os.environ.get("COMPOSER_CONFIG")
    if named:
        return Path(named).absolute()
    if configured is None:
        return file_in_working_directory()
    return Path(configured).absolute() if isinstance(configured, str | Path) else None


def in_force(configured: Source) -> tuple[PolicyBook, Path | None]:
    """Return the book of the first source that exists, and its file if it is from one.

    The sources are ``COMPOSER_CONFIG``, the argument of ``composer.configure``, ``composer.toml``
    in the working directory, and ``[tool.composer]`` of ``pyproject.toml`` there.

    Raises:
        OptionError: the source is malformed. Or it was only found in the working directory, and
            names code to import, a program, a file, or a place to send verdicts to.
    """
    file = file_in_force(configured)
    book = read(configured if file is None else file)
    if file and configured is None and not os.environ.get("COMPOSER_CONFIG"):
        refuse_as_found(book, file)
    return book, file


_using: ContextVar[tuple[PolicyBook | OptionError, ...]] = ContextVar("composer_using", default=())
"""The books of the contexts. Under ``COMPOSER_DISABLE``, a malformed one stands as its error."""


@contextmanager
def using(source: Source = None, **fields: Any) -> Iterator[None]:
    """Add a policy for everything that is compiled within this context.

    A graph keeps the policy that was in force at its first call. Nested contexts add up; leaving
    one restores the policy before. A context belongs to its thread, or asyncio task.

    Args:
        source: As for :func:`composer.configure`.
        fields: Fields of :class:`composer.Policy`, which override those of the source.

    Raises:
        OptionError: keys or values are wrong; the error names all of them.
    """
    added: tuple[PolicyBook | OptionError, ...]
    try:
        added = read(source), PolicyBook(defaults=read_policy(fields))
    except OptionError as mistake:
        if not is_disabled():
            raise
        added = (mistake,)
    token = _using.set((*_using.get(), *added))
    try:
        yield
    finally:
        _using.reset(token)


def books_of_contexts() -> Iterator[Callable[[], PolicyBook]]:
    """Yield a function for each book of a context, which returns it or raises its mistakes."""
    for entry in _using.get():
        yield functools.partial(_book, entry)


def _book(entry: PolicyBook | OptionError) -> PolicyBook:
    if isinstance(entry, OptionError):
        raise entry
    return entry
