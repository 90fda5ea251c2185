"""How far decompositions go: what is beyond is left to torch, or to the translation."""

from __future__ import annotations

import torch

MOST_ADDED = 2**22
"""Elements of a tensor that eager does not make."""

WIDE = (torch.float32, torch.float64)
"""Dtypes that torch computes in as they are; halves it may widen in between."""
