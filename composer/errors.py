"""Every exception that composer raises, in one tree.

::

    Exception
    ├── ComposerError
    │   ├── OptionError(ValueError)        a policy field or engine option that nobody knows
    │   ├── UnknownNameError(LookupError)  a backend's name that nobody knows, close to a known one
    │   ├── LockError                      ``locked``: a graph is not as ``composer.lock`` has it
    │   ├── PassError                      ``on_pass_error="raise"``: a pass broke its contract
    │   ├── PassCheckError(ExceptionGroup) ``passes.check``: every rule that a pass breaks
    │   ├── BackendCheckError(AssertionError) ``testing.check_backend``: rules that an engine breaks
    │   ├── RecordError(ValueError)        a record in a file is not one of a compile
    │   ├── BisectError                    ``passes.bisect``: there is nothing to compare with
    │   ├── RankingError                   ``composer bench``: calls of a model cannot be compared
    │   ├── Refusal                        an engine says no, with a status and a reason code
    │   │   ├── SandboxRefusal             ``isolate``: the build in a sandbox was not accepted
    │   │   └── SharedInputs               a graph writes to an input that shares memory
    │   ├── CandidateError                 ``strict``: a candidate was not accepted
    │   └── ChainExhausted(ExceptionGroup) ``on_exhausted="raise"``: no candidate was accepted
    └── UserWarning
        ├── FallbackWarning                a candidate or a pass the user counts on does not run
        ├── CacheWarning                   what is kept on disk cannot be read or written
        ├── WeightsWarning                 weights were written to behind torch's back
        └── TelemetryWarning               a sink failed; what is compiled is not touched by it

``OptionError``, ``UnknownNameError`` and ``LockError`` are the user's own mistakes: they are raised
at once and are never a reason to fall back. Dynamo wraps what a backend raises in
``torch._dynamo.exc.BackendCompilerFailed``; the original is its ``inner_exception``.
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
    """Base of all errors that composer raises itself. They can be sent to another process."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Made anew as it stands: what ``__init__`` is given is more than the text in ``args``."""
        return _as_it_stood, (type(self), self.args), vars(self)


class OptionError(ComposerError, ValueError):
    """A policy field or an engine's option is unknown or has a value it cannot take."""


class UnknownNameError(ComposerError, LookupError):
    """A name in the chain is known to nobody and looks like a slip of a known one."""


class LockError(ComposerError):
    """The lock file is missing or malformed, or a graph is not as it says.

    Args:
        path: The file.
        what: What is wrong, for a person.
        differences: Between the lock and what is here, each in one sentence.
    """

    def __init__(self, path: Path, what: str, differences: Sequence[str] = ()) -> None:
        told = f": {'; '.join(differences)}" if differences else ""
        super().__init__(f"lock file {str(path)!r} {what}{told}. `composer lock` writes it anew")
        self.path = path
        self.differences = tuple(differences)


MISTAKES = (OptionError, UnknownNameError, LockError)
"""The user's own mistakes, which no engine has failed by."""


class RankingError(ComposerError):
    """Calls of a model cannot be timed, or are not alike."""


class Refusal(ComposerError):
    """An engine's "no", raised by a probe or a build and turned into an attempt's record.

    Args:
        status: What became of the attempt.
        reason: The stable code that docs/reference/reasons.md explains.
        message: One sentence for a person: what was in the way and what would help.
        error_type: Class of an exception that was raised in another process; empty where none was.
        traceback: Its traceback, as text.
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
    """A graph writes to an input that shares memory with another: eager alone is right then."""


class SandboxRefusal(Refusal):
    """A build in a sandbox, a child process, was not accepted.

    Args:
        status: The status of the attempt.
        reason: The stable code.
        message: One sentence.
        error_type: Class of the exception that was raised there; empty where none was.
        traceback: Its traceback, as text.
        output: The last that the sandbox printed, where it ended without an exception.
        by_others: Whether it ended by no doing of the engine's.
    """

    def __init__(
        self,
        status: Status,
        reason: Reason,
        message: str,
        error_type: str = "",
        traceback: str = "",
        *,
        output: str = "",
        by_others: bool = False,
    ) -> None:
        super().__init__(status, reason, message, error_type, traceback or output)
        self.by_others = by_others


class PassError(ComposerError):
    """Under ``on_pass_error="raise"``, the pass that raised or broke a rule of its contract.

    Args:
        name: The pass.
        rule: The rule's name: ``raises``, ``inputs``, ``outputs``, ``order``, ``lint``,
            ``metadata``, ``numbers`` or ``stage`` (:mod:`composer.passes.rules` says what each
            means).
        message: What was found, in one sentence.
        node: The node of the graph where it was found; empty where it is none in particular.
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
        """Stay what it is when the group is split (``except*``)."""
        return PassCheckError(self.message, excs)


class BackendCheckError(ComposerError, AssertionError):
    """:func:`composer.testing.check_backend` found rules that an engine breaks.

    Args:
        name: The engine.
        rules: What was found, by the name of the rule.
    """

    def __init__(self, name: str, rules: Mapping[str, str]) -> None:
        lines = (f"- {rule}: {found}" for rule, found in rules.items())
        what = f"backend {name!r} breaks the rules: {', '.join(rules)}"
        super().__init__("\n".join((what, *lines)))
        self.rules = dict(rules)


class RecordError(ComposerError, ValueError):
    """What was read is not the record of a compile, or one of another schema version."""


class BisectError(ComposerError):
    """:func:`composer.passes.bisect` has nothing to compare with.

    Two runs in eager do not agree, or eager and the chain without any pass.
    """


class CandidateError(ComposerError):
    """Under ``strict``, the first candidate that was not accepted. ``attempt`` is its record.

    In :class:`ChainExhausted` it stands for what ended the attempt, where that is no ``Exception``.
    """

    def __init__(self, attempt: Attempt) -> None:
        super().__init__(attempt.sentence())
        self.attempt = attempt


class ChainExhausted(ComposerError, ExceptionGroup[Exception]):
    """Under ``on_exhausted="raise"``, no candidate was accepted.

    ``exceptions`` holds the error of every candidate in the order of the chain, ``attempts``
    their records. For an error that is no ``Exception``, which a group of those cannot hold, it has
    a :class:`CandidateError` whose ``__cause__`` that is.
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
        """As for all errors, but by what ``__new__`` takes."""
        return _as_it_stood, (type(self), (self.attempts, self.exceptions)), vars(self)

    def derive(self, excs: Sequence[Exception], /) -> ChainExhausted:  # type: ignore[override]
        """Keep the attempts when the group is split (``except*``)."""
        return ChainExhausted(self.attempts, excs)


class FallbackWarning(UserWarning):
    """A candidate not accepted, a pass rolled back, a variable misspelt; once per name and why."""


class CacheWarning(UserWarning):
    """What is kept on disk cannot be used; never an error, even where warnings are."""


class WeightsWarning(UserWarning):
    """Weights were written to, and no version told; once, and never an error."""


class TelemetryWarning(UserWarning):
    """A sink failed; once for each sink. It is no error, even where warnings are."""


def refuse(status: Status, reason: Reason, message: str) -> NoReturn:
    """Leave a probe or a build with a status and a reason.

    Raises:
        Refusal: always.
    """
    raise Refusal(status, reason, message)


def text_of(error: BaseException) -> str:
    """What the error says; some cannot even say that."""
    try:
        return str(error)
    except Exception as another:  # noqa: BLE001  # a slip in somebody's __str__
        return f"its text cannot be read: {type(another).__name__}"


def first_line(text: str) -> str:
    """The first line of ``text`` that says something, up to 1,000 characters."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")[:1000]


def class_and_text(error: BaseException) -> str:
    """What stands at the end of a traceback: ``"ValueError: no such size"``, in all its lines."""
    return f"{type(error).__name__}: {text_of(error)}"


def error_line(error: BaseException) -> str:
    """The class of an error and the first line of its text: ``"ValueError: no such size"``.

    Of one that torch wraps, it is those of what it wraps.
    """
    error = unwrapped(error)
    return f"{type(error).__name__}: {first_line(text_of(error))}"


def import_failure(error: BaseException) -> str:
    """Why an import failed; with the class of the error where that is none of an import."""
    plain = isinstance(error, ImportError | AttributeError)
    return text_of(error) if plain else class_and_text(error)


def unwrapped(error: BaseException) -> BaseException:
    """What a backend raised, out of the errors that torch wraps it in."""
    while isinstance(inner := getattr(error, "inner_exception", None), BaseException):
        error = inner
    return error


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and what led to it, through torch's and Python's own chains."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = getattr(error, "inner_exception", None) or error.__cause__


def chained(error: BaseException, handled: BaseException | None = None) -> Iterator[BaseException]:
    """As :func:`causes`, and what was being handled when each of them was raised.

    Args:
        error: Where to begin.
        handled: Where to stop: this one, and what only it leads to, is left out.
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


def without_frames(error: BaseException, handled: BaseException | None) -> BaseException:
    """The error without its traceback, and so without the frames, which hold what they computed.

    To clear a frame is not enough: it refers to its function, and so to what that closes over.

    Args:
        error: What was caught.
        handled: As for :func:`without_locals`.
    """
    for each in chained(error, handled):
        for inner in each.exceptions if isinstance(each, BaseExceptionGroup) else ():
            without_frames(inner, handled)
        each.__traceback__ = None
    return error


def without_locals(error: BaseException, handled: BaseException | None) -> BaseException:
    """The error, whose traceback keeps its lines and lets go of the local variables.

    Those may hold gigabytes, for as long as the error is kept.

    Args:
        error: What was caught, in the function that calls this.
        handled: What the program was handling before that (``sys.exception()``). Its traceback
            is the program's own and stays as it is.
    """
    for each in chained(error, handled):
        for inner in each.exceptions if isinstance(each, BaseExceptionGroup) else ():
            without_locals(inner, handled)
        traceback.clear_frames(each.__traceback__)
    own = error.__traceback__  # of the caller, which still runs: its frame cannot be cleared
    return error.with_traceback(own and own.tb_next)
