"""Writes the tables of ``docs/benchmarks``, and that of operators, from ``bench/results``.

``python bench/tables.py`` replaces what stands between the markers; nothing there is typed by
hand.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from markdown_table import Record, described, ratio, table
from model_tables import headline, models, scaling
from start_tables import choosing, generation, guards, warm

HERE = Path(__file__).parent
WRONG = ("wrong", "raised", "crashed")
NOT_RUN = "not run"


def overhead(record: Record) -> str:
    """Microseconds a call, milliseconds a compile."""
    headings = ("what", "unit", "without", "with", "ratio (quartiles)", "added")
    rows = []
    for part, unit, scale in (("calls", "us a call", 1e3), ("compiles", "ms a compile", 1.0)):
        for name, row in record[part].items():
            label = f"through `{name}`" if part == "calls" else f"first candidate {name}"
            times = [row[side]["median_ms"] * scale for side in ("plain", "composer", "added_ms")]
            plain, ours, added = (f"{time:.2f}" for time in times)
            rows.append((label, unit, plain, ours, ratio(row["ratio"]), added))
    return f"{described(record)}\n\n{table(headings, rows)}"


def guard(record: Record) -> str:
    """Microseconds that the guard adds to a call."""
    headings = ("inputs", "without, us a call", "with", "added, of the minima")
    headings += ("added, median of the rounds",)
    rows = []
    for count, row in record["guard"].items():
        plain, ours = (row[side]["minimum_ms"] * 1e3 for side in ("plain", "composer"))
        median = row["added_ms"]["median_ms"] * 1e3
        rows.append((count, *(f"{each:.2f}" for each in (plain, ours, ours - plain, median))))
    return f"{described(record)}\n\n{table(headings, rows)}"


def telemetry(record: Record) -> str:
    """What the sink ``jsonl`` takes of a compile."""
    headings = ("a compile", "unit", "without", "with", "ratio (quartiles)", "the sink's own time")
    headings += ("its share (quartiles)",)
    rows = []
    for name, row in record["compiles"].items():
        times = (row["plain"]["median_ms"], row["composer"]["median_ms"])
        median, p25, p75 = (f"{row['share'][part]:.2%}" for part in ("median", "p25", "p75"))
        rows.append(
            (
                *(name, "ms", *(f"{time:.1f}" for time in times), ratio(row["ratio"])),
                *(f"{row['sink_ms']:.2f}", f"{median} ({p25}-{p75})"),
            )
        )
    return f"{described(record)}\n\n{table(headings, rows)}"


def gpu(record: Record) -> str:
    """Milliseconds, errors and memory on the card; engines without figures say why, once."""
    card, rows = record["card"], record["results"]
    headings = ("model", "variant", "dtype", "median ms", "eager / variant (quartiles)")
    headings += ("compile s", "kernels", "error against float64", "peak MiB", "card MiB")
    figures = [gpu_row(row) for row in rows if not row["left_out"]]
    late = [row for row in rows if row["left_out"].startswith(NOT_RUN)]
    left_out = [row for row in rows if row["left_out"] and row not in late]
    why = dict.fromkeys((row["variant"], row["left_out"]) for row in left_out)
    packages = (record["machine"]["packages"] | card["packages"]).items()
    said = (
        f"Measured {record['machine']['date'][:10]} on {card['card']}, driver {card['driver']}, "
        f"CUDA {card['cuda']}; {', '.join(f'{name} {v}' for name, v in packages if v)}."
    )
    parts = [said, table(headings, figures)]
    short = [(name, textwrap.shorten(reason, 240, placeholder=" ...")) for name, reason in why]
    parts += [table(("without figures", "why"), short)] if short else []
    behind = dict.fromkeys(f"{row['model']} in {row['dtype']}" for row in late)
    parts += (
        [f"Not run, or not all variants, for lack of time: {', '.join(behind)}."] if late else []
    )
    return "\n\n".join(parts)


def gpu_row(row: Record) -> tuple[str, ...]:
    """One variant of one model in one dtype; a compile from Inductor's cache has a ``*``."""
    seconds, kernels = row["compile_seconds"], row["kernels"]
    return (
        f"{row['model']} x{row['batch']}",
        row["variant"],
        row["dtype"],
        f"{row['series']['median_ms']:.3f}",
        ratio(row["speedup"]) if row["speedup"] else "",
        "" if seconds is None else f"{seconds:.1f}{'*' if row['cached'] else ''}",
        "" if kernels is None else str(kernels),
        f"{row['relative_error']:.0e}",
        f"{row['peak_mib']:.0f}",
        f"{row['device_mib']:.0f}",
    )


def onnxrt(record: Record) -> str:
    """What the engine costs around ONNX Runtime."""
    calls = [
        (
            *(name, "us a call", f"{1e3 * row['alone']['median_ms']:.1f}"),
            *(f"{row['added_us']:.1f}", f"{row['allowed_us']:.0f}"),
        )
        for name, row in record["calls"].items()
    ]
    waiting = [
        (name, "ms", *(median(row.get(part)) for part in ("call", "torch_after")))
        for name, row in record["spinning"].items()
    ]
    translation = [
        (
            *(model, f"{row['nodes']} nodes", f"{row['exporter_s_per_1000']:.2f}"),
            *(f"{row['composer_s_per_1000']:.2f}", ratio(row["ratio"])),
        )
        for model, row in record["translation"].items()
    ]
    memory = [
        (name, "MB", f"{row['grown_mb']:.0f}", f"{row['grown_over_weights']:.2f}")
        for name, row in record["memory"].items()
    ]
    sessions = [
        (model, median(row["session"]), ratio(row["transposed"]))
        for model, row in record["sessions"].items()
    ]
    tables = (
        table(("a call", "unit", "the session's run", "ours, above it", "aimed at"), calls),
        table(("threads", "unit", "a call of BERT", "torch's next operation"), waiting),
        table(
            ("translation", "size", "exporter, s per 1,000 nodes", "composer", "ratio (quartiles)"),
            translation,
        ),
        table(("weights", "unit", "growth of the process", "over the weights"), memory),
        table(
            ("time without / with all", "", *record["rewrites"]["bert"]),
            [
                (model, "ratio (quartiles)", *map(ratio, row.values()))
                for model, row in record["rewrites"].items()
            ],
        ),
        table(
            ("a session and its first call", "ms", "with weights transposed / as they lie"),
            sessions,
        ),
    )
    return "\n\n".join((described(record), *tables))


def halves(record: Record) -> str:
    """What models in half precision gain by ONNX Runtime."""
    headings = ("half precision", "onnxrt, ms", "eager / onnxrt (quartiles)", "inductor / onnxrt")
    headings += ("error of onnxrt", "of inductor")
    rows = [
        (
            *(name, median(row["onnxrt"])),
            *(ratio(row[f"{each}_over_onnxrt"]) for each in ("eager", "inductor")),
            *(f"{row[f'{each}_error']:.0e}" for each in ("onnxrt", "inductor")),
        )
        for name, row in record["halves"].items()
    ]
    return f"{described(record)}\n\n{table(headings, rows)}"


def passes(record: Record) -> str:
    """Speed and compile seconds of each pass on the models that it matches, engine by engine."""
    headings = ("pass", "model", "engine", "matches", "without / with (quartiles)")
    headings += ("its own s", "longer first call, s", "largest relative error")
    matching = [row for row in record["results"] if row["matches"]]
    rows = [pass_row(row) for row in sorted(matching, key=lambda row: row["passes"])]
    return f"{described(record)}\n\n{table(headings, rows)}"


def pass_costs(record: Record) -> str:
    """Seconds of the pipeline as a share of Inductor's, and of the ``aten`` stage by node."""
    whole, inductor = record["thousand"], record["inductor_s"]
    kinds = {"none": "nothing", "tenth": "a tenth each", "half": "half each"}
    shares = [
        (said, f"{whole[f'passes_{name}_s']:.3f}", f"{whole[f'passes_{name}_s'] / inductor:.1%}")
        for name, said in kinds.items()
    ]
    graphs = {f"{record['operations']:,} operations": whole, **record["models"]}
    stages = [
        (name, str(row["nodes"]), f"{row['aten_s']:.2f}", f"{row['aten_ms_a_node']:.2f}")
        for name, row in graphs.items()
    ]
    tables = (
        table(("five passes rewrite", "s", f"of Inductor's {inductor:.1f} s"), shares),
        table(("graph", "nodes", "canonical ATen, s", "ms a node"), stages),
    )
    return "\n\n".join((described(record), *tables))


def pass_row(row: Record) -> tuple[str, ...]:
    """One pass on one model under one engine; a failed one says why."""
    names = (f"`{row['passes']}`", row["model"], row["engine"], str(row["matches"]))
    if row["speedup"] is None:
        return (*names, *[""] * 3, row["error"])
    return (
        *names,
        ratio(row["speedup"]),
        f"{row['own_seconds']:.2f}",
        f"{row['extra_compile_seconds']:.1f}",
        f"{row['max_relative_error']:.0e}",
    )


def median(series: Record | None) -> str:
    """The median and its quartiles, in milliseconds; nothing where there is no series."""
    if series is None:
        return ""
    return f"{series['median_ms']:.2f} ({series['p25_ms']:.2f}-{series['p75_ms']:.2f})"


def faults(record: Record) -> str:
    """What became of the calls of a model whose first engine fails, by fault and by way."""
    ways = list(dict.fromkeys(row["way"] for row in record["cells"]))
    tables = []
    for training in (False, True):
        rows: dict[tuple[str, str], list[str]] = {}
        for cell in record["cells"]:
            if cell["training"] is training:
                key = (f"`{cell['fault']}`" if cell["fault"] else "none", cell["strikes"])
                rows.setdefault(key, []).append(fault_cell(cell))
        mode = "training" if training else "inference"
        tables.append(
            table((f"fault, {mode}", "strikes", *ways), [(*k, *v) for k, v in rows.items()])
        )
    return "\n\n".join((described(record), *tables))


def soak(record: Record) -> str:
    """What many calls from several threads came to, while engines failed."""
    names = ("graphs", "calls", "engines_that_raised", "recorded_as_raised", "recorded_fallbacks")
    rows = [(name.replace("_", " "), "", f"{record[name]:,}") for name in names]
    rows += [("not as eager", "calls", str(sum(record["not_as_eager"].values())))]
    rows += [
        ("growth", "MB", f"{record['growth_mb']:.1f}"),
        ("took", "s", f"{record['seconds']:.0f}"),
    ]
    return f"{described(record)}\n\n{table(('what', 'unit', 'figure'), rows)}"


def fault_cell(cell: Record) -> str:
    """``aot_eager, right, +0.4 s``: who answers in the end, the calls, the time lost."""
    calls, total = dict(cell["calls"]), sum(cell["calls"].values())
    if set(calls) & {"hung", "process lost"}:
        return f"**{next(iter(calls))}**"
    wrong = [f"**{what}** in {n} of {total}" for what, n in calls.items() if what != "right"]
    lost = f", +{cell['lost_s']:.1f} s" if cell["lost_s"] >= 0.15 else ""
    return ", ".join((cell["served_by"] or "nobody", *(wrong or ["right"]))) + lost


def operators(record: Record) -> str:
    """What torch's operator samples came to, and the operators not taken, by cause."""
    counts = record["summary"]["forward"]
    said = (
        f"{counts['graphs']} operators of torch's `op_db` yield a graph "
        f"({record['settings']['dtype']}, forward). {counts['nothing']} of them compute nothing: "
        "they only make views, or draw random numbers, which stay torch's. "
        f"Of the other {counts['computing']}, {counts['taken']} "
        f"({counts['taken_for_all']:.0%}) are taken with all samples, {counts['partly']} with "
        f"some, and {counts['declined']} are declined. On average {counts['coverage']:.0%} of an "
        f"operator's graphs is ONNX Runtime's; of {counts['taken_whole']:.0%} of the operators all "
        "is."
    )
    if back := record["summary"].get("backward"):
        most = record["settings"].get("samples_backward", record["settings"]["samples"])
        said += (
            f" With their backward, {most} samples each at most, {back['taken']} of "
            f"{back['computing']} are taken with all samples, {back['partly']} with some, "
            f"{back['declined']} are declined."
        )
    wrong = sum(each[kind] for each in record["summary"].values() for kind in WRONG)
    said += f" Wrong, crashed, or raising what eager does not: {wrong}."
    if again := record.get("repeated_after_a_mend"):
        said += f" Repeated after a mend: {', '.join(f'`{op}`' for op in again)}."
    said += " Declined going forward:"
    causes: dict[str, list[str]] = {}
    for result in record["results"]:
        if (result["direction"], result["verdict"]) == ("forward", "declined"):
            for each in sorted({cause(*refusal) for refusal in result["refused"]}):
                causes.setdefault(each, []).append(f"`{result['op']}`")
    rows = [(each, ", ".join(ops)) for each, ops in sorted(causes.items(), key=by_length)]
    return f"{described(record)}\n\n{said}\n\n{table(('why not', 'operators'), rows)}"


def edges(record: Record) -> str:
    """What operators came to on numbers at the edges, and those that are not right."""
    headings = ("engine", "dtype", "operators with a graph", "as in eager", "of them declined")
    headings += ("documented", "otherwise")
    rows, known, otherwise = [], [], []
    for sweep in record["sweeps"]:
        counts, place = sweep["counts"], (f"`{sweep['engine']}`", sweep["dtype"])
        right = sum(counts[each] for each in ("taken", "partly", "declined", "nothing"))
        figures = (right + sum(counts[each] for each in WRONG), right, counts["declined"])
        figures += (len(sweep["known"]), len(sweep["otherwise"]))
        rows.append((*place, *map(str, figures)))
        if sweep["known"]:
            known.append((*place, ", ".join(f"`{op}`" for op in sweep["known"])))
        for op, found in sweep["otherwise"].items():
            otherwise.append((*place, f"`{op}`", ", ".join(found["at"])))
    said = f"{described(record)} {record['samples']} samples an operator."
    if again := record.get("repeated"):
        said += f" Repeated after a change of the bench: {', '.join(f'`{op}`' for op in again)}."
    parts = [said, table(headings, rows)]
    parts += [table(("engine", "dtype", "documented"), known, text=3)] if known else []
    parts += [table(("engine", "dtype", "otherwise", "at"), otherwise, text=4)] if otherwise else []
    return "\n\n".join(parts)


def cause(reason: str, message: str) -> str:
    """Why an attempt was refused, in words that operators share."""
    known = re.findall(r"(?:aten|prims|torch_nn)\.[\w.]+ \(([^()]+)\)", message)
    if known:
        return str(known[0])
    if reason == "unsupported_dtype":
        return "complex, sparse or quantized tensors"
    return f"`{reason}`"


def by_length(item: tuple[str, list[str]]) -> tuple[int, str]:
    """The longest list first."""
    return -len(item[1]), item[0]


@dataclass(frozen=True, slots=True)
class Part:
    """What stands between two markers of a page.

    Attributes:
        page: From the repository's root.
        marker: The markers' name, and by default that of the file with the figures.
        render: Makes the text of the figures.
        command: What makes the figures, to be said where there are none. Without it the text that
            is there stays.
    """

    page: str
    marker: str
    render: Callable[[Record], str]
    command: str = ""

    def text(self, folder: Path) -> str | None:
        """The text; ``None`` to leave it as it is."""
        file = folder / f"{self.marker}.json"
        if file.exists():
            return self.render(json.loads(file.read_text(encoding="utf-8")))
        return f"Not measured yet: `python bench/{self.command}`." if self.command else None


PARTS = (
    Part("docs/benchmarks/what-composer-adds.md", "overhead", overhead),
    Part("docs/benchmarks/what-composer-adds.md", "guard", guard),
    Part("docs/benchmarks/what-an-engine-that-fails-costs.md", "faults", faults),
    Part("docs/benchmarks/what-an-engine-that-fails-costs.md", "soak", soak),
    Part("docs/benchmarks/what-telemetry-takes.md", "telemetry", telemetry),
    Part(
        "docs/benchmarks/ten-public-models.md",
        "models",
        models,
        command="models.py --json bench/results/models.json",
    ),
    Part(
        "docs/benchmarks/ten-public-models.md",
        "models_bf16",
        models,
        command="models.py --precisions fp32,bf16 --json bench/results/models_bf16.json",
    ),
    Part("docs/benchmarks/ten-public-models.md", "models_zen4", headline),
    Part("docs/benchmarks/ten-public-models.md", "models_amx", headline),
    Part("docs/benchmarks/ten-public-models.md", "models_amx_bf16", headline),
    Part(
        "docs/benchmarks/ten-public-models.md",
        "training",
        models,
        command="models.py --train --json bench/results/training.json",
    ),
    Part(
        "docs/benchmarks/how-composer-grows.md",
        "scaling",
        scaling,
        command="scaling.py --json bench/results/scaling.json",
    ),
    Part(
        "docs/benchmarks/warm-starts.md",
        "warm",
        warm,
        command="warm.py --json bench/results/warm.json",
    ),
    Part(
        "docs/benchmarks/choosing-by-measurement.md",
        "choosing",
        choosing,
        command="choosing.py --load 1 --json bench/results/choosing.json",
    ),
    Part("docs/benchmarks/choosing-by-measurement.md", "choosing_amx", choosing),
    Part(
        "docs/benchmarks/dynamos-guards.md",
        "guards",
        guards,
        command="guards.py --json bench/results/guards.json",
    ),
    Part(
        "docs/benchmarks/dynamos-guards.md",
        "guards_openvino",
        guards,
        command="guards.py --engine openvino --json bench/results/guards_openvino.json",
    ),
    Part(
        "docs/benchmarks/generation.md",
        "generation",
        generation,
        command="generation.py --json bench/results/generation.json",
    ),
    Part("docs/benchmarks/on-a-gpu.md", "gpu", gpu),
    Part("docs/benchmarks/around-onnx-runtime.md", "onnxrt", onnxrt),
    Part("docs/benchmarks/around-onnx-runtime.md", "halves", halves),
    Part("docs/benchmarks/passes-that-ship.md", "passes", passes),
    Part("docs/benchmarks/what-shared-passes-cost-a-compile.md", "pass_costs", pass_costs),
    Part(
        "docs/benchmarks/numbers-at-the-edges.md",
        "edges",
        edges,
        command="edges.py --json bench/results/edges.json",
    ),
    Part("docs/reference/engines/onnxrt-numbers.md", "ops", operators),
)


def rewrite(root: Path, results: Path) -> None:
    """Replace what stands between the markers of every page.

    Args:
        root: The folder in which the pages lie.
        results: The folder of the figures.

    Raises:
        ValueError: a page has not the markers.
    """
    for part in PARTS:
        text = part.text(results)
        if text is None:  # no card was at hand yet
            continue
        page = root / part.page
        before = page.read_text(encoding="utf-8")
        block = f"<!-- {part.marker} -->\n{text}\n<!-- /{part.marker} -->"
        marked = rf"<!-- {part.marker} -->.*<!-- /{part.marker} -->"
        after, found = re.subn(marked, lambda _, b=block: b, before, flags=re.S)
        if found != 1:
            raise ValueError(f"{part.page} has the markers of {part.marker!r} {found} times")
        page.write_text(after, encoding="utf-8")


def main() -> int:
    """Rewrite the tables in place."""
    rewrite(HERE.parent, HERE / "results")
    return 0


if __name__ == "__main__":
    sys.exit(main())
