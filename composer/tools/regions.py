"""Writes the parts of a graph that an ONNX engine takes, each as a folder without composer.

The graph is compiled as it is in a chain, but torch runs the parts in place of the engine. So each
part has arguments, whatever the engine does with them.
"""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.fx

from composer.backends import find_backend
from composer.backends.onnx_engine import Loaded, OnnxBuild, OnnxEngine, OnnxRegion, as_scalar
from composer.build import Artefacts, BuildRequest, BuildTerms
from composer.chain import repro
from composer.graphs import check, clones
from composer.graphs.case import Case
from composer.lowering.partition.regions import Region


def write_regions(source: Path, folder: Path) -> None:
    """Write a folder for each part of a graph that the engine takes and can run alone.

    Args:
        source: The folder of the graph and the engine, by :func:`composer.chain.repro.write`.
        folder: The folder for these folders.

    Raises:
        Exception: whatever the engine or torch raises.
    """
    facts = json.loads((source / "about.json").read_text())
    case = Case.read(source, with_data=facts["with_data"])
    candidate = facts["candidate"]
    engine: Any = find_backend(candidate["backend"])
    kind = type("Recording", (_Recording, type(engine)), {"title": engine.title})
    recording = kind()
    recording.begin()

    def compiled(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        terms = BuildTerms(artefacts=Artefacts(0.0))
        options = candidate["options"]
        request = BuildRequest(gm, [*example_inputs], facts["mode"], options, terms)
        return recording.build(request).compiled

    program = runpy.run_path(str(source / "graph.py"))
    dynamic = True if facts["dynamic"] else None
    settings = check.Settings(grad=facts["training"])

    def by_engine(module: torch.nn.Module) -> Any:
        return torch.compile(module, backend=compiled, dynamic=dynamic)

    check.values_of(program["Graph"](), program["inputs"](), by_engine, settings)
    # Only now, since torch.load makes fake tensors while a graph is compiled.
    for number, part in enumerate(recording.parts):
        _write(part, recording, case, folder / f"region-{number}")


@dataclass(frozen=True)
class _Part:
    """A region as an engine was to load it.

    Attributes:
        region: The region.
        gm: Its graph.
        values: The arguments of its first call, with weights and constants.
        weights: The positions of the values that the engine takes in.
        build: The terms of the build.
    """

    region: OnnxRegion
    gm: torch.fx.GraphModule
    values: Sequence[Any]
    weights: Collection[int]
    build: OnnxBuild[Any]


def _write(part: _Part, engine: OnnxEngine[Any], of: Case, folder: Path) -> None:
    """Write a region, with a model that has the weights that its program draws."""
    facts = {**of.facts, "training": False, "dynamic": False, "autocast": []}
    candidate = facts["candidate"]
    case = Case.of(part.gm, part.values, part.weights, facts, with_data=bool(of.data))
    title = f"{engine.title} on a part of a graph."
    case.write(folder, repro.policy_file(facts["policy"]), title=title, candidate=candidate)
    module = runpy.run_path(str(folder / "graph.py"))["Graph"]()
    names = part.region.graph.inputs
    drawn = {names[i]: getattr(module, f"w{i}").detach().contiguous() for i in part.weights}
    program = engine.alone(folder, part.region, drawn, part.build)
    if program:
        imports, _, function = program.partition("\n\n\n")
        text = repro.script(case, title, imports, f"\n{function}", candidate)
        (folder / "run.py").write_text(text, encoding="utf-8")


class _Recording(OnnxEngine[Any]):
    """An ONNX engine that notes what it would load, and has torch run it."""

    def begin(self) -> None:
        """Begin with no part. An engine is made without arguments."""
        self.parts: list[_Part] = []
        self._graphs: dict[int, torch.fx.GraphModule] = {}

    def _key(self, request: BuildRequest) -> str:
        return ""  # so that no model is taken from disk, of which there would be no graph

    def read(self, model: OnnxRegion, region: Region, build: OnnxBuild[Any]) -> Any:
        """Read the model as the engine does, and remember the graph that it is of."""
        self._graphs[id(model.graph)] = clones.clone_graph(region.gm)
        return super().read(model, region, build)

    def load(
        self, region: OnnxRegion, weights: Mapping[str, torch.Tensor], build: OnnxBuild[Any]
    ) -> Loaded:
        """Return torch's own run of the graph, which notes the region at its first call."""
        gm = self._graphs[id(region.graph)]
        names = region.graph.inputs
        held = {i: weights[name] for i, name in enumerate(names) if name in weights}
        is_noted = False

        def run(args: tuple[Any, ...]) -> Sequence[Any]:
            nonlocal is_noted
            values = [*args, *(held[i] for i in range(len(args), len(names)))]
            if not is_noted:
                is_noted = True
                self.parts.append(_Part(region, gm, values, held.keys(), build))
            return [_as_returned(each) for each in gm(*values)]

        return Loaded(run=run)


def _as_returned(value: Any) -> torch.Tensor:
    """Return a result in the form in which a model of ONNX gives it."""
    if isinstance(value, torch.Tensor):
        return value.clone(memory_format=torch.contiguous_format)
    return as_scalar(value)


if __name__ == "__main__":
    write_regions(Path(sys.argv[1]), Path(sys.argv[2]))
