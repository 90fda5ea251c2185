"""Where an engine runs: the device, its streams, and what a plan for it depends on."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch

from composer.backends.tensorrt.plan import Target
from composer.system import forks
from composer.system.hardware import nvidia_driver

_one_records = forks.lock()


class Place(Protocol):
    """A device, as far as running a plan asks for one."""

    device: torch.device
    """Where inputs and outputs are."""

    @property
    def target(self) -> Target:
        """What plans for it are built for."""

    def stream(self) -> int:
        """The handle of the stream that the work of the calling thread goes to."""

    def current(self) -> AbstractContextManager[object]:
        """While it is entered, the device is the calling thread's current one.

        TensorRT loads an engine on the current device, and runs it there and nowhere else.
        """

    def launching(self) -> AbstractContextManager[object]:
        """While it is entered, the device's stream waits for the caller's."""

    def record(self, launch: Callable[[int], None]) -> Callable[[], None]:
        """Record what ``launch`` puts on a stream, after one run of it; returns what replays it."""

    def wait(self) -> None:
        """Wait until the work on the calling thread's stream is done."""


class CudaPlace:
    """A CUDA device: work goes to torch's current stream.

    On the default stream TensorRT would wait for the whole device at each call, so that there the
    work goes to a stream of ours, which waits for the default one before and is waited for after.

    Not run: no machine with a GPU was at hand.
    """

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self._default = torch.cuda.default_stream(self.device)
        self._side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]  # torch's own
        self._recording = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]  # as above

    @functools.cached_property
    def target(self) -> Target:
        """Name and compute capability of the GPU, and the driver."""
        capability = torch.cuda.get_device_capability(self.device)
        return Target(torch.cuda.get_device_name(self.device), capability, _driver())

    def stream(self) -> int:
        """The current stream's handle, or that of the stream beside the default one."""
        return self._stream().cuda_stream

    def current(self) -> AbstractContextManager[object]:
        """As torch's own."""
        return torch.cuda.device(self.device)

    @contextmanager
    def launching(self) -> Iterator[None]:
        """Order the work after what the caller's stream holds, and that stream after the work."""
        current, chosen = torch.cuda.current_stream(self.device), self._stream()
        if chosen != current:
            chosen.wait_stream(current)
        yield
        if chosen != current:
            current.wait_stream(chosen)

    def record(self, launch: Callable[[int], None]) -> Callable[[], None]:
        """Record a CUDA graph. The run before it makes what TensorRT makes at the first run.

        One at a time, on a stream that nothing else is launched on; what other threads do meanwhile
        is neither recorded nor forbidden.
        """
        graph, stream = torch.cuda.CUDAGraph(), self._recording
        with _one_records:
            stream.wait_stream(torch.cuda.current_stream(self.device))
            launch(stream.cuda_stream)
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                launch(stream.cuda_stream)
            torch.cuda.current_stream(self.device).wait_stream(stream)
        return graph.replay

    def wait(self) -> None:
        """Wait for the current stream."""
        torch.cuda.current_stream(self.device).synchronize()

    def _stream(self) -> torch.cuda.Stream:
        current = torch.cuda.current_stream(self.device)
        return self._side if current == self._default else current


def _driver() -> str:
    """The version of CUDA that the driver brings, and the driver's own where Linux says it."""
    number = ctypes.c_int()
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    return f"{number.value} {nvidia_driver()}".strip()
