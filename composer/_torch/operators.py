"""Operators and their schemas: names, paths, writes in place, random numbers."""

from __future__ import annotations

import functools
import importlib
import operator
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
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from composer._torch.names import optional


def takes_functions(target: Any) -> bool:
    """True if this is an operator over functions, graphs or a user's Triton kernel."""
    return isinstance(target, HigherOrderOperator)


def operator_namespace(target: Any) -> str:
    """The namespace of an operator or a packet of overloads (``"aten"``); empty for others."""
    if isinstance(target, OpOverload):
        return target.namespace
    if isinstance(target, OpOverloadPacket):
        return target._qualified_op_name.partition("::")[0]
    return ""


def operator_name(target: Any) -> str:
    """The name without the overload (``"aten::add"``); empty if ``target`` is not an operator."""
    return target._schema.name if isinstance(target, OpOverload) else ""


def has_effect(target: Any) -> bool:
    """True if an operator is called for its effect: it returns nothing, or its calls are ordered.

    AOTAutograd wraps operators that print or raise, such as ``aten._linalg_check_errors``, in
    ``with_effects``. Each such call returns a token without elements, which is passed to the next
    call.
    """
    if isinstance(target, OpOverload):
        return not target._schema.returns
    return target is torch.ops.higher_order.with_effects


def is_view(target: Any) -> bool:
    """True if the operator's result shares its input's memory, by its schema."""
    return isinstance(target, OpOverload) and target.is_view


def draws(target: object) -> bool:
    """True if an operator draws random numbers."""
    return isinstance(target, OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


_HAS_KERNEL = "torch._C:_dispatch_has_kernel_for_dispatch_key"


@optional(
    "telling operators that draw from those that are composed of such",
    *(_HAS_KERNEL, "torch._C:DispatchKey.CompositeImplicitAutograd"),
    without=lambda target: draws(target),
)
def draws_itself(target: object) -> bool:
    """True if an operator draws in a kernel of its own, and not in operators that it calls."""
    is_composed = torch._C.DispatchKey.CompositeImplicitAutograd
    return draws(target) and not _has_kernel(cast(OpOverload, target), is_composed)


def _has_kernel(operator: OpOverload, key: Any) -> bool:
    """True if C++ has a kernel for the key. Torch's own check also counts Python decompositions."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(registry_name(operator), key)


def argument(node: torch.fx.Node, name: str) -> Any:
    """The value of the argument ``name`` in a call of an operator; ``None`` if there is none."""
    for position, each in enumerate(cast(Any, node.target)._schema.arguments):
        if each.name == name:
            given = dict(enumerate(node.args))
            return node.kwargs.get(name, given.get(position, each.default_value))
    return None


def results_of(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The nodes of a call's results: its ``getitem`` nodes if it returns several."""
    parts = [user for user in node.users if user.target is operator.getitem]
    return parts or [node]


def wants_data(error: BaseException) -> bool:
    """True if tracing failed because it needed a number that only the data tell."""
    return isinstance(error, DataDependentOutputException | DynamicOutputShapeException)


def shares_memory(operator: OpOverload) -> bool:
    """True if a result may share an argument's memory, or be that argument, by the schema."""
    return any(each.alias_info is not None for each in operator._schema.returns)


def written_by(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The nodes that a call of an operator writes to in place, by the operator's schema."""
    nodes: list[torch.fx.Node] = []
    for each in filter(_is_written, cast(Any, node.target)._schema.arguments):
        torch.fx.map_arg(argument(node, each.name), nodes.append)
    return nodes


def may_write_by_schema(node: torch.fx.Node) -> bool:
    """True if a call of an operator may write to an operand, by the operator's schema.

    If the overload is not chosen yet, all overloads are considered.
    """
    target: Any = node.target
    if isinstance(target, OpOverload):
        return bool(written_by(node))
    if not isinstance(target, OpOverloadPacket):
        return False
    for name in cast(Any, target).overloads():
        written = filter(_is_written, getattr(target, name)._schema.arguments)
        if any(each.name in node.kwargs or not each.is_out for each in written):
            return True
    return False


def _is_written(argument: Any) -> bool:
    """True if an operator with this argument in its schema writes to it."""
    return argument.alias_info is not None and argument.alias_info.is_write


def operator_path(target: object) -> str | None:
    """The path of an operator, such as ``"torch.ops.aten.add.Tensor"``.

    Operators cannot be pickled. Two kinds of operator have no
    meaning in another process. A user's Triton kernel is named by a number of this process, and
    compiled autograd calls functions that it made for the current backward.

    Returns:
        ``None`` if ``target`` is not an operator.

    Raises:
        TypeError: the operator runs a Triton kernel of the user's, or is one of compiled
            autograd's.
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
    """Functional operators over lists of tensors, each with torch's own loop over the lists.

    The loop calls the plain operator once for each place. Eager runs that loop on a CPU, and no
    public name leads to it.
    """
    names = torch._C._dispatch_get_all_op_names()
    key = torch._C.DispatchKey.CompositeExplicitAutograd
    loops: dict[OpOverload, Callable[..., Any]] = {}
    for name in names:
        if not name.startswith("aten::_foreach_"):
            continue
        packet, _, overload = name.removeprefix("aten::").partition(".")
        operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
        if not operator._schema.is_mutable and _has_kernel(operator, key):
            loops[operator] = functools.partial(operator._op_dk, key)
    return loops


@optional(
    "models quantized by PT2E on engines that read ONNX",
    "torch._C:DispatchKey.CompositeExplicitAutograd",
)
def eager_parts_of(operator: OpOverload) -> Callable[..., Any]:
    """The kernel that an operator has for all devices, for a kernel that calls other operators."""
    return functools.partial(operator._op_dk, torch._C.DispatchKey.CompositeExplicitAutograd)


@optional(
    "steps of optimizers with a factor on engines that read ONNX",
    "torch._inductor.inductor_prims:fma",
    lazily=True,
)
def multiply_add() -> OpOverload | None:
    """The operator that Dynamo makes of ``addcmul_``, ``addcdiv_`` and ``add_`` with a factor.

    Optimizers use these. The operator is made for Inductor; eager computes a product and a sum.
    """
    from torch._inductor.inductor_prims import fma

    return cast(OpOverload, fma)


_PACKAGES = ("torch", "_operator", "math", "builtins")
_FOLDER = str(Path(torch.__file__).parent)


def path_in_torch(function: Any) -> str | None:
    """The path of a function of torch or Python, such as ``"torch.nn.functional.linear"``.

    Returns:
        ``None`` for any other function, and for one that was put in the place of torch's.
    """
    if isinstance(function, types.BuiltinFunctionType):
        module = function.__module__ or type(function.__self__).__module__
        is_known = module.split(".")[0] in _PACKAGES
    elif isinstance(function, types.FunctionType):
        module = function.__module__
        is_there = getattr(sys.modules.get(module), function.__name__, None) is function
        is_known = is_there and _is_written_in_torch(function)
    else:
        return None
    return f"{module}.{function.__name__}" if is_known else None


def is_method_of_torch(name: str) -> bool:
    """True if a tensor's method is torch's own, and nobody has replaced it."""
    found = getattr(torch.Tensor, name, None)
    if isinstance(found, types.FunctionType):
        return _is_written_in_torch(found)
    return isinstance(found, types.MethodDescriptorType | types.WrapperDescriptorType)


def _is_written_in_torch(function: types.FunctionType) -> bool:
    return function.__code__.co_filename.startswith(_FOLDER + os.sep)


def can_quantize() -> bool:
    """True if the operators by which PT2E quantizes are loaded; torch loads them when needed."""
    return hasattr(torch.ops.quantized_decomposed, "quantize_per_tensor")


def load_quantizing() -> None:
    """Load the operators by which PT2E quantizes. Nothing public loads them alone."""
    importlib.import_module("torch.ao.quantization.fx._decomposed")


def registry_name(target: Any) -> str:
    """The name of a node's target in the exporter's registry. It is equal in every process."""
    if isinstance(target, OpOverload | HigherOrderOperator):
        return cast(str, cast(Any, target).name())
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', target)}"
