"""Two processes with a default group of gloo, kept for a whole file of tests."""

from __future__ import annotations

import contextlib
import multiprocessing
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_SECONDS = 90.0


class Pair:
    """Runs a function of a module on both ranks; each call has a group of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._calls = 0
        context = multiprocessing.get_context("spawn")
        self._ends: list[Connection] = []
        self._processes = []
        for rank in range(2):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, theirs, sys.path), daemon=True)
            process.start()
            self._ends.append(mine)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What ``function(rank, *args)`` returns on each.

        Raises:
            AssertionError: it raised on a rank, or a rank waits for ever.
        """
        self._calls += 1
        met_by = self._folder / f"store{self._calls}"
        for end in self._ends:
            end.send((function, args, str(met_by)))
        answers = []
        for rank, end in enumerate(self._ends):
            if not end.poll(_SECONDS):
                self.close()
                raise AssertionError(f"rank {rank} gave no answer within {_SECONDS:g} s")
            answers.append(end.recv())
        slips = [text for good, text in answers if not good]
        if slips:
            raise AssertionError("\n".join(slips))
        return [value for _, value in answers]

    def close(self) -> None:
        """End both."""
        for process in self._processes:
            process.kill()
            process.join()


@contextlib.contextmanager
def pair(folder: Path) -> Iterator[Pair]:
    """Two ranks, ended at the end."""
    both = Pair(folder)
    try:
        yield both
    finally:
        both.close()


def _serve(rank: int, calls: Connection, path: list[str]) -> None:
    sys.path[:] = path
    warnings.simplefilter("ignore")
    while True:
        function, args, met_by = calls.recv()
        try:
            calls.send((True, _one(rank, function, args, met_by)))
        except Exception:  # noqa: BLE001  # raised again by the test
            calls.send((False, f"rank {rank}: {traceback.format_exc()}"))


def _one(rank: int, function: Callable[..., Any], args: Any, met_by: str) -> Any:
    import torch
    from torch import distributed

    import composer
    from composer.chain import ranks

    # Rank 0 leads, also where a busy machine lets it begin seconds after rank 1.
    ranks._GRACE = 30.0
    torch.set_num_threads(1)
    torch.compiler.reset()
    composer.reset()
    composer.configure(None)
    torch.manual_seed(0)
    store = distributed.FileStore(met_by, 2)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    try:
        return function(rank, *args)
    finally:
        distributed.destroy_process_group()
