"""Around the compiled callable, at every call: as little as can be."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, cast

from composer import _torch
from composer.records import Runtime

_TIMED = 16
"""The first so many calls are timed, then one in so many, which stands for the others."""


def watch(
    compiled: Callable[..., Any],
    runtime: Runtime,
    restore: Callable[[Sequence[Any]], Any] | None = None,
) -> Callable[..., Any]:
    """Count the calls of ``compiled`` and time some; costs about 0.1 us each (bench/overhead.py).

    Engines hand over callables that Dynamo must not trace. One such wrapper is enough, and Dynamo
    puts its own where it finds ours, so theirs is taken off: each costs about 0.4 us a call.

    Args:
        compiled: What serves the graph.
        runtime: Where calls are counted.
        restore: Makes the caller's structure of the flat outputs; for graphs of direct calls.
    """
    tick, run = runtime.tick, _torch.undisabled(compiled)

    def call(*args: Any) -> Any:
        number = tick()
        if number >= _TIMED and number % _TIMED:
            return run(*args)
        return timed(_TIMED if number >= _TIMED else 1, args)

    def timed(weight: int, args: tuple[Any, ...]) -> Any:
        started = time.perf_counter()
        outputs = run(*args)
        runtime.spent(weight * (time.perf_counter() - started))
        return outputs

    def call_and_restore(*args: Any) -> Any:
        return cast(Callable[..., Any], restore)(call(*args))

    return _torch.disabled(call if restore is None else call_and_restore)
