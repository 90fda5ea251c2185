"""Tensors and their memory."""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
import torch.fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_unflatten as tree_unflatten

from composer._torch.names import optional, optional_value

_NORMS = torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm
BATCH_NORMS: Any = optional_value(
    "knowing batch norms of other packages",
    "torch.nn.modules.batchnorm:_BatchNorm",
    without=_NORMS,
)
"""The class of batch norms, or the classes. Torch documents the base class, but does not export
it."""


PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor)
"""Types that hold dense memory and nothing else."""


def tensors_among(values: Iterable[object]) -> list[torch.Tensor]:
    """The values that are tensors, in their order."""
    return [each for each in values if isinstance(each, torch.Tensor)]


def inner_tensors(value: Any) -> list[Any]:
    """The plain tensors of a traceable subclass, in the order of AOTAutograd; else ``[value]``.

    Such a subclass keeps its data in other tensors, which may be of subclasses as well. The tensors
    are the same objects each time.
    """
    if type(value) in PLAIN_TENSORS or not _is_traceable(type(value)):
        return [value]
    names, _ = value.__tensor_flatten__()
    return [tensor for name in names for tensor in inner_tensors(getattr(value, name))]


def _is_traceable(kind: type) -> bool:
    """True for a type that has the two methods by which torch takes its tensors apart."""
    return hasattr(kind, "__tensor_flatten__") and hasattr(kind, "__tensor_unflatten__")


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    """The memory of a tensor. For a wrapper of ``torch.func``, it is that of the wrapped tensor."""
    return _unwrapped(tensor).untyped_storage()


@optional(
    "the memory of tensors within torch.func",
    *(f"torch._C._functorch:{each}" for each in ("get_unwrapped", "is_functorch_wrapped_tensor")),
    without=lambda tensor: tensor,
)
def _unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    from torch._C import _functorch

    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor


@optional(
    "telling rows or columns of one tensor that alternate from such that overlap",
    "torch._C._dynamo.guards:compute_overlapping_tensors",
    without=lambda tensors: set(range(len(tensors))),
)
def overlapping(tensors: Sequence[torch.Tensor]) -> set[int]:
    """Positions of the tensors that share an element with another. All are of one storage."""
    from torch._C._dynamo.guards import compute_overlapping_tensors

    return compute_overlapping_tensors(list(tensors), symbolic=False)


def storage_id(tensor: torch.Tensor) -> int:
    """A number that is equal for tensors that share memory.

    It exists for fake tensors as well, which have no address.
    """
    return int(storage_of(tensor)._cdata)


@optional(
    "backwards for many gradients at once (is_grads_batched)",
    "torch._C._functorch:is_legacy_batchedtensor",
    without=lambda values: False,
)
def any_batched(values: Iterable[object]) -> bool:
    """True if a tensor stands for several, as in a backward for many gradients at once.

    Within ``torch.func.vmap`` torch itself refuses to call a compiled backward.
    """
    from torch._C import _functorch

    return any(map(_functorch.is_legacy_batchedtensor, tensors_among(values)))


def reach(tensor: torch.Tensor) -> int:
    """The number of elements in memory from the tensor's first element to its last one."""
    if not tensor.numel():
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in steps)


def suggested_memory_format(x: torch.Tensor) -> torch.memory_format:
    """The memory format in which torch's kernels return their results for this tensor.

    The tensor has four dimensions.
    """
    from torch._prims_common import suggest_memory_format

    return suggest_memory_format(cast(Any, x))


def memory_gone(tensor: torch.Tensor) -> Callable[[], bool]:
    """A function that returns true once the present memory of a tensor is freed.

    It does not keep the memory.
    """
    reference = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return cast(Callable[[], bool], reference.expired)


def copy_storage(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """A copy of a storage, on the same device."""
    return cast(torch.UntypedStorage, cast(Any, storage).clone())


def empty(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Callable[[], torch.Tensor]:
    """A function that allocates a contiguous tensor."""
    if device.type == "cpu":
        return _empty_on_cpu(shape, dtype)
    return lambda: torch.empty(shape, dtype=dtype, device=device)


@optional(
    "the quicker way to allocate results on the CPU",
    "torch._C._dynamo.guards:_empty_strided_cpu",
    without=lambda shape, dtype: lambda: torch.empty(shape, dtype=dtype, device="cpu"),
)
def _empty_on_cpu(shape: tuple[int, ...], dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    """A function that allocates a contiguous tensor by the call that Inductor's own code makes.

    The call takes a third of the time of ``torch.empty``, which parses its arguments every time.
    """
    from torch._C._dynamo.guards import _empty_strided_cpu  # type: ignore[attr-defined]  # no stub

    strides = torch.empty(shape, device="meta").stride()
    return functools.partial(_empty_strided_cpu, shape, strides, dtype)


@optional(
    "sizes marked as unbacked, in operators for which the order of memory matters",
    "torch._prims_common:is_contiguous_or_false",
    without=lambda x: x.is_contiguous(),
)
def is_row_major(x: torch.Tensor) -> bool:
    """True if a tensor is known to be contiguous. With unbacked sizes that may be unknown."""
    from torch._prims_common import is_contiguous_or_false

    return is_contiguous_or_false(x)


def order_of_memory(x: torch.Tensor) -> list[int]:
    """Dimensions of a new tensor like this one, in the order in which they lie in memory."""
    from torch._prims_common import compute_elementwise_output_logical_to_physical_perm

    return compute_elementwise_output_logical_to_physical_perm(x)[0]


@optional(
    "another engine's answer where one fails at a call that was compared, and the graph writes",
    "torch._C._autograd:_unsafe_set_version_counter",
)
def put_back_versions(versions: Iterable[tuple[torch.Tensor, int]]) -> None:
    """Set the version counters of tensors back, after their values were restored."""
    from torch._C import _autograd

    changed = [(tensor, version) for tensor, version in versions if tensor._version != version]
    if changed:
        tensors, numbers = zip(*changed, strict=True)
        _autograd._unsafe_set_version_counter(tensors, numbers)


def flatten(value: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """The leaves of nested tuples, lists and dicts, and a function that nests others like them."""
    leaves, spec = tree_flatten(value)
    return leaves, lambda new: tree_unflatten(new, spec)


def before_swaps(told: Callable[[torch.Tensor], None]) -> None:
    """Call ``told`` with every tensor that ``torch.utils.swap_tensors`` is about to swap.

    The function itself is not replaced, since a program may hold it (``from torch.utils import
    swap_tensors``). Instead, the module ``weakref`` that it uses is replaced by one whose
    ``getweakrefs`` calls ``told`` first.
    """

    def getweakrefs(tensor: torch.Tensor) -> list[Any]:
        told(tensor)
        return weakref.getweakrefs(tensor)

    asked = types.SimpleNamespace(**vars(weakref) | {"getweakrefs": getweakrefs})
    cast(Any, torch.utils).weakref = asked


def receives_parameters(optimizer: torch.optim.Optimizer) -> bool:
    """True if a step of the optimizer gets parameters from other ranks.

    The collectives that bring them do not raise the version counters of the parameters.
    """
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return isinstance(optimizer, getattr(module, "ZeroRedundancyOptimizer", ()))
