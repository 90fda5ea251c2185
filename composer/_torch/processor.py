"""The processor."""

from __future__ import annotations

import torch
import torch.fx


def multiplies_bf16() -> bool:
    """Whether the processor has bfloat16 products of its own: AVX512_BF16 or AMX; BF16 on Arm.

    ``torch.cpu.get_capabilities`` is public where there is one; torch 2.11 may have its parts only.
    oneDNN also says yes where it can but emulate them.
    """
    ask = getattr(torch.cpu, "get_capabilities", None)
    if ask is None:
        return _has_parts()
    found = ask()
    return any(found.get(each, False) for each in ("avx512_bf16", "amx_bf16", "bf16"))


def _has_parts() -> bool:
    """Torch 2.11 tells of AVX512_BF16 and of AMX one by one."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
