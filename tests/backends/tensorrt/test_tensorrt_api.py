"""Each name of TensorRT's that the engine uses is there in every release that it is meant for.

The lists in ``tensorrt_api`` were made by its ``listing.py`` from the real bindings of each
release. What the engine uses is read off its code: an attribute of an object that is called what
TensorRT calls it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import composer

HERE = Path(__file__).parent / "tensorrt_api"
ENGINE = Path(composer.__file__).parent / "backends" / "tensorrt"
RELEASES = sorted(path.stem for path in HERE.glob("*.txt"))
FILES = (
    *("log.py", "network.py", "plan.py", "loading.py", "allocator.py", "execution.py"),
    "refit.py",
)

CLASSES = {
    "builder": "Builder",
    "config": "IBuilderConfig",
    "network": "INetworkDefinition",
    "terminal": "ITensor",
    "parser": "OnnxParser",
    "profile": "IOptimizationProfile",
    "times": "ITimingCache",
    "runtime": "Runtime",
    "_engine": "ICudaEngine",
    "engine": "ICudaEngine",
    "context": "IExecutionContext",
    "refitter": "Refitter",
    "reader": "OnnxParserRefitter",
    "serialization": "ISerializationConfig",
}
"""What a variable or an attribute of this name holds, in the files above."""

MODULES = ("trt", "module")
ONLY_RTX = {
    "ComputeCapability.__members__",
    "IBuilderConfig.num_compute_capabilities",
    "IBuilderConfig.set_compute_capability",
}


def offered(release: str) -> dict[str, str]:
    """Name to signatures."""
    pairs = (line.partition(" ") for line in (HERE / f"{release}.txt").read_text().splitlines())
    return {name: signatures for name, _, signatures in pairs}


def used(source: str) -> Iterator[tuple[str, ast.Call | None]]:
    """``Class.member`` and the call, if it is called, of everything of TensorRT's in some code."""
    tree = ast.parse(source)
    calls = {node.func: node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        holder = ast.unparse(node.value).split(".")
        if holder[-1] in CLASSES:
            yield f"{CLASSES[holder[-1]]}.{node.attr}", calls.get(node)
        elif len(holder) > 1 and holder[-2] in MODULES and holder[-1][0].isupper():
            yield f"{holder[-1]}.{node.attr}", None
        elif holder[-1] in MODULES and node in calls:
            yield f"{node.attr}.__init__", calls[node]


def everything() -> dict[str, list[ast.Call | None]]:
    found: dict[str, list[ast.Call | None]] = {}
    for name in FILES:
        for member, call in used((ENGINE / name).read_text()):
            found.setdefault(member, []).append(call)
    return found


def takes(signature: str, call: ast.Call) -> bool:
    """Whether one signature takes a call's arguments, by their number and keywords."""
    inside = signature[1 : signature.rindex(")")]
    given = re.sub(r"<[^>]*>|\[[^]]*\]", "", inside).split(",")[1:]
    names = [each.split(":")[0].strip() for each in given]
    needed = [name for name, each in zip(names, given, strict=True) if "=" not in each]
    keywords = {each.arg for each in call.keywords}
    asked = set(names[: len(call.args)]) | keywords
    return len(call.args) <= len(names) and keywords <= set(names) and set(needed) <= asked


def missing(release: str, uses: dict[str, list[ast.Call | None]]) -> list[str]:
    """What a release does not have, or does not take these arguments for."""
    has = offered(release)
    classes = {name.partition(".")[0] for name in has}
    lacks = []
    for name, calls in uses.items():
        if name.endswith("__members__"):
            if name.partition(".")[0] not in classes:
                lacks.append(name)
            continue
        signatures = [each for each in has.get(name, "").split(" | ") if each.startswith("(self")]
        fits = all(
            call is None or not signatures or any(takes(each, call) for each in signatures)
            for call in calls
        )
        if name not in has or not fits:
            lacks.append(name)
    return lacks


def test_the_releases_are_those_that_the_engine_is_meant_for() -> None:
    """Both ends of either major version, and RTX."""
    assert [each.rpartition("-")[2].rsplit(".", 2)[0] for each in RELEASES] == [
        *("10.13", "10.16", "11.0", "11.4", "1.6"),
    ]


@pytest.mark.parametrize("release", RELEASES)
def test_every_name_is_there_and_takes_the_arguments(release: str) -> None:
    """What only RTX has is asked of RTX only."""
    uses = everything()
    assert len(uses) > 45
    expected = set() if release.startswith("tensorrt_rtx") else ONLY_RTX
    assert set(missing(release, uses)) == expected


@pytest.mark.parametrize(
    ("code", "lacks"),
    [
        ("context.execute_async_v3(stream)", []),
        ("context.execute_async_v2(stream)", ["IExecutionContext.execute_async_v2"]),
        ("self.lane.context.set_tensor_address(1)", ["IExecutionContext.set_tensor_address"]),
        ("trt.BuilderFlag.TF32", []),
        ("library.module.BuilderFlag.FP16", ["BuilderFlag.FP16"]),
        ("config.set_timing_cache(a, mismatch=False)", ["IBuilderConfig.set_timing_cache"]),
        ("trt.Builder()", ["Builder.__init__"]),
    ],
)
def test_what_is_not_there_is_found_out(code: str, lacks: list[str]) -> None:
    """A name, a number of arguments, a keyword."""
    uses = {name: [call] for name, call in used(code)}
    assert missing("tensorrt-11.4.0.106", uses) == lacks


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize(
    "method", ["ILogger.log", "IProgressMonitor.phase_start", "IProgressMonitor.step_complete"]
)
def test_what_tensorrt_calls_back_has_its_parameters(release: str, method: str) -> None:
    """Their number and names; those of the output allocator are not in the bindings."""
    name = method.partition(".")[2]
    functions = (
        node
        for file in FILES
        for node in ast.walk(ast.parse((ENGINE / file).read_text()))
        if isinstance(node, ast.FunctionDef) and node.name == name
    )
    (ours,) = functions
    theirs = re.findall(r"(\w+):", offered(release)[method].partition(")")[0])
    assert [each.arg for each in ours.args.args] == theirs
