"""Work whose imports have used a device, which no forked process can do then."""

from __future__ import annotations

import torch
from children import look_around

__all__ = ["look_around"]

torch.cuda._is_in_bad_fork = lambda: True
