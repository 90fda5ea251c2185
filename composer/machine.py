"""Which machine this is and what is installed on it, as far as what is compiled depends on it."""

from __future__ import annotations

import functools
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

try:
    import resource
except ImportError:
    resource = None  # type: ignore[assignment]

_CPUS = Path("/proc/cpuinfo")
_OF_ARM = ("CPU implementer", "CPU variant", "CPU part")
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


def interruptions() -> int:
    """How often the system took a core from a thread of this process so far, for another to run.

    Where the system does not count that, 0: Python has no ``resource`` on Windows.
    """
    return 0 if resource is None else resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


@functools.cache
def version_of(distribution: str) -> str:
    """The version of an installed distribution; empty where it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""
