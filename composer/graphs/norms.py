"""Norms that write to running statistics, which their schemas do not declare."""

from __future__ import annotations

KEEP_STATISTICS = {
    "batch_norm": (5, False),
    "native_batch_norm": (5, False),
    "cudnn_batch_norm": (5, False),
    "miopen_batch_norm": (5, False),
    "_batch_norm_impl_index": (5, False),
    "instance_norm": (5, True),
}
"""For each name, the position and default of the argument that says whether to update them."""
