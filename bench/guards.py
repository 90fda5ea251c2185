"""Where the time of a call goes: Dynamo's guards and prologue, composer, AOTAutograd, the engine.

``python bench/guards.py`` calls a model by an engine natively and through composer with only that
engine, in rounds: with all guards, with what each filter of ``torch.compiler`` leaves of them
(docs/explanation/call-cost.md says what goes unnoticed then), and without those on weights, which
is the most that a filter of weights could gain. Further variants leave out one layer each:

- without Dynamo: what composer gave to Dynamo, on the graph's own inputs;
- without composer: what the engine gave to composer;
- without AOTAutograd: the regions of the graph, on their own arguments;
- without the check of weights: what the engine loaded for each region.

The differences between neighbours are the parts. Guards and the prologue, which fetches each weight
of the model, are Dynamo's, and every backend of ``torch.compile`` pays them.
"""

from __future__ import annotations

import argparse
import functools
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import zoo
from compiles import own_code
from native_cpu import Native, OnnxRuntime, OpenVino
from rich.console import Console
from rich.table import Table
from timing import Series, machine, measure, paired_ratio, write_json

import composer
from composer.dispatch import compose
from composer.lowering.loaded import BoundRegion
from composer.runtime.served import ServedGraph


def without_weights(entries: Sequence[Any]) -> list[bool]:
    """Leave out the guards on parameters, and on buffers of torch's own modules."""
    return [not is_of_weight(entry) for entry in entries]


def is_of_weight(entry: Any) -> bool:
    """True for a guard on the sizes, strides, dtype and so on of a weight."""
    is_parameter = type(entry.value) is torch.nn.Parameter
    is_of_torch = entry.orig_guard.source.is_unspecialized_builtin_nn_module()
    return entry.guard_type == "TENSOR_MATCH" and (is_parameter or is_of_torch)


NATIVES = {"onnxrt": "onnxruntime", "openvino": "openvino"}
FILTERS: dict[str, Callable[..., Any] | None] = {
    "all guards": None,
    "without weights'": without_weights,
    "without modules'": torch.compiler.skip_guard_on_all_nn_modules_unsafe,
    "only tensors'": torch.compiler.keep_tensor_guards_unsafe,
    "none": torch.compiler.skip_all_guards_unsafe,
}
LAYERS = (
    "without Dynamo",
    "without composer",
    "without AOTAutograd",
    "without the check of weights",
)
PARTS = {
    "guards on weights": ("all guards", "without weights'"),
    "other guards": ("without weights'", "none"),
    "Dynamo's prologue": ("none", LAYERS[0]),
    "composer": LAYERS[0:2],
    "AOTAutograd, torch's nodes": LAYERS[1:3],
    "check of weights": LAYERS[2:4],
    "feed and engine": (LAYERS[3], None),
}
"""Each part, as the difference of two variants."""


def call_it(module: torch.nn.Module, inputs: Mapping[str, torch.Tensor]) -> object:
    """What is compiled: a function, so that each filter can have a code object of its own."""
    return module(**inputs)


def compiled(name: str, keep: Callable[..., Any] | None, engine: str) -> Callable[..., object]:
    """The function, with the guards that ``keep`` leaves."""
    options = {"chain": [engine]} | ({"guard_filter_fn": keep} if keep else {})
    own = own_code(call_it, name)
    return torch.compile(own, backend="composer", dynamic=False, options=options)


def layers(
    module: torch.nn.Module, inputs: Mapping[str, torch.Tensor], engine: str
) -> dict[str, Callable[[], object]]:
    """Calls that begin further and further within, for the model's one graph."""
    calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        call = compose(gm, example_inputs, options={"chain": [engine]})

        def noted(*args: Any) -> Any:
            calls.append((call, args))
            return call(*args)

        return noted

    before = {id(each) for each in served_graphs()}
    own = own_code(call_it, "layers")
    with regions_called() as regions:
        torch.compile(own, backend=backend, dynamic=False)(module, inputs)
        regions.clear()  # those of the compile itself
        (served,) = (each for each in served_graphs() if id(each) not in before)
        ((call, args),) = calls
        served.run(*args)
    runs = [(region._made_for(given).run, given) for region, given in regions]
    whole = [(call, args)], [(served.run, args)], regions, [(run, (given,)) for run, given in runs]
    return {
        name: functools.partial(one_by_one, each) for name, each in zip(LAYERS, whole, strict=True)
    }


def one_by_one(calls: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]]) -> None:
    """Make the calls in turn."""
    for call, args in calls:
        call(*args)


def served_graphs() -> list[ServedGraph]:
    """All that are alive."""
    return [each for each in gc.get_objects() if type(each) is ServedGraph]


@contextmanager
def regions_called() -> Iterator[list[tuple[BoundRegion, tuple[Any, ...]]]]:
    """Note each call of a region meanwhile, with its arguments."""
    found: list[tuple[BoundRegion, tuple[Any, ...]]] = []
    own = BoundRegion.__call__

    def noted(region: BoundRegion, *args: Any) -> Any:
        found.append((region, args))
        return own(region, *args)

    BoundRegion.__call__ = noted  # type: ignore[method-assign]
    try:
        yield found
    finally:
        BoundRegion.__call__ = own  # type: ignore[method-assign]


def native(module: torch.nn.Module, engine: str) -> Native:
    """The engine, called by itself."""
    return OnnxRuntime(module) if engine == "onnxrt" else OpenVino(module, "fp32")


def bench(model: str, engine: str, rounds: int, calls: int, *, tiny: bool) -> dict[str, Any]:
    """Milliseconds of a call by variant, the ratios to the engine by itself, and the parts.

    Raises:
        RuntimeError: the engine does not serve.
    """
    module, inputs = zoo.build(model, tiny=tiny)
    variants: dict[str, Callable[[], object]] = {
        NATIVES[engine]: functools.partial(native(module, engine), **inputs)
    }
    for name, keep in FILTERS.items():
        variants[name] = functools.partial(compiled(name, keep, engine), module, inputs)
    variants |= layers(module, inputs, engine)
    for each in variants.values():
        each()
    for report in composer.reports():
        if report.chosen != engine:
            raise RuntimeError(f"meant to measure {engine}, but {report.chosen} serves")
    taken = measure(variants, rounds, calls=calls)
    return {
        "milliseconds": {n: s.to_dict() for n, s in taken.items()},
        "ratios": ratios(taken, NATIVES[engine]),
        "parts": {n: part(taken, *pair).to_dict() for n, pair in PARTS.items()},
    }


def ratios(taken: Mapping[str, Series], native: str) -> dict[str, Any]:
    """Each by the native engine's, round by round."""
    return {n: paired_ratio(s, taken[native]).to_dict() for n, s in taken.items() if n != native}


def part(taken: Mapping[str, Series], whole: str, rest: str | None) -> Series:
    """What a variant takes more than another one, round by round."""
    if rest is None:
        return taken[whole]
    pairs = zip(taken[whole].milliseconds, taken[rest].milliseconds, strict=True)
    return Series(tuple(a - b for a, b in pairs))


def show(model: str, found: Mapping[str, Any]) -> None:
    """A table of one model."""
    table = Table("variant", "median ms", "of native", "quartiles", title=model)
    for name, each in found["milliseconds"].items():
        told = found["ratios"].get(name)
        spread = (f"{told['median']:.3f}", f"{told['p25']:.3f}-{told['p75']:.3f}") if told else ()
        table.add_row(name, f"{each['median_ms']:.2f}", *spread)
    parts = Table("part", "median us", title=model)
    for name, each in found["parts"].items():
        parts.add_row(name, f"{each['median_ms'] * 1e3:,.0f}")
    Console().print(table, parts)


def main() -> None:
    """Print the figures of each model; ``--json PATH`` writes them as well."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="t5,mobilenet,bert", help="names of the zoo")
    parser.add_argument("--engine", choices=NATIVES, default="onnxrt")
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--calls", type=int, default=10, help="that are timed together")
    parser.add_argument("--tiny", action="store_true", help="the small sizes")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    record: dict[str, Any] = {"machine": machine(), "native": NATIVES[given.engine], "models": {}}
    with torch.no_grad():
        for model in given.models.split(","):
            torch.compiler.reset()
            found = bench(model, given.engine, given.rounds, given.calls, tiny=given.tiny)
            record["models"][model] = found
            show(model, found)
    if given.json:
        write_json(given.json, record)


if __name__ == "__main__":
    main()
