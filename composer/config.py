"""Where policies come from: files, ``composer.configure``, ``composer.using``, the environment."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, cast

from pydantic import Field, ValidationError, field_validator

from composer.errors import OptionError, UnknownNameError
from composer.layers import Layer, Rules, merge, over
from composer.policy import (
    AUTO,
    FROZEN,
    Cache,
    Distributed,
    Facts,
    FormatVersion,
    Match,
    Policy,
    Select,
    check_mode,
    copied,
    names_code,
    read_policy,
)
from composer.wording import Hinting, Location, in_words

CONFIG_FILE = "composer.toml"
PROJECT_FILE = "pyproject.toml"

_ON, _OFF = {"1", "true", "yes", "on"}, {"0", "false", "no", "off", ""}


class Rule(Policy):
    """The fields of a policy, for the graphs that ``match``."""

    match: Match = Match()
    """Which graphs the rule holds for; a key that is not given holds for all."""


class PolicyBook(Hinting):
    """Policies of many models: what a policy file holds, and what ``composer.configure`` takes."""

    model_config = FROZEN

    version: FormatVersion = 1
    """The version of the format."""

    defaults: Policy = Policy()
    """The policy of every graph."""

    models: tuple[Rule, ...] = ()
    """Policies of the graphs that match, field by field, later ones over earlier."""

    backends: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Options of engines, by name, where a candidate gives none of its own."""

    cache: Cache = Cache()
    """What the process keeps on disk for the next ones."""

    distributed: Distributed = Distributed()
    """How long the ranks of ``torch.distributed`` wait for one another."""

    @field_validator("models", mode="before")
    @classmethod
    def _a_list(cls, models: Any) -> Any:
        if isinstance(models, Mapping):
            raise ValueError("each rule is a table of a list: write [[models]], not [models]")
        return models

    @classmethod
    def hint_for(cls, key: str) -> str:
        """Return a hint what to write instead of an unknown key; empty if there is none."""
        return f"{key!r} is an option of the table 'defaults'" if key in Policy.model_fields else ""

    def layers(self, graph: Facts) -> Iterator[Layer]:
        """Return the layers that hold for this graph, in order."""
        yield Layer("defaults", self.defaults)
        for index, rule in enumerate(self.models):
            if rule.match.holds(graph):
                fields = {name: getattr(rule, name) for name in rule.model_fields_set - {"match"}}
                yield Layer(f"models[{index}]", Policy.model_construct(set(fields), **fields))


Source = PolicyBook | Policy | Mapping[str, Any] | str | Path | None
"""A book, a policy for every graph, a mapping shaped like the TOML, a file's path, or nothing."""


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
    return _validated(table_in(path, _load(path)), f"{path}: ")


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


def _load(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise OptionError(f"policy file {str(path)!r} cannot be read: {error}") from error


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
    if not project.is_file() or _table_of_project(_load(project.absolute())) is None:
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


def in_force(configured: Source) -> PolicyBook:
    """Return the book of the first source that exists.

    The sources are ``COMPOSER_CONFIG``, the argument of ``composer.configure``, ``composer.toml``
    in the working directory, and ``[tool.composer]`` of ``pyproject.toml`` there.

    Raises:
        OptionError: the source is malformed. Or it was only found in the working directory, and
            names code to import, a program, a file, or a place to send verdicts to.
    """
    named = os.environ.get("COMPOSER_CONFIG")
    if named:
        return read(named)
    if configured is not None:
        return read(configured)
    here = file_in_working_directory()
    if here is None:
        return PolicyBook()
    book = read(here)
    _refuse_as_found(book, here)
    return book


_WORD = re.compile(r"(-O\w|[\w.,+][\w.,+-]*)?")
"""Matches plain words, which are safe as the value of an engine's option. Other text may be a
command to run (Inductor's ``cpp.cxx``), a compiler's flag (``-Ifolder``), a library to load or a
file to write."""

_OF_FILES = re.compile(r"(cxx|dir|directory|home|root|paths?|library|libs|output)$", re.IGNORECASE)
"""Matches names of options whose value is a program, a library or a file, even if it is a plain
word: Inductor's ``cpp.cxx``, ``cuda.cuda_cxx``, ``cuda.cutlass_dir``, ``rocm.rocm_home``,
``xpu.oneapi_root``, ``trace.debug_dir`` and others, and ONNX Runtime's
``session.optimized_model_filepath``."""


def _refuse_as_found(book: PolicyBook, path: Path) -> None:
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

    These are code to import, programs and files given to engines, and a place to send verdicts to.
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


def resolve(
    graph: Facts,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    configured: Source = None,
    installed: Callable[[], Iterable[str]] | None = None,
) -> Rules:
    """Return the policy in force for one graph.

    Args:
        graph: The facts that policies match by.
        mode: ``torch.compile``'s mode.
        options: ``torch.compile``'s options: fields of :class:`composer.Policy`.
        configured: The argument of ``composer.configure``.
        installed: Returns the engines that ``chain = "auto"`` stands for. Without it ``auto`` is
            kept.

    Raises:
        OptionError: there are mistakes in a source; the error names all of them.
    """
    try:
        return _resolved(graph, mode, options, configured, installed)
    except OptionError as mistake:
        if not is_disabled():
            raise
        return dataclasses.replace(merge([_disabled_layer()], {}), disregarded=str(mistake))


def _resolved(
    graph: Facts,
    mode: str | None,
    options: Mapping[str, Any] | None,
    configured: Source,
    installed: Callable[[], Iterable[str]] | None,
) -> Rules:
    own, book, switches, inner, _ = _all_of(
        lambda: read_policy(options),
        lambda: in_force(configured),
        lambda: tuple(_switches()),
        _books_of_contexts,
        lambda: check_mode(mode),
    )
    file = file_in_force(configured) if book.backends else None
    option_tables = dict.fromkeys(book.backends, str(file or ""))
    models = (own.model, *(each.defaults.model for each in reversed(inner)))
    name = next(filter(None, models), "")  # the innermost that gives one
    graph = dataclasses.replace(graph, names=(*graph.names, name))
    layers = [*_layers_of_mode(mode), *book.layers(graph)]
    engines = dict(book.backends)
    cache, distributed = book.cache, book.distributed
    for each in inner:
        layers += [Layer("using", layer.policy) for layer in each.layers(graph)]
        for name, options in each.backends.items():
            engines[name] = engines.get(name, {}) | options
            option_tables.setdefault(name, "")
        cache, distributed = over(cache, each.cache), over(distributed, each.distributed)
    rules = merge([*layers, Layer("options", own), *switches], engines, installed)
    store = os.environ.get("COMPOSER_VERDICT_STORE")
    if store:
        cache = cache.model_copy(update={"store": store})
    return dataclasses.replace(
        rules, cache=cache, distributed=distributed, option_tables=option_tables
    )


def _books_of_contexts() -> list[PolicyBook]:
    """Return the books of the contexts; raise one error that names the mistakes of all."""
    books: list[PolicyBook] = []
    mistakes: list[str] = []
    for entry in _using.get():
        if isinstance(entry, PolicyBook):
            books.append(entry)
        else:
            mistakes.append(str(entry))
    if mistakes:
        raise OptionError("; ".join(mistakes))
    return books


@contextmanager
def named_origin(layer: str, configured: Source) -> Iterator[None]:
    """Add the file or variable to errors about a chain or a list of passes raised within.

    If the program set the field, the traceback shows the place. A file or variable is not there.

    Args:
        layer: The layer that set the field.
        configured: The argument of ``composer.configure``.

    Raises:
        OptionError, UnknownNameError: the error raised within, with the place in front.
    """
    try:
        yield
    except (OptionError, UnknownNameError) as mistake:
        place = _place(layer, configured)
        if not place:
            raise
        raise type(mistake)(f"{place}: {mistake}") from mistake


def _place(layer: str, configured: Source) -> str:
    if layer.startswith("COMPOSER_"):
        return layer
    if not layer.startswith(("defaults", "models[")):
        return ""
    file = file_in_force(configured)
    return f"{file}: {layer}" if file else ""


def _layers_of_mode(mode: str | None) -> Iterator[Layer]:
    """Yield the layer of ``torch.compile``'s mode, if any; every other layer overrides it."""
    if mode == "max-autotune":
        yield Layer("mode", read_policy({"chain": AUTO, "select": "fastest"}))


def _all_of(*steps: Callable[[], Any]) -> list[Any]:
    """Return the results of the steps, or raise one error that names the mistakes of all."""
    results, mistakes = [], []
    for step in steps:
        try:
            results.append(step())
        except OptionError as mistake:
            mistakes.append(str(mistake))
    if mistakes:
        raise OptionError("; ".join(mistakes))
    return results


def _switches() -> Iterator[Layer]:
    """Yield the switches of the environment, as layers that override the program's settings."""
    names = _names_in_chain_variable()
    if names:
        yield Layer("COMPOSER_CHAIN", read_policy({"chain": names, "locked": False}))
    word = os.environ.get("COMPOSER_SELECT")
    if word:
        yield Layer("COMPOSER_SELECT", _select_policy(word))
    if "COMPOSER_STRICT" in os.environ:
        yield Layer("COMPOSER_STRICT", read_policy({"strict": is_on("COMPOSER_STRICT")}))
    if is_on("COMPOSER_DISABLE"):
        yield _disabled_layer()


def _select_policy(word: str) -> Policy:
    try:
        return read_policy({"select": word})
    except OptionError:
        words = " or ".join(Select.words())
        raise OptionError(f"COMPOSER_SELECT is {word!r}, and should be {words}") from None


def _disabled_layer() -> Layer:
    fields = {"chain": ["eager"], "select": "first", "passes": [], "locked": False}
    return Layer("COMPOSER_DISABLE", read_policy(fields))


def is_disabled() -> bool:
    """Return True if ``COMPOSER_DISABLE`` is on. A malformed value counts as off."""
    return os.environ.get("COMPOSER_DISABLE", "").strip().lower() in _ON


def _names_in_chain_variable() -> list[str]:
    """Return the names in ``COMPOSER_CHAIN``.

    Raises:
        OptionError: the variable is written as a list of Python or TOML.
    """
    chain = os.environ.get("COMPOSER_CHAIN", "")
    if not {*chain}.isdisjoint("[]{}\"'"):
        raise OptionError(f"COMPOSER_CHAIN is names with commas between, as in a,b, not {chain!r}")
    return [name.strip() for name in chain.split(",") if name.strip()]


def switch_on_call() -> str:
    """Return the variable that overrides the engines of all policies; empty if none is set.

    Raises:
        OptionError: ``COMPOSER_DISABLE`` is neither on nor off, or ``COMPOSER_CHAIN`` is malformed.
    """
    if is_on("COMPOSER_DISABLE"):
        return "COMPOSER_DISABLE"
    if _names_in_chain_variable():
        return "COMPOSER_CHAIN"
    return "COMPOSER_SELECT" if os.environ.get("COMPOSER_SELECT") else ""


def is_on(switch: str) -> bool:
    """Return True if a switch of the environment is on.

    Raises:
        OptionError: its value is neither a word for on nor for off.
    """
    value = os.environ.get(switch, "").strip().lower()
    if value not in _ON | _OFF:
        accepted = f"on: {', '.join(sorted(_ON))}; off: {', '.join(sorted(_OFF - {''}))}, empty"
        raise OptionError(f"{switch} is {value!r} ({accepted})")
    return value in _ON
