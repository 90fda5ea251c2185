"""Whether torch lets a GPU compute float32 in TF32, which engines would do by themselves.

TF32 keeps 10 bits of what is multiplied, for an error of about 1e-3.
"""

from __future__ import annotations

from typing import Any

import torch

_TF32 = "tf32"


def allows_products() -> bool:
    """In matrix products: not, by default."""
    return str(torch.backends.cuda.matmul.fp32_precision) == _TF32


def allows_both() -> bool:
    """In products and convolutions, for engines that have one switch."""
    return allows_products() and allows_convolutions()


def allows_convolutions() -> bool:
    """In convolutions: by default."""
    settings: Any = torch.backends.cudnn  # its stubs lack it
    return str(settings.conv.fp32_precision) == _TF32
