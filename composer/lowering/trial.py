"""One run of a compiled graph before it is accepted, for errors that show only at run time."""

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
"""What an unbacked size is taken for."""


def try_once(
    compiled: Callable[..., Any], graph: FunctionalGraph, written: Collection[int] = ()
) -> None:
    """Run ``compiled`` on the inputs of the first call; a backward on ones of the right shapes.

    Nothing is run where there are no real inputs to be had, nor what waits for other ranks: they
    would not take part, or not with what belongs to this call. Torch's random state stays as it is.
    Inputs on which torch itself fails say nothing of the engine: the program meets that error at
    the call, and other inputs may be right.

    Args:
        compiled: What was made of the graph.
        graph: The graph.
        written: Positions of the inputs that ``compiled`` writes to: it is given copies.

    Raises:
        Refusal: the run fails, or an output has not the shape or dtype of eager's.
    """
    args = placeholder_values(graph.gm) if graph.kind is GraphKind.BACKWARD else graph.example_args
    if args is None or collectives.meets_other_ranks(graph.gm):
        return
    try:
        results = _run(compiled, _with_copies(args, written))
    except BaseException as error:
        control_flow.pass_on(error)
        if not lacks_memory(error) and _torch_fails(graph, args):
            return
        what = f"the engine fails on the first inputs: {text_of(error)}"
        reason = Reason.OUT_OF_MEMORY if lacks_memory(error) else Reason.BUILD_FAILED
        raise Refusal(Status.FAILED, reason, what) from error
    for index, (got, expected) in enumerate(zip(results, graph.expected, strict=True)):
        if expected is not None and not _fits(got, *expected):
            what = f"output {index} is {got.dtype} {tuple(got.shape)}, not {expected}"
            refuse(Status.REJECTED, Reason.OUTPUT_MISMATCH, what)


def _with_copies(args: Sequence[Any], written: Collection[int]) -> Sequence[Any]:
    others = frozenset(range(len(args))) - {*written}
    return clones.copy_inputs(args, others) if written else args


def _fits(got: torch.Tensor, sizes: Sequence[int | None], dtype: torch.dtype) -> bool:
    """Whether it has the dtype, and all sizes that are known beforehand."""
    alike = zip(got.shape, sizes, strict=False)
    return (
        got.dtype == dtype
        and got.dim() == len(sizes)
        and all(expected in (None, size) for size, expected in alike)
    )


def _run(compiled: Callable[..., Any], args: Sequence[Any]) -> Any:
    with torch.no_grad(), torch.random.fork_rng(devices=devices(args)):
        return compiled(*args)


def _torch_fails(graph: FunctionalGraph, args: Sequence[Any]) -> bool:
    """Whether the graph's own operators raise on these inputs, for any cause but memory."""
    try:
        _run(_torch.sources.settled_forward(graph.gm), args)
    except BaseException as error:  # noqa: BLE001  # the program meets it at the call
        control_flow.pass_on(error)
        return not lacks_memory(error)
    return False


def placeholder_values(gm: torch.fx.GraphModule) -> tuple[Any, ...]:
    """A value for each placeholder: ones if it is floating point, else zeros (valid as indices)."""
    return tuple(
        _placeholder_value(node.meta["val"]) for node in gm.graph.find_nodes(op="placeholder")
    )


def _placeholder_value(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return _number(value)
    sizes, strides = map(_number, value.shape), map(_number, value.stride())
    made = torch.empty_strided(tuple(sizes), tuple(strides), dtype=value.dtype, device=value.device)
    return made.fill_(1 if value.dtype.is_floating_point else 0)


def _number(size: Any) -> Any:
    """That of the first call; with some number for each symbol that torch knows no value of."""
    if not _torch.symbols.is_unbacked(size):
        return _torch.symbols.hint(size)
    facts = _torch.symbols.symbol_facts(size).items()
    return _torch.symbols.size_with(
        size, {n: _ANY if known is None else known for n, (known, *_) in facts}
    )
