"""What a graph in a folder says of the modes that it was captured in."""

from __future__ import annotations

FACTS = {
    "mode": None,
    "dynamic": False,
    "training": False,
    "autocast": [],
    "default_dtype": "torch.float32",
    "versions": {},
    "policy": {},
}
