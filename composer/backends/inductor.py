"""Inductor: torch's own compiler (Triton on GPUs, C++ on CPUs), exactly as plain torch runs it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from composer import _torch
from composer.backends import inductor_freezing, inductor_hooks
from composer.backends.base import Backend, Build, BuildRequest
from composer.backends.inductor_hooks import hooks
from composer.errors import OptionError
from composer.graphs.keys import graph_key
from composer.passes.within_aotautograd import LatePasses
from composer.records import Stage
from composer.registry import unknown_among

_STRICT = {
    "numerics": "strict",
    "emulate_precision_casts": True,
    "max_fusion_size": 1,
    "pattern_matcher": False,
}
"""Settings of Inductor that keep it close to eager. The first is new in torch 2.14."""


class InductorBackend(Backend):
    """The same code path as ``torch.compile(model)``: same caches, freezing and CUDA graphs.

    Its options are Inductor's settings (``torch._inductor.list_options()``), as
    ``torch.compile(options=...)`` takes them.
    """

    reads_example_inputs = False
    runs_shared_passes = True
    writes_as_the_graph = True
    comes_with_torch = True
    packages = ("triton",)

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Let Inductor itself check names and types."""
        if not options:
            return
        known = _torch.inductor.inductor_options()
        names = (name.replace("-", "_") for name in options)
        mistakes = unknown_among(names, known, "unknown option")
        if mistakes:
            raise OptionError(f"backend 'inductor': {mistakes} (torch._inductor.list_options())")
        try:
            _torch.inductor.inductor_config(None, dict(options))
        except RuntimeError as error:
            raise OptionError(f"backend 'inductor': {error}") from error

    def stricter(self, options: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the options without fusion, rewrites and shortcuts in low precision."""
        known = _torch.inductor.inductor_options()
        strict = {**options, **{name: _STRICT[name] for name in _STRICT if name in known}}
        return None if strict == options else strict

    def build(self, request: BuildRequest) -> Build:
        """Compile with the settings of ``mode``; the candidate's options take precedence.

        Inductor's own hooks run the shared passes, after the user's own passes in these hooks.
        """
        mode, passes, facts = request.mode, request.terms.late or LatePasses(), request.terms.facts
        config = _torch.inductor.inductor_config(mode, dict(request.options))
        config |= hooks(passes, config)
        settings = f"{mode} {sorted(request.options.items())} {passes.shared.key}"
        key = graph_key(request.gm, settings) if passes.shared.late else ""
        compiled = inductor_freezing.compiled(request, config)
        if passes.shared.late and _complete(passes, key):
            facts.extra["passes"] = "in the graph that Inductor had in its cache"
        facts.coverage, facts.versions["torch"] = 1.0, torch.__version__
        if mode:
            facts.extra["mode"] = mode
        return Build(compiled)


def _complete(passes: LatePasses, key: str) -> bool:
    """Complete the record of the passes; true if Inductor took the graph from its cache.

    Inductor does not run the passes in that case, so the record is read from the disk. A
    partitioner alone is no sign of a cached graph: it leaves no record in inference either, where
    there is nothing to cut.
    """
    if passes.ran_all():
        inductor_hooks.remember(key, passes.records)
        return False
    remembered = inductor_hooks.recall(key)
    passes.complete(remembered)
    return bool(remembered or passes.rewrites(Stage.JOINT) or passes.rewrites(Stage.POST_GRAD))
