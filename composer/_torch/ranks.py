"""The other ranks of ``torch.distributed``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from composer._torch.names import optional


def world_size() -> int:
    """The number of ranks in the default group of ``torch.distributed``; 1 without a group."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return 1
    return distributed.get_world_size()


@dataclass(frozen=True, slots=True)
class GroupMember:
    """This process in the default group of ``torch.distributed``.

    Attributes:
        rank: Its rank.
        world: How many ranks there are.
        store: The key-value store by which the ranks found each other.
    """

    rank: int
    world: int
    store: Any

    def store_below(self, prefix: str) -> Any:
        """The store with a prefix before every key, so that keys differ from those of others."""
        from torch.distributed.distributed_c10d import PrefixStore

        return PrefixStore(prefix, self.store)


@optional(
    "agreeing with other ranks on one engine",
    "torch.distributed.distributed_c10d:_get_default_store",
    lazily=True,
)
def group_member() -> GroupMember | None:
    """This process in the default group; ``None`` where it is alone.

    The key-value store exists already, however the ranks were started, except under MPI. No public
    function returns it.
    """
    world = world_size()
    if world == 1:
        return None
    from torch.distributed.distributed_c10d import _get_default_store

    return GroupMember(torch.distributed.get_rank(), world, _get_default_store())
