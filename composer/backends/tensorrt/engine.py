"""One region of a graph, run by plans: one plan for each set of weights, built or from disk."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from composer.backends.base import BuildTerms
from composer.backends.tensorrt import apart, cache
from composer.backends.tensorrt.execution import LoadedPlan, OutOfProfile
from composer.backends.tensorrt.library import Library
from composer.backends.tensorrt.loading import Signature
from composer.backends.tensorrt.log import Lines
from composer.backends.tensorrt.place import Place
from composer.backends.tensorrt.plan import Recipe
from composer.backends.tensorrt.profiles import Ranges, profile_of, ranges_of, symbols_in, wider
from composer.backends.tensorrt.refit import refit
from composer.backends.tensorrt.settings import Settings
from composer.backends.tf32 import allows_both
from composer.errors import Refusal
from composer.lowering.export.plain import PlainOnnx, shapes_with_symbols
from composer.lowering.partition.regions import Region
from composer.lowering.weights.bindings import BindingEngine
from composer.system.disk import digest_of
from composer.system.subprocesses import Limits


class TensorRTEngine(BindingEngine[LoadedPlan]):
    """Runs plans on the inputs of a region; several threads may call it.

    The region has the weights, and the witnesses that show when they change. With ``record``, CUDA
    graphs are replayed where all shapes are fixed. The terms have the limits of the build.
    """

    def __init__(
        self,
        library: Library,
        plain: PlainOnnx,
        region: Region,
        settings: Settings,
        place: Place,
        *,
        record: bool,
        terms: BuildTerms,
    ) -> None:
        super().__init__(region)
        self._library = library
        self._graph = plain.graph
        self._settings = settings
        self._place = place
        self._record = record
        self._terms = terms
        if settings.refittable and settings.plan_cache:
            self._changes_allowed = math.inf  # a change costs no build
        self._dtypes = dtypes_of(plain, region)
        self._shapes = shapes_with_symbols(plain.graph, region.gm)
        self.ranges: tuple[Ranges, ...] = ranges_of(self._shapes, settings.profiles)
        """The ranges of the dynamic sizes, one set for each profile."""
        self.found_on_disk = 0
        """How many plans were loaded from disk instead of built."""
        self.is_recorded = self.bind_first(region).is_recorded
        """True if calls replay a CUDA graph."""
        # Plans of later calls have no time limit; they are built in a sandbox if the first was.
        self._terms = BuildTerms(limits=Limits(isolate=terms.limits.isolate))

    def __call__(self, *args: Any) -> list[Any]:
        """Run the plan for these weights; if its profiles do not fit, build a wider one first."""
        plan = self._made_for(args)
        try:
            return plan(args)
        except OutOfProfile as call:
            self._widen(plan, call)
        return self._made_for(args)(args)

    def _widen(self, plan: LoadedPlan, call: OutOfProfile) -> None:
        """Widen the last profile to contain the shapes of a call, and drop all plans.

        Plans are built again when they are needed. Another thread may have widened the profile
        before, for these shapes or for others.
        """
        with self._lock:
            values = symbols_in(self._shapes, call.shapes)
            self.ranges = (*self.ranges[:-1], wider(self.ranges[-1], values))
            self._drop_all(plan)

    def _make(self, values: Mapping[int, torch.Tensor]) -> LoadedPlan:
        with self._place.current():
            return self._found_or_built(values)

    def _found_or_built(self, values: Mapping[int, torch.Tensor]) -> LoadedPlan:
        recipe = self._recipe(values)
        signature = self._signature(recipe)
        plans = cache.plans() if self._settings.plan_cache else None
        if plans is None:
            return self._loaded(apart.build(self._library, recipe, self._terms), signature)
        facts = recipe.facts(self._library)
        key = digest_of(facts)
        entry = plans.get(key)
        if entry is not None and entry.blob:
            try:
                plan = self._loaded(entry.blob, signature, self._filler(recipe))
            except Refusal:  # damaged, or of another release: build it again
                plans.remove(key)
            else:
                self.found_on_disk += 1
                return plan
        built = apart.build(self._library, recipe, self._terms)
        plan = self._loaded(built, signature)
        plans.put(key, facts, plan.without_weights() if self._settings.refittable else built)
        return plan

    def _filler(self, recipe: Recipe) -> Callable[[Any, Lines], None] | None:
        """Return a function that gives a plan from disk its weights; ``None`` if it has them."""
        if not self._settings.refittable:
            return None
        return lambda engine, lines: refit(
            self._library, engine, recipe.graph, recipe.weights, lines
        )

    def _loaded(
        self, plan: bytes, signature: Signature, fill: Callable[[Any, Lines], None] | None = None
    ) -> LoadedPlan:
        place, record = self._place, self._record
        return LoadedPlan(self._library, plan, signature, place, record=record, fill=fill)

    def _recipe(self, values: Mapping[int, torch.Tensor]) -> Recipe:
        return Recipe(
            graph=self._graph,
            weights=in_host_memory(self._graph.inputs, values),
            dtypes=self._dtypes,
            profiles=tuple(profile_of(self._shapes, ranges) for ranges in self.ranges),
            settings=self._settings,
            tf32=allows_both(),
            target=self._place.target,
        )

    def _signature(self, recipe: Recipe) -> Signature:
        position = {name: i for i, name in enumerate(self._graph.inputs)}
        model = self._graph.model.graph
        inputs = [each.name for each in model.input if each.name not in recipe.weights]
        outputs = zip((each.name for each in model.output), self._graph.outputs, strict=True)
        budget = self._settings.weight_streaming_mib
        return Signature(
            inputs=tuple((name, position[name]) for name in inputs),
            outputs=tuple(outputs),
            dtypes=self._dtypes,
            profiles=recipe.profiles,
            weights_on_device=None if budget is None else budget << 20,
        )


def dtypes_of(plain: PlainOnnx, region: Region) -> dict[str, torch.dtype]:
    """Return the torch dtypes of the model's inputs and outputs; a number is an int64."""
    inputs = zip(plain.graph.inputs, region.input_dtypes, strict=True)
    results = zip(plain.graph.model.graph.output, plain.graph.outputs, strict=True)
    outputs = ((result.name, output.dtype) for result, output in results)
    return {name: dtype or torch.int64 for name, dtype in (*inputs, *outputs)}


def in_host_memory(
    names: tuple[str, ...], values: Mapping[int, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return weights by name, in host memory, where TensorRT's parser can read them."""
    return {names[i]: each.detach().cpu().contiguous() for i, each in values.items()}
