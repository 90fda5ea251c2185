"""Which of torch's operators an engine computes otherwise at the edges of what a dtype holds.

Does what ``bench/ops.py --values edges`` does for several engines and dtypes, and keeps what came
of each: how many operators were right, and of the others what differed. Run from anywhere, with
composer installed::

    python bench/edges.py --dtypes float32,int64 --json bench/results/edges.json

What is known and documented (docs/reference/engines/) is told apart. The exit status is 1 if any
other operator is wrong, raises what eager does not, or crashes.
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ops
from timing import cores, machine, write_json

ENGINES = "onnxrt,openvino"
DTYPES = "float32,bfloat16,float16,float64,int64,int32,uint8,bool"

_LOSES_NAN = (
    r"exp|expm1|sigmoid|(masked\.|nn\.functional\.|.*_safe_)?(log_)?soft(max|min)(\..*)?|"
    r"nn\.functional\.(celu|glu|hardsigmoid|hardtanh|relu|relu6|normalize|triplet_margin_.*|"
    r"margin_ranking_loss|soft_margin_loss|multi_head_attention_forward)|masked\.norm"
)
_OVERFLOWS_OTHERWISE = (
    r"add(cdiv|r)|prod|renorm|(linalg\.vector_|masked\.)?norm|"
    r"nn\.functional\.(gelu|hardswish|prelu|interpolate\..*|upsample_bilinear|grid_sample)|"
    r"grid_sampler_2d|native_layer_norm"
)
KNOWN = (
    ("onnxrt|openvino", {"infinities", "extremes"}, _OVERFLOWS_OTHERWISE),
    ("onnxrt|openvino", {"nan", "extremes"}, r"nn\.functional\.multi(label)?_margin_loss"),
    (
        "onnxrt|openvino",
        {"small", "not zero", "ends"},  # of uint8
        r"nn\.functional\.(interpolate\.bi.*|upsample_bilinear)",
    ),
    ("onnxrt|openvino", {"nan"}, "cdist"),
    ("openvino", {"nan", "infinities", "extremes"}, _LOSES_NAN),
    ("openvino", {"nan", "infinities"}, r"nn\.functional\.conv.*"),
    ("openvino", {"extremes"}, r"nn\.functional\.softsign|logit|bmm.*|cummin"),
)
"""Engines, kinds of numbers and operators that docs/reference/engines/ names as different."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit status is 1 if anything is wrong that is not known to be."""
    options = parse(arguments)
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    record: dict[str, Any] = {"machine": machine(), "samples": options.samples, "sweeps": []}
    for engine in options.engines.split(","):
        for dtype in options.dtypes.split(","):
            settings = ops.Settings(dtype, options.samples, engine, 0.5, False, ops.EDGES)
            names = options.ops or sorted(ops.operators())
            units = [f"{ops.FORWARD}:{name}" for name in names if ops.is_tried(name, settings)]
            results = ops.sweep_all(units, settings, options.limit, False, options.jobs)
            record["sweeps"].append(digest(engine, dtype, results))
            if options.json:
                write_json(options.json, record)
            show(record["sweeps"][-1])
    return int(any(each["otherwise"] for each in record["sweeps"]))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Torch's operators on numbers at the edges.")
    parser.add_argument("--engines", default=ENGINES, metavar="A,B", help=f"default: {ENGINES}")
    parser.add_argument("--dtypes", default=DTYPES, metavar="A,B", help=f"default: {DTYPES}")
    parser.add_argument(
        "--ops", type=ops.operator_names, metavar="A,B", help="default: all of op_db"
    )
    parser.add_argument("--samples", type=int, default=2, help="an operator at most (2)")
    parser.add_argument("--jobs", type=int, default=cores() or 1, help="workers (one a core)")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds an operator (120)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")
    return parser.parse_args(arguments)


def digest(engine: str, dtype: str, results: Sequence[ops.Result]) -> dict[str, Any]:
    """What one sweep came to: operators by verdict, and those that are not right."""
    counts = ops.summary(results, ops.FORWARD)
    wrong = [each for each in results if each.verdict in ops.SEVERITY]
    known = [each.op for each in wrong if is_known(engine, each)]
    return {
        "engine": engine,
        "dtype": dtype,
        "counts": {verdict: counts[verdict] for verdict in ops.VERDICTS},
        "known": known,
        "otherwise": {
            each.op: {"at": kinds_of(each), "first": each.problems[0]}
            for each in wrong
            if each.op not in known
        },
    }


def is_known(engine: str, result: ops.Result) -> bool:
    """Whether an operator is documented as different, for all the numbers at which it is."""
    kinds = set(kinds_of(result))
    return result.verdict == "wrong" and any(
        kinds <= named and re.fullmatch(engines, engine) and re.fullmatch(names, result.op)
        for engines, named, names in KNOWN
    )


def kinds_of(result: ops.Result) -> list[str]:
    """The kinds of numbers at which an operator is not right."""
    found = re.findall(r"(?:^|; )([a-z ]+): ", "; ".join(result.problems))
    return sorted(set(found)) or [result.verdict]


def show(sweep: dict[str, Any]) -> None:
    """Print one sweep."""
    for op, found in sweep["otherwise"].items():
        print(f"{sweep['engine']} {sweep['dtype']} {op}: {found['first']} [{found['at']}]")
    counts = ", ".join(f"{name} {count}" for name, count in sweep["counts"].items())
    print(f"{sweep['engine']} {sweep['dtype']}: {counts}; known {sweep['known']}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
