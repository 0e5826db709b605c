"""The worker that makes one task happen: bounded buffers, pread and pwrite, nothing else."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from .blocks import GAP_BYTES, Encode, General, Ranges, RowBlocks, Task, Woven
from .dtypes import dtype
from .errors import CkptError
from .planning import Move
from .quantised import load_scaled
from .strided import load_block
from .tensors import intersect

if TYPE_CHECKING:
    import numpy as np

TILE_BYTES = 8 * 2**20  # a transposed block is turned in memory in tiles of at most this size


class Worker:
    """Buffers of one thread. `sources` / `targets`: open file descriptors by number; `names`: their paths, for messages.

    overflow counts finite values that became infinite in a cast.
    """

    def __init__(self, buffer: int, sources: Sequence[int], targets: Sequence[int], names: Sequence[str]) -> None:
        self._sources, self._targets, self._names = sources, targets, names
        self._size = buffer
        self._buffer = memoryview(mmap.mmap(-1, buffer))
        self._out: memoryview | None = None
        self.overflow = 0

    def run(self, task: Task) -> None:
        """Make every move. CkptError E406 when a source is shorter than planned, E901 when it cannot be read; OSError from the target."""
        if isinstance(task, Ranges):
            self._ranges(task)
        elif isinstance(task, RowBlocks):
            (self._scatter if task.kind == "scatter" else self._gather)(task)
        elif isinstance(task, Woven):
            self._woven(task)
        elif isinstance(task, Encode):
            self._encode(task)
        else:
            self._general(task)

    def read(self, source: int, offset: int, view: memoryview) -> None:
        """Fill `view` from a source file."""
        done, size = 0, len(view)
        while done < size:
            try:
                count = os.preadv(self._sources[source], [view[done:]], offset + done)
            except OSError as error:
                raise CkptError(
                    "E901", "a file cannot be read", where=self._names[source], found=f"{error.strerror} at byte {offset + done}"
                ) from None
            if count == 0:
                raise CkptError(
                    "E406",
                    "a source file became shorter while it was read",
                    where=self._names[source],
                    expected=f"bytes at {offset + done}",
                )
            done += count

    def write(self, target: int, offset: int, view: memoryview) -> None:
        """Write all of `view` into a target file."""
        done, size = os.pwrite(self._targets[target], view, offset), len(view)
        while done < size:
            done += os.pwrite(self._targets[target], view[done:], offset + done)

    def _ranges(self, task: Ranges) -> None:
        size, buffer, position, ranges = self._size, self._buffer, 0, task.ranges
        while position < len(ranges):
            start, target, target_offset, length = ranges[position]
            if length * 2 > size:
                for done in range(0, length, size):
                    part = buffer[: min(size, length - done)]
                    self.read(task.source, start + done, part)
                    self.write(target, target_offset + done, part)
                position += 1
                continue
            last, end = position, start + length
            while last + 1 < len(ranges):
                offset, _, _, more = ranges[last + 1]
                if offset < end or offset - end > GAP_BYTES or offset + more - start > size:
                    break
                last, end = last + 1, offset + more
            self.read(task.source, start, buffer[: end - start])
            for offset, target, target_offset, length in ranges[position : last + 1]:
                self.write(target, target_offset, buffer[offset - start : offset - start + length])
            position = last + 1

    def _second(self, size: int) -> memoryview:
        if self._out is None or len(self._out) < size:
            self._out = memoryview(mmap.mmap(-1, max(size, self._size)))
        return self._out

    def _scatter(self, task: RowBlocks) -> None:
        import numpy as np

        moves = task.moves
        low = moves[0].source_offset
        high = max(m.source_offset + m.shape[1] * m.source_strides[1] for m in moves)
        step = max(1, (self._size - (high - low)) // task.pitch + 1)
        if high - low > self._size:  # one row is larger than the buffer: only casts come here
            for move in moves:
                self._general(General(_rows_of(move, task.first, task.last), 0))
            return
        for row in range(task.first, task.last, step):
            count = min(step, task.last - row)
            start = low + row * task.pitch
            block = self._buffer[: (count - 1) * task.pitch + high - low]
            self.read(moves[0].source, start, block)
            for move in moves:
                item, width = dtype(move.source_dtype).itemsize, move.shape[1]
                at = move.source_offset - low
                if move.plain:
                    out = self._second(count * width * item)[: count * width * item]
                    rows = np.ndarray((count, width * item), np.uint8, buffer=block, offset=at, strides=(task.pitch, 1))
                    np.copyto(np.frombuffer(out, np.uint8).reshape(count, width * item), rows)
                else:
                    values = np.ndarray(
                        (count, width), dtype(move.source_dtype).to_numpy(), buffer=block, offset=at, strides=(task.pitch, item)
                    )
                    out = self._cast(values, move)
                self.write(move.target, move.target_offset + row * move.target_strides[0], out)

    def _gather(self, task: RowBlocks) -> None:
        import numpy as np

        moves, pitch = task.moves, task.pitch
        low = moves[0].target_offset
        step = max(1, self._size // max(pitch, max(m.source_strides[0] for m in moves)))
        for row in range(task.first, task.last, step):
            count = min(step, task.last - row)
            out = self._second(count * pitch)[: count * pitch]
            for move in moves:
                item, width = dtype(move.source_dtype).itemsize, move.shape[1]
                span = (count - 1) * move.source_strides[0] + width * item
                if span > self._size:
                    raise CkptError("E490", "a gathered row is larger than the buffer", where=self._names[move.source])
                block = self._buffer[:span]
                self.read(move.source, move.source_offset + row * move.source_strides[0], block)
                target_item = dtype(move.target_dtype).itemsize
                place = np.ndarray((count, width * target_item), np.uint8, buffer=out, offset=move.target_offset - low, strides=(pitch, 1))
                if move.plain:
                    np.copyto(place, np.ndarray((count, width * item), np.uint8, buffer=block, strides=(move.source_strides[0], 1)))
                else:
                    values = np.ndarray(
                        (count, width), dtype(move.source_dtype).to_numpy(), buffer=block, strides=(move.source_strides[0], item)
                    )
                    np.copyto(place, np.frombuffer(self._cast(values, move), np.uint8).reshape(count, -1))
            self.write(moves[0].target, low + row * pitch, out)

    def _cast(self, values: np.ndarray, move: Move) -> memoryview:
        import numpy as np

        from .kernels.casts import cast

        result, lost = cast(values, dtype(move.target_dtype).to_numpy(), move.add)
        self.overflow += lost
        return memoryview(result.reshape(-1).view(np.uint8).data)

    def _general(self, task: General) -> None:
        for (tile,) in tiles((task.move,), TILE_BYTES):
            self._store(tile, self._cast(self._load(tile), tile))

    def _woven(self, task: Woven) -> None:
        import numpy as np

        for parts in tiles(task.moves, TILE_BYTES):
            first, turns = parts[0], len(parts)
            item = dtype(first.target_dtype).itemsize
            out: np.ndarray = np.empty((*first.shape, turns), f"V{item}")
            for turn, move in enumerate(parts):
                out[..., turn] = np.frombuffer(self._cast(self._load(move), move), f"V{item}").reshape(first.shape)
            whole = replace(first, shape=out.shape, target_strides=(*first.target_strides, item))
            self._store(whole, memoryview(out.reshape(-1).view(np.uint8).data))

    def _encode(self, task: Encode) -> None:
        import numpy as np

        from .kernels.numpy_backend import quantise_blocks

        made, start = task.encoding, (task.rows[0], task.columns[0])
        size = (task.rows[1] - start[0], task.columns[1] - start[1])
        values: np.ndarray = np.zeros(size, np.float32)
        for move, place in zip(made.moves, made.places, strict=True):
            box = intersect(place, move.shape, start, size)
            if box is None:
                continue
            for axis in range(2):
                move = _part(move, axis, box[0][axis] - place[axis], box[1][axis])
            at = tuple(slice(o - s, o - s + n) for o, s, n in zip(box[0], start, box[1], strict=True))
            values[at] = np.frombuffer(self._cast(self._load(move), move), np.float32).reshape(move.shape)
        coded, scales = quantise_blocks(values, (made.block[0], made.block[1]), made.dtype)
        high, wide = made.block
        self._put(coded, made.dtype, made.target, made.offset, start, made.shape[1])
        first = (start[0] // high, start[1] // wide)
        self._put(scales, "float32", made.scales_target, made.scales_offset, first, -(-made.shape[1] // wide))

    def _put(self, values: np.ndarray, kind: str, target: int, offset: int, place: tuple[int, int], columns: int) -> None:
        """Write a box at (row, column) `place` of a matrix of so many columns that begins at `offset`."""
        import numpy as np

        item = dtype(kind).itemsize
        at = offset + (place[0] * columns + place[1]) * item
        whole = Move(0, 0, target, at, values.shape, (0, 0), (columns * item, item), kind, kind)
        self._store(whole, memoryview(values.reshape(-1).view(np.uint8).data))

    def _load(self, move: Move) -> np.ndarray:
        read, place = partial(self.read, move.source), (move.source_offset, move.shape, move.source_strides, move.source_dtype)
        if move.scale is None:
            return load_block(read, *place)
        return load_scaled(read, *place, move.scale, partial(self.read, move.scale.source))

    def _store(self, move: Move, values: memoryview) -> None:
        item = dtype(move.target_dtype).itemsize
        inner, axis = item, len(move.shape)
        while axis and move.target_strides[axis - 1] == inner:
            axis -= 1
            inner *= move.shape[axis]
        position = 0
        for offset in _offsets(move.shape[:axis], move.target_strides[:axis]):
            self.write(move.target, move.target_offset + offset, values[position : position + inner])
            position += inner


def _offsets(shape: tuple[int, ...], strides: tuple[int, ...]) -> list[int]:
    offsets = [0]
    for n, s in zip(shape, strides, strict=True):
        offsets = [o + i * s for o in offsets for i in range(n)]
    return offsets


def _rows_of(move: Move, first: int, last: int) -> Move:
    return _part(move, 0, first, last - first)


def _part(move: Move, axis: int, start: int, size: int) -> Move:
    """The elements [start, start + size) of one axis of a move."""
    return replace(
        move,
        shape=(*move.shape[:axis], size, *move.shape[axis + 1 :]),
        source_offset=move.source_offset + start * move.source_strides[axis],
        target_offset=move.target_offset + start * move.target_strides[axis],
        scale=move.scale and replace(move.scale, origin=tuple(o + start * (i == axis) for i, o in enumerate(move.scale.origin))),
    )


def tiles(moves: tuple[Move, ...], limit: int) -> list[tuple[Move, ...]]:
    """Moves of one shape, all cut alike along their longest axes until the parts that belong together have at most `limit` bytes."""
    move = moves[0]
    count = max(dtype(name).itemsize for m in moves for name in (m.source_dtype, m.target_dtype)) * len(moves)
    for n in move.shape:
        count *= n
    if count <= limit or max(move.shape, default=1) == 1:
        return [moves]
    # the axis that is farthest apart in the source keeps each part's source bytes together
    axis = max((i for i, n in enumerate(move.shape) if n > 1), key=lambda i: move.source_strides[i])
    half = move.shape[axis] // 2
    halves = ((0, half), (half, move.shape[axis] - half))
    return [part for span in halves for part in tiles(tuple(_part(m, axis, *span) for m in moves), limit)]
