"""The tensors that a graph may write to, by the schemas and names of its operations."""

from __future__ import annotations

import keyword
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.fx

from composer import _torch
from composer.graphs.nodes import attribute_at, value_of
from composer.graphs.norms import KEEP_STATISTICS
from composer.records import GraphRequest

_ASSIGNS = frozenset(
    {"setitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "ipow", "imod", "imatmul"}
    | {"iand", "ior", "ixor", "ilshift", "irshift"}
)

_KERNEL = "triton_kernel_wrapper_mutation"
"""A user's Triton kernel, which may write to all its arguments (not run: no GPU)."""

Writes = Callable[[torch.fx.Node], bool]


def may_write(gm: torch.fx.GraphModule) -> bool:
    """True if the graph may write to an input, or to a tensor that ``gm`` holds.

    Writes to the graph's own intermediate values, such as by an in-place ReLU, do not count. Any
    write in a nested graph counts, and so does a write to memory whose owner is not known.
    """
    graphs = (each for each in gm.modules() if isinstance(each, torch.fx.GraphModule))
    nested = (node for each in graphs if each is not gm for node in each.graph.nodes)
    if any(map(_writes, nested)):
        return True
    lasting = {_memory(n) for n in gm.graph.nodes if n.op in ("placeholder", "get_attr")}
    written = _memory_written(gm, _writes)
    return any(each in lasting or isinstance(each, torch.fx.Node) for each in written)


def is_known(gm: torch.fx.GraphModule) -> bool:
    """True if all operations belong to torch or Python, so that their writes are known.

    The following may write without declaring it: operators of other packages, functions and modules
    that Dynamo was told not to trace, and operators that take functions or kernels.
    """
    return all(is_torchs(node) for node in gm.graph.nodes)


def is_torchs(node: torch.fx.Node) -> bool:
    """True if an operation belongs to torch or Python, and takes no functions or kernels."""
    if node.op != "call_function":
        return node.op != "call_module"
    if _torch.operators.takes_functions(node.target):
        return False
    namespace = _torch.operators.operator_namespace(node.target)
    if namespace:
        return namespace in ("aten", "prims")
    module = str(getattr(node.target, "__module__", None)).partition(".")[0]
    return module in ("torch", "_operator", "builtins", "math")


def tracked_inputs(request: GraphRequest, *, weights: bool) -> tuple[tuple[int, ...], bool]:
    """Positions of the inputs to check for writes, and whether other writes may go unnoticed.

    Args:
        request: The graph.
        weights: True to check all weights. Otherwise parameters are checked only if the graph
            itself writes to them, and buffers only if it writes to anything.

    Returns:
        The positions, and true if the graph may write to an inference tensor, which has no version.
    """
    writing = may_write(request.gm)
    written = written_parameters(request)
    values = request.example_inputs
    tensors = {i: each for i, each in enumerate(values) if isinstance(each, torch.Tensor)}
    open_to_writes = {
        i
        for i, each in tensors.items()
        if i not in request.weights or i in written or (writing and not _is_parameter(each))
    }
    unseen = {i for i, each in tensors.items() if each.is_inference()}
    tracked = sorted((tensors.keys() if weights else open_to_writes) - unseen)
    return tuple(tracked), writing and not open_to_writes.isdisjoint(unseen)


def written_parameters(request: GraphRequest) -> frozenset[int]:
    """Positions of the parameters passed in that the graph may write to."""
    values = request.example_inputs
    if not any(map(_is_parameter, values)):
        return frozenset()
    return frozenset(i for i in assigned_inputs(request.gm) if _is_parameter(values[i]))


def assigned_inputs(gm: torch.fx.GraphModule) -> frozenset[int]:
    """Positions of the inputs that the graph may write to; statistics of norms do not count."""
    written = _memory_written(gm, _assigns)
    inputs = enumerate(_placeholders(gm))
    return frozenset(i for i, node in inputs if _memory(node) in written)


def reads_what_it_wrote(gm: torch.fx.GraphModule) -> bool:
    """True if the graph uses an input elsewhere, too, besides the assignment to it.

    A counter, for example, is only assigned to.
    """
    assigned = assigned_inputs(gm)
    memories = {_memory(n) for i, n in enumerate(_placeholders(gm)) if i in assigned}
    users = Counter(
        memory for n in gm.graph.nodes for memory in {_memory(e) for e in n.all_input_nodes}
    )
    return any(users[memory] > 1 for memory in memories)


def written_attributes(gm: torch.fx.GraphModule) -> list[torch.Tensor]:
    """Tensors that the graph module itself holds and may write to, as an optimizer's step does.

    Statistics of norms count if they are not parameters.
    """
    held = {node: attribute_at(gm, str(node.target)) for node in _attributes(gm)}
    tensors = {node: each for node, each in held.items() if isinstance(each, torch.Tensor)}
    if not tensors:
        return []
    assigned, moved = (_memory_written(gm, kind) for kind in (_assigns, _moves))
    return [
        each
        for node, each in tensors.items()
        if _memory(node) in assigned or (_memory(node) in moved and not _is_parameter(each))
    ]


def open_weights(request: GraphRequest) -> list[torch.Tensor]:
    """Inputs and attributes that the graph may write to, including the statistics of norms."""
    gm, written = request.gm, _memory_written(request.gm, _writes)
    given = zip(_placeholders(gm), request.example_inputs, strict=True)
    passed = [value for node, value in given if _memory(node) in written]
    nodes = [node for node in _attributes(gm) if _memory(node) in written]
    found = [*passed, *(attribute_at(gm, str(node.target)) for node in nodes)]
    return [each for each in found if isinstance(each, torch.Tensor)]


def _placeholders(gm: torch.fx.GraphModule) -> Iterable[torch.fx.Node]:
    return gm.graph.find_nodes(op="placeholder")


def _attributes(gm: torch.fx.GraphModule) -> Iterable[torch.fx.Node]:
    return gm.graph.find_nodes(op="get_attr")


def _is_parameter(value: object) -> bool:
    """True for a parameter; also for a tensor subclass, such as a quantized one, marked as one."""
    return isinstance(value, torch.nn.Parameter)


def _memory_written(gm: torch.fx.GraphModule, writes: Writes) -> set[object]:
    nodes = [node for node in gm.graph.nodes if writes(node)]
    operands = [operand for node in nodes for operand in node.all_input_nodes]
    if writes is not _moves:
        operands += [each for node in gm.graph.nodes for each in _assigned_within(gm, node)]
    return set(map(_memory, operands))


def _assigned_within(gm: torch.fx.GraphModule, node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """The operands of a higher-order operator that one of its graphs or kernels assigns to.

    The last operands of such an operator are the inputs of its graphs.
    """
    if node.op != "call_function" or not _torch.operators.takes_functions(node.target):
        return
    if _name(node) == _KERNEL:
        yield from node.all_input_nodes
        return
    leaves, _ = _torch.tensors.flatten((node.args, node.kwargs))
    given = [each for each in leaves if isinstance(each, torch.fx.Node)]
    graphs = (attribute_at(gm, str(each.target)) for each in given if each.op == "get_attr")
    for graph in [each for each in graphs if isinstance(each, torch.fx.GraphModule)]:
        count = len(list(_placeholders(graph)))
        inputs = given[len(given) - count :] if count else []
        assigned = assigned_inputs(graph)
        yield from (each for at, each in enumerate(inputs) if at in assigned)


def _memory(node: torch.fx.Node) -> object:
    """An identity of the node's memory: the storage if it is known, else the node itself.

    Views of one tensor have the same storage.
    """
    fake = value_of(node)
    if isinstance(fake, torch.Tensor) and fake.layout is torch.strided:
        return _torch.tensors.storage_id(fake)
    return node


def _name(node: torch.fx.Node) -> str:
    if not node.op.startswith("call_"):
        return ""
    return str(getattr(node.target, "__name__", node.target)).partition(".")[0]


def _writes(node: torch.fx.Node) -> bool:
    return _moves(node) or _assigns(node)


def _moves(node: torch.fx.Node) -> bool:
    """True for a norm that updates its running statistics."""
    if _name(node) not in KEEP_STATISTICS:
        return False
    at, default = KEEP_STATISTICS[_name(node)]
    given = node.args[at] if len(node.args) > at else default
    return bool(node.kwargs.get("training", node.kwargs.get("use_input_stats", given)))


def _assigns(node: torch.fx.Node) -> bool:
    if _torch.operators.may_write_by_schema(node):
        return True
    if node.kwargs.get("out") is not None or is_told_to_write(node):
        return True
    if _given(node, "max_norm") is not None:  # an embedding shortens rows in place
        return True
    name = _name(node)
    return name in _ASSIGNS or _is_in_place(name)


def is_told_to_write(node: torch.fx.Node) -> bool:
    """True if the node's function is called with ``inplace=True``."""
    return bool(_given(node, "inplace"))


def _given(node: torch.fx.Node, name: str) -> Any:
    """The argument of a Python function for a parameter, passed by name or by position."""
    code = getattr(node.target, "__code__", None)
    names = code.co_varnames[: code.co_argcount] if code is not None else ()
    at = names.index(name) if name in names else len(node.args)
    return node.args[at] if at < len(node.args) else node.kwargs.get(name)


def _is_in_place(name: str) -> bool:
    """True if the name ends with an underscore that does not only avoid a keyword (``and_``)."""
    return name.endswith("_") and not name.endswith("__") and not keyword.iskeyword(name[:-1])
