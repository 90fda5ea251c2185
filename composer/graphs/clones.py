"""Copies of a graph, its inputs and its buffers, which a candidate may change freely."""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.fx

from composer import _torch
from composer.graphs import writes
from composer.graphs.nodes import attribute_at, nested_graphs, paths_read
from composer.records import GraphRequest

_LARGE = 64 << 20
"""Storages up to this number of bytes are always copied as a whole."""


def clone_graph(
    gm: torch.fx.GraphModule, make: Callable[..., torch.fx.GraphModule] = torch.fx.GraphModule
) -> torch.fx.GraphModule:
    """A copy of the graph module that shares only tensors and leaf modules with ``gm``.

    Graphs nested in it (the branches of ``torch.cond``, say) are cloned as well. ``make`` is the
    class of the copy.
    """
    twin = make(gm, copy.deepcopy(gm.graph), gm.__class__.__name__)
    twin.meta.update(gm.meta)
    for name, child in nested_graphs(twin).items():
        setattr(twin, name, clone_graph(child))
    _torch.sources.carry_source_metadata(gm, twin)
    _torch.sources.let_go_of_examples(twin)
    return twin


def flat_outputs(
    gm: torch.fx.GraphModule,
) -> tuple[torch.fx.GraphModule, Callable[[Sequence[Any]], Any] | None]:
    """A graph that returns a flat tuple, and a function that restores the original structure.

    Graphs from Dynamo are already flat: they are returned as they are, with ``None``. The graph of
    a direct call may return a tensor or a dict, which AOTAutograd refuses.
    """
    (returned,) = gm.graph.find_nodes(op="output")
    if _is_flat(returned.args[0]):
        return gm, None
    flat = clone_graph(gm)
    (returned,) = flat.graph.find_nodes(op="output")
    leaves, restore = _torch.tensors.flatten(_as_returned(returned.args[0]))
    returned.args = (tuple(leaves),)
    flat.recompile()
    return flat, restore


def _is_flat(value: object) -> bool:
    if not isinstance(value, tuple | list):
        return False
    return not any(isinstance(each, tuple | list | dict) for each in value)


def _as_returned(value: Any) -> Any:
    """The output with plain lists, tuples and dicts; the graph holds immutable ones."""
    if isinstance(value, dict):
        return {key: _as_returned(each) for key, each in value.items()}
    if isinstance(value, list):
        return list(map(_as_returned, value))
    if type(value) is tuple:
        return tuple(map(_as_returned, value))
    return value


def flat_inputs(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any]
) -> tuple[torch.fx.GraphModule, Sequence[Any], Callable[[Sequence[Any]], list[Any]] | None]:
    """A graph without list inputs, its example inputs, and a function that flattens inputs.

    Only a backward that torch traces (``compiled_autograd``) has an input that is a list of
    tensors. A call empties this list, so that each tensor is freed after its last use. A comparison
    or a measurement runs a graph twice, and the second run would find an empty list. Other graphs
    are returned as they are, with ``None``.
    """
    if not any(isinstance(value, list) for value in example_inputs):
        return gm, example_inputs, None
    flat = clone_graph(gm)
    placeholders = flat.graph.find_nodes(op="placeholder")
    for node, value in zip(placeholders, example_inputs, strict=True):
        if isinstance(value, list):
            _spread(node, len(value))
    flat.recompile()
    return flat, _spread_out(example_inputs), _take_inputs


def with_captured_dtypes(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any]
) -> Callable[[Sequence[Any]], list[Any]] | None:
    """A function that casts a call's inputs to the captured dtypes; ``None`` if not needed.

    Dynamo captures a number from ``random.uniform`` in the default dtype, but passes it in float64
    (https://github.com/pytorch/pytorch/issues/198187). Engines that read inputs by address would
    read a wrong number.
    """
    dtypes: dict[int, torch.dtype] = {}
    for i, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        if _torch.dynamo.is_random_number(node) and example_inputs[i].is_floating_point():
            dtypes[i] = example_inputs[i].dtype
    return functools.partial(_cast, dtypes) if dtypes else None


def _cast(dtypes: Mapping[int, torch.dtype], args: Sequence[Any]) -> list[Any]:
    cast_args = list(args)
    for i, dtype in dtypes.items():
        cast_args[i] = args[i].to(dtype)
    return cast_args


def _spread(node: torch.fx.Node, size: int) -> None:
    """Replace the placeholder of a list by one for each element of the list."""
    graph = node.graph
    with graph.inserting_before(node):
        elements = [graph.placeholder(f"{node.name}_{i}") for i in range(size)]
    for each in elements:
        _torch.sources.carry_no_source(node, each)
    for read in tuple(node.users):
        element = elements[cast(int, read.args[1])]
        element.meta.update(read.meta)
        read.replace_all_uses_with(element)
        graph.erase_node(read)
    graph.erase_node(node)


def _spread_out(args: Sequence[Any]) -> list[Any]:
    """The arguments, with the elements of lists in place of the lists."""
    flat: list[Any] = []
    for argument in args:
        flat.extend(argument if isinstance(argument, list) else (argument,))
    return flat


def _take_inputs(args: Sequence[Any]) -> list[Any]:
    """The flat inputs of a call; its lists are emptied, as torch does."""
    flat = _spread_out(args)
    for argument in args:
        if isinstance(argument, list):
            argument.clear()
    return flat


def copy_inputs(example_inputs: Sequence[Any], keep: Set[int]) -> list[Any]:
    """The inputs, with tensors copied except those at the positions ``keep``.

    Copies have the same strides and offsets, and share storages in the same way. If an input is a
    small part of a large storage, such as a mapped file, and shares it with no other input, only
    that part is copied. Tensors that are not plain (conjugated, sparse) are cloned. Subclasses and
    all other values are passed on as they are.
    """
    copied = [i for i in range(len(example_inputs)) if i not in keep]
    plain = filter(is_plain, (example_inputs[i] for i in copied))
    uses = Counter(map(_torch.tensors.storage_id, plain))
    storages: dict[int, torch.UntypedStorage] = {}

    def copy_on_storage(tensor: torch.Tensor) -> torch.Tensor:
        storage = _torch.tensors.storage_id(tensor)
        if storage not in storages:
            storages[storage] = _torch.tensors.copy_storage(tensor.untyped_storage())
        return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
            storages[storage], tensor.storage_offset(), tensor.shape, tensor.stride()
        )

    def copy_input(value: Any) -> Any:
        if type(value) is not torch.Tensor:
            return value
        if not is_plain(value):
            made = value.detach().clone().requires_grad_(value.requires_grad)
        elif uses[_torch.tensors.storage_id(value)] == 1 and _is_small_part(value):
            made = _copy_part(value).requires_grad_(value.requires_grad)
        else:
            made = copy_on_storage(value).requires_grad_(value.requires_grad)
        _torch.fakes.share_fake(value, made)
        return made

    values = list(example_inputs)
    with torch.no_grad(), torch.inference_mode(False):
        for i in copied:
            values[i] = copy_input(values[i])
    return values


def _is_small_part(tensor: torch.Tensor) -> bool:
    """True if a tensor is a small part of a large storage."""
    part = _torch.tensors.reach(tensor) * tensor.element_size()
    return tensor.untyped_storage().nbytes() > max(_LARGE, 2 * part)


def _copy_part(tensor: torch.Tensor) -> torch.Tensor:
    """A copy without the surrounding memory, which ``as_strided`` cannot reach from it."""
    memory = tensor.as_strided((_torch.tensors.reach(tensor),), (1,)).clone()
    return memory.as_strided(tensor.shape, tensor.stride())


def not_leaf(leaf: torch.Tensor) -> torch.Tensor:
    """A tensor with the memory, sizes and strides of a leaf, which operations may write to.

    Autograd does not allow writes to a leaf that requires a gradient, or to a view of it.
    """
    return cast(torch.Tensor, _NotLeaf.apply(leaf) if is_plain(leaf) else leaf.clone())  # type: ignore[no-untyped-call]


class _NotLeaf(torch.autograd.Function):
    """Gives a tensor on the leaf's memory that is no view for autograd, and has its strides."""

    @staticmethod
    def forward(_: Any, leaf: torch.Tensor) -> torch.Tensor:
        memory = leaf.untyped_storage(), leaf.storage_offset(), leaf.shape, leaf.stride()
        return torch.empty(0, dtype=leaf.dtype, device=leaf.device).set_(*memory)

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class LeftAlone:
    """Detects writes to the parameters that a graph itself does not write to. Nothing is copied."""

    def __init__(self, request: GraphRequest) -> None:
        self._states: list[tuple[torch.Tensor, tuple[object, ...]]] = []
        open_to_writes = set(map(id, writes.open_weights(request)))
        weights = (*_passed_weights(request), *request.gm.parameters())
        parameters = (each for each in weights if isinstance(each, torch.nn.Parameter))
        self._states = [(p, state_of(p)) for p in parameters if id(p) not in open_to_writes]

    def written(self) -> bool:
        """True if a parameter was written to, or given other memory, since this was made."""
        return any(state_of(each) != state for each, state in self._states)


class Buffers:
    """Copies of the tensors of a model that a run may change, to restore them afterwards.

    These are its buffers, and the parameters that the graph writes to, such as in the step of an
    optimizer. Buffers are compared by value, because a warm-up run changes the statistics of a
    batch norm without a new version.

    If a parameter has changed that the graph does not write to, nothing is restored: another thread
    loads a state, and to restore the buffers would undo half of that.
    """

    def __init__(self, request: GraphRequest) -> None:
        buffers = _open_to_change(request)
        with torch.no_grad():
            self._copies = [(buffer, buffer.detach().clone()) for buffer in buffers]
        # The restored tensors are as they were, so nobody is to see that they were written to: not
        # the check for an engine's own writes, and not an engine that has them as constants.
        counted = [each for each in buffers if not each.is_inference()]
        self._versions = [(each, each._version) for each in counted]
        self._leaves = [each for each in buffers if not each.requires_grad and not each._is_view()]
        self._others = LeftAlone(request)

    def restore(self) -> bool:
        """Restore the tensors to their copies, and their versions; true if any was restored."""
        if self._others.written():
            return False
        for each in self._leaves:
            if each.requires_grad:  # autograd recorded what was written to it
                each.detach_()
        changed = [put_back(buffer, copy) for buffer, copy in self._copies]
        _torch.tensors.put_back_versions(self._versions)
        return any(changed)


def _open_to_change(request: GraphRequest) -> list[torch.Tensor]:
    """The buffers of a model, and the parameters that the graph writes to."""
    held = (*_passed_weights(request), *request.gm.buffers())
    buffers = [each for each in held if not isinstance(each, torch.nn.Parameter)]
    parameters = [request.example_inputs[i] for i in sorted(writes.written_parameters(request))]
    attributes = writes.written_attributes(request.gm)
    tensors = filter(_is_real, (*buffers, *parameters, *attributes))
    return list({id(each): each for each in tensors}.values())


def _passed_weights(request: GraphRequest) -> list[Any]:
    return [request.example_inputs[i] for i in sorted(request.weights)]


def state_of(weight: torch.Tensor) -> tuple[object, ...]:
    """A value that changes if a weight is written to, or given other memory (``p.data = new``).

    It is made of the tensor's version, which inference tensors do not have, and of its memory. A
    write by ``p.data.mul_(2)`` or through numpy changes neither, so it is not detected.
    """
    version = None if weight.is_inference() else weight._version
    if not _is_real(weight) or weight.layout is not torch.strided or weight.is_nested:
        return (version,)
    memory = _Memory(_torch.tensors.storage_id(weight), _torch.tensors.storage_of(weight))
    return version, memory, weight.storage_offset(), weight.shape, weight.stride()


@dataclass(frozen=True, slots=True)
class _Memory:
    """The identity of a storage.

    The storage is kept alive, because a new one could get its address after it is freed.
    """

    id: int
    held: torch.UntypedStorage = field(compare=False, repr=False)


def put_back(tensor: torch.Tensor, copy: torch.Tensor) -> bool:
    """Copy the values back to a tensor; true if they differed."""
    if same_values(tensor, copy):
        return False
    with torch.no_grad():
        tensor.copy_(copy)
    return True


def _is_real(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, _torch.fakes.FakeTensor)


def same_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if all elements are equal; NaN equals NaN."""
    return bool(torch.isclose(a, b, rtol=0, atol=0, equal_nan=True).all())


def is_plain(value: Any) -> bool:
    """True for a dense tensor that is no subclass, quantized, conjugated or negated."""
    return (
        type(value) is torch.Tensor
        and value.layout is torch.strided
        and not value.is_quantized
        and not value.is_conj()
        and not value.is_neg()
    )


def same_graph(a: torch.fx.GraphModule, b: torch.fx.GraphModule) -> bool:
    """True if calls of ``a`` and ``b`` do the same: equal code on the same objects."""
    if a is b:
        return True
    if a.code != b.code:
        return False
    paths = paths_read(b.graph)
    return all(_same_target(attribute_at(a, path), attribute_at(b, path)) for path in paths)


def _same_target(a: object, b: object) -> bool:
    if isinstance(a, torch.fx.GraphModule) and isinstance(b, torch.fx.GraphModule):
        return same_graph(a, b)
    return a is b
