"""The processor."""

from __future__ import annotations

import torch
import torch.fx


def multiplies_bf16() -> bool:
    """True if the processor has instructions for products in bfloat16.

    They are AVX512_BF16 or AMX, and BF16 on Arm. Torch 2.11 may lack the public
    ``torch.cpu.get_capabilities``. oneDNN is not asked, because it also says yes where it only
    emulates such products.
    """
    ask = getattr(torch.cpu, "get_capabilities", None)
    if ask is None:
        return _has_parts()
    found = ask()
    return any(found.get(each, False) for each in ("avx512_bf16", "amx_bf16", "bf16"))


def _has_parts() -> bool:
    """Torch 2.11 tells of AVX512_BF16 and of AMX one by one."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
