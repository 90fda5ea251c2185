"""Images of another size, or read at given points."""

from __future__ import annotations

import torch
import torch.fx

from composer import _torch
from composer.lowering.operators.entry import Operator, Operators, always

aten = torch.ops.aten


def entries() -> Operators:
    """The entries of this module."""
    read_otherwise = (always("scales and corners are read otherwise"),)
    return {
        aten._upsample_bilinear2d_aa: Operator(unsupported=read_otherwise),
        aten._upsample_bicubic2d_aa: Operator(unsupported=read_otherwise),
        aten.grid_sampler_2d: Operator(unsupported=(reflected_neighbour,)),
    }


def reflected_neighbour(node: torch.fx.Node) -> str | None:
    """ONNX Runtime and OpenVINO round to a pixel before they reflect at the border, torch after."""
    modes = [
        _torch.operators.argument(node, name) for name in ("interpolation_mode", "padding_mode")
    ]
    return "the nearest pixel is found otherwise" if modes == [1, 2] else None
