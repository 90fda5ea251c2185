"""Inductor: torch's own compiler (Triton on GPUs, C++ on CPUs), exactly as plain torch runs it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.fx

from composer import _torch
from composer.backends import inductor_freezing, inductor_records
from composer.backends.base import Backend, note
from composer.backends.inductor_hooks import hooks
from composer.errors import OptionError
from composer.graphs.keys import graph_key
from composer.passes import late
from composer.records import Stage
from composer.registry import did_you_mean


class InductorBackend(Backend):
    """The same code path as ``torch.compile(model)``: same caches, freezing and CUDA graphs.

    Its options are Inductor's settings (``torch._inductor.list_options()``), as
    ``torch.compile(options=...)`` takes them.
    """

    reads_example_inputs = False
    runs_shared_passes = True
    writes_as_the_graph = True
    packages = ("triton",)

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Let Inductor itself judge names and types."""
        known = _torch.inductor.inductor_options() if options else ()
        unknown = [name for name in options if name.replace("-", "_") not in known]
        if unknown:
            named = "; ".join(f"unknown option {n!r}{did_you_mean(n, known)}" for n in unknown)
            raise OptionError(f"backend 'inductor': {named} (torch._inductor.list_options())")
        try:
            _torch.inductor.inductor_config(None, dict(options))
        except RuntimeError as error:
            raise OptionError(f"backend 'inductor': {error}") from error

    def build(
        self,
        gm: torch.fx.GraphModule,
        example_inputs: list[Any],
        *,
        mode: str | None,
        options: Mapping[str, Any],
    ) -> object:
        """Compile with the settings that ``mode`` stands for, then the candidate's options.

        Shared passes come in by Inductor's own hooks, behind what the user set there.
        """
        config = _torch.inductor.inductor_config(mode, dict(options))
        passes = late.in_force()
        config |= hooks(passes, config)
        settings = f"{mode} {sorted(options.items())} {passes.shared.key}"
        key = graph_key(gm, settings) if passes.shared.late else ""
        compiled = inductor_freezing.compiled(gm, example_inputs, config)
        if passes.shared.late:
            _complete(passes, key)
        chosen: dict[str, Any] = {"mode": mode} if mode else {}
        note(coverage=1.0, torch=torch.__version__, **chosen)
        return compiled


def _complete(passes: late.LatePasses, key: str) -> None:
    """Have the record say what the passes did to a graph, where Inductor had it in its cache.

    A partitioner by itself leaves no record in inference either, where there is nothing to cut.
    """
    if passes.ran_all():
        inductor_records.remember(key, passes.records)
        return
    remembered = inductor_records.recall(key)
    passes.complete(remembered)
    if remembered or passes.rewrites(Stage.JOINT) or passes.rewrites(Stage.POST_GRAD):
        note(passes="in the graph that Inductor had in its cache")
