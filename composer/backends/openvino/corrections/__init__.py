"""Edits of OpenVINO's models for what it would compute wrongly; results stay what they are.

Each module knows one fault of OpenVINO's (2026.4): a kernel, or a pattern that it takes for another
one. A test of each (``tests/backends/openvino``) says when it is gone, and the edit may go.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from composer.backends.openvino.corrections.channels import widen_channels
from composer.backends.openvino.corrections.comparisons import turn_comparisons
from composer.backends.openvino.corrections.gelus import tell_from_gelu
from composer.backends.openvino.corrections.magnitudes import compute_magnitudes, keep_signs
from composer.backends.openvino.corrections.masks import bound_masks
from composer.backends.openvino.corrections.nans import keep_nans
from composer.backends.openvino.corrections.ranks import spell_out_ranks
from composer.backends.openvino.corrections.reductions import spell_out_reductions
from composer.backends.openvino.corrections.rotations import line_up_rotations
from composer.backends.openvino.corrections.slopes import line_up_slopes
from composer.backends.openvino.corrections.swishes import drop_dimensions_of_factors
from composer.backends.openvino.corrections.windows import keep_windows

Edit = Callable[[Any], None]

ALWAYS: tuple[Edit, ...] = (
    turn_comparisons,
    spell_out_ranks,
    spell_out_reductions,
    line_up_rotations,
    line_up_slopes,
    drop_dimensions_of_factors,
    tell_from_gelu,
    compute_magnitudes,
    keep_signs,
    keep_windows,
    widen_channels,
)
"""For what is wrong in every precision."""

IN_BFLOAT16: tuple[Edit, ...] = (bound_masks,)
"""For what is wrong where float32 may be computed in bfloat16."""


def correct(model: Any, *, in_bfloat16: bool, keeps_nan: bool) -> None:
    """Edit a model, with its weights in it, in place."""
    for edit in (*ALWAYS, *(IN_BFLOAT16 if in_bfloat16 else ())):
        edit(model)
    if keeps_nan:  # behind the others, which know operations by what reads them
        keep_nans(model)
