"""Finds the line of a table or key in a TOML file, which ``tomllib`` does not tell."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Sequence
from typing import Any

from composer.policy.wording import Location

_STRING = re.compile(r'"(?:\\.|[^"\\])*"|\'[^\']*\'')
_HEADER = re.compile(r"\s*(\[\[?)([^\[\]]+)\]\]?\s*(?:#.*)?")
_KEY = re.compile(r"""\s*((?:[\w-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[\w-]+|"[^"]*"|'[^']*'))*)\s*=""")


def line_of(text: str, location: Location) -> int:
    """Return the line (from 1) of a location, or of the nearest table or key that holds it.

    In a value of several lines, it is the first line that has the last key of the location.

    Args:
        text: The text of the file.
        location: Keys and places in lists.
    """
    entries = list(_entries(text))
    holders = [(path, line) for path, line in entries if location[: len(path)] == path]
    path, first = max(holders, key=lambda holder: len(holder[0]))  # the first of equal ones
    after = [line for _, line in entries if line > first]
    lines = text.splitlines()[max(first - 1, 0) : min(after, default=None)]
    for key in reversed(location[len(path) :]):
        if isinstance(key, str) and (offset := _line_with(key, lines)):
            return max(first, 1) + offset
    return max(first, 1)


def line_of_error(error: tomllib.TOMLDecodeError, text: str) -> int:
    """Return the line (from 1) of a syntax error in a TOML file."""
    match = re.search(r"at line (\d+)", str(error))
    if match:
        return int(match[1])
    return max(len(text.splitlines()), 1)


def _line_with(word: str, lines: Sequence[str]) -> int:
    """Return the index of the first line that has the word; 0 if no line has it."""
    whole = re.compile(rf"(?<![\w.-]){re.escape(word)}(?![\w-])")
    for index, line in enumerate(lines):
        if whole.search(line):
            return index
    return 0


def _entries(text: str) -> Iterator[tuple[Location, int]]:
    """Yield each table and key outside of values, with its path and line; the file is line 0."""
    yield (), 0
    table: Location = ()
    lists: dict[tuple[str, ...], int] = {}
    depth = 0
    for number, line in enumerate(text.splitlines(), 1):
        bare = _STRING.sub("", line).partition("#")[0]
        if depth == 0 and (header := _HEADER.fullmatch(line)):
            keys = _keys(f"{header[2]} = 0")
            if header[1] == "[[":
                lists[keys] = lists.get(keys, -1) + 1
            table = _placed(keys, lists)
            yield table, number
            continue
        if depth == 0 and (key := _KEY.match(line)):
            yield (*table, *_keys(f"{key[1]} = 0")), number
        depth += sum(map(bare.count, "[{")) - sum(map(bare.count, "]}"))


def _keys(line: str) -> tuple[str, ...]:
    """Return the keys of a line such as ``a."b.c" = 0``."""
    table: Any = tomllib.loads(line)
    keys = []
    while isinstance(table, dict):
        ((key, table),) = table.items()
        keys.append(key)
    return tuple(keys)


def _placed(keys: tuple[str, ...], lists: dict[tuple[str, ...], int]) -> Location:
    """Return the path of a table, with its place in each list of tables on the way."""
    path: list[str | int] = []
    for length, key in enumerate(keys, 1):
        path.append(key)
        if keys[:length] in lists:
            path.append(lists[keys[:length]])
    return tuple(path)
