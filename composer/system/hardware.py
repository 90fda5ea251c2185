"""The facts about this machine that a compiled graph depends on."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path

import torch

_CPUS = Path("/proc/cpuinfo")
_OF_ARM = ("CPU implementer", "CPU variant", "CPU part")
_THREADS = Path("/proc/self/task")
_TIMES = Path("/proc/stat")
_DRIVER = Path("/sys/module/nvidia/version")

_BUSY = 0.1
"""There is a load if threads wait for a core for more than this share of their time, and others
take more than this share of one core. Of the time, threads wait on two cores: 0.02 to 0.05 alone,
0.12 to 0.15 beside a program that runs for a quarter of the time, 0.4 to 0.65 beside one that
always runs. Threads that sleep between calls wait for each other for up to 0.45: Linux wakes them
on one core."""


def describe(device: str) -> tuple[str, ...]:
    """The processor, the kind of accelerator and, for a graph on a GPU, that GPU and its driver.

    Args:
        device: The graph's device: ``"cpu"``, ``"cuda:0"``.
    """
    facts = list(_processor())
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator:
        facts.append(f"{torch.accelerator.device_count()} {accelerator.type}")
    if device.startswith("cuda") and torch.cuda.is_available():
        facts += _gpu(device)
    return tuple(facts)


def _gpu(device: str) -> list[str]:
    major, minor = torch.cuda.get_device_capability(device)
    cuda = torch.version.cuda or torch.version.hip
    facts = [torch.cuda.get_device_name(device), f"capability {major}.{minor}", f"CUDA {cuda}"]
    driver = nvidia_driver()
    return [*facts, f"driver {driver}"] if driver else facts


def nvidia_driver() -> str:
    """The version of NVIDIA's driver; empty if the system does not report it."""
    return _DRIVER.read_text().strip() if _DRIVER.exists() else ""


@functools.cache
def _processor() -> tuple[str, ...]:
    capability = torch.backends.cpu.get_cpu_capability()
    return _model() or platform.machine(), capability, f"{os.cpu_count()} processors"


def _model() -> str:
    """The processor's model: from Linux (on Arm, as numbers), or else from Python."""
    try:
        lines = _CPUS.read_text(errors="replace").splitlines()
    except OSError:
        return platform.processor()
    numbers: dict[str, None] = {}
    for line in lines:
        name, _, text = line.partition(":")
        name, text = name.strip(), text.strip()
        if name == "model name" and text:
            return text
        if name in _OF_ARM:
            numbers[f"{name.removeprefix('CPU ')} {text}"] = None
    return ", ".join(numbers) or platform.processor()


def cores() -> int:
    """The number of processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def seconds_without_a_core() -> float:
    """The seconds for which threads of this process were ready to run and had to wait for a core.

    It is the sum over the threads that live now, each since its start. Linux counts it in
    ``/proc/self/task/*/schedstat`` (documented as "time spent waiting on a runqueue"). The result
    is 0 if the system does not report it.
    """
    nanoseconds = 0
    for each in _THREADS.glob("*/schedstat"):
        with contextlib.suppress(OSError):
            nanoseconds += int(each.read_text().split()[1])
    return nanoseconds / 1e9


def seconds_of_others() -> float | None:
    """The CPU seconds of other programs on the cores of this process, since the system's start.

    Programs that stand back by a nice value are left out. Linux counts in ``/proc/stat``. The
    result is ``None`` if the system does not report it.
    """
    if not _TIMES.exists():
        return None
    mine = {f"cpu{each}" for each in os.sched_getaffinity(0)}
    ticks = 0
    for line in _TIMES.read_text().splitlines():
        name, *numbers = line.split()
        if name in mine:
            user, _, system, _, _, *interrupts_and_stolen = map(int, numbers[:8])
            ticks += user + system + sum(interrupts_and_stolen)
    return ticks / os.sysconf("SC_CLK_TCK") - time.process_time()


@dataclass(frozen=True, slots=True)
class Waits:
    """How long threads of this process wait for a core, since some moment.

    Attributes:
        waited: The :func:`seconds_without_a_core` at that moment; 0 for the start of the process.
        ran: The CPU seconds of this process then.
        others: The :func:`seconds_of_others` then; ``None`` if they are not known.
        began: That moment, in seconds.
    """

    waited: float = 0.0
    ran: float = 0.0
    others: float | None = None
    began: float = 0.0

    @staticmethod
    def from_now() -> Waits:
        """Return the waits that begin now. A reading takes 20 us for each thread."""
        waited = seconds_without_a_core()
        return Waits(waited, time.process_time(), seconds_of_others(), time.perf_counter())

    def beside_load(self) -> bool:
        """Return True if threads of this process waited, and other programs took the cores.

        The time for which the process's own threads wait for each other is left out.
        """
        now = Waits.from_now()
        waited = max(now.waited - self.waited, 0.0)
        share = waited / max(waited + now.ran - self.ran, 1e-9)
        for_each_other = max(1 - cores() / torch.get_num_threads(), 0.0)
        if share - for_each_other <= _BUSY:
            return False
        if self.others is None or now.others is None:
            return True
        return now.others - self.others > _BUSY * (now.began - self.began)
