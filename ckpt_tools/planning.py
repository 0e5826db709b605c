"""A conversion as pure data: the files to make and the strided blocks to move. Planning decides everything; executing decides nothing."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from math import prod
from typing import Any

from .dtypes import dtype
from .errors import CkptError
from .notes import Note
from .tensors import Chunk, Shape, TensorMetadata, contiguous_strides

PLAN_SCHEMA = "ckpt.plan/1"


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file that is read, and how it looked when the plan was made (bytes, mtime in ns, inode): a change while reading is an error."""

    path: str
    size: int
    mtime_ns: int
    inode: int


@dataclass(frozen=True, slots=True)
class TargetFile:
    """A file that is made: path relative to the target folder, size in bytes, and literal bytes (headers) at offsets."""

    path: str
    size: int
    literals: tuple[tuple[int, bytes], ...] = ()


@dataclass(frozen=True, slots=True)
class Copied:
    """A side file (tokenizer, config, ...) copied whole: source path, path relative to the target folder, bytes."""

    source: str
    target: str
    size: int


@dataclass(frozen=True, slots=True)
class Scale:
    """The scales of a quantised block: where they lie, how many elements have one in common, where the block lies in its tensor.

    source   index into Plan.sources.   offset  byte of the tensor's first scale.   strides  bytes from scale to scale per axis of the move.
    dtype    of the scales.   block  elements per scale and axis.   origin  of the move's box in the stored tensor.
    packed   four-bit elements, two to a byte along the axis of the block, whose scales are exponents (see `packed`).
    """

    source: int
    offset: int
    strides: Shape
    dtype: str
    block: Shape
    origin: Shape
    packed: bool = False


@dataclass(frozen=True, slots=True)
class Move:
    """One strided block from a source file to a target file.

    source, target   indexes into Plan.sources / Plan.targets.      *_offset  byte of element 0.
    shape   elements per axis;  *_strides  bytes per axis;  *_dtype  names; the same dtype on both sides means bytes are moved as they are.
    add     number added in float32 on the way (0 = none).   scale  scales to multiply by in float32 on the way.
    """

    source: int
    source_offset: int
    target: int
    target_offset: int
    shape: Shape
    source_strides: Shape
    target_strides: Shape
    source_dtype: str
    target_dtype: str
    add: float = 0.0
    scale: Scale | None = None

    @property
    def plain(self) -> bool:
        """Whether the bytes are moved as they are."""
        return self.source_dtype == self.target_dtype and not self.add and self.scale is None

    @property
    def nbytes(self) -> int:
        """Bytes written by this move."""
        return prod(self.shape) * dtype(self.target_dtype).itemsize


@dataclass(frozen=True, slots=True)
class Placement:
    """A box of a view's tensor and where it is to be stored: contiguous at `offset` of target file number `file`, as `dtype`."""

    name: str
    origin: Shape
    shape: Shape
    file: int
    offset: int
    dtype: str
    strides: Shape | None = None


@dataclass(frozen=True, slots=True)
class Encoding:
    """A matrix that is quantised on its way: its pieces are put together as float32, each block becomes elements of `dtype` and a scale.

    moves    the pieces, whose axes are those of the matrix;  places  where each begins in it. What no piece covers is zero.
    shape    (rows, columns).   block  rows and columns that share a scale.
    target, offset, scales_target, scales_offset  where elements and float32 scales go: file number and byte, row after row.
    """

    moves: tuple[Move, ...]
    places: tuple[Shape, ...]
    shape: Shape
    block: Shape
    dtype: str
    target: int
    offset: int
    scales_target: int
    scales_offset: int

    @property
    def nbytes(self) -> int:
        """Bytes written: elements and scales."""
        return prod(self.shape) * dtype(self.dtype).itemsize + 4 * prod(-(-n // b) for n, b in zip(self.shape, self.block, strict=True))


@dataclass(frozen=True, slots=True)
class Plan:
    """A whole conversion. source / target: what is read and made (path, format, iteration, ...) for people and for JSON."""

    source: dict[str, Any]
    target: dict[str, Any]
    sources: tuple[SourceFile, ...]
    targets: tuple[TargetFile, ...]
    copies: tuple[Copied, ...]
    moves: tuple[Move, ...]
    notes: tuple[Note, ...] = ()
    tensors: int = 0
    buffer: int = field(default=256 * 1024)
    encodings: tuple[Encoding, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all files that will be made."""
        return sum(t.size for t in self.targets) + sum(c.size for c in self.copies)

    @property
    def moved_bytes(self) -> int:
        """Tensor bytes that will be written."""
        return sum(m.nbytes for m in self.moves) + sum(e.nbytes for e in self.encodings)


class MoveBuilder:
    """Collects moves from a view's tensors into placements, numbering the source files as they appear."""

    def __init__(self) -> None:
        self.moves: list[Move] = []
        self.encodings: list[Encoding] = []
        self._files: dict[str, int] = {}

    def place(self, tensor: TensorMetadata, placement: Placement) -> None:
        """Add the moves that fill one placement. Zero boxes need none: new files read as zeros. E404 when bytes are missing."""
        covered = 0
        item = dtype(placement.dtype).itemsize
        strides = placement.strides or contiguous_strides(placement.shape, item)
        for part in tensor.region(placement.origin, placement.shape):
            covered += prod(part.local_shape)
            if part.extent is None:
                continue
            if part.extent.strides is None:
                raise CkptError("E490", f"{tensor.fqn} was planned before its bytes were located")
            at = sum((a - b) * s for a, b, s in zip(part.global_offset, placement.origin, strides, strict=True))
            move = move_of(part, tensor.dtype, strides, placement.dtype, self._number)
            self.moves.append(replace(move, target=placement.file, target_offset=placement.offset + at))
        if covered != prod(placement.shape):
            raise CkptError(
                "E404",
                f"the source does not hold every element of {placement.name}",
                where=placement.name,
                expected=f"{prod(placement.shape)} elements",
                found=f"{covered}",
            )

    def encode(self, tensor: TensorMetadata, weight: Placement, scales: Placement, block: Shape) -> None:
        """Add the encoding of a matrix. E404 when bytes are missing."""
        self.encodings.append(
            encoding_of(tensor, weight.dtype, block, (weight.file, weight.offset), (scales.file, scales.offset), self._number)
        )

    def _number(self, path: str) -> int:
        return self._files.setdefault(path, len(self._files))

    def sources(self) -> tuple[SourceFile, ...]:
        """The source files as they look now."""
        found = []
        for path in self._files:
            stat = os.stat(path)
            found.append(SourceFile(path, stat.st_size, stat.st_mtime_ns, stat.st_ino))
        return tuple(found)


def encoding_of(
    tensor: TensorMetadata, kind: str, block: Shape, weight: tuple[int, int], scales: tuple[int, int], source: Callable[[str], int]
) -> Encoding:
    """The encoding of a matrix as dtype `kind`; weight and scales are (file number, byte). CkptError E404 when bytes are missing."""
    moves, places, covered = [], [], 0
    strides = contiguous_strides(tensor.global_shape, 4)
    for part in tensor.chunks:
        covered += prod(part.local_shape)
        if part.extent is not None:
            moves.append(move_of(part, tensor.dtype, strides, "float32", source, aligned=True))
            places.append(part.global_offset)
    if covered != tensor.numel:
        raise CkptError(
            "E404",
            f"the source does not hold every element of {tensor.fqn}",
            where=tensor.fqn,
            expected=f"{tensor.numel} elements",
            found=f"{covered}",
        )
    return Encoding(tuple(moves), tuple(places), tensor.global_shape, block, kind, *weight, *scales)


def move_of(
    part: Chunk, kind: str, strides: Shape, target_dtype: str, source: Callable[[str], int], *, aligned: bool = False
) -> Move:
    """The move of a stored chunk of a tensor of dtype `kind` into a box of these strides, at offset 0 of target 0.

    source gives the number of a source file. aligned: the axes stay as they are; so they do where a chunk has scales, since they say which
    scale is whose.
    """
    extent, decode = part.extent, part.decode
    if extent is None or extent.strides is None:
        raise CkptError("E490", "a chunk was planned before its bytes were located")
    stored = kind if decode is None else decode.stored
    number = source(extent.path)
    if decode is not None and decode.kind in ("scale", "packed"):
        (scales,) = decode.scales
        if scales.extent is None or scales.extent.strides is None:
            raise CkptError("E490", "scales were planned before their bytes were located", where=extent.path)
        where = source(scales.extent.path), scales.extent.offset, scales.extent.strides
        scale = Scale(*where, decode.scale_dtype, decode.block, decode.origin, decode.kind == "packed")
        return Move(number, extent.offset, 0, 0, part.local_shape, extent.strides, strides, stored, target_dtype, scale=scale)
    items = dtype(stored).itemsize, dtype(target_dtype).itemsize
    axes = (part.local_shape, extent.strides, strides)
    shape, from_strides, to_strides = axes if aligned else merge_axes(*axes, *items)
    add = 0.0 if decode is None else decode.value
    return Move(number, extent.offset, 0, 0, shape, from_strides, to_strides, stored, target_dtype, add)


def merge_axes(shape: Shape, source: Shape, target: Shape, source_item: int, target_item: int) -> tuple[Shape, Shape, Shape]:
    """Drop axes of size 1, put the others in order of falling target strides, so that targets are written in long runs, and join
    neighbouring axes that are contiguous on both sides; a single element keeps one axis."""
    axes: list[list[int]] = []
    for size, a, b in sorted(zip(shape, source, target, strict=True), key=lambda axis: -axis[2]):
        if size == 1:
            continue
        if axes and axes[-1][1] == size * a and axes[-1][2] == size * b:
            axes[-1][0] *= size
            axes[-1][1:] = [a, b]
        else:
            axes.append([size, a, b])
    if not axes:
        return (1,), (source_item,), (target_item,)
    return tuple(x[0] for x in axes), tuple(x[1] for x in axes), tuple(x[2] for x in axes)


def build_moves(tensors: Mapping[str, TensorMetadata], placements: Iterable[Placement]) -> MoveBuilder:
    """Moves for all placements, from the tensors they name."""
    builder = MoveBuilder()
    for placement in placements:
        builder.place(tensors[placement.name], placement)
    return builder


def cast_notes(tensors: Mapping[str, TensorMetadata], target: Mapping[str, str]) -> list[Note]:
    """One note per pair of dtypes that the plan casts, listing how many tensors and the first names."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, wanted in target.items():
        if tensors[name].dtype != wanted:
            groups.setdefault((tensors[name].dtype, wanted), []).append(name)
    return [Note("cast", ", ".join(names), f"{len(names)} tensors {a} -> {b}") for (a, b), names in sorted(groups.items())]


def to_json(plan: Plan) -> str:
    """The plan as JSON text (schema ckpt.plan/1); `from_json` gives it back equal."""
    document = {
        "schema": PLAN_SCHEMA,
        "source": plan.source,
        "target": plan.target,
        "sources": [asdict(s) for s in plan.sources],
        "targets": [
            {"path": t.path, "size": t.size, "literals": [[o, base64.b64encode(b).decode()] for o, b in t.literals]} for t in plan.targets
        ],
        "copies": [asdict(c) for c in plan.copies],
        "moves": [_row(m) for m in plan.moves],
        "encodings": [{**{f.name: getattr(e, f.name) for f in fields(e)}, "moves": [_row(m) for m in e.moves]} for e in plan.encodings],
        "notes": [asdict(n) for n in plan.notes],
        "tensors": plan.tensors,
        "buffer": plan.buffer,
    }
    return json.dumps(document, separators=(",", ":"))


def from_json(text: str) -> Plan:
    """A plan from its JSON. CkptError E405 when it is not one."""
    try:
        d = json.loads(text)
        if d.get("schema") != PLAN_SCHEMA:
            raise CkptError("E405", "not a ckpt plan", expected=PLAN_SCHEMA, found=repr(d.get("schema")))
        return Plan(
            d["source"],
            d["target"],
            tuple(SourceFile(**s) for s in d["sources"]),
            tuple(TargetFile(t["path"], t["size"], tuple((o, base64.b64decode(b)) for o, b in t["literals"])) for t in d["targets"]),
            tuple(Copied(**c) for c in d["copies"]),
            tuple(_move(m) for m in d["moves"]),
            tuple(Note(**n) for n in d["notes"]),
            d["tensors"],
            d["buffer"],
            tuple(_encoding(e) for e in d["encodings"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CkptError("E405", "not a ckpt plan", found=str(error)[:200]) from None


def _row(m: Move) -> list[Any]:
    place = [m.source, m.source_offset, m.target, m.target_offset, m.shape, m.source_strides, m.target_strides]
    return [*place, m.source_dtype, m.target_dtype, m.add, None if m.scale is None else asdict(m.scale)]


def _encoding(e: dict[str, Any]) -> Encoding:
    moves, places = tuple(_move(m) for m in e["moves"]), tuple(tuple(p) for p in e["places"])
    return Encoding(**{**e, "moves": moves, "places": places, "shape": tuple(e["shape"]), "block": tuple(e["block"])})


def _move(row: Sequence[Any]) -> Move:
    scale = row[10] if len(row) > 10 else None
    if scale is not None:
        strides, block, origin = (tuple(scale[name]) for name in ("strides", "block", "origin"))
        scale = Scale(scale["source"], scale["offset"], strides, scale["dtype"], block, origin, scale["packed"])
    return Move(row[0], row[1], row[2], row[3], tuple(row[4]), tuple(row[5]), tuple(row[6]), row[7], row[8], row[9], scale)
