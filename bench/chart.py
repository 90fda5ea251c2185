"""The README's chart, drawn from the figures of ``bench/models.py``: a light and a dark SVG.

``python bench/chart.py`` writes both from ``bench/results/models_amx.json``. A bar says how many
times as fast as eager a model ran: as ``torch.compile(model)`` has it, and as composer's choice.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

HERE = Path(__file__).parent
FIGURES = HERE / "results" / "models_amx.json"
IMAGES = HERE.parent / "docs" / "images"

SIDES = (("inductor", "torch.compile"), ("composer, fastest", "composer"))
"""The variants that are drawn, and what the legend calls them."""

NAMES = {
    **{"bert": "BERT", "gpt2": "GPT-2", "llama": "Llama", "convnext": "ConvNeXt"},
    **{"whisper_enc": "Whisper encoder", "swin": "Swin", "t5": "T5", "resnet": "ResNet-50"},
    **{"vit": "ViT", "mobilenet": "MobileNet"},
}

LEFT, TOP, BAR, GAP, WIDTH, SCALE = 130, 64, 11, 9, 720, 110


@dataclass(frozen=True)
class Colours:
    """Of one kind of page."""

    text: str
    faint: str
    sides: tuple[str, str]


LIGHT = Colours("#1f2328", "#8c959f", ("#9aa5b1", "#0969da"))
DARK = Colours("#e6edf3", "#6e7681", ("#6e7681", "#58a6ff"))


def speeds(record: dict[str, Any]) -> dict[str, list[float]]:
    """How many times as fast as eager each side ran a model in float32; medians of the rounds."""
    found: dict[str, list[float]] = {}
    for variant, _ in SIDES:
        for row in record["results"]:
            if row["variant"] == variant and row["precision"] == "fp32":
                found.setdefault(row["model"], []).append(row["speedup_over_eager"]["median"])
    return dict(sorted(found.items(), key=lambda item: -item[1][-1]))


def svg(record: dict[str, Any], colours: Colours) -> str:
    """The chart as the text of an SVG file."""
    rows = speeds(record)
    bottom = TOP + len(rows) * (2 * BAR + GAP)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 34}" '
        'font-family="system-ui, sans-serif" font-size="13" role="img">',
        "<title>Ten models: how many times as fast as eager</title>",
        *_head(colours),
        *(line for at, row in enumerate(rows.items()) for line in _bars(at, *row, colours)),
        _text(LEFT, bottom + 24, _machine(record), colours.faint, size=11),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _head(colours: Colours) -> Iterator[str]:
    """The title, the legend, and the line at which a model is as fast as eager."""
    yield _text(LEFT, 20, "Times as fast as eager, float32 on a CPU", colours.text, size=15)
    for at, (_, name) in enumerate(SIDES):
        x = LEFT + at * 130
        yield f'<rect x="{x}" y="34" width="12" height="12" rx="2" fill="{colours.sides[at]}"/>'
        yield _text(x + 18, 45, name, colours.text)
    x = LEFT + SCALE
    yield _text(x + 4, TOP - 6, "eager = 1", colours.faint, size=11)
    bottom = TOP + len(NAMES) * (2 * BAR + GAP)
    yield f'<line x1="{x}" y1="{TOP - 14}" x2="{x}" y2="{bottom}" stroke="{colours.faint}"/>'


def _bars(at: int, model: str, ratios: list[float], colours: Colours) -> Iterator[str]:
    """The two bars of a model, each with its number."""
    y = TOP + at * (2 * BAR + GAP)
    yield _text(LEFT - 8, y + BAR + 5, NAMES[model], colours.text, anchor="end")
    for side, ratio in enumerate(ratios):
        top, width = y + side * BAR, round(ratio * SCALE, 1)
        colour = colours.sides[side]
        yield f'<rect x="{LEFT}" y="{top}" width="{width}" height="{BAR - 1}" fill="{colour}"/>'
        yield _text(LEFT + width + 5, top + BAR - 1, f"{ratio:.2f}", colours.text, size=11)


def _machine(record: dict[str, Any]) -> str:
    """Where and when this was measured."""
    machine = record["machine"]
    versions = machine["packages"]
    engines = f"ONNX Runtime {versions['onnxruntime']}, OpenVINO {versions['openvino']}"
    where = f"{machine['cpu'].partition(' Processor')[0]}, {machine['cores']} cores"
    return f"{machine['date'][:10]}, {where}, torch {versions['torch']}, {engines}"


def _text(x: float, y: float, text: str, colour: str, size: int = 13, anchor: str = "start") -> str:
    place = f'x="{x}" y="{y}" fill="{colour}" font-size="{size}" text-anchor="{anchor}"'
    return f"<text {place}>{escape(text)}</text>"


def main() -> None:
    """Write both files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=FIGURES, help="the figures of bench/models.py")
    parser.add_argument("--out", type=Path, default=IMAGES, help="the folder of the two files")
    asked = parser.parse_args()
    record = json.loads(asked.json.read_text(encoding="utf-8"))
    for name, colours in (("light", LIGHT), ("dark", DARK)):
        (asked.out / f"speed-{name}.svg").write_text(svg(record, colours), encoding="utf-8")


if __name__ == "__main__":
    main()
