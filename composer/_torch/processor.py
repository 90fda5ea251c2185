"""The processor."""

from __future__ import annotations

import torch
import torch.fx


def multiplies_bf16() -> bool:
    """True if the processor has instructions for products in bfloat16.

    They are AVX512_BF16 or AMX, and BF16 on Arm. oneDNN is not asked, because it also says yes
    where it only emulates such products.
    """
    instructions = torch.cpu.get_capabilities()
    return any(instructions.get(each) for each in ("avx512_bf16", "amx_bf16", "bf16"))


def multiplies_int8() -> bool:
    """True if the processor has instructions that multiply uint8 by int8 and add up in int32.

    They are VNNI or AMX.
    """
    instructions = torch.cpu.get_capabilities()
    return any(instructions.get(each) for each in ("avx512_vnni", "avx_vnni", "amx_int8"))
