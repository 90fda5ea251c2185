"""What benches that compile share: caches, code objects, timing what compiled, errors in a line."""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import os
import re
import tempfile
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, cast

import torch
from timing import Series, VariantError
from torch import Tensor

log = logging.getLogger("bench.compiles")

Call = Callable[[], object]
Outputs = tuple[Tensor, ...]
Function = TypeVar("Function", bound=Callable[..., Any])


def time_together(
    calls: Mapping[str, Call], measured: Callable[[Mapping[str, Call]], dict[str, Series]]
) -> tuple[dict[str, Series], dict[str, str]]:
    """Time all variants in the same rounds, starting anew without any that raises.

    All variants of a model share Dynamo's cache, where each entry belongs to one backend with its
    options. ``fail_on_recompile`` makes a variant raise, not compile, should it miss its entry.

    Args:
        calls: What to call, by variant.
        measured: Times them, such as :func:`timing.measure`.

    Returns:
        The times by variant, and the error's first line for each variant that raised.
    """
    left, failures = dict(calls), dict[str, str]()
    with torch.compiler.set_stance("fail_on_recompile"):
        while left:
            try:
                return measured(left), failures
            except VariantError as error:
                log.debug("timing failed", exc_info=True)
                failures[error.variant] = "timing: " + first_line(error.__cause__ or error)
                del left[error.variant]
    return {}, failures


def own_code(function: Function, name: str) -> Function:
    """The same function over a code object of its own.

    Dynamo looks through the cache entries of one code object in turn.
    """
    given = cast(types.FunctionType, function)
    code = given.__code__.replace(co_name=name, co_qualname=name)
    made = types.FunctionType(code, given.__globals__, name, None, given.__closure__)
    return cast(Function, made)


def flat(outputs: Tensor | Outputs) -> Outputs:
    """What a model of the zoo returned, always as a tuple."""
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


def first_line(error: BaseException) -> str:
    """The error's type and first line; of Dynamo's, what the backend raised. No folder names."""
    cause = getattr(error, "inner_exception", error)
    lines = (line.strip() for line in str(cause).splitlines())
    text = without_folders(next(filter(None, lines), ""))
    return f"{type(cause).__name__}: {text}" if text else type(cause).__name__


def without_folders(text: str) -> str:
    """The text with files by their names alone: where they lie is a matter of this machine."""
    return re.sub(r"(?<![\w.])(?:/[\w.+-]+)+/", "", text)


@contextlib.contextmanager
def own_caches() -> Iterator[None]:
    """Have Inductor keep its kernels in a folder that is empty now and gone afterwards."""
    variable = "TORCHINDUCTOR_CACHE_DIR"
    folder_before = os.environ.get(variable)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.environ[variable] = folder
        try:
            yield
        finally:
            os.environ.pop(variable, None)
            if folder_before is not None:
                os.environ[variable] = folder_before


@contextlib.contextmanager
def cold_compiles() -> Iterator[None]:
    """Let every compile start from empty caches.

    Inductor would otherwise find the kernels of the variant, or of the run, before.
    """
    disabled_before = torch.compiler.config.force_disable_caches
    with own_caches():
        torch.compiler.config.force_disable_caches = True
        try:
            yield
        finally:
            torch.compiler.config.force_disable_caches = disabled_before


def forget() -> None:
    """Free what the last model compiled."""
    torch.compiler.reset()
    gc.collect()


def positive(text: str) -> int:
    """A whole number from 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number
