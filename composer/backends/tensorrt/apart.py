"""Builds a plan in a sandbox, so that a crash or hang of the builder happens there.

The sandbox gets the model as bytes, and the weights as files that it maps into memory. It writes
the plan to a file. The calling process then builds no plan; it only loads one.
"""

from __future__ import annotations

import json
import pickle
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from composer.backends.base import BuildTerms
from composer.backends.tensorrt.library import Library, load_library
from composer.backends.tensorrt.plan import Recipe, build_plan
from composer.errors import Refusal, SandboxRefusal, text_of
from composer.records import Reason, Status
from composer.system import subprocesses

_PLAN = "plan"


def build(library: Library, recipe: Recipe, terms: BuildTerms) -> bytes:
    """Build a plan, in a sandbox or in this process, and return its bytes.

    The limits of the terms say if a sandbox is used, and how much time is left.

    Raises:
        Refusal: as :func:`~composer.backends.tensorrt.plan.build_plan`, there or here. For the
            sandbox also ``crashed``, ``timed_out``, or ``failed`` with ``out_of_memory``.
    """
    limits = terms.limits_left()
    if not limits.isolate:
        return build_plan(library, recipe, terms.check_time)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="composer-") as folder:
        payload = _sent(recipe, Path(folder))
        answer = subprocesses.ask(f"{__name__}:work", payload, limits, began=terms.clock.excuse)
        if answer["status"] != Status.SUCCEEDED:
            status, reason = Status(answer.pop("status")), Reason(answer.pop("reason"))
            raise SandboxRefusal(status, reason, **answer)
        terms.facts.extra["isolated"] = {"seconds": round(time.perf_counter() - started, 3)}
        return (Path(folder) / _PLAN).read_bytes()


def work(payload: bytes, ready: Callable[[], None]) -> dict[str, Any]:
    """Build the plan in the sandbox, write it to its file, and return the outcome."""
    recipe, folder = _received(payload)
    library = load_library()
    ready()
    try:
        plan = build_plan(library, recipe)
    except Refusal as refusal:
        outcome = {"status": refusal.status, "reason": refusal.reason, "message": str(refusal)}
        return json.loads(json.dumps(outcome))  # type: ignore[no-any-return]  # enums as text
    except Exception as error:  # noqa: BLE001  # becomes the caller's record
        failed = {"status": Status.FAILED.value, "reason": Reason.BUILD_FAILED.value}
        return {**failed, "message": text_of(error), "error_type": type(error).__name__}
    (folder / _PLAN).write_bytes(plan)
    return {"status": Status.SUCCEEDED.value}


def _sent(recipe: Recipe, folder: Path) -> bytes:
    """Return the recipe as bytes, with its weights in files.

    There may not be enough memory for a copy of the weights.
    """
    places = {}
    for index, (name, tensor) in enumerate(recipe.weights.items()):
        flat = tensor.reshape(-1).view(torch.uint8)
        places[name] = (f"weight{index}", tensor.dtype, tuple(tensor.shape))
        flat.numpy().tofile(folder / f"weight{index}")
    return pickle.dumps((replace(recipe, weights={}), places, str(folder)))


def _received(payload: bytes) -> tuple[Recipe, Path]:
    recipe, places, at = pickle.loads(payload)  # sent by the parent process
    folder = Path(at)
    weights = {name: _mapped(folder / file, *facts) for name, (file, *facts) in places.items()}
    return replace(recipe, weights=weights), folder


def _mapped(path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    size = path.stat().st_size
    if not size:
        return torch.empty(shape, dtype=dtype)
    return torch.from_file(str(path), size=size, dtype=torch.uint8).view(dtype).reshape(shape)
