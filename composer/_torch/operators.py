"""Operators and their schemas: names, paths, who writes, who draws."""

from __future__ import annotations

import functools
import os
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
import torch.fx
from torch._ops import HigherOrderOperator
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket as OpOverloadPacket
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)

from composer._torch.names import optional


def takes_functions(target: Any) -> bool:
    """Whether this is an operator over functions, graphs or a user's Triton kernel."""
    return isinstance(target, HigherOrderOperator)


def operator_namespace(target: Any) -> str:
    """``"aten"`` for an operator of that namespace, overload or not; empty for what is none."""
    if isinstance(target, OpOverload):
        return target.namespace
    if isinstance(target, OpOverloadPacket):
        return target._qualified_op_name.partition("::")[0]
    return ""


def operator_name(target: Any) -> str:
    """``"aten::add"`` for every overload of it; empty for what is no operator."""
    return target._schema.name if isinstance(target, OpOverload) else ""


def has_effect(target: Any) -> bool:
    """Whether an operator is there for what it does: it gives nothing, or is called in order.

    AOTAutograd has ``with_effects`` around operators that print or raise, such as
    ``aten._linalg_check_errors``; it gives a token without elements that the next one is given.
    """
    if isinstance(target, OpOverload):
        return not target._schema.returns
    return target is torch.ops.higher_order.with_effects


def is_view(target: Any) -> bool:
    """Whether the operator's result shares its input's memory, by its schema."""
    return isinstance(target, OpOverload) and target.is_view


def draws(target: object) -> bool:
    """Whether an operator draws random numbers."""
    return isinstance(target, OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


_HAS_KERNEL = "torch._C:_dispatch_has_kernel_for_dispatch_key"
_COMPOSED = "torch._C:DispatchKey.CompositeImplicitAutograd"


@optional(
    "telling operators that draw from those that are composed of such",
    *(_HAS_KERNEL, _COMPOSED),
    without=lambda operator: None,
)
def parts_of(operator: OpOverload) -> Callable[..., Any] | None:
    """What calls the operators that it is composed of; ``None`` where it computes by itself.

    Not ``operator.decompose``: torch's GRU in Python (2.13) forgets its dropout.
    """
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return functools.partial(operator._op_dk, key) if _has_kernel(operator, key) else None


def draws_itself(target: object) -> bool:
    """Whether it does so in a kernel of its own, not by operators that it is composed of."""
    return draws(target) and parts_of(cast(OpOverload, target)) is None


def _has_kernel(operator: OpOverload, key: Any) -> bool:
    """Whether C++ has one; torch's own question counts decompositions in Python as well."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(registry_name(operator), key)


def argument(node: torch.fx.Node, name: str) -> Any:
    """The value that a call of an operator has for the argument ``name`` of its schema, or None."""
    for position, each in enumerate(cast(Any, node.target)._schema.arguments):
        if each.name == name:
            given = dict(enumerate(node.args))
            return node.kwargs.get(name, given.get(position, each.default_value))
    return None


def wants_data(error: BaseException) -> bool:
    """Whether tracing came to a number that only the data have."""
    return isinstance(error, DataDependentOutputException | DynamicOutputShapeException)


def shares_memory(operator: OpOverload) -> bool:
    """Whether a result may share an argument's memory, or be that argument, by the schema."""
    return any(each.alias_info is not None for each in operator._schema.returns)


def written_by(node: torch.fx.Node) -> list[torch.fx.Node]:
    """What a call of an operator writes to in place, by the operator's schema."""
    arguments = cast(Any, node.target)._schema.arguments
    given = [argument(node, a.name) for a in arguments if a.alias_info and a.alias_info.is_write]
    flat = [each for value in given for each in (value if isinstance(value, list) else [value])]
    return [each for each in flat if isinstance(each, torch.fx.Node)]


def may_write_by_schema(node: torch.fx.Node) -> bool:
    """Whether an operator, or any overload of one whose overload is open, writes to an operand."""
    target = node.target
    if isinstance(target, OpOverload):
        return bool(written_by(node))
    if not isinstance(target, OpOverloadPacket):
        return False
    overloads = cast(list[str], cast(Any, target).overloads())
    schemas = (getattr(target, name)._schema for name in overloads)
    aliases = (a for schema in schemas for a in schema.arguments if a.alias_info)
    writes = (a for a in aliases if a.alias_info.is_write)
    return any(a.name in node.kwargs or not a.is_out for a in writes)


def operator_path(target: object) -> str | None:
    """``"torch.ops.aten.add.Tensor"``, where an operator is found; ``None`` for what is none.

    Operators cannot be pickled, and torch's own way around it (``torch.fx._graph_pickler``) sends
    their graphs' metadata along, which cannot always be sent. A Triton kernel of the user's is
    named by a number that means something in this process only, and compiled autograd calls what
    it made for the backward under way.

    Raises:
        TypeError: the operator runs such a kernel, or is one of compiled autograd's.
    """
    if _is_compiled_autograds(target):
        raise TypeError(f"compiled autograd made {target} in this process")
    if isinstance(target, OpOverload):
        return f"torch.ops.{target._schema.name.replace('::', '.')}.{target._overloadname}"
    if isinstance(target, OpOverloadPacket):
        return f"torch.ops.{target._qualified_op_name.replace('::', '.')}"
    if isinstance(target, HigherOrderOperator):
        if "triton_kernel" in target.__name__:
            raise TypeError("it runs a Triton kernel that only this process knows")
        return f"torch.ops.higher_order.{target.__name__}"
    return None


@optional(
    "leaving operators of compiled autograd out of isolate",
    "torch._dynamo.compiled_autograd:Op",
    without=lambda target: False,
)
def _is_compiled_autograds(target: object) -> bool:
    from torch._dynamo.compiled_autograd import Op

    return isinstance(target, Op)


def decomposition_of(operator: OpOverload) -> Callable[..., Any]:
    """Torch's own decomposition of the operator."""
    from torch._decomp import decomposition_table

    return decomposition_table[operator]


@optional(
    "whole steps of optimizers on engines that read ONNX",
    *("torch._C:_dispatch_get_all_op_names", _HAS_KERNEL),
    "torch._C:DispatchKey.CompositeExplicitAutograd",
    without=dict,
)
@functools.cache
def loops_over_lists() -> Mapping[OpOverload, Callable[..., Any]]:
    """Each functional operator over lists of tensors, and torch's own loop over the lists for it.

    The loop calls the plain operator once for each place. It is what eager runs on a CPU, and no
    public name leads to it.
    """
    names = torch._C._dispatch_get_all_op_names()
    found = (_overload(name) for name in names if name.startswith("aten::_foreach_"))
    key = torch._C.DispatchKey.CompositeExplicitAutograd
    return {
        each: functools.partial(each._op_dk, key)
        for each in found
        if not each._schema.is_mutable and _has_kernel(each, key)
    }


def _overload(name: str) -> OpOverload:
    """The operator of a name like ``"aten::add.Tensor"``."""
    packet, _, overload = name.removeprefix("aten::").partition(".")
    return cast(OpOverload, getattr(getattr(torch.ops.aten, packet), overload or "default"))


@optional(
    "steps of optimizers with a factor on engines that read ONNX",
    "torch._inductor.inductor_prims:fma",
    lazily=True,
)
def multiply_add() -> OpOverload | None:
    """What Dynamo makes of ``addcmul_``, ``addcdiv_`` and ``add_`` with a factor, as in optimizers.

    An operator that is made for Inductor; eager computes it as a product and a sum.
    """
    from torch._inductor.inductor_prims import fma

    return cast(OpOverload, fma)


_HOMES = ("torch", "_operator", "math", "builtins")
_FOLDER = str(Path(torch.__file__).parent)


def path_in_torch(function: Any) -> str | None:
    """``"torch.nn.functional.linear"``, for a function of torch's own or Python's own.

    ``None`` for any other, and for one that somebody put in the place of torch's.
    """
    name = str(getattr(function, "__name__", ""))
    home = getattr(function, "__module__", None)
    if isinstance(function, types.BuiltinFunctionType):
        home = home or type(function.__self__).__module__
        return f"{home}.{name}" if home.split(".")[0] in _HOMES else None
    if not isinstance(function, types.FunctionType):
        return None
    is_there = getattr(sys.modules.get(str(home)), name, None) is function
    return f"{home}.{name}" if is_there and _is_written_in_torch(function) else None


def is_method_of_torch(name: str) -> bool:
    """Whether a tensor's method is torch's own; not where somebody put another in its place."""
    found = getattr(torch.Tensor, name, None)
    if isinstance(found, types.FunctionType):
        return _is_written_in_torch(found)
    return isinstance(found, types.MethodDescriptorType | types.WrapperDescriptorType)


def _is_written_in_torch(function: types.FunctionType) -> bool:
    return function.__code__.co_filename.startswith(_FOLDER + os.sep)


def registry_name(target: Any) -> str:
    """A node's target as the exporter's registry names it; equal in every process."""
    if isinstance(target, OpOverload | HigherOrderOperator):
        return cast(str, cast(Any, target).name())
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', target)}"
