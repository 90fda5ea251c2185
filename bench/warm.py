"""How long a process takes to its first result, with nothing on disk and after another process.

Every start is a process of its own, and the variants take turns: Inductor, and composer with ONNX
Runtime and with OpenVINO, each cold (empty caches) and warm (right after a process that filled
them); the first two also loaded from a file that another process wrote
(docs/how-to/save-a-compile.md); both native engines by themselves, cold (exported) and warm (read
from the file of the export); and Dynamo with nothing behind it, below which no engine can come that
it has to trace for. Run from anywhere, with composer installed::

    python bench/warm.py --models bert,resnet --rounds 5 --json bench/results/warm.json

Two times are told of each start, in seconds: ``first`` from the moment where torch is imported and
the model built to the first result, and ``engine``, the same without Dynamo's share, by the round's
own start without an engine. Ratios are those within a round.
"""

from __future__ import annotations

import argparse
import compileall
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from timing import Series, machine, paired_ratio, quartiles, write_json

EAGER = "dynamo"
INDUCTOR_COLD, INDUCTOR_WARM = "inductor, cold", "inductor, warm"
COMPOSER_COLD, COMPOSER_WARM = "composer[onnxrt], cold", "composer[onnxrt], warm"
OPENVINO_COLD, OPENVINO_WARM = "composer[openvino], cold", "composer[openvino], warm"
INDUCTOR_LOADED, COMPOSER_LOADED = "inductor, loaded", "composer[onnxrt], loaded"
NATIVE_ONNXRT_COLD, NATIVE_ONNXRT_WARM = "onnxruntime, cold", "onnxruntime, warm"
NATIVE_OPENVINO_COLD, NATIVE_OPENVINO_WARM = "openvino, cold", "openvino, warm"


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to start: ``backend`` and ``options`` of ``torch.compile``, or a native engine.

    Those that are ``loaded`` read what was compiled from a file. ``caches`` is the folder that cold
    and warm starts of one engine share.
    """

    name: str
    backend: str
    options: dict[str, Any] | None = None
    loaded: bool = False
    caches: str = ""

    @property
    def is_traced(self) -> bool:
        """True if Dynamo traces the model."""
        return not self.loaded and self.backend not in NATIVE


NATIVE = ("onnxruntime", "openvino")
"""Names that variants of native engines have in place of a backend's."""

ONNXRT = {"chain": ["onnxrt"]}
OPENVINO = {"chain": ["openvino"]}
VARIANTS = (
    Variant(EAGER, "eager"),
    Variant(INDUCTOR_COLD, "inductor"),
    Variant(INDUCTOR_WARM, "inductor"),
    Variant(COMPOSER_COLD, "composer", ONNXRT),
    Variant(COMPOSER_WARM, "composer", ONNXRT),
    Variant(OPENVINO_COLD, "composer", OPENVINO, caches="openvino"),
    Variant(OPENVINO_WARM, "composer", OPENVINO, caches="openvino"),
    Variant(INDUCTOR_LOADED, "inductor", loaded=True),
    Variant(COMPOSER_LOADED, "composer", ONNXRT, loaded=True),
    Variant(NATIVE_ONNXRT_COLD, "onnxruntime"),
    Variant(NATIVE_ONNXRT_WARM, "onnxruntime"),
    Variant(NATIVE_OPENVINO_COLD, "openvino"),
    Variant(NATIVE_OPENVINO_WARM, "openvino"),
)
"""In the order of a round, whose caches are empty at first: a warm start finds what the cold one
before it left."""

RATIOS = (
    (COMPOSER_WARM, INDUCTOR_COLD),
    (COMPOSER_WARM, INDUCTOR_WARM),
    (COMPOSER_COLD, INDUCTOR_COLD),
    (OPENVINO_WARM, OPENVINO_COLD),
    (COMPOSER_LOADED, INDUCTOR_LOADED),
    (COMPOSER_LOADED, INDUCTOR_WARM),
    (COMPOSER_COLD, NATIVE_ONNXRT_COLD),
    (COMPOSER_WARM, NATIVE_ONNXRT_WARM),
    (OPENVINO_COLD, NATIVE_OPENVINO_COLD),
    (OPENVINO_WARM, NATIVE_OPENVINO_WARM),
)


TRACED = {each.name for each in VARIANTS if each.is_traced}


def start(model: str, variant: Variant, *, tiny: bool) -> dict[str, Any]:
    """What this process, which has compiled nothing yet, takes to the model's first result."""
    import zoo  # here: the parent needs no transformers

    module, inputs = zoo.build(model, tiny=tiny)
    if variant.backend in NATIVE:
        from native_cpu import kept  # which imports a part of composer
    began = time.perf_counter()
    if variant.loaded:
        with _file(variant).open("rb") as file:
            run = functools.partial(torch.compiler.load_compiled_function(file), module)
    elif variant.backend in NATIVE:
        run = kept(variant.backend, module, _kept("native"))
    else:
        run = torch.compile(module, backend=variant.backend, options=variant.options)
    with torch.no_grad():
        run(**inputs)
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "artefacts": _artefacts(variant)}


def write(model: str, variant: Variant, *, tiny: bool) -> dict[str, Any]:
    """Write the file that starts are loaded from, with the guards that torch can write."""
    import zoo

    module, inputs = zoo.build(model, tiny=tiny)
    options = {
        **(variant.options or {}),
        "guard_filter_fn": torch.compiler.keep_tensor_guards_unsafe,
    }
    run = torch.compile(module.forward, backend=variant.backend, options=options, fullgraph=True)
    with torch.no_grad():
        run.aot_compile(((), inputs)).save_compiled_function(str(_file(variant)))
    return {}


def _file(variant: Variant) -> Path:
    return _kept(f"{variant.backend}.compiled")


def _kept(name: str) -> Path:
    """The path of a file that another process of the round may have written."""
    return Path(os.environ["COMPOSER_CACHE_DIR"], name)


def _artefacts(variant: Variant) -> list[Any]:
    if variant.backend != "composer":
        return []
    import composer

    return [each.attempts[0].engine.get("artefacts") for each in composer.reports()]


def apart(work: str, model: str, variant: Variant, folder: Path, *, tiny: bool) -> dict[str, Any]:
    """``start`` or ``write`` in a child process, whose caches are in ``folder``.

    Raises:
        RuntimeError: the child failed; with what it said last.
    """
    caches = {"TORCHINDUCTOR_CACHE_DIR": folder / "inductor", "COMPOSER_CACHE_DIR": folder / "own"}
    command = [sys.executable, __file__, f"--{work}", variant.name, "--models", model]
    done = subprocess.run(
        [*command, *(["--tiny"] if tiny else [])],
        env=os.environ | {name: str(path) for name, path in caches.items()},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{model}, {variant.name}: {done.stderr.strip().splitlines()[-1]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(model: str, rounds: int, *, tiny: bool) -> dict[str, Any]:
    """All variants of one model, round by round, each round with caches of its own."""
    times: dict[str, list[float]] = {variant.name: [] for variant in VARIANTS}
    artefacts: dict[str, list[Any]] = {}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            for variant in VARIANTS:
                caches = Path(folder, variant.caches)
                if variant.loaded:
                    apart("write", model, variant, caches, tiny=tiny)
                found = apart("start", model, variant, caches, tiny=tiny)
                times[variant.name].append(found["seconds"])
                artefacts[variant.name] = found["artefacts"]
    return {
        "seconds": {name: _spread(taken) for name, taken in times.items()},
        "artefacts": {name: found for name, found in artefacts.items() if found},
        "first": {f"{a} / {b}": _ratio(times[a], times[b]) for a, b in RATIOS},
        "engine": {
            f"{a} / {b}": _ratio(_beyond(times, a), _beyond(times, b))
            for a, b in RATIOS
            if {a, b} <= TRACED
        },
    }


def _beyond(times: dict[str, list[float]], name: str) -> list[float]:
    """What a variant took beyond Dynamo's own share, at least a millisecond."""
    pairs = zip(times[name], times[EAGER], strict=True)
    return [max(taken - fallback, 1e-3) for taken, fallback in pairs]


def _spread(taken: Sequence[float]) -> dict[str, float]:
    p25, median, p75 = quartiles(taken)
    return {"median": median, "p25": p25, "p75": p75, "minimum": min(taken)}


def _ratio(a: Sequence[float], b: Sequence[float]) -> dict[str, float]:
    return paired_ratio(Series(tuple(a)), Series(tuple(b))).to_dict()


def _compile_sources() -> None:
    """Write composer's bytecode, as an installation has it and as torch's lies there."""
    import composer  # here: a child has imported nothing of it when its time begins

    compileall.compile_dir(Path(composer.__file__).parent, quiet=2)


def show(model: str, found: dict[str, Any]) -> None:
    """A table of times, and one of ratios."""
    console = Console()
    table = Table("start", "seconds", "quartiles", title=model)
    for name, each in found["seconds"].items():
        table.add_row(
            escape(name), f"{each['median']:.2f}", f"{each['p25']:.2f} to {each['p75']:.2f}"
        )
    console.print(table)
    table = Table("ratio", "to the first result", "without Dynamo's share")
    for pair in found["first"]:
        cells = (found[kind].get(pair) for kind in ("first", "engine"))
        texts = (
            f"{each['median']:.2f} ({each['p25']:.2f} to {each['p75']:.2f})" if each else ""
            for each in cells
        )
        table.add_row(escape(pair), *texts)
    console.print(table)


def main() -> None:
    """Print the figures of each model; ``--json PATH`` writes them as well."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="bert", help="names of the zoo, with commas")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="the small sizes")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--start", help=argparse.SUPPRESS)  # what a child process is told
    parser.add_argument("--write", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.start or given.write:
        work, name = (start, given.start) if given.start else (write, given.write)
        (variant,) = (each for each in VARIANTS if each.name == name)
        print(json.dumps(work(given.models, variant, tiny=given.tiny)))
        return
    _compile_sources()
    record: dict[str, Any] = {"machine": machine(), "rounds": given.rounds, "models": {}}
    for model in given.models.split(","):
        record["models"][model] = measure(model, given.rounds, tiny=given.tiny)
        show(model, record["models"][model])
        if given.json:
            write_json(given.json, record)


if __name__ == "__main__":
    main()
