"""AOTAutograd: its settings, its step, what it found out."""

from __future__ import annotations

import contextlib
import operator
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.fx
from torch._guards import TracingContext

from composer._torch.compiles import patched
from composer._torch.fakes import fake_mode_of
from composer._torch.modes import autocasts, float32_precision
from composer._torch.names import off, optional
from composer._torch.operators import draws
from composer.errors import refuse
from composer.records import Reason, Status

GraphCompiler = Callable[[torch.fx.GraphModule, Sequence[Any]], Callable[..., Any]]


_CONFIG = "torch._functorch.config:"


def _decline_training(*args: object, **kwargs: object) -> Any:
    """Decline a graph that trains, where this torch cannot be told what composer needs for it."""
    refuse(Status.DECLINED, Reason.TRAINING_GRAPH, "; ".join(off(look=False)))


def _inference_alone() -> contextlib.AbstractContextManager[None]:
    """Nothing to set without a backward; a graph that may have one is declined."""
    if torch.is_grad_enabled():
        _decline_training()
    return contextlib.nullcontext()


@optional(
    "training on an engine",
    f"{_CONFIG}force_non_lazy_backward_lowering",
    without=_inference_alone,
)
def backward_lowering_at_once() -> contextlib.AbstractContextManager[None]:
    """Compile the backward with the forward, so that its failure is the attempt's.

    AOTAutograd leaves it for the first ``.backward()`` otherwise, past every fallback.
    """
    import torch._functorch.config as functorch_config

    return cast(
        contextlib.AbstractContextManager[None],
        functorch_config.patch(force_non_lazy_backward_lowering=True),
    )


@optional(
    "training models that write to a buffer and then read it",
    f"{_CONFIG}treat_parameters_as_free_to_save",
    without=_decline_training,
)
def keeping_no_weights_for_free() -> contextlib.AbstractContextManager[None]:
    """Have what the backward needs be kept at the same cost, whether it is a weight or not.

    The partitioner keeps a buffer, which costs nothing, and computes anew from it what the forward
    wrote to it: from the buffer as it is then, so gradients are wrong (torch 2.13).
    """
    import torch._functorch.config as functorch_config

    return cast(
        contextlib.AbstractContextManager[None],
        functorch_config.patch(treat_parameters_as_free_to_save=False),
    )


@optional(
    "falling back at run time where Inductor's backward fails",
    f"{_CONFIG}donated_buffer",
    without=contextlib.nullcontext,
)
@contextlib.contextmanager
def without_donated_buffers() -> Iterator[None]:
    """Keep AOTAutograd from donating what the forward saved to the backward, to be overwritten.

    Only Inductor makes use of such memory. As long as no engine writes to it, another engine can
    answer for one that failed.
    """
    import torch._functorch.config as functorch_config

    with functorch_config.patch(donated_buffer=False):
        yield


def donate_nothing() -> None:
    """Let ``backward(retain_graph=True)`` work; to be called while a backward is compiled.

    AOTAutograd forbids it where a backward may write to what the forward saved ("donated" buffers,
    meant for Inductor). Its own switch is read at run time as well (torch 2.13), and is not ours.
    """
    context = TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        context.fw_metadata.bw_donated_idxs = []


def boxed(function: Callable[..., Any]) -> Callable[[Sequence[Any]], Any]:
    """``function`` with its arguments in one list, as AOTAutograd calls what it compiled."""
    from functorch.compile import make_boxed_func  # type: ignore[import-untyped]  # no py.typed

    return cast(Callable[[Sequence[Any]], Any], make_boxed_func(function))


def takes_a_list(function: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Mark a function that takes its arguments in one list, which it may empty."""
    cast(Any, function)._boxed_call = True
    return function


def aot_compile(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    forward: GraphCompiler,
    backward: GraphCompiler,
    inference: GraphCompiler,
    partition: Callable[..., tuple[torch.fx.GraphModule, torch.fx.GraphModule]],
    decompositions: dict[Any, Callable[..., Any]],
) -> Callable[..., Any]:
    """Compile through AOTAutograd, which makes graphs functional and replays mutations.

    A graph that needs a backward is cut in two by ``partition``; the halves go to ``forward`` and
    ``backward``, in this order and both before this returns. Any other goes to ``inference``.
    """
    from torch._dynamo.backends.common import aot_autograd

    backend = aot_autograd(
        fw_compiler=forward,
        bw_compiler=backward,
        inference_compiler=inference,
        partition_fn=partition,
        decompositions=decompositions,
    )
    with backward_lowering_at_once():
        return backend(gm, list(example_inputs))


def min_cut(
    gm: torch.fx.GraphModule, joint_inputs: Sequence[Any], **kwargs: Any
) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """Cut a joint graph where the least memory has to be kept in between, as for Inductor."""
    from functorch.compile import min_cut_rematerialization_partition

    drawn = [node for node in gm.graph.nodes if draws(node.target)]
    with _draws_kept_apart(drawn), _draws_saved(drawn) if drawn else contextlib.nullcontext():
        forward, backward = min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
    _describe_second_draws(backward)
    return forward, backward


@optional(
    "training graphs that draw random numbers on engines that read ONNX",
    "torch._functorch.partitioners:choose_saved_values_set",
    without=_decline_training,
    lazily=True,
)
@contextlib.contextmanager
def _draws_saved(drawn: Sequence[torch.fx.Node]) -> Iterator[None]:
    """Have the partitioner keep what is drawn, whatever memory it is to save.

    Where it may compute more anew in the backward (``aggressive_recomputation``,
    ``activation_memory_budget``), it has other numbers drawn there (torch 2.13, ``aot_eager`` too).
    With no budget at all it keeps the inputs alone, with next to none also what has to be kept, and
    a call that gives several tensors where they should be.
    """
    from torch._functorch import partitioners
    from torch.utils.checkpoint import CheckpointPolicy

    for node in drawn:
        for each in {node, *_tensors_drawn(node)}:
            each.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)  # but in a checkpoint
    choose = partitioners.choose_saved_values_set

    def with_some_budget(
        joint_graph: Any, node_info: Any, memory_budget: float = 1
    ) -> list[torch.fx.Node]:
        found = choose(joint_graph, node_info, memory_budget or sys.float_info.min)
        return list(dict.fromkeys(each for node in found for each in _tensors_drawn(node)))

    with patched(partitioners, "choose_saved_values_set", with_some_budget):
        yield


def _tensors_drawn(node: torch.fx.Node) -> list[torch.fx.Node]:
    """What stands for the tensors that a call draws, or gives."""
    parts = [user for user in node.users if user.target is operator.getitem]
    return parts if parts and draws(node.target) else [node]


@optional(
    "drawing twice where a graph that trains has two calls alike (mended in torch 2.14)",
    "torch._functorch.compile_utils:rand_ops",
    without=lambda drawn: contextlib.nullcontext(),
    lazily=True,
)
@contextlib.contextmanager
def _draws_kept_apart(drawn: Sequence[torch.fx.Node]) -> Iterator[None]:
    """Have the partitioner leave calls alone that are alike, where they draw.

    It knows some operators by name and makes one of two calls of any other: two
    ``torch.zeros(3).uniform_()`` get the same numbers (torch 2.13, ``aot_eager`` too).
    """
    from torch._functorch import compile_utils

    packets = {cast(Any, each.target).overloadpacket for each in drawn}
    with patched(compile_utils, "rand_ops", [*compile_utils.rand_ops, *packets]):
        yield


@optional(
    "checkpoints that draw random numbers on engines that read ONNX",
    "torch._prims.rng_prims:run_with_rng_state",
    lazily=True,
)
def _describe_second_draws(backward: torch.fx.GraphModule) -> None:
    """Say what is drawn once more for a checkpoint; the partitioner does not (torch 2.13)."""
    from torch._prims.rng_prims import run_with_rng_state

    for node in backward.graph.find_nodes(op="call_function", target=run_with_rng_state):
        given = torch.fx.node.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
        (state, draw, *operands), kwargs = given
        with fake_mode_of([state]):
            node.meta.setdefault("val", draw(*operands, **kwargs))


def mutated_inputs() -> frozenset[int]:
    """Positions of the inputs that the graph AOTAutograd has just traced writes to."""
    context = TracingContext.try_get()
    if context is None or context.fw_metadata is None:
        return frozenset()
    known = enumerate(context.fw_metadata.input_info)
    return frozenset(i for i, each in known if each.mutates_data or each.mutates_metadata)


def copied_back() -> dict[int, int]:
    """Positions of outputs that AOTAutograd's run-time wrapper copies to inputs after each call.

    Of the graph that it has just traced, to the positions of those inputs. Inputs of which more
    than the numbers changes are left out.
    """
    context = TracingContext.try_get()
    known = context.fw_metadata if context else None
    if known is None:
        return {}
    written = enumerate(known.mutated_inp_runtime_indices)
    info = known.input_info
    return {at: i for at, i in written if info[i].mutates_data and not info[i].mutates_metadata}


@optional(
    "the quicker warm start of whole graphs",
    "torch._functorch._aot_autograd.schemas:OutputType.non_alias",
    without=lambda outputs: False,
    lazily=True,
)
def aot_adds_nothing(outputs: int) -> bool:
    """Whether AOTAutograd's run-time wrapper has nothing to do for the graph it has just traced.

    That is so where no input is written to, no output is a view of one, and the graph has as many
    ``outputs`` as the captured one. ``False`` where AOTAutograd does not say.
    """
    from torch._functorch._aot_autograd.schemas import OutputType

    context = TracingContext.try_get()
    known = None if context is None else context.fw_metadata
    if known is None or mutated_inputs():
        return False
    plain = all(each.output_type is OutputType.non_alias for each in known.output_info)
    extras = known.num_intermediate_bases, len(known.tokens), known.is_rng_op_functionalized
    return plain and not any(extras) and len(known.output_info) == outputs


def tracing_state() -> str:
    """Text of the global settings that decide what AOTAutograd makes of a graph.

    They are those in the key of AOTAutograd's own cache (torch 2.13), the kernels of attention that
    are allowed, and all that float32 is computed in.
    """
    attention: Any = torch.backends.cuda
    facts = (
        *(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype()),
        *autocasts(),
        *(torch.are_deterministic_algorithms_enabled(), float32_precision()),
        *(attention.flash_sdp_enabled(), attention.mem_efficient_sdp_enabled()),
        *(attention.math_sdp_enabled(), attention.cudnn_sdp_enabled()),
        *(torch.backends.mkldnn.enabled, torch.backends.cudnn.enabled),
        _aot_settings(),
    )
    return " ".join(map(str, facts))


@optional(
    "using kept models in another process",
    f"{_CONFIG}save_config_portable",
    without=lambda: [("process", os.getpid())],
)
def _aot_settings() -> list[tuple[str, Any]]:
    import torch._functorch.config

    return sorted(torch._functorch.config.save_config_portable().items())
