"""Read torch's settings for TF32. Engines follow them, since by default they would use TF32.

TF32 is a faster mode for products of float32. It keeps 10 bits of each factor's mantissa, so the
relative error is about 1e-3.
"""

from __future__ import annotations

from typing import Any

import torch

_TF32 = "tf32"


def allows_products() -> bool:
    """True if torch allows TF32 in matrix products. By default it does not."""
    return str(torch.backends.cuda.matmul.fp32_precision) == _TF32


def allows_both() -> bool:
    """True if torch allows TF32 in both products and convolutions, for engines with one switch."""
    return allows_products() and allows_convolutions()


def allows_convolutions() -> bool:
    """True if torch allows TF32 in convolutions. By default it does."""
    settings: Any = torch.backends.cudnn  # the type stubs lack this attribute
    return str(settings.conv.fp32_precision) == _TF32
