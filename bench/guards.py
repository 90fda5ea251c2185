"""What Dynamo's guards are of a call: composer with and without them, against ONNX Runtime itself.

``python bench/guards.py`` calls a model natively and through composer's ``onnxrt``, with all guards
and with what each filter of ``torch.compiler`` leaves of them, in rounds
(docs/explanation/call-cost.md says what goes unnoticed then). One more variant calls what composer
gave to Dynamo on the graph's own inputs: what that takes more than the engine by itself is
composer's part. The rest is Dynamo's, and every backend of ``torch.compile`` pays it: guards, and
fetching each weight of the model.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import zoo
from compiles import own_code
from native_cpu import OnnxRuntime
from rich.console import Console
from rich.table import Table
from timing import Series, machine, measure, paired_ratio, write_json

import composer
from composer.dispatch import compose

NATIVE = "onnxruntime"
FILTERS: dict[str, Callable[..., Any] | None] = {
    "all guards": None,
    "without modules'": torch.compiler.skip_guard_on_all_nn_modules_unsafe,
    "only tensors'": torch.compiler.keep_tensor_guards_unsafe,
    "none": torch.compiler.skip_all_guards_unsafe,
}
BY_ITSELF = "without Dynamo"
OPTIONS: dict[str, Any] = {"chain": ["onnxrt"]}


def call_it(module: torch.nn.Module, inputs: Mapping[str, torch.Tensor]) -> object:
    """What is compiled: a function, so that each filter can have a code object of its own."""
    return module(**inputs)


def compiled(name: str, keep: Callable[..., Any] | None) -> Callable[..., object]:
    """The function, with the guards that ``keep`` leaves."""
    options = OPTIONS | ({"guard_filter_fn": keep} if keep else {})
    own = own_code(call_it, name)
    return torch.compile(own, backend="composer", dynamic=False, options=options)


def by_itself(module: torch.nn.Module, inputs: Mapping[str, torch.Tensor]) -> Callable[[], object]:
    """A call of what composer gave to Dynamo for the model's graph, on the graph's inputs."""
    calls: list[Callable[[], object]] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        served = compose(gm, example_inputs, options=OPTIONS)

        def call(*args: Any) -> Any:
            calls.append(functools.partial(served, *args))
            return served(*args)

        return call

    torch.compile(own_code(call_it, "by_itself"), backend=backend, dynamic=False)(module, inputs)
    (only,) = calls
    return only


def bench(model: str, rounds: int, calls: int, *, tiny: bool = False) -> dict[str, Any]:
    """Milliseconds of a call by guards, and the ratios to the engine by itself.

    Raises:
        RuntimeError: ``onnxrt`` does not serve.
    """
    module, inputs = zoo.build(model, tiny=tiny)
    variants: dict[str, Callable[[], object]] = {
        NATIVE: functools.partial(OnnxRuntime(module), **inputs)
    }
    for name, keep in FILTERS.items():
        variants[name] = functools.partial(compiled(name, keep), module, inputs)
    variants[BY_ITSELF] = by_itself(module, inputs)
    for each in variants.values():
        each()
    for report in composer.reports():
        chosen = report.chosen
        if chosen != "onnxrt":
            raise RuntimeError(f"meant to measure onnxrt, but {chosen} serves")
    taken = measure(variants, rounds, calls=calls)
    return {"milliseconds": {n: s.to_dict() for n, s in taken.items()}, "ratios": ratios(taken)}


def ratios(taken: Mapping[str, Series]) -> dict[str, Any]:
    """Each by the native engine's, round by round."""
    native = taken[NATIVE]
    return {n: paired_ratio(s, native).to_dict() for n, s in taken.items() if n != NATIVE}


def show(model: str, found: Mapping[str, Any]) -> None:
    """A table of one model."""
    table = Table("guards", "median ms", "of native", "quartiles", title=model)
    for name, each in found["milliseconds"].items():
        told = found["ratios"].get(name)
        spread = (f"{told['median']:.3f}", f"{told['p25']:.3f}-{told['p75']:.3f}") if told else ()
        table.add_row(name, f"{each['median_ms']:.2f}", *spread)
    Console().print(table)


def main() -> None:
    """Print the figures of each model; ``--json PATH`` writes them as well."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="t5,mobilenet,bert", help="names of the zoo")
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--calls", type=int, default=10, help="that are timed together")
    parser.add_argument("--tiny", action="store_true", help="the small sizes")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    record: dict[str, Any] = {"machine": machine(), "models": {}}
    with torch.no_grad():
        for model in given.models.split(","):
            torch.compiler.reset()
            found = bench(model, given.rounds, given.calls, tiny=given.tiny)
            record["models"][model] = found
            show(model, found)
    if given.json:
        write_json(given.json, record)


if __name__ == "__main__":
    main()
