"""An operator that takes so long that eager is a slow engine."""

from __future__ import annotations

import time

import torch

NAP = 0.008


@torch.library.custom_op("composer_tests::short_nap", mutates_args=())
def short_nap(x: torch.Tensor) -> torch.Tensor:
    """Take so long that eager is a slow engine."""
    time.sleep(NAP)
    return x.clone()


short_nap.register_fake(torch.empty_like)
