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

from composer.backends import names_code, refuse_slip
from composer.errors import OptionError, UnknownNameError
from composer.layers import Layer, Rules, merge, over
from composer.policy import (
    AUTO,
    FROZEN,
    NOW,
    Cache,
    Distributed,
    Facts,
    FormatVersion,
    Match,
    Policy,
    Select,
    check_mode,
    owned,
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
        """What to write instead of an unknown key; empty where nobody knows."""
        if key in NOW:
            return f"it is now {NOW[key]}"
        return f"{key!r} is an option of the table 'defaults'" if key in Policy.model_fields else ""

    def layers(self, graph: Facts) -> Iterator[Layer]:
        """The layers that speak of this graph, in order."""
        yield Layer("defaults", self.defaults)
        for index, rule in enumerate(self.models):
            if rule.match.holds(graph):
                fields = {name: getattr(rule, name) for name in rule.model_fields_set - {"match"}}
                yield Layer(f"models[{index}]", Policy.model_construct(set(fields), **fields))


Source = PolicyBook | Policy | Mapping[str, Any] | str | Path | None
"""A book, a policy for every graph, a mapping shaped like the TOML, a file's path, or nothing."""


def read(source: Source) -> PolicyBook:
    """The book that a source holds, with dicts and lists of its own; an empty one for ``None``.

    Raises:
        OptionError: it is no source, a file is missing or no TOML, or naming every key and value
            that is wrong.
    """
    if source is None:
        return PolicyBook()
    if isinstance(source, PolicyBook):
        return cast(PolicyBook, owned(source))
    if isinstance(source, Policy):
        return PolicyBook(defaults=owned(source))
    if isinstance(source, Mapping):
        return _validated(owned(source), "")
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
    """A file's book; the time and size it had are part of the key."""
    return _validated(table_in(path, _load(path)), f"{path}: ")


def table_in(path: Path, content: dict[str, Any]) -> dict[str, Any]:
    """The table of a policy file: all of it, or ``[tool.composer]`` of a ``pyproject.toml``.

    Raises:
        OptionError: there is none.
    """
    if path.name != PROJECT_FILE:
        return content
    found = _of_project(content)
    if found is None:
        raise OptionError(f"{path} has no table [tool.composer]")
    if not isinstance(found, dict):
        raise OptionError(f"{path}: [tool.composer] is one table, not {found!r}")
    return found


def _of_project(table: Mapping[str, Any]) -> Any:
    """What a ``pyproject.toml`` has for composer; ``None`` for nothing."""
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
    """The book that a table holds, or else each of its mistakes, and where it stands."""
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
    if project.is_file() and _of_project(_load(project.absolute())) is not None:
        return project.absolute()
    return None


def file_in_force(configured: Source) -> Path | None:
    """The file that this process has its policy from, if it has it from one.

    Args:
        configured: What ``composer.configure`` was given.
    """
    named = os.environ.get("COMPOSER_CONFIG")
    if named:
        return Path(named).absolute()
    if configured is None:
        return file_in_working_directory()
    return Path(configured).absolute() if isinstance(configured, str | Path) else None


def in_force(configured: Source) -> PolicyBook:
    """The book of the first of these sources that exists.

    ``COMPOSER_CONFIG``, then what ``composer.configure`` was given, then ``composer.toml`` in the
    working directory, then ``[tool.composer]`` of ``pyproject.toml`` there.

    Raises:
        OptionError: the source is malformed, or one found only because it lies in the working
            directory names code to import, a program or a file, or a place to send verdicts to.
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
"""Text for an engine that is one of its own words. Any other may be a command to run (Inductor's
``cpp.cxx``), what a compiler is told (``-Ifolder``), a library to load or a file to write."""

_OF_FILES = re.compile(r"(cxx|dir|directory|home|root|paths?|library|libs|output)$", re.IGNORECASE)
"""Options whose text is a program, a library or a file, a plain word as well: of Inductor's
``cpp.cxx``, ``cuda.cuda_cxx``, ``cuda.cutlass_dir``, ``rocm.rocm_home``, ``xpu.oneapi_root``,
``trace.debug_dir`` and kin, of ONNX Runtime's ``session.optimized_model_filepath``."""


def _refuse_as_found(book: PolicyBook, path: Path) -> None:
    """Refuse a file that was only found, where it asks for what only the user may ask for."""
    asked = list(for_the_user_to_say(book, path.parent))
    if asked:
        raise OptionError(
            f"{path} was found only because it lies in the working directory, so it "
            f"{'; and it '.join(f'may not {each}' for each in asked)}. "
            "To have it all the same, point at it by COMPOSER_CONFIG or composer.configure"
        )


def for_the_user_to_say(book: PolicyBook, folder: Path) -> Iterator[str]:
    """What a book asks for beyond names that are registered and values that stay within composer.

    Those are code to import, programs and files that engines are told of, and a place to send
    verdicts to.
    """
    policies = (book.defaults, *book.models)
    chain = [candidate for policy in policies for candidate in policy.chain]
    passes = [
        each.get("pass") if isinstance(each, Mapping) else each
        for policy in policies
        for each in policy.passes
    ]
    named = (*(candidate.backend for candidate in chain), *passes)
    code = [each for each in named if names_code(each)]
    if code:
        yield f"import code: {', '.join(map(str, code))} (an entry point gives it a name)"
    given = [*((each.name, each.options) for each in chain), *book.backends.items()]
    told = [
        f"{engine} {option}"
        for engine, options in given
        for option, value in options.items()
        if _names_a_file(option, value, folder)
    ]
    if told:
        yield f"tell engines of programs and files: {', '.join(told)}"
    if book.cache.store:
        yield "say where verdicts are sent: [cache] store (COMPOSER_VERDICT_STORE says it)"


def _names_a_file(option: str, value: Any, folder: Path) -> bool:
    """Whether text is that of such an option, no plain word, or the name of something here."""
    if isinstance(value, Mapping):
        return any(_names_a_file(name, each, folder) for name, each in value.items())
    if isinstance(value, list):
        return any(_names_a_file(option, each, folder) for each in value)
    if not isinstance(value, str) or not value:
        return False
    return bool(_OF_FILES.search(option) or not _WORD.fullmatch(value) or (folder / value).exists())


_using: ContextVar[tuple[PolicyBook | OptionError, ...]] = ContextVar("composer_using", default=())
"""What the contexts ask for; in the place of a mistake under ``COMPOSER_DISABLE``, its error."""


@contextmanager
def using(source: Source = None, **fields: Any) -> Iterator[None]:
    """Compile what is compiled within this context by another policy as well.

    A graph keeps the policy that was in force at its first call. Nested contexts add up; leaving
    one restores what was. A context belongs to its thread, or asyncio task.

    Args:
        source: As for :func:`composer.configure`.
        fields: Fields of :class:`composer.Policy`, over those of the source.

    Raises:
        OptionError: naming every key and value that is wrong.
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
    """The policy in force for one graph.

    Args:
        graph: What policies match by; the name that the user gave it is found here.
        mode: ``torch.compile``'s mode.
        options: ``torch.compile``'s options: fields of :class:`composer.Policy`.
        configured: What ``composer.configure`` was given.
        installed: Gives the engines that ``chain = "auto"`` stands for; without it ``auto`` stays.

    Raises:
        OptionError: naming every mistake at once, wherever it stands.
        UnknownNameError: a table of an engine's options is for a name that is nearly a known one.
    """
    try:
        return _resolved(graph, mode, options, configured, installed)
    except (OptionError, UnknownNameError) as mistake:
        if not is_disabled():
            raise
        return dataclasses.replace(merge([_disabled()], {}), disregarded=str(mistake))


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
    given = (own.model, *(book.defaults.model for book in reversed(inner)))
    graph = dataclasses.replace(graph, names=(*graph.names, next(filter(None, given), "")))
    layers = [
        *_meant_by(mode),
        *book.layers(graph),
        *(dataclasses.replace(each, name="using") for b in inner for each in b.layers(graph)),
        Layer("options", own),
        *switches,
    ]
    _refuse_slips(book.backends, file_in_force(configured) if book.backends else None)
    for each in inner:
        _refuse_slips(each.backends)
    rules = merge(layers, _options_of_engines((book, *inner)), installed)
    cache, distributed = book.cache, book.distributed
    for each in inner:
        cache, distributed = over(cache, each.cache), over(distributed, each.distributed)
    if store := os.environ.get("COMPOSER_VERDICT_STORE"):
        cache = cache.model_copy(update={"store": store})
    return dataclasses.replace(rules, cache=cache, distributed=distributed)


def _books_of_contexts() -> list[PolicyBook]:
    found = _using.get()
    mistakes = [str(each) for each in found if isinstance(each, OptionError)]
    if mistakes:
        raise OptionError("; ".join(mistakes))
    return [each for each in found if isinstance(each, PolicyBook)]


@contextmanager
def named_origin(layer: str, configured: Source) -> Iterator[None]:
    """Have a mistake in a chain or a list of passes say where that stands, as files say theirs.

    What the program itself wrote is in the traceback; a file or a variable is not.

    Args:
        layer: The layer that set the field.
        configured: What ``composer.configure`` was given.

    Raises:
        OptionError, UnknownNameError: what was raised within, with the place in front.
    """
    try:
        yield
    except (OptionError, UnknownNameError) as mistake:
        if place := _place(layer, configured):
            raise type(mistake)(f"{place}: {mistake}") from mistake
        raise


def _place(layer: str, configured: Source) -> str:
    if layer.startswith("COMPOSER_"):
        return layer
    file = file_in_force(configured) if layer.startswith(("defaults", "models[")) else None
    return f"{file}: {layer}" if file else ""


def _options_of_engines(books: Iterable[PolicyBook]) -> dict[str, dict[str, Any]]:
    """The options that books give engines, by name: option by option, later books over earlier."""
    found: dict[str, dict[str, Any]] = {}
    for book in books:
        for name, options in book.backends.items():
            found[name] = {**found.get(name, {}), **options}
    return found


def _refuse_slips(engines: Iterable[str], file: Path | None = None) -> None:
    """Find names that nobody will ever ask for, which would be left out in silence."""
    mistakes: list[str] = []
    for name in engines:
        try:
            refuse_slip(name)
        except UnknownNameError as mistake:
            mistakes.append(str(mistake))
    if mistakes:
        where = f"{file}: " if file else ""
        raise UnknownNameError(f"{where}table 'backends': {'; '.join(mistakes)}")


def _meant_by(mode: str | None) -> Iterator[Layer]:
    """The layer that ``torch.compile``'s mode stands for; every other layer goes over it."""
    if mode == "max-autotune":
        yield Layer("mode", read_policy({"chain": AUTO, "select": "fastest"}))


def _all_of(*steps: Callable[[], Any]) -> list[Any]:
    """The results of the steps, or one error that names the mistakes of all of them."""
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
    """The on-call switches of the environment, as layers over all that the program says."""
    if names := _chain_on_call():
        yield Layer("COMPOSER_CHAIN", read_policy({"chain": names, "locked": False}))
    if word := os.environ.get("COMPOSER_SELECT"):
        yield Layer("COMPOSER_SELECT", _selecting(word))
    if "COMPOSER_STRICT" in os.environ:
        yield Layer("COMPOSER_STRICT", read_policy({"strict": is_on("COMPOSER_STRICT")}))
    if is_on("COMPOSER_DISABLE"):
        yield _disabled()


def _selecting(word: str) -> Policy:
    try:
        return read_policy({"select": word})
    except OptionError:
        words = " or ".join(Select.words())
        raise OptionError(f"COMPOSER_SELECT is {word!r}, and should be {words}") from None


def _disabled() -> Layer:
    off = {"chain": ["eager"], "select": "first", "passes": [], "locked": False}
    return Layer("COMPOSER_DISABLE", read_policy(off))


def is_disabled() -> bool:
    """Whether ``COMPOSER_DISABLE`` is on; what is neither on nor off is not."""
    return os.environ.get("COMPOSER_DISABLE", "").strip().lower() in _ON


def _chain_on_call() -> list[str]:
    """The names in ``COMPOSER_CHAIN``.

    Raises:
        OptionError: it is spelled as in a program or a file.
    """
    chain = os.environ.get("COMPOSER_CHAIN", "")
    if not {*chain}.isdisjoint("[]{}\"'"):
        raise OptionError(f"COMPOSER_CHAIN is names with commas between, as in a,b, not {chain!r}")
    return [name.strip() for name in chain.split(",") if name.strip()]


def switch_on_call() -> str:
    """The variable that says which engines are tried or serve, over all policies; empty for none.

    Raises:
        OptionError: ``COMPOSER_DISABLE`` is neither on nor off, ``COMPOSER_CHAIN`` is no names.
    """
    if is_on("COMPOSER_DISABLE"):
        return "COMPOSER_DISABLE"
    if _chain_on_call():
        return "COMPOSER_CHAIN"
    return "COMPOSER_SELECT" if os.environ.get("COMPOSER_SELECT") else ""


def is_on(switch: str) -> bool:
    """Whether a switch of the environment is on.

    Raises:
        OptionError: its value is none of the words for that.
    """
    value = os.environ.get(switch, "").strip().lower()
    if value not in _ON | _OFF:
        accepted = f"on: {', '.join(sorted(_ON))}; off: {', '.join(sorted(_OFF - {''}))}, empty"
        raise OptionError(f"{switch} is {value!r} ({accepted})")
    return value in _ON
