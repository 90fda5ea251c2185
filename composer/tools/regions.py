"""Writes the parts of a graph that an ONNX engine takes, each as a folder without composer.

The graph is compiled as it is in a chain, but torch runs the parts in place of the engine. So each
part has arguments, whatever the engine does with them.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Mapping, Sequence
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
    case = Case.read(source)
    facts = case.facts
    candidate = facts["candidate"]
    engine: Any = find_backend(candidate["backend"])
    kind = type("Recording", (_Recording, type(engine)), {"title": engine.title})
    recording = kind()
    recording.begin(case, candidate, folder)

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


class _Recording(OnnxEngine[Any]):
    """An ONNX engine that writes what it would load, and has torch run it."""

    def begin(self, case: Case, candidate: Mapping[str, Any], folder: Path) -> None:
        """Say what is written, and where to."""
        self._facts = {**case.facts, "training": False, "dynamic": False, "autocast": []}
        self._candidate = candidate
        self._folder = folder
        self._graphs: dict[int, torch.fx.GraphModule] = {}
        self._count = 0

    def _key(self, request: BuildRequest) -> str:
        return ""  # so that no model is taken from disk, of which there would be no graph

    def read(self, model: OnnxRegion, region: Region, build: OnnxBuild[Any]) -> Any:
        """Read the model as the engine does, and remember the graph that it is of."""
        self._graphs[id(model.graph)] = clones.clone_graph(region.gm)
        return super().read(model, region, build)

    def load(
        self, region: OnnxRegion, weights: Mapping[str, torch.Tensor], build: OnnxBuild[Any]
    ) -> Loaded:
        """Return torch's own run of the graph, which writes the region at its first call."""
        gm = self._graphs[id(region.graph)]
        names = region.graph.inputs
        held = {i: weights[name] for i, name in enumerate(names) if name in weights}
        is_written = False

        def run(args: tuple[Any, ...]) -> Sequence[Any]:
            nonlocal is_written
            values = [*args, *(held[i] for i in range(len(args), len(names)))]
            if not is_written:
                is_written = True
                self._write(region, gm, values, held.keys(), build)
            return [_as_returned(each) for each in gm(*values)]

        return Loaded(run=run)

    def _write(
        self,
        region: OnnxRegion,
        gm: torch.fx.GraphModule,
        values: Sequence[Any],
        weights: Any,
        build: OnnxBuild[Any],
    ) -> None:
        """Write a region, with a model that has the weights that its program draws."""
        folder = self._folder / f"region-{self._count}"
        self._count += 1
        case = Case.of(gm, values, weights, self._facts, with_data=self._facts["with_data"])
        title = f"{self.title} on a part of a graph."
        more = repro.policy_file(self._facts["policy"])
        case.write(folder, more, title=title, candidate=self._candidate)
        module = runpy.run_path(str(folder / "graph.py"))["Graph"]()
        drawn = {region.graph.inputs[i]: getattr(module, f"w{i}").detach() for i in weights}
        contiguous = {name: each.contiguous() for name, each in drawn.items()}
        program = self.alone(folder, region, contiguous, build)
        if program:
            imports, _, engine = program.partition("\n\n\n")
            text = repro.script(case, title, imports, f"\n{engine}", self._candidate)
            (folder / "run.py").write_text(text, encoding="utf-8")


def _as_returned(value: Any) -> torch.Tensor:
    """Return a result in the form in which a model of ONNX gives it."""
    if isinstance(value, torch.Tensor):
        return value.clone(memory_format=torch.contiguous_format)
    return as_scalar(value)


if __name__ == "__main__":
    write_regions(Path(sys.argv[1]), Path(sys.argv[2]))
