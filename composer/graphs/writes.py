"""The tensors that a graph may write to, by the schemas and names of its operations."""

from __future__ import annotations

import keyword
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.fx

from composer import _torch
from composer.graphs.nodes import attribute_at, graph_modules, is_strided, placeholders_of, value_of
from composer.records import GraphRequest

_ASSIGNS = frozenset(
    {"setitem", "delitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "ipow", "imod"}
    | {"imatmul", "iand", "ior", "ixor", "ilshift", "irshift", "iconcat"}
    | {"triton_kernel_wrapper_mutation"}
)
"""Names of functions that write to an operand. The last one runs a user's Triton kernel, which may
write to all of its arguments (not tested: no GPU)."""


KEEP_STATISTICS = {
    "batch_norm": (5, "training", False),
    "native_batch_norm": (5, "training", False),
    "cudnn_batch_norm": (5, "training", False),
    "miopen_batch_norm": (5, "training", False),
    "_batch_norm_impl_index": (5, "training", False),
    "instance_norm": (5, "use_input_stats", True),
}
"""Norms that write to running statistics, which their schemas do not declare. For each name, the
position, name and default of the argument that says whether to update them."""


def may_write(gm: torch.fx.GraphModule) -> bool:
    """True if the graph may write to an input, or to a tensor that ``gm`` holds.

    Writes to the graph's own intermediate values, such as by an in-place ReLU, do not count. Any
    write in a nested graph counts, and so does a write to memory whose owner is not known.
    """
    _, *nested = graph_modules(gm)
    if any(_writes(node) for each in nested for node in each.graph.nodes):
        return True
    lasting = set(map(_memory, (*placeholders_of(gm.graph), *_attributes(gm))))
    written = _written_memory(gm)
    has_unknown_owner = any(isinstance(memory, torch.fx.Node) for memory in written)
    return has_unknown_owner or not written.isdisjoint(lasting)


def computes_nothing(gm: torch.fx.GraphModule) -> bool:
    """True if the graph only returns inputs, tensors that it holds, and views of these."""
    lasting = set(map(_memory, (*placeholders_of(gm.graph), *_attributes(gm))))
    calls = [node for node in gm.graph.nodes if node.op.startswith("call_")]
    values, _ = _torch.tensors.flatten([value_of(node, node) for node in calls])
    # A number, such as a size, is not computed by an engine. A node stands for an unknown value.
    made = (each for each in values if isinstance(each, torch.Tensor | torch.fx.Node))
    is_only_views = all(_storage(each) in lasting for each in made)
    return is_only_views and all(is_torchs(node) and not _writes(node) for node in calls)


def is_known(gm: torch.fx.GraphModule) -> bool:
    """True if all operations belong to torch or Python, so that their writes are known.

    The following may write without declaring it: operators of other packages, functions and modules
    that Dynamo was told not to trace, and operators that take functions or kernels.
    """
    return all(map(is_torchs, gm.graph.nodes))


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
    values = request.example_inputs
    tensors = {i for i, each in enumerate(values) if isinstance(each, torch.Tensor)}
    without_version = {i for i in tensors if values[i].is_inference()}
    open_to_writes = (tensors - request.weights) | written_parameters(request)
    writing = may_write(request.gm)
    if writing:
        open_to_writes |= {i for i in tensors if not _is_parameter(values[i])}
    tracked = tensors if weights else open_to_writes
    unseen = writing and not open_to_writes.isdisjoint(without_version)
    return tuple(sorted(tracked - without_version)), unseen


def written_parameters(request: GraphRequest) -> frozenset[int]:
    """Positions of the parameters passed in that the graph may write to."""
    values = request.example_inputs
    if not any(map(_is_parameter, values)):
        return frozenset()
    return frozenset(i for i in assigned_inputs(request.gm) if _is_parameter(values[i]))


def assigned_inputs(gm: torch.fx.GraphModule) -> frozenset[int]:
    """Positions of the inputs that the graph may write to; statistics of norms do not count."""
    assigned = _assigned_memory(gm)
    inputs = enumerate(placeholders_of(gm.graph))
    return frozenset(i for i, node in inputs if _memory(node) in assigned)


def reads_what_it_wrote(gm: torch.fx.GraphModule) -> bool:
    """True if the graph uses an input elsewhere, too, besides the assignment to it.

    A counter, for example, is only assigned to.
    """
    placeholders = placeholders_of(gm.graph)
    uses = Counter[object]()
    for node in gm.graph.nodes:
        uses.update(set(map(_memory, node.all_input_nodes)))
    return any(uses[_memory(placeholders[i])] > 1 for i in assigned_inputs(gm))


def written_attributes(gm: torch.fx.GraphModule) -> list[torch.Tensor]:
    """Tensors that the graph module itself holds and may write to, as an optimizer's step does.

    Statistics of norms count if they are not parameters.
    """
    held = list(_held_tensors(gm))
    if not held:
        return []
    assigned = _assigned_memory(gm)
    with_statistics = assigned | _memory_used(gm, updates_statistics)
    written = []
    for node, tensor in held:
        memories = assigned if _is_parameter(tensor) else with_statistics
        if _memory(node) in memories:
            written.append(tensor)
    return written


def open_weights(request: GraphRequest) -> list[torch.Tensor]:
    """Inputs and attributes that the graph may write to, including the statistics of norms."""
    written = _written_memory(request.gm)
    inputs = zip(placeholders_of(request.gm.graph), request.example_inputs, strict=True)
    values = (*inputs, *_held_tensors(request.gm))
    return _torch.tensors.tensors_among(value for node, value in values if _memory(node) in written)


def _held_tensors(gm: torch.fx.GraphModule) -> Iterator[tuple[torch.fx.Node, torch.Tensor]]:
    """The nodes that read a tensor which the graph module holds, each with that tensor."""
    for node in _attributes(gm):
        value = attribute_at(gm, str(node.target))
        if isinstance(value, torch.Tensor):
            yield node, value


def _attributes(gm: torch.fx.GraphModule) -> Iterable[torch.fx.Node]:
    return gm.graph.find_nodes(op="get_attr")


def _is_parameter(value: object) -> bool:
    """True for a parameter; also for a tensor subclass, such as a quantized one, marked as one."""
    return isinstance(value, torch.nn.Parameter)


def _written_memory(gm: torch.fx.GraphModule) -> set[object]:
    return _assigned_memory(gm) | _memory_used(gm, updates_statistics)


def _assigned_memory(gm: torch.fx.GraphModule) -> set[object]:
    """The memory that the graph, or a graph nested in it, may assign to."""
    memory = _memory_used(gm, assigns)
    for node in gm.graph.nodes:
        memory.update(map(_memory, _assigned_within(gm, node)))
    return memory


def _memory_used(
    gm: torch.fx.GraphModule, is_counted: Callable[[torch.fx.Node], bool]
) -> set[object]:
    """The memory of all operands of the operations for which ``is_counted`` is true."""
    memory = set[object]()
    for node in filter(is_counted, gm.graph.nodes):
        memory.update(map(_memory, node.all_input_nodes))
    return memory


def _assigned_within(gm: torch.fx.GraphModule, node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """The operands of a higher-order operator that one of its graphs assigns to.

    The last operands of such an operator are the inputs of its graphs.
    """
    if not _torch.operators.takes_functions(node.target):
        return
    leaves, _ = _torch.tensors.flatten((node.args, node.kwargs))
    operands = [each for each in leaves if isinstance(each, torch.fx.Node)]
    for operand in operands:
        if operand.op != "get_attr":
            continue
        graph = attribute_at(gm, str(operand.target))
        if isinstance(graph, torch.fx.GraphModule):
            count = len(placeholders_of(graph.graph))
            inputs = operands[max(0, len(operands) - count) :]
            assigned = assigned_inputs(graph)
            yield from (each for i, each in enumerate(inputs) if i in assigned)


def _memory(node: torch.fx.Node) -> object:
    """An identity of the node's memory: the storage if it is known, else the node itself.

    Views of one tensor have the same storage.
    """
    storage = _storage(value_of(node))
    return node if storage is None else storage


def _storage(value: object) -> int | None:
    """The storage of a strided tensor; ``None`` for any other value."""
    return _torch.tensors.storage_id(value) if is_strided(value) else None


def name_of(node: torch.fx.Node) -> str:
    """The name of what a node calls, such as ``"dropout"`` for ``aten.dropout.default``."""
    if not node.op.startswith("call_"):
        return ""
    return str(getattr(node.target, "__name__", node.target)).partition(".")[0]


def _writes(node: torch.fx.Node) -> bool:
    return updates_statistics(node) or assigns(node)


def updates_statistics(node: torch.fx.Node) -> bool:
    """True for a norm that updates its running statistics."""
    if name_of(node) not in KEEP_STATISTICS:
        return False
    place, keyword, default = KEEP_STATISTICS[name_of(node)]
    positional = dict(enumerate(node.args))
    return bool(node.kwargs.get(keyword, positional.get(place, default)))


def assigns(node: torch.fx.Node) -> bool:
    """True if a call may write to an operand, by its schema, its name or its arguments."""
    if _torch.operators.may_write_by_schema(node) or _argument(node, "inplace"):
        return True
    # With ``max_norm``, an embedding shortens rows in place.
    if node.kwargs.get("out") is not None or _argument(node, "max_norm") is not None:
        return True
    name = name_of(node)
    return name.removeprefix("__").removesuffix("__") in _ASSIGNS or _is_in_place(name)


def _argument(node: torch.fx.Node, name: str) -> Any:
    """The argument of a Python function for a parameter, passed by name or by position."""
    code = getattr(node.target, "__code__", None)
    if code is None:
        return node.kwargs.get(name)
    names = code.co_varnames[: code.co_argcount]
    arguments = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return arguments.get(name)


def _is_in_place(name: str) -> bool:
    """True if the name ends with an underscore that does not only avoid a keyword (``and_``)."""
    return name.endswith("_") and not name.endswith("__") and not keyword.iskeyword(name[:-1])
