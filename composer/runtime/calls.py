"""The code that runs around the engine at every call of a compiled graph: as little as possible."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from composer import _torch
from composer.chain import verify
from composer.records import Runtime
from composer.runtime.served import Compiled, ServedGraph
from composer.runtime.versions import UNREADABLE
from composer.system import control_flow

_TIMED = 16
"""The first 16 calls are timed. After that one call in 16 is timed, and counts 16 times."""


def around(served: ServedGraph, runtime: Runtime) -> Compiled:
    """Return the code around each call. It counts and times calls, and survives failures.

    bench/overhead.py measures what it costs.

    Args:
        served: The graph. It answers the calls that are not ordinary.
        runtime: Counts the calls.
    """
    versions = served.versions
    tick, read, unread = runtime.tick, versions.read, versions.unread

    def call(*args: Any) -> Any:
        number = tick()
        run = serve = served.run
        before: object = unread
        try:
            if read is not None:
                try:
                    before = read(args)
                except UNREADABLE:  # then writes cannot be detected
                    before = None
            if number >= served.due:
                run, serve = served.special(number, run)
            if number >= _TIMED and number % _TIMED:
                outputs = serve(*args)
            else:
                started, aside = time.perf_counter(), served.aside
                outputs = verify.outputs_of(serve(*args))
                taken = time.perf_counter() - started - (served.aside - aside)
                runtime.spent(max(taken, 0.0) * (1 if number < _TIMED else _TIMED))
            return verify.outputs_of(outputs) if outputs is None else outputs
        except BaseException as error:
            control_flow.pass_on(error)
            outputs = served.answer(error, run, args, before)
            if outputs is None:
                raise
            return outputs

    return call


def watch(
    call: Compiled,
    free: Callable[[], None],
    flatten: Callable[[Sequence[Any]], list[Any]] | None = None,
    restore: Callable[[Sequence[Any]], Any] | None = None,
) -> Compiled:
    """Return the callable that the program calls.

    Dynamo must trace neither this callable nor the engine's callable within. One
    ``torch.compiler.disable`` is enough for both. So the engine's own wrapper is removed, which
    saves about 0.4 us a call.

    Args:
        call: The code :func:`around` each call.
        free: Notes that the program has dropped the graph.
        flatten: Converts the caller's inputs to the graph's, if they hold lists or other dtypes.
        restore: Puts the flat outputs back into the caller's structure; for graphs that are called
            directly, without Dynamo.
    """
    weakref.finalize(call, free).atexit = False

    def call_within(*args: Any) -> Any:
        outputs = call(*(args if flatten is None else flatten(args)))
        return outputs if restore is None else restore(outputs)

    return _torch.breaks.disabled(call if flatten is restore is None else call_within)
