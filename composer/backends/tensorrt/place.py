"""Where an engine runs: the device, its streams, and what a plan for it depends on."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from composer.backends.tensorrt.plan import Target
from composer.system import forks
from composer.system.hardware import nvidia_driver

_one_records = forks.lock()


class Place:
    """A CUDA device, with what running a plan needs: work goes to torch's current stream.

    On the default stream TensorRT would wait for the whole device at each call. In that case the
    work goes to a side stream. The side stream waits for the default one first, and the default one
    waits for it afterwards.

    Attributes:
        device: The device of inputs and outputs.
    """

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self._default = torch.cuda.default_stream(self.device)
        self._side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]  # torch's own
        self._recording = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]  # as above

    @functools.cached_property
    def target(self) -> Target:
        """The GPU and driver that plans are built for."""
        capability = torch.cuda.get_device_capability(self.device)
        return Target(torch.cuda.get_device_name(self.device), capability, _driver())

    def stream(self) -> int:
        """Return the current stream's handle, or the side stream's instead of the default one's."""
        return self._stream().cuda_stream

    def current(self) -> AbstractContextManager[object]:
        """Return a context in which the device is the calling thread's current one.

        TensorRT loads an engine on the current device, and can run it only there.
        """
        return torch.cuda.device(self.device)

    @contextmanager
    def launching(self) -> Iterator[None]:
        """Run the work after the work on the caller's stream, and before what follows there."""
        current, chosen = torch.cuda.current_stream(self.device), self._stream()
        if chosen != current:
            chosen.wait_stream(current)
        yield
        if chosen != current:
            current.wait_stream(chosen)

    def record(self, launch: Callable[[int], None]) -> Callable[[], None]:
        """Run ``launch`` on a stream, record a second run, and return a function that replays it.

        TensorRT creates some objects at its first run, so ``launch`` runs once before the
        recording. Only one recording happens at a time, on a stream that is used for nothing else.
        Work of other threads during a recording is allowed, and is not recorded.
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
        """Wait until the work on the calling thread's stream is done."""
        torch.cuda.current_stream(self.device).synchronize()

    def _stream(self) -> torch.cuda.Stream:
        current = torch.cuda.current_stream(self.device)
        return self._side if current == self._default else current


@functools.cache
def place_on(device: torch.device) -> Place:
    """Return the place of a CUDA device, whose streams all regions share."""
    return Place(device)


def _driver() -> str:
    """Return the driver's CUDA version, and on Linux the version of the driver itself."""
    number = ctypes.c_int()
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    return f"{number.value} {nvidia_driver()}".strip()
