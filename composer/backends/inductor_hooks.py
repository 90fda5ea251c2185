"""Shared passes in the slots of Inductor's config for custom passes, behind those of the user."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.fx

from composer import _torch
from composer.backends.inductor_records import FORMAT
from composer.errors import refuse
from composer.passes.late import LatePasses
from composer.records import Reason, Stage, Status

_SLOTS = {
    (Stage.JOINT, False): "joint_custom_pre_pass",
    (Stage.JOINT, True): "joint_custom_post_pass",
    (Stage.POST_GRAD, False): "post_grad_custom_pre_pass",
    (Stage.POST_GRAD, True): "post_grad_custom_post_pass",
}
"""Stage and ``runs_last`` to slot. In front of Inductor's own rewrites its graph is that of every
other engine; behind them it is Inductor's."""


def hooks(passes: LatePasses, config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of Inductor's that make it run these passes in its own AOT step.

    Args:
        passes: The passes of this attempt.
        config: The settings that the user asked for; torch's own config stands behind them.

    Raises:
        Refusal: ``declined``, where the user gave Inductor a partitioner of its own as well.
    """
    settings: dict[str, Any] = {}
    for (stage, last), slot in _SLOTS.items():
        if passes.shared.at(stage, last=last):
            settings[slot] = Hook(passes, stage, last, _already(slot, config))
    if passes.shared.partitioner is not None:
        if _torch.inductor.inductor_setting("custom_partitioner_fn", config) is not None:
            what = "the policy's passes hold a partitioner, and Inductor's config holds another"
            refuse(Status.DECLINED, Reason.POLICY, what)
        settings["custom_partitioner_fn"] = PartitionHook(passes)
    return settings


def _already(slot: str, config: Mapping[str, Any]) -> tuple[Callable[..., Any], ...]:
    """What the user set in a slot: nothing, one pass, or (torch >= 2.13) a list of them."""
    found = _torch.inductor.inductor_setting(slot, config)
    if found is None:
        return ()
    return tuple(found) if isinstance(found, list | tuple) else (found,)


class Hook(_torch.inductor.CustomInferenceAwareGraphPass):
    """The user's own passes of one slot, then the shared ones of its stage."""

    def __init__(
        self, passes: LatePasses, stage: Stage, last: bool, users: Sequence[Callable[..., Any]]
    ) -> None:
        self._passes = passes
        self._stage = stage
        self._last = last
        self._users = users

    def __call__(self, graph: torch.fx.Graph, is_inference: bool | None = None) -> None:
        """Edit the graph in place; only at ``post_grad`` does Inductor say what kind it is."""
        inference = not _has_tangents(graph) if is_inference is None else is_inference
        for each in self._users:
            if isinstance(each, _torch.inductor.CustomInferenceAwareGraphPass):
                each(graph, inference)
            else:
                each(graph)
        gm = graph.owning_module
        assert gm is not None
        self._passes.run(self._stage, gm, inference=inference, last=self._last)

    def uuid(self) -> Any:
        """All that is in the slot; ``None``, which bypasses the cache, where one has no uuid.

        What is to happen when a pass fails belongs to it: a graph that was made without a pass
        that failed is not served to those who want an error.
        """
        shared = self._passes.shared
        own = [each.uuid() for each in shared.at(self._stage, last=self._last)]
        users = [_uuid_of(each) for each in self._users]
        return (*users, *own, shared.on_error, FORMAT) if all((*users, *own)) else None

    def __deepcopy__(self, memo: object) -> Hook:
        """The hook itself: Inductor copies its config, and all copies record into one place."""
        return self


class PartitionHook(_torch.inductor.CustomPartitionerFn):
    """The policy's partitioner, in Inductor's slot for one."""

    def __init__(self, passes: LatePasses) -> None:
        self._passes = passes

    def __call__(
        self, gm: torch.fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
        """Cut a joint graph into forward and backward."""
        return self._passes.partition(_torch.aot.min_cut, gm, joint_inputs, **kwargs)

    def uuid(self) -> Any:
        """The partitioner's own, with what a :class:`Hook` adds; ``None`` where it has none."""
        shared = self._passes.shared
        own = shared.partitioner.uuid()
        return (own, shared.on_error, FORMAT) if own else None

    def __deepcopy__(self, memo: object) -> PartitionHook:
        """As for :class:`Hook`."""
        return self


def _uuid_of(each: object) -> Any:
    return each.uuid() if isinstance(each, _torch.inductor.CUSTOM_PASSES) else None


def _has_tangents(graph: torch.fx.Graph) -> bool:
    """Whether it is a forward and a backward in one, which takes gradients by that name."""
    return any(node.name.startswith("tangents") for node in graph.find_nodes(op="placeholder"))
