"""Make Inductor's ``freezing`` safe: detect a change of a frozen weight, and compile again.

Inductor in torch 2.13 freezes only tensors that the graph holds itself. It never checks whether
they still have the same values (pytorch/pytorch#108863). Dynamo passes weights as inputs; the graph
holds them only if Inductor's setting is on for the whole process.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.fx

from composer import _torch
from composer.backends.base import BuildRequest
from composer.graphs import capture, clones, writes
from composer.graphs.nodes import are_static, attribute_at
from composer.lowering.aot import own_tensors
from composer.lowering.partition.regions import Region
from composer.lowering.weights import samples
from composer.lowering.weights.bindings import BindingEngine
from composer.lowering.weights.by_address import picker
from composer.lowering.weights.statistics import find_witnesses, is_of_norm
from composer.lowering.weights.watchable import watchable

_NO_CACHE = {"fx_graph_cache": False, "fx_graph_remote_cache": False}
"""Turns off Inductor's cache for frozen graphs. In torch 2.13 the cache's key does not contain the
values of frozen weights, but the cached code contains some of them: scalar tensors, and weights
packed by a template."""

Config = Mapping[str, Any]
FrozenCode = Callable[[tuple[Any, ...]], Any]


def compiled(request: BuildRequest, config: Config) -> Callable[..., Any]:
    """Compile a graph with Inductor, with frozen weights if that is asked for.

    The first of these that is set decides: the candidate's option, the policy, the setting of the
    process. If only the process asks for it, composer freezes what Inductor freezes: tensors that
    the graph holds, and no inputs. Graphs are never frozen while gradients are enabled.

    Args:
        request: The graph, its inputs, and the policy's ``freeze``.
        config: The candidate's settings. Torch's own config supplies the others.
    """
    gm, example_inputs = request.gm, request.example_inputs
    if torch.is_grad_enabled():
        return _compile(gm, example_inputs, config)
    wish, told = request.terms.freeze, request.terms.facts.extra
    asked = config.get("freezing", None if wish == "auto" else wish)
    config = config if asked is None else {**config, "freezing": asked}
    if not _torch.inductor.inductor_setting("freezing", config):
        return _compile(gm, example_inputs, config)
    region = _to_freeze(gm, example_inputs, passed=asked is not None)
    if region is None:
        told["frozen"] = 0
        return _compile(gm, example_inputs, {**config, "freezing": False})
    if not region.weights:
        return _compile(gm, example_inputs, config)
    told["frozen"] = len(region.weights)
    return Frozen(gm, example_inputs, region, config)


def _compile(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any], config: Config
) -> Callable[..., Any]:
    compile_fx = _torch.dynamo.lookup_backend("inductor")
    with _torch.inductor.no_idle_workers(example_inputs):
        return compile_fx(gm, list(example_inputs), config_patches=dict(config))  # type: ignore[call-arg]  # Dynamo's protocol names two arguments; Inductor takes more


class Frozen(BindingEngine[FrozenCode]):
    """Calls Inductor's code for the present values of the weights. Several threads may call it.

    Args:
        gm: The graph.
        example_inputs: Tensors and symbols, in the order of the placeholders.
        region: The weights to fold in, by position. The tensors that the graph holds itself are
            counted first, then the inputs.
        config: Inductor's settings.
    """

    def __init__(
        self,
        gm: torch.fx.GraphModule,
        example_inputs: Sequence[Any],
        region: Region,
        config: Config,
    ) -> None:
        super().__init__(region)
        # A compile takes this lock, too; with two locks there could be a deadlock.
        self._lock = _torch.compiles.compile_lock
        self._gm = gm
        self._own = tuple(own_tensors(gm))
        self._held = frozenset(i for i in region.weights if i < len(self._own))
        self._config = config
        fakes = _torch.fakes.fakes_met(example_inputs)
        self._inputs: Sequence[Any] = example_inputs
        self._compiling: Callable[[], AbstractContextManager[None]] = nullcontext  # Dynamo does
        self.bind_first(region)
        self._inputs = fakes
        self._compiling = functools.partial(_torch.compiles.recompiling, fakes)

    def __call__(self, *args: Any) -> Any:
        """Run the code for the present values of the weights among the arguments."""
        return self._made_for((*self._own, *args))(args)

    def _make(self, values: Mapping[int, torch.Tensor]) -> FrozenCode:
        if not self._held <= values.keys():  # Inductor freezes all tensors of the graph or none
            values = {}
        first = len(self._own)
        inlined = {i - first: weight for i, weight in values.items() if i >= first}
        left = tuple(i for i in range(len(self._inputs)) if i not in inlined)
        config = {**self._config, "freezing": bool(values)}
        if values:
            config |= _NO_CACHE
        with (
            self._compiling(),
            _torch.inductor.constants_let_go(),
            _torch.inductor.constants_kept_apart(),
        ):
            gm = _holding(clones.clone_graph(self._gm), inlined)
            run = _torch.breaks.undisabled(_compile(gm, [self._inputs[i] for i in left], config))
        pick = picker(left)
        return lambda args: run(*pick(args))


def _holding(gm: torch.fx.GraphModule, weights: Mapping[int, torch.Tensor]) -> torch.fx.GraphModule:
    """Turn some inputs of a graph into tensors that the graph holds itself.

    It holds other tensors over the same memory, so that it does not keep the weights alive.

    Args:
        gm: The graph. It is changed in place.
        weights: The weights, by the position of their placeholders.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    with _torch.fakes.unset_fake_temporarily(), torch.inference_mode(False), torch.no_grad():
        for i, weight in weights.items():
            name = f"frozen_weight_{i}"
            gm.register_buffer(name, weight.detach())
            node = placeholders[i]
            with gm.graph.inserting_before(node):
                held = gm.graph.get_attr(name)
            held.meta.update(node.meta)
            node.replace_all_uses_with(held)
            gm.graph.erase_node(node)
    _torch.sources.name_sources(gm)
    gm.recompile()
    return gm


def _to_freeze(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any], *, passed: bool
) -> Region | None:
    """The weights to freeze; ``None`` if the graph holds a tensor whose change is not detectable.

    Args:
        gm: The graph.
        example_inputs: Tensors and symbols, in the order of the placeholders.
        passed: Whether to fold in the weights among the inputs, too.
    """
    own = own_tensors(gm)
    written = {id(tensor) for tensor in writes.written_attributes(gm)}
    # Inductor freezes no tensor that the graph writes to.
    held = {i: tensor for i, tensor in enumerate(own) if id(tensor) not in written}
    inputs = _passed(gm, example_inputs) if passed else []
    weights = watchable(held | {len(own) + i: example_inputs[i] for i in inputs})
    buffers = {i: weight for i, weight in weights.items() if _is_large_buffer(weight)}
    floats = {i: buffer for i, buffer in buffers.items() if buffer.is_floating_point()}
    owned = find_witnesses(floats)
    witnesses = {i: witness for i, witness in owned.items() if witness is not None}
    readers = _readers(gm, own)
    for i in buffers:  # a norm may update it without a sign of the change
        norms = [node for node in readers[i] if "norm" in str(node.target)]
        needs_witness = i in owned or bool(norms)
        is_unseen = needs_witness and i not in witnesses
        if is_unseen or not all(map(is_of_norm, norms)):
            del weights[i]
    return Region(gm, weights, witnesses, {}) if weights.keys() >= held.keys() else None


def _is_large_buffer(weight: torch.Tensor) -> bool:
    """True for a buffer whose values are not all compared at each call."""
    return type(weight) is not torch.nn.Parameter and not samples.are_compared_whole(weight)


def _passed(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> list[int]:
    """Positions of the inputs that are weights, are not written to, and are not returned."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    (returned,) = gm.graph.find_nodes(op="output")
    weights = sorted(capture.lasting_weights(gm, example_inputs) - writes.assigned_inputs(gm))
    if writes.may_write(gm):  # a norm updates its statistics
        weights = [i for i in weights if type(example_inputs[i]) is torch.nn.Parameter]
    kept = [i for i in weights if returned not in placeholders[i].users]
    return [i for i in kept if _is_fixed(placeholders[i], example_inputs[i])]


def _is_fixed(placeholder: torch.fx.Node, value: Any) -> bool:
    """True if all sizes of the input are numbers. A symbolic size would be lost with the input."""
    return are_static(placeholder.meta.get("example_value", value).shape)


def _readers(gm: torch.fx.GraphModule, own: Sequence[torch.Tensor]) -> list[list[torch.fx.Node]]:
    """The users of each tensor that the graph holds, then of each input, by position."""
    users = defaultdict[int, list[torch.fx.Node]](list)
    for node in gm.graph.find_nodes(op="get_attr"):
        users[id(attribute_at(gm, str(node.target)))] += node.users
    held = [users[id(tensor)] for tensor in own]
    passed = [list(node.users) for node in gm.graph.find_nodes(op="placeholder")]
    return held + passed
