"""Around the compiled callable, at every call: as little as can be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from composer import _torch
from composer.records import Runtime


def watch(
    compiled: Callable[..., Any],
    runtime: Runtime,
    restore: Callable[[Sequence[Any]], Any] | None = None,
) -> Callable[..., Any]:
    """Count the calls of ``compiled``; costs about 0.1 us each (bench/overhead.py).

    Engines hand over callables that Dynamo must not trace. One such wrapper is enough, and Dynamo
    puts its own where it finds ours, so theirs is taken off: each costs about 0.4 us a call.

    Args:
        compiled: What serves the graph.
        runtime: Where calls are counted.
        restore: Makes the caller's structure of the flat outputs; for graphs of direct calls.
    """
    tick, run = runtime.tick, _torch.undisabled(compiled)

    def call(*args: Any) -> Any:
        tick()
        return run(*args)

    def call_and_restore(*args: Any) -> Any:
        tick()
        return cast(Callable[..., Any], restore)(run(*args))

    return _torch.disabled(call if restore is None else call_and_restore)
