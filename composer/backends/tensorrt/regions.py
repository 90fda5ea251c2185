"""One region of a graph, run by plans: one plan for each set of weights, built or from disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from composer.backends.onnx_engine import Loaded, OnnxBuild, OnnxGraph, Region
from composer.backends.tensorrt import apart, cache
from composer.backends.tensorrt.execution import LoadedPlan
from composer.backends.tensorrt.library import Library
from composer.backends.tensorrt.loading import Signature
from composer.backends.tensorrt.log import Lines
from composer.backends.tensorrt.place import Place
from composer.backends.tensorrt.plan import Recipe
from composer.backends.tensorrt.profiles import (
    Ranges,
    Shape,
    profile_of,
    ranges_of,
    symbols_in,
    wider,
)
from composer.backends.tensorrt.refit import refit
from composer.backends.tensorrt.settings import Settings
from composer.backends.tf32 import allows_both
from composer.errors import Refusal
from composer.lowering.export.plain import shapes_with_symbols
from composer.system import forks
from composer.system.disk import digest_of


@dataclass(slots=True)
class Read:
    """A region's model that TensorRT's parser accepts, and the sizes that plans are made for.

    Attributes:
        graph: The model.
        dtypes: The torch dtype of each input and output of the model, by name.
        shapes: The shapes of the inputs with symbolic sizes, by name.
        ranges: The ranges of the symbolic sizes, one set for each profile.
    """

    graph: OnnxGraph
    dtypes: Mapping[str, torch.dtype]
    shapes: Mapping[str, tuple[int | torch.SymInt, ...]]
    ranges: tuple[Ranges, ...]
    _lock: Any = field(default_factory=forks.lock)

    @staticmethod
    def of(graph: OnnxGraph, region: Region, settings: Settings) -> Read:
        """Return the model of a region with ranges around the sizes of the first call."""
        shapes = shapes_with_symbols(graph, region.gm)
        ranges = ranges_of(shapes, settings.profiles)
        return Read(graph, dtypes_of(graph, region), shapes, ranges)

    def widen(self, called: Mapping[str, Shape]) -> None:
        """Widen the last profile to contain the shapes of a call.

        Another thread may have widened the profile before, for these shapes or for others.
        """
        with self._lock:
            values = symbols_in(self.shapes, called)
            self.ranges = (*self.ranges[:-1], wider(self.ranges[-1], values))


@dataclass(frozen=True, slots=True)
class Plans:
    """Makes the plans of one region."""

    library: Library
    place: Place
    read: Read
    build: OnnxBuild[Settings]

    def load(self, weights: Mapping[str, torch.Tensor]) -> Loaded:
        """Return a plan with these weights, from disk or built."""
        settings = self.build.settings
        with self.place.current():
            plan, found_on_disk = self._found_or_built(weights)

        sums = {
            "regions": 1,
            "cuda_graphs": int(plan.is_recorded),
            "ranges": [self.read.ranges],
            "found_on_disk": int(found_on_disk),
        }
        # A change of weights costs no build if they are refitted into a plan from disk.
        renews_cheaply = settings.refittable and settings.plan_cache
        return Loaded(run=plan, sums=sums, renews_cheaply=renews_cheaply)

    def _found_or_built(self, weights: Mapping[str, torch.Tensor]) -> tuple[LoadedPlan, bool]:
        settings, terms = self.build.settings, self.build.terms
        recipe = self._recipe(weights)
        signature = self._signature(recipe)
        plans = cache.plans() if settings.plan_cache else None
        if plans is None:
            return self._loaded(apart.build(self.library, recipe, terms), signature), False
        facts = recipe.facts(self.library)
        key = digest_of(facts)
        entry = plans.get(key)
        if entry is not None and entry.blob:
            try:
                return self._loaded(entry.blob, signature, self._filler(recipe)), True
            except Refusal:  # damaged, or of another release: build it again
                plans.remove(key)
        built = apart.build(self.library, recipe, terms)
        plan = self._loaded(built, signature)
        plans.put(key, facts, plan.without_weights() if settings.refittable else built)
        return plan, False

    def _filler(self, recipe: Recipe) -> Callable[[Any, Lines], None] | None:
        """Return a function that gives a plan from disk its weights; ``None`` if it has them."""
        if not self.build.settings.refittable:
            return None
        return lambda engine, lines: refit(
            self.library, engine, recipe.graph, recipe.weights, lines
        )

    def _loaded(
        self, plan: bytes, signature: Signature, fill: Callable[[Any, Lines], None] | None = None
    ) -> LoadedPlan:
        record = self.build.mode == "reduce-overhead"
        widen = self.read.widen
        return LoadedPlan(
            self.library, plan, signature, self.place, widen, record=record, fill=fill
        )

    def _recipe(self, weights: Mapping[str, torch.Tensor]) -> Recipe:
        return Recipe(
            graph=self.read.graph,
            weights={name: each.cpu() for name, each in weights.items()},
            dtypes=self.read.dtypes,
            profiles=tuple(profile_of(self.read.shapes, each) for each in self.read.ranges),
            settings=self.build.settings,
            tf32=allows_both(),
            target=self.place.target,
        )

    def _signature(self, recipe: Recipe) -> Signature:
        graph = self.read.graph
        position = {name: i for i, name in enumerate(graph.inputs)}
        inputs = [each.name for each in graph.model.graph.input if each.name not in recipe.weights]
        outputs = zip((each.name for each in graph.model.graph.output), graph.outputs, strict=True)
        budget = self.build.settings.weight_streaming_mib
        return Signature(
            inputs=tuple((name, position[name]) for name in inputs),
            outputs=tuple(outputs),
            dtypes=self.read.dtypes,
            profiles=recipe.profiles,
            weights_on_device=None if budget is None else budget << 20,
        )


def dtypes_of(graph: OnnxGraph, region: Region) -> dict[str, torch.dtype]:
    """Return the torch dtypes of the model's inputs and outputs; a number is an int64."""
    inputs = zip(graph.inputs, region.input_dtypes, strict=True)
    results = zip(graph.model.graph.output, graph.outputs, strict=True)
    outputs = ((result.name, output.dtype) for result, output in results)
    return {name: dtype or torch.int64 for name, dtype in (*inputs, *outputs)}
