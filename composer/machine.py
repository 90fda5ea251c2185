"""Which machine this is and what is installed on it, as far as what is compiled depends on it."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
from pathlib import Path

import torch

_CPUS = Path("/proc/cpuinfo")
_OF_ARM = ("CPU implementer", "CPU variant", "CPU part")
_THREADS = Path("/proc/self/task")
_DRIVER = Path("/sys/module/nvidia/version")


def describe(device: str) -> tuple[str, ...]:
    """The processor, what else torch finds here and, for a graph on a GPU, that GPU and its driver.

    Args:
        device: Where the graph is: ``"cpu"``, ``"cuda:0"``.
    """
    kind = torch.accelerator.current_accelerator(check_available=True)
    others = (f"{torch.accelerator.device_count()} {kind.type}",) if kind else ()
    return (*_processor(), *others, *(_gpu(device) if device.startswith("cuda") else ()))


def _gpu(device: str) -> tuple[str, ...]:
    if not torch.cuda.is_available():
        return ()
    name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    driver = (f"driver {version}",) if (version := nvidia_driver()) else ()
    cuda = torch.version.cuda or torch.version.hip
    return name, f"capability {capability[0]}.{capability[1]}", f"CUDA {cuda}", *driver


def nvidia_driver() -> str:
    """The version of NVIDIA's driver; empty where Linux does not say it."""
    return _DRIVER.read_text().strip() if _DRIVER.exists() else ""


@functools.cache
def _processor() -> tuple[str, ...]:
    capability = torch.backends.cpu.get_cpu_capability()
    return _model() or platform.machine(), capability, f"{os.cpu_count()} processors"


def _model() -> str:
    """Linux says it in a file, for Arm by numbers; elsewhere Python knows, more or less."""
    try:
        lines = _CPUS.read_text(errors="replace").splitlines()
    except OSError:
        return platform.processor()
    facts = [(name.strip(), text.strip()) for name, _, text in (x.partition(":") for x in lines)]
    named = next((text for name, text in facts if name == "model name"), "")
    arm = dict.fromkeys(f"{name[4:]} {text}" for name, text in facts if name in _OF_ARM)
    return named or ", ".join(arm) or platform.processor()


def cores() -> int:
    """How many of the processors this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def seconds_without_a_core() -> float:
    """For how long the threads of this process could have run, and something else had the cores.

    Of the threads that live now, since each began, all together: Linux counts it in
    ``/proc/self/task/*/schedstat`` (documented as "time spent waiting on a runqueue"). Where the
    system does not say, 0.
    """
    nanoseconds = 0
    for each in _THREADS.glob("*/schedstat"):
        with contextlib.suppress(OSError):
            nanoseconds += int(each.read_text().split()[1])
    return nanoseconds / 1e9
