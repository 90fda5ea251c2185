"""AOTAutograd: its settings, a compile through it, and what it found out about a graph."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.fx
from torch._functorch import config as functorch_config
from torch._guards import TracingContext
from torch.utils.checkpoint import CheckpointPolicy

from composer._torch.compiles import patched
from composer._torch.fakes import fake_mode_of
from composer._torch.modes import autocasts, float32_precision
from composer._torch.names import off, optional
from composer._torch.operators import draws, results_of
from composer._torch.tensors import flatten
from composer.errors import refuse
from composer.records import Reason, Status

GraphCompiler = Callable[[torch.fx.GraphModule, Sequence[Any]], Callable[..., Any]]


_CONFIG = "torch._functorch.config:"


def _decline_training(*args: object, **kwargs: object) -> Any:
    """Decline a graph that trains, because this torch lacks a setting that training needs."""
    refuse(Status.DECLINED, Reason.TRAINING_GRAPH, "; ".join(off(look=False)))


def _inference_alone() -> contextlib.AbstractContextManager[None]:
    """Decline a graph that may have a backward; other graphs need no setting."""
    if torch.is_grad_enabled():
        _decline_training()
    return contextlib.nullcontext()


def _setting(**settings: Any) -> contextlib.AbstractContextManager[None]:
    return cast(contextlib.AbstractContextManager[None], functorch_config.patch(**settings))


@optional(
    "training on an engine",
    f"{_CONFIG}force_non_lazy_backward_lowering",
    without=_inference_alone,
)
def backward_lowering_at_once() -> contextlib.AbstractContextManager[None]:
    """Compile the backward together with the forward.

    Otherwise AOTAutograd compiles it at the first ``.backward()``. If that failed, it would be too
    late for a fallback.
    """
    return _setting(force_non_lazy_backward_lowering=True)


@optional(
    "training models that write to a buffer and then read it",
    f"{_CONFIG}treat_parameters_as_free_to_save",
    without=_decline_training,
)
def keeping_no_weights_for_free() -> contextlib.AbstractContextManager[None]:
    """Make the partitioner count weights and buffers like other values to keep for the backward.

    By default they cost nothing. The partitioner then keeps a buffer, and recomputes from it in the
    backward what the forward wrote to it. The buffer has changed by then, so gradients are wrong
    (https://github.com/pytorch/pytorch/pull/197039).
    """
    return _setting(treat_parameters_as_free_to_save=False)


@optional(
    "falling back at run time where Inductor's backward fails",
    f"{_CONFIG}donated_buffer",
    without=contextlib.nullcontext,
)
def without_donated_buffers() -> contextlib.AbstractContextManager[None]:
    """Keep AOTAutograd from letting the backward overwrite what the forward saved.

    Only Inductor makes use of such memory ("donated" buffers). If no engine writes to saved
    tensors, another engine can compute the backward after a failure.
    """
    return _setting(donated_buffer=False)


def donate_nothing() -> None:
    """Allow ``backward(retain_graph=True)``. Call this while a backward is compiled.

    AOTAutograd forbids it where a backward may write to what the forward saved ("donated" buffers,
    meant for Inductor). AOTAutograd's own setting is not used, because it is read at run time as
    well (torch 2.13), and belongs to the program.
    """
    metadata = _metadata()
    if metadata is not None:
        metadata.bw_donated_idxs = []


def _metadata() -> Any:
    """What AOTAutograd has found out about the graph that it has just traced; else ``None``."""
    return getattr(TracingContext.try_get(), "fw_metadata", None)


def boxed(function: Callable[..., Any]) -> Callable[[Sequence[Any]], Any]:
    """Wrap ``function`` to take its arguments in one list, as AOTAutograd calls compiled code."""
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

    Args:
        gm: The captured graph.
        example_inputs: Its inputs, in the order of the placeholders.
        forward: Compiles the forward half of a graph that needs a backward.
        backward: Compiles the backward half. It is called after ``forward``, before this function
            returns.
        inference: Compiles a graph that needs no backward.
        partition: Cuts the joint graph of forward and backward in two.
        decompositions: Functions by which operators are replaced.
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
    """Cut a joint graph into forward and backward where the least memory has to be kept in between.

    Inductor uses the same partitioner. Errors that it makes with random operators and with zeros of
    both signs are corrected.
    """
    from functorch.compile import min_cut_rematerialization_partition

    drawn = [node for node in gm.graph.nodes if draws(node.target)]
    with contextlib.ExitStack() as corrections:
        corrections.enter_context(_draws_kept_apart(drawn))
        if drawn:
            corrections.enter_context(_draws_saved(drawn))
        if any(map(_names_negative_zero, gm.graph.nodes)):
            corrections.enter_context(_repetitions_kept())
        forward, backward = min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
    _describe_second_draws(backward)
    return forward, backward


def _names_negative_zero(node: torch.fx.Node) -> bool:
    """True if ``-0.0`` is among the arguments of a call."""
    arguments, _ = flatten((node.args, node.kwargs))
    return any(isinstance(each, float) and str(each) == "-0.0" for each in arguments)


@optional(
    "a difference between 0.0 and -0.0 in training graphs",
    f"{_CONFIG}cse",
    without=contextlib.nullcontext,
)
def _repetitions_kept() -> contextlib.AbstractContextManager[None]:
    """Keep the partitioner from merging calls that are repeated.

    It takes ``x * -0.0`` for a repetition of ``x * 0.0``, because ``0.0 == -0.0`` (torch 2.13,
    ``test_the_partitioner_takes_zeros_of_both_signs_for_one``).
    """
    return _setting(cse=False)


@optional(
    "training graphs that draw random numbers on engines that read ONNX",
    "torch._functorch.partitioners:choose_saved_values_set",
    without=_decline_training,
    lazily=True,
)
@contextlib.contextmanager
def _draws_saved(drawn: Sequence[torch.fx.Node]) -> Iterator[None]:
    """Make the partitioner keep random numbers for the backward, however little memory it may keep.

    With ``aggressive_recomputation`` or ``activation_memory_budget``, the partitioner may draw
    again in the backward (https://github.com/pytorch/pytorch/issues/190758). So the nodes are
    marked to be saved. With a budget of 0, the partitioner ignores such marks and keeps the inputs
    alone; a tiny budget is given instead. The partitioner may then keep a call that returns several
    tensors; its ``getitem`` nodes are kept instead.
    """
    from torch._functorch import partitioners

    for node in drawn:
        for result in {node, *_tensors_drawn(node)}:
            result.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)  # but in a checkpoint
    choose = partitioners.choose_saved_values_set

    def with_some_budget(
        joint_graph: Any, node_info: Any, memory_budget: float = 1
    ) -> list[torch.fx.Node]:
        saved = choose(joint_graph, node_info, memory_budget or sys.float_info.min)
        tensors = itertools.chain.from_iterable(map(_tensors_drawn, saved))
        return list(dict.fromkeys(tensors))

    with patched(partitioners, "choose_saved_values_set", with_some_budget):
        yield


def _tensors_drawn(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The nodes of the tensors that a call returns."""
    return results_of(node) if draws(node.target) else [node]


@optional(
    "drawing twice where a graph that trains has two calls alike (mended in torch 2.14)",
    "torch._functorch.compile_utils:rand_ops",
    without=lambda drawn: contextlib.nullcontext(),
    lazily=True,
)
@contextlib.contextmanager
def _draws_kept_apart(drawn: Sequence[torch.fx.Node]) -> Iterator[None]:
    """Keep the partitioner from merging two equal calls that draw random numbers.

    It merges equal calls, except of the operators in a list of names. Two
    ``torch.zeros(3).uniform_()`` then get the same numbers, also by ``aot_eager`` (before torch
    2.14; ``test_draws_that_are_alike_are_kept_apart`` fails where that is mended).
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
    """Set the metadata of draws that are repeated for a checkpoint, which the partitioner omits.

    ``test_what_is_drawn_again_for_a_checkpoint_says_what_it_is`` fails once it sets them.
    """
    from torch._prims.rng_prims import run_with_rng_state

    for node in backward.graph.find_nodes(op="call_function", target=run_with_rng_state):
        given = torch.fx.node.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
        (state, draw, *operands), kwargs = given
        with fake_mode_of([state]):
            node.meta.setdefault("val", draw(*operands, **kwargs))


def mutated_inputs() -> frozenset[int]:
    """Positions of the inputs that the graph just traced by AOTAutograd writes to."""
    metadata = _metadata()
    if metadata is None:
        return frozenset()
    inputs = enumerate(metadata.input_info)
    return frozenset(i for i, each in inputs if each.mutates_data or each.mutates_metadata)


def copied_back() -> dict[int, int]:
    """The outputs that AOTAutograd's run-time wrapper copies to inputs after each call.

    Returns:
        A map from positions of outputs to positions of inputs, for the graph that AOTAutograd has
        just traced. Inputs whose metadata change as well are left out.
    """
    metadata = _metadata()
    if metadata is None:
        return {}
    copied = {}
    for output, i in enumerate(metadata.mutated_inp_runtime_indices):
        written = metadata.input_info[i]
        if written.mutates_data and not written.mutates_metadata:
            copied[output] = i
    return copied


@optional(
    "the quicker warm start of whole graphs",
    "torch._functorch._aot_autograd.schemas:OutputType.non_alias",
    without=lambda outputs: False,
    lazily=True,
)
def aot_adds_nothing(outputs: int) -> bool:
    """True if AOTAutograd's run-time wrapper has nothing to do for the graph it has just traced.

    That is so if no input is written to, every output has memory of its own, and AOTAutograd has
    added no output to the ``outputs`` of the captured graph. The result is false if AOTAutograd
    does not say.
    """
    from torch._functorch._aot_autograd.schemas import OutputType

    metadata = _metadata()
    if metadata is None or mutated_inputs():
        return False
    kinds = [each.output_type for each in metadata.output_info]
    added = (
        metadata.num_intermediate_bases,
        len(metadata.tokens),
        metadata.is_rng_op_functionalized,
    )
    return kinds == [OutputType.non_alias] * outputs and not any(added)


def tracing_state() -> str:
    """Text of the global settings that decide what AOTAutograd makes of a graph.

    They are the settings in the key of AOTAutograd's own cache (torch 2.13), the kernels of
    attention that are allowed, and the precisions in which float32 is computed.
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
    return sorted(functorch_config.save_config_portable().items())
