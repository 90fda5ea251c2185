"""Run shared passes from Inductor's config settings for custom passes, after the user's own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.fx

from composer import _torch
from composer.errors import refuse
from composer.passes.within_aotautograd import LatePasses
from composer.records import PassRecord, Reason, Stage, Status
from composer.system.disk import DiskCache

_SLOTS = {
    (Stage.JOINT, False): "joint_custom_pre_pass",
    (Stage.JOINT, True): "joint_custom_post_pass",
    (Stage.POST_GRAD, False): "post_grad_custom_pre_pass",
    (Stage.POST_GRAD, True): "post_grad_custom_post_pass",
}
"""Maps a stage and ``runs_last`` to a setting of Inductor. Before Inductor's own rewrites the graph
is the same as for every other engine; after them it is specific to Inductor."""


def hooks(passes: LatePasses, config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that make Inductor run these passes in its own AOT step.

    Args:
        passes: The passes of this attempt.
        config: The user's settings. Torch's own config supplies the others.

    Raises:
        Refusal: ``declined``, if both the policy and Inductor's config have a partitioner.
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
    """The user's own passes in a setting: none, one, or from torch 2.13 on a list of them."""
    found = _torch.inductor.inductor_setting(slot, config)
    if found is None:
        return ()
    return tuple(found) if isinstance(found, list | tuple) else (found,)


class Hook(_torch.inductor.CustomInferenceAwareGraphPass):
    """Runs the user's own passes of one setting, then the shared passes of its stage."""

    def __init__(
        self, passes: LatePasses, stage: Stage, last: bool, users: Sequence[Callable[..., Any]]
    ) -> None:
        self._passes = passes
        self._stage = stage
        self._last = last
        self._users = users

    def __call__(self, graph: torch.fx.Graph, is_inference: bool | None = None) -> None:
        """Edit the graph in place.

        Args:
            graph: The graph.
            is_inference: Whether the graph is for inference. Inductor passes it only at the stage
                ``post_grad``.
        """
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
        """The uuids of all passes in the setting, for the key of Inductor's cache.

        ``None`` if a pass has no uuid; Inductor then bypasses its cache. The result contains
        ``on_error``: a graph that was made without a failed pass must not be given to a user who
        wants an error.
        """
        shared = self._passes.shared
        own = [each.uuid() for each in shared.at(self._stage, last=self._last)]
        uuids = [*map(_uuid_of, self._users), *own]
        return (*uuids, shared.on_error, FORMAT) if all(uuids) else None

    def __deepcopy__(self, memo: object) -> Hook:
        """Return the hook itself: Inductor copies its config, but all copies share one record."""
        return self


class PartitionHook(_torch.inductor.CustomPartitionerFn):
    """Runs the policy's partitioner from Inductor's setting for a partitioner."""

    def __init__(self, passes: LatePasses) -> None:
        self._passes = passes

    def __call__(
        self, gm: torch.fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
        """Split a joint graph into forward and backward."""
        return self._passes.partition(_torch.aot.min_cut, gm, joint_inputs, **kwargs)

    def uuid(self) -> Any:
        """The partitioner's uuid, with the additions of :meth:`Hook.uuid`; ``None`` without one."""
        shared = self._passes.shared
        own = shared.partitioner.uuid()
        return (own, shared.on_error, FORMAT) if own else None

    def __deepcopy__(self, memo: object) -> PartitionHook:
        """Return the hook itself, as in :class:`Hook`."""
        return self


def _uuid_of(each: object) -> Any:
    return each.uuid() if isinstance(each, _torch.inductor.CUSTOM_PASSES) else None


def _has_tangents(graph: torch.fx.Graph) -> bool:
    """True for a joint graph of forward and backward, whose gradient inputs are ``tangents...``."""
    return any(node.name.startswith("tangents") for node in graph.find_nodes(op="placeholder"))


_LIMIT = 64 << 20

FORMAT = 3
"""The version of the keys of records. Increase it whenever ``graph_key`` changes. It is part of
Inductor's key, so Inductor's cache never returns a graph whose record cannot be found."""


def remember(key: str, records: Iterable[PassRecord]) -> None:
    """Store the records of a graph key, for when Inductor takes the graph from its cache.

    Inductor then does not run the passes, so they make no new record. If the records cannot be
    stored, only later reports lack them.
    """
    _cache().put(key, {"passes": [dataclasses.asdict(each) for each in records]})


def recall(key: str) -> tuple[PassRecord, ...]:
    """The records stored for this key, with their times set to zero; empty if there are none."""
    entry = _cache().get(key)
    kept = entry.facts["passes"] if entry else ()
    return tuple(dataclasses.replace(PassRecord(**each), seconds=0.0) for each in kept)


def _cache() -> DiskCache:
    """A cache beside Inductor's own, so that records live as long as the cached graphs."""
    root = Path(_torch.inductor.inductor_cache_dir())
    return DiskCache("composer_passes", limit=_LIMIT, root=root)
