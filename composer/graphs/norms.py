"""Norms that write to running statistics, which their schemas do not declare."""

from __future__ import annotations

KEEP_STATISTICS = {
    "batch_norm": (5, "training", False),
    "native_batch_norm": (5, "training", False),
    "cudnn_batch_norm": (5, "training", False),
    "miopen_batch_norm": (5, "training", False),
    "_batch_norm_impl_index": (5, "training", False),
    "instance_norm": (5, "use_input_stats", True),
}
"""For each name, the position, name and default of the argument that says whether to update
them."""
