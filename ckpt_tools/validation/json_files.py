"""JSON files of a checkpoint as the checks need them: the safetensors index, and keys that are there twice."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Index:
    """model.safetensors.index.json: path, content, keys that are there twice with different values."""

    path: str
    value: dict[str, Any]
    weight_map: dict[str, str]
    doubles: tuple[str, ...]


def twice_in_json(path: str) -> tuple[str, ...]:
    """Keys that an object of a JSON file has twice with different values."""
    found: list[str] = []

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        table: dict[str, Any] = {}
        for key, value in items:
            if key in table and table[key] != value:
                found.append(key)
            table[key] = value
        return table

    try:
        with open(path, encoding="utf-8-sig") as file:
            json.loads(file.read(512 * 2**20), object_pairs_hook=pairs)
    except (OSError, ValueError, RecursionError):
        return ()
    return tuple(dict.fromkeys(found))
