"""The ways to run a model that ``bench/models.py`` compares."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from native_cpu import OnnxRuntime, OpenVino
from torch import nn
from torch._inductor import config as inductor_config

EAGER, INDUCTOR = "eager", "inductor"
MAX_AUTOTUNE = "inductor, max-autotune"
ONNX_RUNTIME, OPENVINO = "onnxruntime", "openvino"
FIRST, FASTEST = "composer", "composer, fastest"
WITHOUT_OPENVINO = "composer, fastest, no openvino"
PRECISIONS = ("fp32", "bf16")


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to run a model.

    Attributes:
        name: In tables and JSON.
        make: What to call instead of a module, in a precision; its first call compiles.
        single: Whether it is one engine by itself: what a choice among engines is held against.
        trains: Whether it can run a step of training.
        precisions: Those it can be asked for.
        lowers_itself: Whether bfloat16 is its own affair: it is given the model in float32.
        native: The same engine called by itself, which its calls are held against.
        by_default: Whether it runs when nobody names it.
    """

    name: str
    make: Callable[[nn.Module, str, bool], Callable[..., Any]]
    single: bool = True
    trains: bool = True
    precisions: tuple[str, ...] = PRECISIONS
    lowers_itself: bool = False
    native: str = ""
    by_default: bool = True


def _compiled(**given: Any) -> Callable[[nn.Module, str, bool], Callable[..., Any]]:
    return lambda module, precision, training: torch.compile(module, dynamic=False, **given)


def _frozen(module: nn.Module, precision: str, training: bool) -> Callable[..., Any]:
    """As by ``TORCHINDUCTOR_FREEZING=1``; the option takes no weights in (torch 2.13)."""
    compiled = torch.compile(module, dynamic=False)

    def first(**inputs: Any) -> Any:
        with inductor_config.patch(freezing=True):
            return compiled(**inputs)

    calls = itertools.chain([first], itertools.repeat(compiled))
    return lambda **inputs: next(calls)(**inputs)


def _by_composer(
    choose: bool, *, openvino: bool = True
) -> Callable[[nn.Module, str, bool], Callable[..., Any]]:
    """By the default chain, or by the fastest of all engines for the CPU.

    In bfloat16 that is ``precision = "auto"``: each engine where it is accurate enough.
    """

    def make(module: nn.Module, precision: str, training: bool) -> Callable[..., Any]:
        options: dict[str, Any] = {"precision": "auto"} if precision == "bf16" else {}
        if choose:
            options |= {"select": "fastest", "chain": _chain(training, openvino)}
        return torch.compile(module, backend="composer", dynamic=False, options=options or None)

    return make


def _in_chain(engine: str, native: str) -> Variant:
    """An engine with nothing else in composer's chain, held against the same engine by itself."""
    return Variant(
        f"composer[{engine.removeprefix('composer_')}]",
        _compiled(backend="composer", options={"chain": [engine]}),
        single=False,
        trains=engine == "onnxrt",
        precisions=("fp32",),
        native=native,
    )


def _chain(training: bool, openvino: bool) -> list[Any]:
    """Freezing is for inference only."""
    inductor = INDUCTOR if training else {"backend": INDUCTOR, "options": {"freezing": True}}
    here = openvino and importlib.util.find_spec("openvino") is not None
    return ["onnxrt", inductor, *(["openvino"] if here else [])]


VARIANTS: Mapping[str, Variant] = MappingProxyType(
    {
        each.name: each
        for each in (
            Variant(EAGER, lambda module, precision, training: module),
            Variant(INDUCTOR, _compiled()),
            Variant(MAX_AUTOTUNE, _compiled(mode="max-autotune")),
            Variant("inductor, freezing", _frozen, trains=False),
            Variant(
                ONNX_RUNTIME,
                lambda module, precision, training: OnnxRuntime(module),
                trains=False,
                precisions=("fp32",),
            ),
            Variant(
                OPENVINO,
                lambda module, precision, training: OpenVino(module, precision),
                trains=False,
                lowers_itself=True,
            ),
            _in_chain("onnxrt", ONNX_RUNTIME),
            _in_chain("openvino", OPENVINO),
            Variant(FIRST, _by_composer(choose=False), single=False, lowers_itself=True),
            Variant(FASTEST, _by_composer(choose=True), single=False, lowers_itself=True),
            Variant(
                WITHOUT_OPENVINO,
                _by_composer(choose=True, openvino=False),
                single=False,
                lowers_itself=True,
                by_default=False,
            ),
        )
    }
)
"""By name. ONNX Runtime has few kernels for bfloat16 on the CPU, and runs in float32 only."""

ONE_OF_EACH = frozenset({INDUCTOR, MAX_AUTOTUNE, ONNX_RUNTIME, OPENVINO, FASTEST})
"""Names of variants that reach every engine in every way."""
