"""The key that identifies a graph, and the text from which it is computed."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.fx

from composer import _torch
from composer.graphs.written import lines
from composer.records import GraphRequest


def with_key(request: GraphRequest, name: str | None, passes: str, settings: str) -> GraphRequest:
    """The request with its keys, and with the user's own name for the model if there is one.

    Args:
        request: The facts about the graph, with the name of the class or function as its model.
        name: The user's name for the model.
        passes: Text of the shared passes.
        settings: Text of the settings of the policy.
    """
    graph = _text(request.gm, passes, request.example_inputs)
    text = f"{graph}\n{without_address(settings)}"
    among_ranks = _digest(_as_on_every_rank(text)) if _torch.ranks.world_size() > 1 else ""
    return dataclasses.replace(
        request,
        model=name or request.model,
        graph_key=_digest(text),
        graph_digest=_digest(graph),
        key_among_ranks=among_ranks,
    )


def graph_key(gm: torch.fx.GraphModule, settings: str = "") -> str:
    """The SHA-256 of all operations, arguments, shapes, dtypes, strides and devices of the graph.

    Names of nodes and symbols are replaced by their position, so that the key is equal in
    every process that captures the same graph.

    Args:
        gm: The graph.
        settings: Text of everything else that the key depends on.
    """
    return _digest(_text(gm, settings, ()))


def parts_of(request: GraphRequest, settings: Mapping[str, str]) -> dict[str, str]:
    """The text of the key in named parts, so that a message can say which part differs.

    The parts are ``surroundings`` (grad and forward mode, autocast, default dtype), ``inputs``,
    ``weights``, ``operations`` and those of the settings. They are equal on all ranks of
    ``torch.distributed``. The modes are those at the time of the call.

    Args:
        request: The captured graph.
        settings: Text of everything else that the key depends on, by name.
    """
    placeholders = request.gm.graph.find_nodes(op="placeholder")
    names = dict.fromkeys(request.gm.graph.nodes, "operations")
    for i, node in enumerate(placeholders):
        names[node] = "weights" if i in request.weights else "inputs"
    graph_lines = map(_on_one_line, (_surroundings(), *lines(request.gm, request.example_inputs)))
    setting_lines = map(without_address, map(_on_one_line, settings.values()))
    text = "\n".join((normalized("\n".join(graph_lines)), *setting_lines))
    parts: dict[str, list[str]] = {name: [] for name in ("surroundings", "inputs", "weights")}
    names_of_lines = ("surroundings", *names.values(), *settings)
    for name, line in zip(names_of_lines, _as_on_every_rank(text).split("\n"), strict=True):
        # The position of a placeholder is left out here; the operations that read it contain it.
        own = line.partition(" ")[2] if name in ("inputs", "weights") else line
        parts.setdefault(name, []).append(own)
    return {name: "\n".join(own) for name, own in parts.items()}


def _on_one_line(text: str) -> str:
    return text.replace("\n", " ")


def normalized(text: str) -> str:
    """A text without addresses, and with the names of symbols replaced by their position."""
    return _by_position(r"\b()([su]\d+)\b", "sym", without_address(text))


def _by_position(pattern: str, word: str, text: str) -> str:
    """The text with the second group of each match replaced by a number.

    Numbers are given in the order in which the matched names first occur.
    """
    seen: dict[str, str] = {}
    return re.sub(pattern, lambda m: m[1] + seen.setdefault(m[2], f"{word}{len(seen)}"), text)


def _text(gm: torch.fx.GraphModule, settings: str, example_inputs: Sequence[Any]) -> str:
    graph = normalized("\n".join((_surroundings(), *lines(gm, example_inputs))))
    return f"{graph}\n{without_address(settings)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


_OWN_TO_A_RANK = (
    r"(device\(type='\w+', index=|\b(?:cuda|xpu|hpu|npu|mtia):)(\d+)",
    r"(\b_?c10d_functional\S* \([^{]*)'([^'{]*)'(?=\) \{)",
)
"""Patterns of device numbers and of the group names of collectives, which are the last argument.
Ranks that do the same work differ in both."""


def _as_on_every_rank(text: str) -> str:
    """A graph's text with device numbers and group names replaced, so that ranks agree."""
    for pattern in _OWN_TO_A_RANK:
        text = _by_position(pattern, "#", text)
    return text


def _surroundings() -> str:
    autocast, dtype = _torch.modes.autocasts(), torch.get_default_dtype()
    forward = " forward-mode" if _torch.modes.is_forward_mode() else ""
    return f"grad={torch.is_grad_enabled()}{forward} autocast={autocast} {dtype}"


def without_address(text: str) -> str:
    """A text without the addresses of objects, which differ in every process."""
    return re.sub(r" at 0x[0-9a-f]+", "", text)
