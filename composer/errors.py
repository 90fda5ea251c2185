"""Every exception that composer raises, in one tree.

::

    Exception
    ├── ComposerError
    │   ├── OptionError(ValueError)        a policy field or engine option is unknown or wrong
    │   ├── UnknownNameError(LookupError)  a name in the chain looks like a misspelling
    │   ├── LockError                      ``locked``: a graph differs from ``composer.lock``
    │   ├── PassError                      ``on_pass_error="raise"``: a pass broke its contract
    │   ├── PassCheckError(ExceptionGroup) ``passes.check``: every rule that a pass breaks
    │   ├── BackendCheckError(AssertionError) ``testing.check_backend``: rules that an engine breaks
    │   ├── RecordError(ValueError)        an object is not the record of a compile
    │   ├── BisectError                    ``passes.bisect``: there is nothing to compare with
    │   ├── SavedFileError                 ``composer.load``: a file is damaged, or not for here
    │   ├── ReproError                     ``composer repro``: a graph was not kept
    │   ├── RankingError                   ``composer bench``: calls of a model cannot be compared
    │   ├── Refusal                        an engine refuses, with a status and a reason code
    │   │   ├── SandboxRefusal             ``isolate``: the build in a sandbox was not accepted
    │   │   └── SharedInputs               a graph writes to an input that shares memory
    │   ├── CandidateError                 ``strict``: a candidate was not accepted
    │   └── ChainExhausted(ExceptionGroup) ``on_exhausted="raise"``: no candidate was accepted
    └── UserWarning
        ├── FallbackWarning                a candidate or a pass was not accepted
        ├── CacheWarning                   files of the disk cache cannot be read or written
        ├── WeightsWarning                 weights changed and their version counters did not
        ├── LateCompileWarning             a graph was compiled when its function had settled
        └── TelemetryWarning               a sink failed, which does not affect the compile

``OptionError``, ``UnknownNameError`` and ``LockError`` are the user's own mistakes. They are raised
at once and never cause a fallback. Dynamo wraps an error of a backend in
``torch._dynamo.exc.BackendCompilerFailed``, whose ``inner_exception`` is the original error.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from pathlib import Path

    from composer.records import Attempt, Reason, Status


def _as_it_stood(cls: type[Exception], given: tuple[Any, ...]) -> Exception:
    return cls.__new__(cls, *given)


class ComposerError(Exception):
    """Base of all errors that composer raises itself. They can be pickled for another process."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without calling ``__init__``, whose arguments are more than ``args`` has."""
        return _as_it_stood, (type(self), self.args), vars(self)


class OptionError(ComposerError, ValueError):
    """A policy field or an engine's option is unknown or has a value it cannot take."""


class UnknownNameError(ComposerError, LookupError):
    """A name in the chain is unknown and looks like a misspelling of a known one."""


class LockError(ComposerError):
    """The lock file is missing or malformed, or a graph differs from its entry.

    Args:
        path: The file.
        what: What is wrong, in words.
        differences: The differences between the lock and the program, one sentence each.
    """

    def __init__(self, path: Path, what: str, differences: Sequence[str] = ()) -> None:
        told = f": {'; '.join(differences)}" if differences else ""
        super().__init__(f"lock file {str(path)!r} {what}{told}. `composer lock` writes it anew")
        self.path = path
        self.differences = tuple(differences)


MISTAKES = (OptionError, UnknownNameError, LockError)
"""Mistakes of the user, which are not failures of an engine."""


class RankingError(ComposerError):
    """Calls of a model cannot be timed, or each call computes something else."""


class Refusal(ComposerError):
    """An engine's "no", raised by a probe or a build and turned into an attempt's record.

    Args:
        status: The status of the attempt.
        reason: The stable code that docs/reference/reasons.md explains.
        message: One sentence for a person: what went wrong and what would help.
        error_type: The class of an exception raised in another process; empty if there is none.
        traceback: The traceback of that exception, as text.
    """

    def __init__(
        self,
        status: Status,
        reason: Reason,
        message: str,
        error_type: str = "",
        traceback: str = "",
    ) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.error_type = error_type
        self.traceback = traceback


class SharedInputs(Refusal):
    """A graph writes to an input that shares memory with another: only eager computes it right."""


class SandboxRefusal(Refusal):
    """A build in a sandbox, a child process, was not accepted.

    Args:
        refused: The arguments of :class:`Refusal`. Where the sandbox ended without an exception,
            the traceback is the end of its output.
        by_others: True if something other than the engine ended the sandbox.
        named: The same arguments by name.
    """

    def __init__(self, *refused: Any, by_others: bool = False, **named: Any) -> None:
        super().__init__(*refused, **named)
        self.by_others = by_others


class PassError(ComposerError):
    """A pass raised or broke a rule of its contract, under ``on_pass_error="raise"``.

    Args:
        name: The pass.
        rule: The rule's name: ``raises``, ``inputs``, ``outputs``, ``order``, ``lint``,
            ``metadata``, ``numbers`` or ``stage`` (:mod:`composer.passes.invariants` says what each
            means).
        message: What was found, in one sentence.
        node: The node of the graph where it was found; empty if there is no particular one.
        before: Names of the passes that had changed this graph before.
    """

    def __init__(
        self, name: str, rule: str, message: str, node: str = "", before: Sequence[str] = ()
    ) -> None:
        where = f" at node {node!r}" if node else ""
        earlier = f"; it ran after {', '.join(before)}" if before else ""
        super().__init__(f"pass {name!r} broke the rule {rule!r}{where}: {message}{earlier}")
        self.name = name
        self.rule = rule
        self.node = node
        self.before = tuple(before)


class PassCheckError(ComposerError, ExceptionGroup[PassError], AssertionError):
    """:func:`composer.passes.check` found rules that a pass breaks, one exception for each."""

    def derive(self, excs: Sequence[PassError], /) -> PassCheckError:  # type: ignore[override]
        """Keep the class when the group is split (``except*``)."""
        return PassCheckError(self.message, excs)


class BackendCheckError(ComposerError, AssertionError):
    """:func:`composer.testing.check_backend` found rules that an engine breaks.

    Args:
        name: The engine.
        rules: The findings, by the name of the broken rule.
    """

    def __init__(self, name: str, rules: Mapping[str, str]) -> None:
        lines = (f"- {rule}: {found}" for rule, found in rules.items())
        what = f"backend {name!r} breaks the rules: {', '.join(rules)}"
        super().__init__("\n".join((what, *lines)))
        self.rules = dict(rules)


class RecordError(ComposerError, ValueError):
    """An object that was read is not the record of a compile, or has another schema version."""


class ReproError(ComposerError):
    """A graph was not kept, or no folder of it can be made."""


class SavedFileError(ComposerError):
    """A file of :func:`composer.save` is damaged, or cannot work in this process."""


class BisectError(ComposerError):
    """:func:`composer.passes.bisect` has nothing to compare with.

    Either two runs in eager do not agree, or eager and the chain without any pass do not.
    """


class CandidateError(ComposerError):
    """A candidate was not accepted, under ``strict``. ``attempt`` is the candidate's record.

    In :class:`ChainExhausted` it takes the place of an error that is not an ``Exception``.
    """

    def __init__(self, attempt: Attempt) -> None:
        super().__init__(attempt.sentence())
        self.attempt = attempt


class ChainExhausted(ComposerError, ExceptionGroup[Exception]):
    """No candidate was accepted, under ``on_exhausted="raise"``.

    ``exceptions`` holds the error of every candidate in the order of the chain, ``attempts``
    their records. An ``ExceptionGroup`` cannot hold an error that is not an ``Exception``. In its
    place stands a :class:`CandidateError` whose ``__cause__`` is that error.
    """

    attempts: tuple[Attempt, ...]

    def __new__(
        cls, attempts: Sequence[Attempt], exceptions: Sequence[Exception]
    ) -> ChainExhausted:
        """Build the group; see the class."""
        sentences = "; ".join(attempt.sentence() for attempt in attempts)
        self = super().__new__(cls, f"no candidate was accepted: {sentences}", exceptions)
        self.attempts = tuple(attempts)
        return self

    def __init__(self, attempts: Sequence[Attempt], exceptions: Sequence[Exception]) -> None:
        """State is set in ``__new__``, where ``ExceptionGroup`` wants it."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as all errors of composer do, but with the arguments of ``__new__``."""
        return _as_it_stood, (type(self), (self.attempts, self.exceptions)), vars(self)

    def derive(self, excs: Sequence[Exception], /) -> ChainExhausted:  # type: ignore[override]
        """Keep the attempts when the group is split (``except*``)."""
        return ChainExhausted(self.attempts, excs)


class FallbackWarning(UserWarning):
    """A candidate was not accepted, a pass was rolled back, or an environment variable is misspelt.

    Or a file of :func:`composer.save` was made with something else than what is here. It is given
    once for each name and reason.
    """


class CacheWarning(UserWarning):
    """Files of the disk cache cannot be used. Never an error, even if warnings are errors."""


class WeightsWarning(UserWarning):
    """Weights were changed and their version counters were not. Given once, never an error."""


class LateCompileWarning(UserWarning):
    """A graph was compiled when its function had settled, and a call waited for it."""


class TelemetryWarning(UserWarning):
    """A sink failed. Given once for each sink; never an error, even if warnings are errors."""


def refuse(status: Status, reason: Reason, message: str) -> NoReturn:
    """End a probe or a build with a status and a reason.

    Raises:
        Refusal: always.
    """
    raise Refusal(status, reason, message)


def text_of(error: BaseException) -> str:
    """Return the text of an error, even if its ``__str__`` raises."""
    try:
        return str(error)
    except Exception as another:  # noqa: BLE001  # a slip in somebody's __str__
        return f"its text cannot be read: {type(another).__name__}"


def first_line(text: str) -> str:
    """Return the first line of ``text`` that is not empty, up to 1,000 characters."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")[:1000]


def class_and_text(error: BaseException) -> str:
    """Return the end of a traceback with all its lines: ``"ValueError: no such size"``."""
    return f"{type(error).__name__}: {text_of(error)}"


def error_line(error: BaseException) -> str:
    """Return the class of an error and the first line of its text: ``"ValueError: no such size"``.

    If torch has wrapped the error of a backend, the wrapped error is described.
    """
    error = unwrapped(error)
    return f"{type(error).__name__}: {first_line(text_of(error))}"


def import_failure(error: BaseException) -> str:
    """Return why an import failed; with the error's class if it is not an ImportError."""
    is_plain = isinstance(error, ImportError | AttributeError)
    return text_of(error) if is_plain else class_and_text(error)


def unwrapped(error: BaseException) -> BaseException:
    """Return the error that a backend raised, without the errors that torch wraps it in."""
    while isinstance(inner := getattr(error, "inner_exception", None), BaseException):
        error = inner
    return error


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error and its causes, through torch's wrappers and Python's own chains."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = getattr(error, "inner_exception", None) or error.__cause__


def chained(error: BaseException, handled: BaseException | None = None) -> Iterator[BaseException]:
    """Yield the error, its causes, the errors handled meanwhile, and the members of groups.

    Args:
        error: The error to begin with.
        handled: The error to stop at: it, and errors that are reached only through it, are left
            out.
    """
    seen: set[int] = {id(handled)}
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            yield each
            inner = getattr(each, "inner_exception", None)
            waiting += [each.__context__, each.__cause__, inner]
            if isinstance(each, BaseExceptionGroup):
                waiting += each.exceptions


def without_frames(error: BaseException, handled: BaseException | None) -> BaseException:
    """Return the error without its traceback, so that it does not keep the frames' values alive.

    Clearing the frames is not enough: a frame refers to its function, and so to the closure.

    Args:
        error: The error that was caught.
        handled: As for :func:`without_locals`.
    """
    for each in chained(error, handled):
        each.__traceback__ = None
    return error


def without_locals(error: BaseException, handled: BaseException | None) -> BaseException:
    """Return the error with a traceback that keeps its lines but releases local variables.

    Local variables may hold gigabytes for as long as the error is kept.

    Args:
        error: The error that was caught in the calling function.
        handled: The error that the program was handling before that (``sys.exception()``). Its
            traceback belongs to the program and stays as it is.
    """
    for each in chained(error, handled):
        traceback.clear_frames(each.__traceback__)
    own = error.__traceback__  # of the caller, which still runs: its frame cannot be cleared
    return error.with_traceback(own and own.tb_next)
