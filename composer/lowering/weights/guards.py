"""A filter of Dynamo's guards on weights, at which composer looks itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from composer import _torch


def guards(entries: Sequence[Any]) -> list[bool]:
    """Leave out Dynamo's guards on weights in inference: a ``guard_filter_fn`` for torch.compile.

    Composer looks at the identity, the address and the version of each weight at every call. So a
    changed weight is noticed without these guards, and so is a change of anything else, whose
    guards stay. Under ``torch.no_grad()`` and ``torch.inference_mode()`` the guards on parameters
    are left out, and those on buffers of torch's own modules. Where gradients are recorded, all
    stay.

    What is given up: ``p.data = p.data.t()`` and ``p.data = p.data[:4]``, which keep all three, are
    not noticed. Where a parameter gets other sizes or another dtype, or is gone, nothing is
    compiled anew: the captured graph answers.

    Args:
        entries: Of each guard, torch's ``GuardFilterEntry``.

    Returns:
        True for each guard that stays.

    Example:
        ``torch.compile(model, backend="composer", options={"guard_filter_fn": composer.guards})``
    """
    if torch.is_grad_enabled():
        return [True] * len(entries)
    of_weights = map(_torch.dynamo.guards_weight, entries)
    return [not each for each in of_weights]
