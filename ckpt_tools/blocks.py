"""Moves grouped into tasks: neighbouring ranges joined, shared source rows read once, shared target rows written once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from .dtypes import dtype
from .planning import Encoding, Move

TASK_BYTES = 8 * 2**20  # bytes a worker takes at a time
ROW_ELEMENTS = 16 * 1024  # a contiguous cast is done in rows of this many elements
ENCODED = 2 * 2**20  # elements that are quantised at a time, in float32, unless a block has more
GAP_BYTES = 32 * 1024  # a hole in the source up to this size is read along with its neighbours


@dataclass(frozen=True, slots=True)
class Ranges:
    """Plain byte ranges of one source file in source order: (source offset, target file, target offset, bytes)."""

    source: int
    ranges: tuple[tuple[int, int, int, int], ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class RowBlocks:
    """Moves of rows that share their source rows (kind "scatter") or their target rows (kind "gather").

    All have the same number of rows; pitch = bytes from row to row on the shared side. Only rows [first, last) belong to the task.
    """

    kind: str
    moves: tuple[Move, ...]
    pitch: int
    first: int
    last: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class General:
    """A move that is neither: transposed, more than two axes, or cast of scattered elements."""

    move: Move
    nbytes: int


@dataclass(frozen=True, slots=True)
class Woven:
    """Moves whose elements take turns in the target (gate, up, gate, up): the first of each, the second of each, and so on. All have the
    same shape and target strides; the last of these is what one element of every move takes up."""

    moves: tuple[Move, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Encode:
    """Whole blocks of a matrix that is quantised: its elements [first, last) of both axes."""

    encoding: Encoding
    rows: tuple[int, int]
    columns: tuple[int, int]
    nbytes: int


Task = Ranges | RowBlocks | General | Woven | Encode


def make_tasks(moves: Iterable[Move], buffer: int, encodings: Iterable[Encoding] = ()) -> list[Task]:
    """Tasks in source order that together make exactly the given moves and encodings."""
    plain: list[tuple[int, int, int, int, int]] = []
    rows: list[Move] = []
    tasks: list[Task] = []
    for move in moves:
        item = dtype(move.source_dtype).itemsize
        if move.scale is not None:
            tasks.append(General(move, move.nbytes))
        elif move.plain and len(move.shape) == 1 and move.source_strides[0] == item == move.target_strides[0]:
            plain.append((move.source, move.source_offset, move.target, move.target_offset, move.shape[0] * item))
        elif move.source_strides[-1] == item and move.target_strides[-1] == dtype(move.target_dtype).itemsize:
            rows.extend(_two_axes(move))
        else:
            tasks.append(General(move, move.nbytes))
    grouped, loose = _row_groups(rows, buffer)
    tasks = [*_woven(tasks), *grouped]
    plain.extend(loose)
    tasks.extend(_range_tasks(plain))
    tasks.extend(task for encoding in encodings for task in _encode_tasks(encoding))
    return sorted(tasks, key=_position)


def _position(task: Task) -> tuple[int, int]:
    if isinstance(task, Ranges):
        return task.source, task.ranges[0][0]
    if isinstance(task, Encode):
        first = next(iter(task.encoding.moves), None)
        return (first.source, first.source_offset + task.rows[0] * first.source_strides[0]) if first else (0, 0)
    move = task.move if isinstance(task, General) else task.moves[0]
    skipped = task.first * move.source_strides[0] if isinstance(task, RowBlocks) else 0
    return move.source, move.source_offset + skipped


def _encode_tasks(encoding: Encoding) -> Iterator[Encode]:
    (rows, columns), (high, wide) = encoding.shape, encoding.block
    across = max(1, ENCODED // (high * wide)) * wide
    down = max(1, ENCODED // (high * min(across, -(-columns // wide) * wide))) * high
    for row in range(0, rows, down):
        for column in range(0, columns, across):
            last = min(row + down, rows), min(column + across, columns)
            part = replace(encoding, shape=(last[0] - row, last[1] - column))
            yield Encode(encoding, (row, last[0]), (column, last[1]), part.nbytes)


def _woven(tasks: Iterable[Task]) -> Iterator[Task]:
    """The tasks with moves together that would each write single elements into the gaps of the other."""
    places: dict[object, dict[int, Move]] = {}
    for task in tasks:
        if isinstance(task, General) and task.move.scale is None and task.move.target_strides[-1] > dtype(task.move.target_dtype).itemsize:
            move = task.move
            places.setdefault((move.target, move.shape, move.target_strides, move.target_dtype), {})[move.target_offset] = move
        else:
            yield task
    for found in places.values():
        for offset in sorted(found):
            if offset not in found:
                continue
            first = found[offset]
            item = dtype(first.target_dtype).itemsize
            turns = [found.get(offset + n * item) for n in range(first.target_strides[-1] // item)]
            together = [m for m in turns if m is not None]
            if len(together) < len(turns):
                together = [first]
            for move in together:
                del found[move.target_offset]
            nbytes = sum(m.nbytes for m in together)
            yield Woven(tuple(together), nbytes) if len(together) > 1 else General(first, nbytes)


def _two_axes(move: Move) -> Iterator[Move]:
    """The move as moves of (rows, columns); a single axis is broken into rows of at most ROW_ELEMENTS."""
    if len(move.shape) == 1:
        total, (a,), (b,) = move.shape[0], move.source_strides, move.target_strides
        full = total // ROW_ELEMENTS
        for start, rows, columns in ((0, full, ROW_ELEMENTS), (full * ROW_ELEMENTS, 1, total % ROW_ELEMENTS)):
            if rows and columns:
                yield replace(
                    move,
                    source_offset=move.source_offset + start * a,
                    target_offset=move.target_offset + start * b,
                    shape=(rows, columns),
                    source_strides=(columns * a, a),
                    target_strides=(columns * b, b),
                )
        return
    outer = len(move.shape) - 2
    for index in product(*(range(n) for n in move.shape[:outer])):
        source = move.source_offset + sum(i * s for i, s in zip(index, move.source_strides, strict=False))
        target = move.target_offset + sum(i * s for i, s in zip(index, move.target_strides, strict=False))
        yield replace(
            move,
            source_offset=source,
            target_offset=target,
            shape=move.shape[outer:],
            source_strides=move.source_strides[outer:],
            target_strides=move.target_strides[outer:],
        )


def _row_groups(moves: Sequence[Move], buffer: int) -> tuple[list[Task], list[tuple[int, int, int, int, int]]]:
    scatter: dict[object, list[Move]] = {}
    gather: dict[object, list[Move]] = {}
    for move in moves:
        width = move.shape[1] * move.target_strides[1]
        if move.target_strides[0] == width:
            scatter.setdefault(
                (move.source, move.shape[0], move.source_strides[0], move.source_dtype, move.target_dtype, move.add), []
            ).append(move)
        else:
            gather.setdefault(
                (move.target, move.shape[0], move.target_strides[0], move.source_dtype, move.target_dtype, move.add), []
            ).append(move)
    tasks: list[Task] = []
    loose: list[tuple[int, int, int, int, int]] = []
    for group in _windows(scatter, by_source=True):
        pitch = group[0].source_strides[0]
        wanted = sum(m.shape[1] * m.source_strides[1] for m in group)
        if pitch > 4 * wanted or (pitch > buffer and group[0].plain):
            loose.extend(_row_ranges(group)) if group[0].plain else tasks.extend(General(m, m.nbytes) for m in group)
        else:
            tasks.extend(_cut_rows("scatter", group, pitch))
    for group in _windows(gather, by_source=False):
        pitch = group[0].target_strides[0]
        width = sum(m.shape[1] * m.target_strides[1] for m in group)
        if width == pitch and pitch <= buffer:
            tasks.extend(_cut_rows("gather", group, pitch))
        elif group[0].plain:
            loose.extend(_row_ranges(group))
        else:
            tasks.extend(General(m, m.nbytes) for m in group)
    return tasks, loose


def _windows(groups: dict[object, list[Move]], *, by_source: bool) -> Iterator[list[Move]]:
    """Moves whose first rows lie within one row's length of each other."""
    for moves in groups.values():
        moves.sort(key=lambda m: m.source_offset if by_source else m.target_offset)
        current: list[Move] = []
        for move in moves:
            if current:
                first = current[0]
                distance = move.source_offset - first.source_offset if by_source else move.target_offset - first.target_offset
                width = move.shape[1] * (move.source_strides[1] if by_source else move.target_strides[1])
                pitch = first.source_strides[0] if by_source else first.target_strides[0]
                if distance + width > pitch:
                    yield current
                    current = []
            current.append(move)
        if current:
            yield current


def _row_ranges(moves: Iterable[Move]) -> Iterator[tuple[int, int, int, int, int]]:
    for move in moves:
        width = move.shape[1] * move.source_strides[1]
        for row in range(move.shape[0]):
            yield (
                move.source,
                move.source_offset + row * move.source_strides[0],
                move.target,
                move.target_offset + row * move.target_strides[0],
                width,
            )


def _cut_rows(kind: str, group: Sequence[Move], pitch: int) -> Iterator[RowBlocks]:
    rows = group[0].shape[0]
    step = max(1, TASK_BYTES // pitch)
    per_row = sum(m.nbytes for m in group) // rows
    for first in range(0, rows, step):
        last = min(first + step, rows)
        yield RowBlocks(kind, tuple(group), pitch, first, last, per_row * (last - first))


def _range_tasks(ranges: list[tuple[int, int, int, int, int]]) -> Iterator[Ranges]:
    ranges.sort()
    batch: list[tuple[int, int, int, int]] = []
    source, size = -1, 0
    for src, src_offset, dst, dst_offset, length in _joined(ranges):
        while length:
            if batch and (src != source or size >= TASK_BYTES):
                yield Ranges(source, tuple(batch), size)
                batch, size = [], 0
            source = src
            part = min(length, TASK_BYTES)
            batch.append((src_offset, dst, dst_offset, part))
            size += part
            src_offset, dst_offset, length = src_offset + part, dst_offset + part, length - part
    if batch:
        yield Ranges(source, tuple(batch), size)


def _joined(ranges: Sequence[tuple[int, int, int, int, int]]) -> Iterator[tuple[int, int, int, int, int]]:
    current: tuple[int, int, int, int, int] | None = None
    for item in ranges:
        if current is not None:
            source, source_offset, target, target_offset, length = current
            if item[:4] == (source, source_offset + length, target, target_offset + length):
                current = (source, source_offset, target, target_offset, length + item[4])
                continue
            yield current
        current = item
    if current is not None:
        yield current
