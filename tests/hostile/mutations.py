"""Damage for checkpoints: single bytes, whole ranges, values inside JSON, safetensors headers and torch_dist's index."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

STRANGE: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 10**30, 1e400, float("nan"), 0.5, "", "x" * 5000, "../../../../etc/passwd", "/etc/passwd",
    "\x1b[2J\x1b]0;title\x07", "[red]", "\u202e", "\udcff", [], [[]], {}, [0] * 100, {"a": {"b": {}}}, [2**40, 2**40], [-1, 5], ["1"], "BF16", "F8_E4M3",
)  # fmt: skip


def flip(data: bytearray, random: Random) -> bytearray:
    """A few bytes changed."""
    for _ in range(random.choice((1, 1, 2, 8))):
        if data:
            data[random.randrange(len(data))] = random.randrange(256)
    return data


def cut(data: bytearray, random: Random) -> bytearray:
    """The end is missing."""
    return data[: random.randrange(len(data) + 1)]


def remove(data: bytearray, random: Random) -> bytearray:
    """A range is missing."""
    start = random.randrange(len(data) + 1)
    return data[:start] + data[start + random.randrange(1, 64) :]


def repeat(data: bytearray, random: Random) -> bytearray:
    """A range is there twice."""
    start = random.randrange(len(data) + 1)
    return data[:start] + data[start : start + random.randrange(1, 64)] * 2 + data[start:]


def noise(data: bytearray, random: Random) -> bytearray:
    """Something else altogether."""
    return bytearray(random.randbytes(random.choice((0, 1, 8, 200, 5000))))


BYTES: tuple[Callable[[bytearray, Random], bytearray], ...] = (flip, flip, flip, cut, remove, repeat, noise)


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to everything inside a JSON value."""
    found = [path] if path else []
    if isinstance(value, dict):
        for key in value:
            found += leaves(value[key], (*path, key))
    elif isinstance(value, list):
        for index in range(len(value)):
            found += leaves(value[index], (*path, index))
    return found


def strange_json(value: Any, random: Random) -> Any:
    """A JSON value with one part replaced, removed, renamed or nested deeply."""
    paths = leaves(value)
    if not paths:
        return random.choice(STRANGE)
    path = random.choice(paths)
    parent = value
    for key in path[:-1]:
        parent = parent[key]
    kind = random.randrange(8)
    if kind == 0:
        del parent[path[-1]]
    elif kind == 1 and isinstance(parent, dict):
        parent[str(path[-1]) + random.choice(("x", "", "\x00", ".weight", "/../x"))] = parent.pop(path[-1])
    elif kind == 2:
        deep: Any = 1
        for _ in range(random.choice((50, 3000))):
            deep = [deep]
        parent[path[-1]] = deep
    elif kind == 3 and isinstance(parent[path[-1]], int):
        parent[path[-1]] = parent[path[-1]] + random.choice((-1, 1, 8, 2**40))
    else:
        parent[path[-1]] = random.choice(STRANGE)
    return value


def dumps(value: Any) -> bytes:
    """JSON, however deep."""
    try:
        return json.dumps(value).encode("utf-8", "surrogatepass")
    except RecursionError:
        return b"[" * 3000 + b"]" * 3000


def damage_json(path: Path, random: Random) -> None:
    """One strange value in a JSON file."""
    path.write_bytes(dumps(strange_json(json.loads(path.read_bytes()), random)))


def damage_header(path: Path, random: Random) -> None:
    """One strange value in the header of a safetensors file, or a strange length."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    if random.randrange(6) == 0:
        length = random.choice((0, 1, length - 1, length + 1, len(data), 2**31, 2**63, 2**64 - 1))
        path.write_bytes(length.to_bytes(8, "little") + data[8:])
        return
    header = dumps(strange_json(json.loads(data[8 : 8 + length]), random))
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])


def damage_index(path: Path, random: Random) -> None:
    """One strange value in torch_dist's `.metadata`, which stays a well-formed pickle."""
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, ChunkStorageMetadata

    with path.open("rb") as file:
        metadata = pickle.load(file)
    name = random.choice(sorted(metadata.state_dict_metadata))
    entry = metadata.state_dict_metadata[name]
    index = random.choice(list(metadata.storage_data))
    info = metadata.storage_data[index]
    numbers = (0, -1, 1, 2**40, 2**63, "3", None, 1.5)
    kind = random.randrange(10)
    if kind == 0:
        object.__setattr__(
            info, "relative_path", random.choice(("../x", "/etc/passwd", "", "\x00", "__0_0.distcp/..", 3, None, "no-such-file"))
        )
    elif kind == 1:
        object.__setattr__(info, "offset", random.choice(numbers))
    elif kind == 2:
        object.__setattr__(info, "length", random.choice(numbers))
    elif kind == 3:
        del metadata.storage_data[index]
    elif kind == 4:
        del metadata.state_dict_metadata[name]
    elif kind == 5:
        metadata.state_dict_metadata[random.choice(("decoder.layers.0.x", "x" * 5000, "\x1b[31m", "", 5))] = entry
    elif isinstance(entry, BytesStorageMetadata) or not entry.chunks:
        metadata.state_dict_metadata[name] = random.choice((None, 5, "x", []))
    elif kind == 6:
        entry.size = random.choice(((), (0,), (2**40, 2**40), (-1, 5), "x", None, (1.5,)))
    elif kind == 7:
        entry.chunks.append(entry.chunks[0])
    elif kind == 8:
        entry.chunks[0] = random.choice(
            (ChunkStorageMetadata(offsets=(0,), sizes=(2**50,)), ChunkStorageMetadata(offsets=(-5, 0), sizes=(3, 3)), None)
        )
    else:
        entry.properties.dtype = random.choice((None, "float32", 7))
    with path.open("wb") as file:
        pickle.dump(metadata, file)


def damage(folder: Path, random: Random) -> str:
    """Damage one file of a checkpoint; says what was done."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and not p.is_symlink())
    small = [p for p in files if p.suffix in (".json", ".txt", ".metadata") or p.name in (".metadata", "common.pt")]
    path = random.choice(small if small and random.randrange(3) else files)
    kind = random.randrange(12)
    if kind == 0:
        path.unlink()
        what = "removed"
    elif kind == 1:
        path.unlink()
        if random.randrange(2):
            os.mkfifo(path)  # to open it would be to wait for ever
        else:
            path.symlink_to(random.choice(("/dev/zero", "/nowhere", ".", path.name, *(p.name for p in files if p.parent == path.parent))))
        what = "pipe or link"
    elif kind == 2:
        path.unlink()
        path.mkdir()
        what = "folder"
    elif kind < 8 and path.suffix == ".json":
        damage_json(path, random)
        what = "json"
    elif kind < 8 and path.suffix == ".safetensors":
        damage_header(path, random)
        what = "header"
    elif kind < 8 and path.name == ".metadata":
        damage_index(path, random)
        what = "index"
    else:
        change = random.choice(BYTES)
        path.write_bytes(bytes(change(bytearray(path.read_bytes()), random)))
        what = change.__name__
    return f"{path.relative_to(folder)}: {what}"
