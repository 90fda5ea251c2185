"""What it costs that OpenVINO keeps NaN (``keeps_nan``), on the public models in float32.

Both builds of a model run in one process, in interleaved rounds::

    python bench/nans.py --models resnet,bert --json bench/results/nans.json
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path
from typing import Any

import torch
import zoo
from timing import machine, measure, paired_ratio, write_json

import composer


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(zoo.MODELS))
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = {}
    for name in options.models.split(","):
        rows[name] = compared(name, options.rounds, tiny=options.tiny)
        print(name, rows[name], flush=True)
    if options.json:
        write_json(options.json, {"machine": machine(("openvino",)), "keeps over loses": rows})
    return 0


def compared(name: str, rounds: int, *, tiny: bool) -> dict[str, Any]:
    """How many times as long a call takes that keeps NaN, with the quartiles of the rounds."""
    model, inputs = zoo.build(name, tiny=tiny)
    runs = {}
    with torch.inference_mode():
        for keeps in (False, True):
            torch.compiler.reset()
            one = {"backend": "openvino", "options": {"keeps_nan": keeps}}
            run = torch.compile(model, backend="composer", options={"chain": [one]}, dynamic=False)
            runs[str(keeps)] = functools.partial(run, **inputs)
            runs[str(keeps)]()
            assert composer.reports()[-1].chosen == "openvino"
        found = measure(runs, rounds=rounds)
    ratio = paired_ratio(found["True"], found["False"])
    return {"median": ratio.median, "p25": ratio.p25, "p75": ratio.p75}


if __name__ == "__main__":
    raise SystemExit(main())
