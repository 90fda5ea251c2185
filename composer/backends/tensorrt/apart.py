"""A plan built in a sandbox: a builder that crashes or hangs does so there.

The sandbox is given the model, by bytes, and the weights, by files that it maps; it leaves the plan
in a file. Nothing of TensorRT's builder runs in the calling process then, which only loads it.
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
    """A plan: from a sandbox, or from this process.

    Args:
        library: The TensorRT to use.
        recipe: What to build.
        terms: Of the build: whether to build in a sandbox, and what is left to it.

    Raises:
        Refusal: what :func:`~composer.backends.tensorrt.plan.build_plan` raises, there or here;
            ``crashed``, ``timed_out`` or ``failed`` with ``out_of_memory`` for the sandbox.
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
    """The work of the sandbox: build the plan, leave it in its file, say what became of it."""
    recipe, folder = _received(payload)
    library = load_library()
    ready()
    try:
        plan = build_plan(library, recipe)
    except Refusal as refusal:
        told = {"status": refusal.status, "reason": refusal.reason, "message": str(refusal)}
        return json.loads(json.dumps(told))  # type: ignore[no-any-return]  # enums as text
    except Exception as error:  # noqa: BLE001  # becomes the caller's record
        failed = {"status": Status.FAILED.value, "reason": Reason.BUILD_FAILED.value}
        return {**failed, "message": text_of(error), "error_type": type(error).__name__}
    (folder / _PLAN).write_bytes(plan)
    return {"status": Status.SUCCEEDED.value}


def _sent(recipe: Recipe, folder: Path) -> bytes:
    """The recipe, its weights left in files: they may be larger than memory allows to be copied."""
    places = {}
    for index, (name, tensor) in enumerate(recipe.weights.items()):
        flat = tensor.reshape(-1).view(torch.uint8)
        places[name] = (f"weight{index}", tensor.dtype, tuple(tensor.shape))
        flat.numpy().tofile(folder / f"weight{index}")
    return pickle.dumps((replace(recipe, weights={}), places, str(folder)))


def _received(payload: bytes) -> tuple[Recipe, Path]:
    recipe, places, at = pickle.loads(payload)  # from the pipe of the process that started this one
    folder = Path(at)
    weights = {name: _mapped(folder / file, *facts) for name, (file, *facts) in places.items()}
    return replace(recipe, weights=weights), folder


def _mapped(path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    size = path.stat().st_size
    if not size:
        return torch.empty(shape, dtype=dtype)
    return torch.from_file(str(path), size=size, dtype=torch.uint8).view(dtype).reshape(shape)
