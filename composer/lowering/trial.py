"""Runs a compiled graph once before it is accepted, to find errors that show only at run time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from composer import _torch
from composer.errors import Refusal, refuse, text_of
from composer.graphs import clones, collectives
from composer.graphs.comparison import devices
from composer.lowering.aot import FunctionalGraph, GraphKind
from composer.records import Reason, Status
from composer.system import control_flow
from composer.system.memory import lacks_memory

_ANY = 2
"""The value that is used for an unbacked size."""


def try_once(
    compiled: Callable[..., Any], graph: FunctionalGraph, written: Collection[int] = ()
) -> None:
    """Run ``compiled`` once, and refuse it if it fails or its outputs have wrong shapes or dtypes.

    It runs on the inputs of the first call; a backward runs on made-up inputs of the right shapes.
    Torch's random state does not change. Nothing is run if there are no real inputs. Nor is a graph
    that waits for other ranks: they would not take part, or with values of another call. If torch
    itself fails on these inputs, the engine is accepted. The program gets torch's error at the
    call, and other inputs may work.

    Args:
        compiled: The compiled graph.
        graph: The functional graph.
        written: Positions of the inputs that ``compiled`` writes to. It gets copies of these.

    Raises:
        Refusal: The run fails, or an output has another shape or dtype than eager's.
    """
    args = graph.example_args
    if graph.kind is GraphKind.BACKWARD:
        args = placeholder_values(graph.gm)
    if args is None or collectives.meets_other_ranks(graph.gm):
        return
    try:
        results = _run(compiled, _with_copies(args, written))
    except BaseException as error:
        control_flow.pass_on(error)
        is_memory = lacks_memory(error)
        if not is_memory and _torch_fails(graph, args):
            return
        what = f"the engine fails on the first inputs: {text_of(error)}"
        reason = Reason.OUT_OF_MEMORY if is_memory else Reason.BUILD_FAILED
        raise Refusal(Status.FAILED, reason, what) from error
    for index, (got, expected) in enumerate(zip(results, graph.expected, strict=True)):
        if expected is not None and not _fits(got, *expected):
            what = f"output {index} is {got.dtype} {tuple(got.shape)}, not {expected}"
            refuse(Status.REJECTED, Reason.OUTPUT_MISMATCH, what)


def _with_copies(args: Sequence[Any], written: Collection[int]) -> Sequence[Any]:
    if not written:
        return args
    return clones.copy_inputs(args, keep=frozenset(range(len(args))) - {*written})


def _fits(got: torch.Tensor, sizes: Sequence[int | None], dtype: torch.dtype) -> bool:
    """True if the output has the dtype, and all sizes that are known beforehand."""
    if got.dtype != dtype or got.dim() != len(sizes):
        return False
    pairs = zip(got.shape, sizes, strict=True)
    return all(expected in (None, size) for size, expected in pairs)


def _run(compiled: Callable[..., Any], args: Sequence[Any]) -> Any:
    with torch.no_grad(), torch.random.fork_rng(devices=devices(args)):
        return compiled(*args)


def _torch_fails(graph: FunctionalGraph, args: Sequence[Any]) -> bool:
    """True if torch raises on these inputs too, for any cause but a lack of memory."""
    try:
        _run(_torch.sources.settled_forward(graph.gm), args)
    except BaseException as error:  # noqa: BLE001  # the program meets it at the call
        control_flow.pass_on(error)
        return not lacks_memory(error)
    return False


def placeholder_values(gm: torch.fx.GraphModule) -> tuple[Any, ...]:
    """Return a value for each placeholder: ones if floating point, else zeros (valid indices)."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    return tuple(_placeholder_value(node.meta["val"]) for node in placeholders)


def _placeholder_value(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return _number(value)
    sizes, strides = tuple(map(_number, value.shape)), tuple(map(_number, value.stride()))
    made = torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device)
    return made.fill_(1 if value.dtype.is_floating_point else 0)


def _number(size: Any) -> Any:
    """Return a size in the first call, with a fixed number for each unbacked symbol."""
    if not _torch.symbols.is_unbacked(size):
        return _torch.symbols.hint(size)
    numbers = {
        name: _ANY if first is None else first
        for name, (first, _, _) in _torch.symbols.symbol_facts(size).items()
    }
    return _torch.symbols.size_with(size, numbers)
