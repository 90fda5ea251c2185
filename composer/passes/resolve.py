"""Turns the policy's list of passes into pass objects, and finds mistakes before anything runs."""

from __future__ import annotations

import contextlib
import inspect
import operator
import pkgutil
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import PydanticUserError, TypeAdapter, ValidationError

from composer import _torch
from composer.errors import (
    ComposerError,
    OptionError,
    UnknownNameError,
    error_line,
    import_failure,
    text_of,
)
from composer.passes.base import GraphPass, as_stage
from composer.passes.digests import Unstable, digest, file_of
from composer.passes.function import FunctionPass, qualified_name
from composer.passes.pipeline import OnError
from composer.records import BEFORE_AUTOGRAD, Stage
from composer.registry import OpenRegistry, unknown_among
from composer.system import control_flow

PassClass = TypeVar("PassClass", bound=type[GraphPass])

PASSES: OpenRegistry[Any] = OpenRegistry(
    "pass",
    {
        "eliminate_common_subexpressions": "composer.passes.eliminate_common_subexpressions:"
        "EliminateCommonSubexpressions",
        "fold_batch_norm": "composer.passes.fold_batch_norm:FoldBatchNorm",
        "fold_constants": "composer.passes.fold_constants:FoldConstants",
        "merge_parallel_linears": "composer.passes.merge_parallel_linears:MergeParallelLinears",
        "remove_no_ops": "composer.passes.remove_no_ops:RemoveNoOps",
    },
    group="composer.passes",
)


@dataclass(frozen=True, slots=True)
class SharedPasses:
    """The passes of a policy, in the order of its list.

    ``partitioner`` is the policy's ``CustomPartitionerFn``, if it has one.
    """

    passes: tuple[GraphPass, ...] = ()
    partitioner: Any = None
    on_error: OnError = "skip"

    def at(self, stage: Stage, *, last: bool | None = None) -> tuple[GraphPass, ...]:
        """Return the passes of one stage, in the order in which they run.

        Before autograd no engine rewrites the graph, so ``runs_last`` has no effect, and the order
        is that of the list.

        Args:
            stage: The stage.
            last: True for only the passes with ``runs_last``, false for only the other ones, and
                ``None`` for all.
        """
        passes = [each for each in self.passes if each.stage == stage]
        if stage in BEFORE_AUTOGRAD:
            return tuple(passes)
        if last is not None:
            passes = [each for each in passes if each.runs_last is last]
        return tuple(sorted(passes, key=operator.attrgetter("runs_last")))

    @property
    def late(self) -> bool:
        """True if a pass or partitioner works on AOTAutograd's graphs, within each candidate."""
        return bool(self.partitioner or self.at(Stage.JOINT) or self.at(Stage.POST_GRAD))

    @property
    def key(self) -> str:
        """A text that is equal in every process for the same passes with the same parameters."""
        passes = [each.uuid() or _without_uuid(each) for each in self.passes]
        partitioner = ""
        if self.partitioner:
            partitioner = self.partitioner.uuid() or qualified_name(self.partitioner)
        return f"{passes} {partitioner}" if passes or partitioner else ""


def _without_uuid(each: GraphPass) -> str:
    """Return a key for a pass that has no uuid.

    For a function it covers its source, but not the functions that it calls in other files. That is
    too little for a key of Inductor's cache. It is enough for another purpose: composer remembers
    which engines failed on a graph, and after a fix of the pass that memory must not apply.
    """
    code = each.function if isinstance(each, FunctionPass) else type(each)
    function = _torch.dynamo.without_arguments(code)
    parts = each.name, str(each.stage), each.runs_last, file_of(function)
    try:
        return digest(*parts, code)
    except Unstable:
        return digest(*parts)


def register(cls: PassClass) -> PassClass:
    """Register a pass under its name, so that policies can list it; a class decorator.

    Raises:
        ComposerError: Another class has that name.
        OptionError: The argument is not a subclass of ``GraphPass``.
    """
    if not (isinstance(cls, type) and issubclass(cls, GraphPass)):
        raise OptionError(f"register is for subclasses of GraphPass, not {cls!r}")
    PASSES.add(cls.name, cls)
    return cls


def shared_passes(listed: Sequence[Any], on_error: OnError = "skip") -> SharedPasses:
    """Make the passes that a policy's ``passes`` lists.

    Args:
        listed: Names, ``"module:Class"``, tables ``{"pass": ..., field: value}``, passes, classes
            of passes, Inductor's custom passes, functions, and at most one ``CustomPartitionerFn``.
        on_error: What to do with a pass that fails.

    Raises:
        UnknownNameError, OptionError: An entry is wrong, or ``listed`` is text. The message names
            every wrong entry; the class of the error is that of the first one.
    """
    if isinstance(listed, str):
        raise OptionError(f"passes is a list, such as [{listed!r}]")
    passes: list[GraphPass] = []
    partitioners: list[Any] = []
    mistakes: list[ComposerError] = []
    for entry in listed:
        try:
            found = _find(entry)
        except (UnknownNameError, OptionError) as mistake:
            mistakes.append(mistake)
            continue
        if isinstance(found, _torch.inductor.CustomPartitionerFn):
            partitioners.append(found)
        else:
            passes.append(found)
    if len(partitioners) > 1:
        names = ", ".join(map(qualified_name, partitioners))
        mistakes.append(OptionError(f"a graph is partitioned once, not by each of {names}"))
    if mistakes:
        raise type(mistakes[0])("; ".join(map(str, mistakes)))
    return SharedPasses(tuple(passes), next(iter(partitioners), None), on_error)


def _find(entry: Any) -> Any:
    if not isinstance(entry, Mapping):
        return _make(look_up(entry), {})
    if "pass" not in entry:
        raise OptionError(f"a table in passes names its pass: {{'pass': ...}}, not {dict(entry)}")
    fields = dict(entry)
    return _make(look_up(fields.pop("pass")), fields)


def look_up(entry: Any) -> Any:
    """Return the object, class or function that a name in the list refers to.

    An entry that is not text is returned as it is.

    Raises:
        UnknownNameError: The name refers to nothing, or its module cannot be imported.
    """
    if not isinstance(entry, str):
        return entry
    try:
        return pkgutil.resolve_name(entry) if ":" in entry else PASSES.get(entry)
    except ComposerError:
        raise
    except BaseException as error:
        control_flow.pass_on(error)
        why = import_failure(error)
        raise UnknownNameError(f"pass {entry!r} cannot be imported: {why}") from error


def check_class(found: Any) -> None:
    """Check that a class is a class of passes; objects that are not classes are accepted.

    Raises:
        OptionError: It is another class.
    """
    kinds = (GraphPass, *_torch.inductor.CUSTOM_PASSES)
    if isinstance(found, type) and not issubclass(found, kinds):
        raise OptionError(f"passes holds {found!r}, which is no class of passes")


def _make(found: Any, fields: dict[str, Any]) -> Any:
    if isinstance(found, type):
        check_class(found)
        if issubclass(found, GraphPass):
            return _with_a_stage(_instance(found, fields))
        with _mistakes_in(qualified_name(found)):
            found = found()
    if fields:
        raise OptionError(f"pass {found!r} takes no parameters, but is given {fields}")
    if isinstance(found, GraphPass | _torch.inductor.CustomPartitionerFn):
        return _with_a_stage(found)
    if callable(found) or _torch.canonical.is_pattern_matcher_pass(found):
        return _with_a_stage(FunctionPass(found))
    raise OptionError(f"passes holds {found!r}, which is no pass")


@contextlib.contextmanager
def _mistakes_in(name: str) -> Iterator[None]:
    """Raise ``OptionError`` for an exception that making the pass of this name raises.

    The message has the class of the exception, unless it is a ``TypeError`` or a ``ValueError``:
    wrong parameters raise these.
    """
    try:
        yield
    except BaseException as error:
        control_flow.pass_on(error)
        is_plain = isinstance(error, TypeError | ValueError)
        why = text_of(error) if is_plain else error_line(error)
        raise OptionError(f"pass {name!r}: {why}") from error


def _with_a_stage(found: Any) -> Any:
    """Return the pass, or raise ``OptionError`` if no pass can run at its stage."""
    if isinstance(found, _torch.inductor.CustomPartitionerFn):
        return _at_partitioner(found)
    if as_stage(found.stage, found.name) is Stage.PARTITIONER:
        what = "no pass runs at stage 'partitioner'; a CustomPartitionerFn of torch's stands there"
        raise OptionError(f"pass {found.name!r}: {what}")
    return found


def _at_partitioner(found: Any) -> Any:
    """Return the partitioner, or raise ``OptionError`` if its attribute names another stage."""
    stage = getattr(found, "stage", Stage.PARTITIONER)
    name = qualified_name(found)
    if isinstance(found, GraphPass) or stage is None:
        return found
    if as_stage(stage, name) is not Stage.PARTITIONER:
        what = f"a CustomPartitionerFn runs at stage 'partitioner', not at {str(stage)!r}"
        raise OptionError(f"pass {name!r}: {what}")
    return found


def _instance(cls: type[GraphPass], fields: dict[str, Any]) -> GraphPass:
    known = list(inspect.signature(cls).parameters)
    undeclared = [name for name in annotated(cls) if name not in known]
    if undeclared and "__init__" not in vars(cls):
        what = f"annotates {', '.join(undeclared)}; decorate it with @dataclass"
        raise OptionError(f"pass {cls.name!r} {what}")
    slips = unknown_among(fields, known, "unknown parameter")
    if slips:
        accepted = ", ".join(known) or "none"
        raise OptionError(f"pass {cls.name!r}: {slips} (accepted: {accepted})")
    with _mistakes_in(cls.name):
        return cls(**_as_annotated(cls, fields))


def _as_annotated(cls: type[GraphPass], fields: dict[str, Any]) -> dict[str, Any]:
    """Convert the values to the types that the class annotates.

    A policy file has lists but no tuples, for example. A value is not converted if pydantic does
    not know its type, as for a dtype or a tensor.

    Raises:
        ValueError: A value does not have the annotated type; the message names every such value.
    """
    try:
        kinds = typing.get_type_hints(cls.__init__)
    except (NameError, AttributeError, TypeError):  # names imported only for type checkers
        return fields
    values, mistakes = dict(fields), []
    for name in fields.keys() & kinds.keys():
        try:
            values[name] = TypeAdapter(kinds[name]).validate_python(fields[name])
        except (PydanticUserError, NameError):
            continue
        except ValidationError as error:
            what = error.errors()[0]["msg"]
            mistakes.append(f"parameter {name!r} is {fields[name]!r}: {what}")
    if mistakes:
        raise ValueError("; ".join(sorted(mistakes)))
    return values


def annotated(cls: type) -> list[str]:
    """Return the names of the fields that the class itself annotates."""
    own = inspect.get_annotations(cls)
    return [name for name, kind in own.items() if "ClassVar" not in str(kind)]
