"""What makes one machine's figures good for another: the same processor and cards."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch


def describe() -> str:
    """Processor, cores and cards in words; equal on machines that are alike."""
    cards = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    counted = [f"{cards.count(name)} x {name}" for name in dict.fromkeys(cards)]
    return ", ".join([f"{_processor()}, {os.cpu_count()} cores", *counted])


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
