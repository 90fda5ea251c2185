"""Rewrites of OpenVINO models that work around wrong results of OpenVINO.

Each module works around one fault of OpenVINO 2026.4: a wrong kernel, or a pattern that matches
more than it should. Each has a test in ``tests/backends/openvino``, which tells when OpenVINO is
fixed and the module can be deleted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from composer.backends.openvino.corrections.channels import widen_channels
from composer.backends.openvino.corrections.comparisons import turn_comparisons
from composer.backends.openvino.corrections.extra_dimensions import spell_out_ranks
from composer.backends.openvino.corrections.gelus import tell_from_gelu
from composer.backends.openvino.corrections.magnitudes import compute_magnitudes, keep_signs
from composer.backends.openvino.corrections.masks import bound_masks
from composer.backends.openvino.corrections.nans import drop_checks, keep_nans
from composer.backends.openvino.corrections.quotients import divide_where_it_shows
from composer.backends.openvino.corrections.reductions import spell_out_reductions
from composer.backends.openvino.corrections.rotations import line_up_rotations
from composer.backends.openvino.corrections.scalars import squeeze_to_scalars
from composer.backends.openvino.corrections.slopes import line_up_slopes
from composer.backends.openvino.corrections.swishes import drop_dimensions_of_factors
from composer.backends.openvino.corrections.windows import keep_windows

Edit = Callable[[Any], None]
"""Changes a model of OpenVINO's in place, so that OpenVINO computes what the model says."""

ALWAYS: tuple[Edit, ...] = (
    turn_comparisons,
    spell_out_ranks,
    spell_out_reductions,
    squeeze_to_scalars,
    line_up_rotations,
    line_up_slopes,
    drop_dimensions_of_factors,
    tell_from_gelu,
    compute_magnitudes,
    keep_signs,
    keep_windows,
    widen_channels,
    divide_where_it_shows,
)
"""Rewrites that are needed in every precision."""

IN_BFLOAT16: tuple[Edit, ...] = (bound_masks,)
"""Rewrites that are needed where OpenVINO may compute float32 in bfloat16."""


def correct(model: Any, *, in_bfloat16: bool, keeps_nan: bool) -> None:
    """Apply all rewrites that a model needs, in place.

    Args:
        model: A model of OpenVINO's, with its weights as constants.
        in_bfloat16: True if OpenVINO may compute float32 in bfloat16.
        keeps_nan: True if operations must return NaN where an operand is NaN.
    """
    edits = ALWAYS + IN_BFLOAT16 if in_bfloat16 else ALWAYS
    for edit in edits:
        edit(model)
    if keeps_nan:  # last: the other rewrites look at the users of a node
        keep_nans(model)
    else:
        drop_checks(model)
