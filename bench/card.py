"""The NVIDIA card: how long calls take on it, what memory they take, what figures depend on."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable

import torch
from timing import installed_version

PACKAGES = ("triton", "tensorrt", "tensorrt-rtx-cu13-bindings", "torch_tensorrt", "onnxruntime-gpu")
MIB = 2**20


class Card:
    """One NVIDIA GPU. The bench asks nothing of CUDA but through this class.

    Args:
        index: Which one, as torch counts them.
    """

    def __init__(self, index: int = 0) -> None:
        self.device = torch.device("cuda", index)

    def clock(self, call: Callable[[], object], calls: int) -> float:
        """Milliseconds of one call between two CUDA events, the mean of ``calls`` in a row.

        The card is idle before the first, so what the CPU takes to launch work counts as far as
        the card waits for it.
        """
        self.synchronize()
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / calls

    def synchronize(self) -> None:
        """Wait for all work."""
        torch.cuda.synchronize(self.device)

    def clear(self) -> None:
        """Give back what torch's allocator only keeps in reserve."""
        self.synchronize()
        torch.cuda.empty_cache()

    def allocated(self) -> float:
        """MiB that live tensors take, by torch's allocator."""
        return torch.cuda.memory_allocated(self.device) / MIB

    def used(self) -> float:
        """MiB of the card in use by anybody, reserves and engines' own memory included."""
        free, total = torch.cuda.mem_get_info(self.device)
        return (total - free) / MIB

    def peak(self, call: Callable[[], object]) -> float:
        """The most MiB that torch's allocator had given out at a time during a call."""
        torch.cuda.reset_peak_memory_stats(self.device)
        call()
        self.synchronize()
        return torch.cuda.max_memory_allocated(self.device) / MIB

    def facts(self) -> dict[str, object]:
        """Card, driver and versions, as they stand in the results."""
        properties = torch.cuda.get_device_properties(self.device)
        return {
            "card": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_mib": round(properties.total_memory / MIB),
            "driver": driver(self.device.index),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "float32_matmul_precision": torch.get_float32_matmul_precision(),
            "packages": {name: installed_version(name) for name in PACKAGES},
        }


def driver(index: int) -> str | None:
    """The driver's version, as ``nvidia-smi`` says it; ``None`` where it does not."""
    if (command := shutil.which("nvidia-smi")) is None:
        return None
    asked = ("--query-gpu=driver_version", "--format=csv,noheader", f"--id={index}")
    try:
        done = subprocess.run(
            [command, *asked], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
