"""From the policy's list to passes by stage; every slip in it is found before anything runs."""

from __future__ import annotations

import functools
import inspect
import pkgutil
import typing
from collections.abc import Mapping, Sequence
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
from composer.passes.fingerprint import Unstable, digest, file_of
from composer.passes.function import FunctionPass, qualified_name
from composer.passes.pipeline import OnError
from composer.records import BEFORE_AUTOGRAD, Stage
from composer.registry import OpenRegistry, did_you_mean
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
    """The passes of a policy, by the graph they are given, each group in the order of the list.

    ``key`` covers all of them, in order.
    """

    passes: tuple[GraphPass, ...] = ()
    partitioner: Any = None
    on_error: OnError = "skip"

    def at(self, stage: Stage, *, last: bool | None = None) -> tuple[GraphPass, ...]:
        """Those of one stage, in the order in which they run; ``last`` asks for one half of them.

        Before autograd no engine stands between the halves, and the order is that of the list.
        """
        here = [each for each in self.passes if each.stage == stage]
        if stage in BEFORE_AUTOGRAD:
            return tuple(here)
        halves = (False, True) if last is None else (last,)
        return tuple(each for half in halves for each in here if each.runs_last is half)

    @property
    def late(self) -> bool:
        """Whether any of them works on what AOTAutograd makes, within each candidate."""
        return bool(self.partitioner or self.at(Stage.JOINT) or self.at(Stage.POST_GRAD))

    @property
    def key(self) -> str:
        """Text that is equal in every process for the same passes with the same parameters."""
        own = [each.uuid() or _without_uuid(each) for each in self.passes]
        cut = self.partitioner and (self.partitioner.uuid() or qualified_name(self.partitioner))
        return f"{own} {cut or ''}" if own or cut else ""


def _without_uuid(each: GraphPass) -> str:
    """What can be told of a pass that has no uuid: of a function, all but what it calls elsewhere.

    Too little to serve a graph from Inductor's cache. It is enough for a pass that was mended not
    to inherit what is remembered of an engine that failed on the graph that it left.
    """
    shown = each.function if isinstance(each, FunctionPass) else type(each)
    named = shown.func if isinstance(shown, functools.partial) else shown
    parts = each.name, str(each.stage), each.runs_last, file_of(named)
    try:
        return digest(*parts, shown)
    except Unstable:
        return digest(*parts)


def register(cls: PassClass) -> PassClass:
    """Class decorator: make a pass known by its name, for policies to list.

    Raises:
        ComposerError: another class has that name.
        OptionError: it is no class of passes.
    """
    if not (isinstance(cls, type) and issubclass(cls, GraphPass)):
        raise OptionError(f"register is for subclasses of GraphPass, not {cls!r}")
    PASSES.add(cls.name, cls)
    return cls


def shared_passes(listed: Sequence[Any], on_error: OnError = "skip") -> SharedPasses:
    """Find what every entry of a policy's ``passes`` stands for.

    Args:
        listed: Names, ``"module:Class"``, tables ``{"pass": ..., field: value}``, passes, classes
            of passes, Inductor's custom passes, functions, and at most one ``CustomPartitionerFn``.
        on_error: What to do with a pass that fails.

    Raises:
        UnknownNameError, OptionError: naming every entry that stands for nothing; or it is no list.
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
        (partitioners if isinstance(found, _torch.inductor.CustomPartitionerFn) else passes).append(
            found
        )
    if len(partitioners) > 1:
        names = ", ".join(map(qualified_name, partitioners))
        mistakes.append(OptionError(f"a graph is partitioned once, not by each of {names}"))
    if mistakes:
        raise type(mistakes[0])("; ".join(map(str, mistakes)))
    return SharedPasses(tuple(passes), partitioners[0] if partitioners else None, on_error)


def _find(entry: Any) -> Any:
    if isinstance(entry, Mapping):
        fields = {key: value for key, value in entry.items() if key != "pass"}
        if "pass" not in entry:
            raise OptionError(
                f"a table in passes names its pass: {{'pass': ...}}, not {dict(entry)}"
            )
        return _make(look_up(entry["pass"]), fields)
    return _make(look_up(entry), {})


def look_up(entry: Any) -> Any:
    """What a spelling stands for: an object, a class or a function.

    Raises:
        UnknownNameError: nothing.
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
    """Know a class of passes from any other.

    Raises:
        OptionError: it is another.
    """
    if isinstance(found, type) and not issubclass(
        found, (GraphPass, *_torch.inductor.CUSTOM_PASSES)
    ):
        raise OptionError(f"passes holds {found!r}, which is no class of passes")


def _make(found: Any, fields: dict[str, Any]) -> Any:
    if isinstance(found, type):
        if issubclass(found, GraphPass):
            return _with_a_stage(_instance(found, fields))
        check_class(found)
        found = _without_parameters(found)
    if fields:
        raise OptionError(f"pass {found!r} takes no parameters, but is given {fields}")
    if isinstance(found, GraphPass | _torch.inductor.CustomPartitionerFn):
        return _with_a_stage(found)
    if callable(found) or _torch.canonical.is_pattern_matcher_pass(found):
        return _with_a_stage(FunctionPass(found))
    raise OptionError(f"passes holds {found!r}, which is no pass")


def _with_a_stage(found: Any) -> Any:
    """The pass, if there is a graph at its stage to give it."""
    if isinstance(found, _torch.inductor.CustomPartitionerFn):
        return _at_partitioner(found)
    if as_stage(found.stage, found.name) is Stage.PARTITIONER:
        what = "no pass runs at stage 'partitioner'; a CustomPartitionerFn of torch's stands there"
        raise OptionError(f"pass {found.name!r}: {what}")
    return found


def _at_partitioner(found: Any) -> Any:
    """The partitioner, if it names no other stage: an attribute of it is not ignored in silence."""
    stage = Stage.PARTITIONER if isinstance(found, GraphPass) else getattr(found, "stage", None)
    name = qualified_name(found)
    if stage is not None and as_stage(stage, name) is not Stage.PARTITIONER:
        what = f"a CustomPartitionerFn runs at stage 'partitioner', not at {str(stage)!r}"
        raise OptionError(f"pass {name!r}: {what}")
    return found


def _without_parameters(cls: type) -> Any:
    try:
        return cls()
    except BaseException as error:
        control_flow.pass_on(error)
        raise OptionError(f"pass {qualified_name(cls)!r}: {_slip(error)}") from error


def _slip(error: BaseException) -> str:
    """Why a pass cannot be made; with the class of the error where it is none of parameters."""
    return text_of(error) if isinstance(error, TypeError | ValueError) else error_line(error)


def _instance(cls: type[GraphPass], fields: dict[str, Any]) -> GraphPass:
    known = list(inspect.signature(cls).parameters)
    undeclared = [name for name in annotated(cls) if name not in known]
    if undeclared and "__init__" not in vars(cls):
        what = f"annotates {', '.join(undeclared)}; decorate it with @dataclass"
        raise OptionError(f"pass {cls.name!r} {what}")
    unknown = [name for name in fields if name not in known]
    if unknown:
        named = "; ".join(f"unknown parameter {n!r}{did_you_mean(str(n), known)}" for n in unknown)
        raise OptionError(f"pass {cls.name!r}: {named} (accepted: {', '.join(known) or 'none'})")
    try:
        return cls(**_as_annotated(cls, fields))
    except BaseException as error:
        control_flow.pass_on(error)
        raise OptionError(f"pass {cls.name!r}: {_slip(error)}") from error


def _as_annotated(cls: type[GraphPass], fields: dict[str, Any]) -> dict[str, Any]:
    """The values as the class annotates them: a file knows lists, and no tuples.

    A type that pydantic does not know, a dtype or a tensor, is left to the class.

    Raises:
        ValueError: naming every value of another type.
    """
    try:
        kinds = typing.get_type_hints(cls.__init__)
    except (NameError, AttributeError, TypeError):  # imported for type checkers alone
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
    """Names that the class itself annotates as fields."""
    own = inspect.get_annotations(cls)
    return [name for name, kind in own.items() if "ClassVar" not in str(kind)]
