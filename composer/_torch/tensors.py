"""Tensors and their memory."""

from __future__ import annotations

import contextlib
import functools
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.fx
from torch._dynamo.convert_frame import compile_lock
from torch._subclasses.fake_tensor import (
    FakeTensor,
)
from torch.multiprocessing.reductions import StorageWeakRef

from composer._torch.names import optional

_NORMS = torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm


@optional(
    "knowing batch norms of other packages",
    "torch.nn.modules.batchnorm:_BatchNorm",
    without=lambda: _NORMS,
)
def _batch_norms() -> tuple[type[torch.nn.Module], ...]:
    from torch.nn.modules.batchnorm import _BatchNorm

    return (_BatchNorm,)


BATCH_NORMS = _batch_norms()
"""The classes of batch norms. Torch documents their base and does not export it."""


PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor)
"""Types that hold dense memory and nothing else."""


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    """The memory of a tensor; of what ``torch.func`` wraps, that of what is within."""
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
    "starting no idle processes for Inductor's compiles on a CPU",
    "torch._inductor.async_compile:maybe_warm_pool",
    without=lambda inputs: contextlib.nullcontext(),
    lazily=True,
)
@contextlib.contextmanager
def no_idle_workers(inputs: Sequence[Any]) -> Iterator[None]:
    """Have Inductor start no processes for compiling where it has no kernels for them.

    They are for Triton's; C++ is compiled by threads of this process (2.13). Its Dynamo backend
    starts them for any graph, ``torch.compile(backend="inductor")`` by itself only for one on a
    GPU. Their start takes a core for some seconds: engines were measured beside it, and a slow one
    was chosen.
    """
    on_cpu = all(each.device.type == "cpu" for each in inputs if isinstance(each, torch.Tensor))
    if not on_cpu:
        yield
        return
    from torch._inductor import async_compile

    with compile_lock:
        starts = async_compile.maybe_warm_pool
        async_compile.maybe_warm_pool = lambda: None
        try:
            yield
        finally:
            async_compile.maybe_warm_pool = starts


@optional(
    "telling rows or columns of one tensor that alternate from such that overlap",
    "torch._C._dynamo.guards:compute_overlapping_tensors",
    without=lambda tensors: set(range(len(tensors))),
)
def overlapping(tensors: Sequence[torch.Tensor]) -> set[int]:
    """The places of those that share an element with another; all are of one storage."""
    from torch._C._dynamo.guards import compute_overlapping_tensors

    return compute_overlapping_tensors(list(tensors), symbolic=False)


def storage_id(tensor: torch.Tensor) -> int:
    """Equal for tensors that share memory; works for fake tensors, which have no address."""
    return int(storage_of(tensor)._cdata)


@optional(
    "backwards for many gradients at once (is_grads_batched)",
    "torch._C._functorch:is_legacy_batchedtensor",
    without=lambda values: False,
)
def any_batched(values: Iterable[object]) -> bool:
    """Whether a tensor stands for several, as in a backward for many gradients at once.

    Within ``torch.func.vmap`` torch itself refuses to call a compiled backward.
    """
    from torch._C import _functorch

    tensors = (each for each in values if isinstance(each, torch.Tensor))
    return any(map(_functorch.is_legacy_batchedtensor, tensors))


def suggested_memory_format(x: torch.Tensor) -> torch.memory_format:
    """The order in which torch's kernels lay out what they make of a tensor of four dimensions."""
    from torch._prims_common import suggest_memory_format

    return suggest_memory_format(cast(Any, x))


def memory_gone(tensor: torch.Tensor) -> Callable[[], bool]:
    """What tells whether the memory that a tensor has now was freed; does not keep it."""
    reference = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return cast(Callable[[], bool], reference.expired)


def copy_storage(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """The same bytes elsewhere, on the same device."""
    return cast(torch.UntypedStorage, cast(Any, storage).clone())


def empty(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Callable[[], torch.Tensor]:
    """What allocates a contiguous tensor."""
    if device.type == "cpu":
        return _empty_on_cpu(shape, dtype)
    return lambda: torch.empty(shape, dtype=dtype, device=device)


@optional(
    "the quicker way to allocate results on the CPU",
    "torch._C._dynamo.guards:_empty_strided_cpu",
    without=lambda shape, dtype: lambda: torch.empty(shape, dtype=dtype, device="cpu"),
)
def _empty_on_cpu(shape: tuple[int, ...], dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    """By the call that Inductor's own code makes.

    It takes a third of ``torch.empty``'s time, which parses its arguments anew every time.
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
    """Whether a tensor is contiguous, and known to be: of unbacked sizes that cannot be asked."""
    from torch._prims_common import is_contiguous_or_false

    return is_contiguous_or_false(x)


def order_of_memory(x: torch.Tensor) -> list[int]:
    """Dimensions of a new tensor like this one, in the order in which they lie in memory."""
    from torch._prims_common import compute_elementwise_output_logical_to_physical_perm

    return compute_elementwise_output_logical_to_physical_perm(x)[0]


def flatten(value: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """The leaves of nested tuples, lists and dicts, and the way back."""
    from torch.utils import _pytree

    leaves, spec = _pytree.tree_flatten(value)
    return leaves, lambda new: _pytree.tree_unflatten(new, spec)


def before_swaps(told: Callable[[torch.Tensor], None]) -> None:
    """Tell of every tensor that ``torch.utils.swap_tensors`` is about to swap.

    It has no hook (torch 2.13), and refuses tensors that have weak references. It is reached by
    what it asks, since a program may hold the function itself
    (``from torch.utils import swap_tensors``).
    """

    def getweakrefs(tensor: torch.Tensor) -> list[Any]:
        told(tensor)
        return weakref.getweakrefs(tensor)

    asked = types.SimpleNamespace(**vars(weakref) | {"getweakrefs": getweakrefs})
    cast(Any, torch.utils).weakref = asked


def receives_parameters(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step gets parameters from other ranks, by collectives that raise no version."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return isinstance(optimizer, getattr(module, "ZeroRedundancyOptimizer", ()))
