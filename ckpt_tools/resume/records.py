"""What the trainer's processes recorded, put together over ranks: the course of a run, and its whole state after some steps."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import CkptError
from ..formats.safetensors import read_header
from ..naming import canonical_tensors, parse_key
from ..tensors import Chunk, Shape, TensorMetadata

COMPONENTS = ("weights", "master", "exp_avg", "exp_avg_sq")
State = dict[str, dict[str, TensorMetadata]]


@dataclass(frozen=True, slots=True)
class Step:
    """A run after one iteration, or as it was when it began.

    steps: step counts that the optimizer holds;  rng: "tp.pp.dp generator" -> digest;  digests: piece -> digest;  samples: consumed in
    this step. loss, grad_norm, lr, weight_decay: of this step, None at the beginning.
    """

    iteration: int
    consumed: int
    steps: tuple[int, ...]
    scheduler: dict[str, Any]
    rng: dict[str, str]
    digests: dict[str, str]
    samples: tuple[int, ...]
    loss: float | None
    grad_norm: float | None
    lr: float | None
    weight_decay: float | None


@dataclass(frozen=True, slots=True)
class Trace:
    """A run: its steps by iteration, and what it said it could not restore."""

    name: str
    steps: dict[int, Step]
    notes: tuple[str, ...]

    @property
    def first(self) -> int:
        """The iteration at which it began."""
        return min(self.steps)


def read_trace(folder: Path, name: str, ranks: int) -> Trace:
    """The trace of job `name`. Errors: E514 when a rank left none."""
    lines: dict[int, list[dict[str, Any]]] = {}
    for rank in range(ranks):
        path = folder / f"{name}.{rank}.jsonl"
        if not path.exists():
            raise CkptError("E514", "a process of the trainer recorded nothing", where=f"{name}, rank {rank}")
        for line in path.read_text().splitlines():
            told = json.loads(line)
            lines.setdefault(told["iteration"], []).append(told)
    notes = dict.fromkeys(note for told in lines.values() for one in told for note in one["notes"])
    return Trace(name, {iteration: _joined(told) for iteration, told in sorted(lines.items())}, tuple(notes))


def _joined(ranks: list[dict[str, Any]]) -> Step:
    rng: dict[str, str] = {}
    for told in ranks:
        place = ".".join(str(told["place"][axis]) for axis in ("tp", "pp", "dp"))
        rng |= {f"{place} {generator}": digest for generator, digest in told["rng"].items()}
    first = ranks[0]
    return Step(
        first["iteration"],
        first["consumed"],
        tuple(sorted({step for told in ranks for step in told["steps"]})),
        first["scheduler"],
        rng,
        {label: digest for told in ranks for label, digest in told["digests"].items()},
        tuple(sorted({number for told in ranks for number in told.get("samples", ())})),
        next((told["loss"] for told in ranks if told.get("loss") is not None), None),
        first.get("grad_norm"),
        first.get("lr"),
        first.get("weight_decay"),
    )


def component_of(label: str) -> str:
    """The component ("weights", "master", "exp_avg", "exp_avg_sq") of a piece."""
    return label.partition("|")[0]


def tensor_of(label: str) -> str:
    """The canonical name of the parameter that a piece belongs to."""
    _, key, _, offset = label.split("|")
    parsed = parse_key(key)
    axes = [part for part in offset.split(".") if part]
    layer = axes[0] if parsed.layers else ""
    expert = axes[int(parsed.layers)] if parsed.experts else ""
    return parsed.template.replace("{l}", layer).replace("{e}", expert)


def dumped(folder: Path, name: str, iteration: int, ranks: int) -> State:
    """component -> canonical name -> tensor, of the whole model after `iteration`; nothing is read but headers."""
    whole: dict[str, dict[str, list[tuple[Shape, Shape, TensorMetadata]]]] = {}
    for rank in range(ranks):
        path = folder / f"{name}.{iteration}.{rank}.safetensors"
        for label, tensor in read_header(str(path)).tensors.items() if path.exists() else ():
            component, key, shape, offset = label.split("|")
            whole.setdefault(component, {}).setdefault(key, []).append((_numbers(shape), _numbers(offset), tensor))
    return {component: canonical_tensors(_assembled(keys), str(folder)) for component, keys in sorted(whole.items())}


def _assembled(keys: Mapping[str, list[tuple[Shape, Shape, TensorMetadata]]]) -> dict[str, TensorMetadata]:
    return {key: TensorMetadata(key, parts[0][2].dtype, parts[0][0], tuple(_chunks(parts))) for key, parts in keys.items()}


def _chunks(parts: Iterable[tuple[Shape, Shape, TensorMetadata]]) -> Iterable[Chunk]:
    for _, offset, tensor in parts:
        for chunk in tensor.chunks:
            at = tuple(o + c for o, c in zip(offset, chunk.global_offset, strict=True))
            yield replace(chunk, global_offset=at)


def _numbers(text: str) -> Shape:
    return tuple(int(part) for part in text.split(".") if part)
