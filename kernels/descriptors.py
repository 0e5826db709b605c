"""Moves packed into the int64 table that one Triton launch reads: which axes a tile spans, in words of which size. Pure; needs no GPU.

Every row is one box. Columns (offsets and strides count units of `unit` bytes where not said otherwise):

    0 source array number      1 source offset      2 target array number      3 target offset
    4 columns of the tile plane                     5 rows of it
    6 source stride of columns 7 target stride of columns   8 source stride of rows   9 target stride of rows
    10.. OUTER times (size, source stride, target stride)
    -1 number of the first tile of this row

Kinds: STRAIGHT, columns are contiguous on both sides; TURNED, columns are contiguous in the target and rows in the source (a transpose);
SCATTERED, anything else. Rows of the same kind, word size and tile width share a launch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import gcd, prod
from typing import TYPE_CHECKING

from .tables import item_of

if TYPE_CHECKING:
    import numpy as np

    from ..planning import Move

STRAIGHT, TURNED, SCATTERED = 0, 1, 2
OUTER = 4  # axes besides the two of the tile; a box with more is cut into several rows
COLUMNS = 11 + 3 * OUTER
TILE = 4096  # words per tile: 16 for each thread of 8 warps
TURNED_TILE = 64  # edge of a transposed tile
WIDTH = 128  # words that a row of a tile need not exceed: a kilobyte is read as fast as more
UNIT = 16  # bytes of the widest load


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch. kind; item = bytes per word that is loaded; lanes = words per unit; tile = (rows, columns) in words; rows = the table,
    int64 [boxes, COLUMNS]; tiles = how many each box has, int64 [boxes]."""

    kind: int
    item: int
    lanes: int
    tile: tuple[int, int]
    rows: np.ndarray
    tiles: np.ndarray


@dataclass(frozen=True, slots=True)
class _Row:
    kind: int
    item: int
    lanes: int
    tile: tuple[int, int]
    values: tuple[int, ...]
    tiles: int


def launches(moves: Iterable[Move], source_addresses: Sequence[int], target_addresses: Sequence[int]) -> list[Launch]:
    """The launches that make all moves. addresses = of element 0 of each array; only their alignment (at most 16 bytes) matters here."""
    import numpy as np

    groups: dict[tuple[int, int, int, tuple[int, int]], list[_Row]] = {}
    for move in moves:
        if prod(move.shape):
            for part in _few_axes(move):
                row = _row(part, source_addresses[part.source] % UNIT, target_addresses[part.target] % UNIT)
                groups.setdefault((row.kind, row.item, row.lanes, row.tile), []).append(row)
    result = []
    for (kind, item, lanes, tile), rows in groups.items():
        tiles = np.array([r.tiles for r in rows], np.int64)
        table = np.zeros((len(rows), COLUMNS), np.int64)
        table[:, :-1] = [r.values for r in rows]
        table[:, -1] = np.cumsum(tiles) - tiles
        result.append(Launch(kind, item, lanes, tile, table, tiles))
    return result


def _few_axes(move: Move) -> list[Move]:
    """The move, or moves of at most OUTER + 2 axes each."""
    if len(move.shape) <= OUTER + 2:
        return [move]
    axis = min(range(len(move.shape)), key=lambda a: (move.shape[a], move.target_strides[a] == item_of(move)))
    parts = []
    for index in range(move.shape[axis]):
        part = replace(
            move,
            source_offset=move.source_offset + index * move.source_strides[axis],
            target_offset=move.target_offset + index * move.target_strides[axis],
            shape=_without(move.shape, axis),
            source_strides=_without(move.source_strides, axis),
            target_strides=_without(move.target_strides, axis),
        )
        parts.extend(_few_axes(part))
    return parts


def _without(values: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return values[:axis] + values[axis + 1 :]


def _row(move: Move, source_address: int, target_address: int) -> _Row:
    item, axes = item_of(move), list(zip(move.shape, move.source_strides, move.target_strides, strict=True))
    in_source = next((i for i, (_, s, _) in enumerate(axes) if s == item), None)
    in_target = next((i for i, (_, _, t) in enumerate(axes) if t == item), None)
    if in_target is None or in_source is None:
        kind, columns = SCATTERED, in_target if in_target is not None else min(range(len(axes)), key=lambda i: abs(axes[i][2]))
    else:
        kind, columns = STRAIGHT if in_source == in_target else TURNED, in_target
    width = axes.pop(columns)
    if kind == TURNED and in_source is not None:
        height = axes.pop(in_source - (in_source > columns))
    else:
        height = axes.pop(max(range(len(axes)), key=lambda i: axes[i][0])) if axes else (1, 0, 0)

    unit = item
    if kind != SCATTERED:
        measures = [
            move.source_offset,
            move.target_offset,
            source_address,
            target_address,
            width[0] * item,
            *(s for _, *both in axes for s in both),
        ]
        measures += height[1:] if kind == STRAIGHT else [height[0] * item, height[2], width[1]]
        unit = gcd(UNIT, *measures)
    word = item if kind != STRAIGHT else min(unit, 8)
    lanes = unit // word
    counts = [width[0] * item // unit if kind != SCATTERED else width[0], height[0] * item // unit if kind == TURNED else height[0]]
    tile = _tile(kind, counts[0] * lanes, counts[1])
    in_words = (counts[1] * (lanes if kind == TURNED else 1), counts[0] * lanes)
    tiles = prod(-(-n // t) for n, t in zip(in_words, tile, strict=True)) * prod(n for n, _, _ in axes)
    outer = [v for n, s, t in [*axes, *[(1, 0, 0)] * (OUTER - len(axes))] for v in (n, s // unit, t // unit)]
    # strides of one word are known to the kernel by its kind, and are no whole number of units
    strides = (
        0 if kind == STRAIGHT else width[1] // unit,
        0 if kind != SCATTERED else width[2] // unit,
        0 if kind == TURNED else height[1] // unit,
        height[2] // unit,
    )
    values = (move.source, move.source_offset // unit, move.target, move.target_offset // unit, *counts, *strides, *outer)
    return _Row(kind, word, lanes, tile, values, tiles)


def _tile(kind: int, columns: int, rows: int) -> tuple[int, int]:
    """(rows, columns) of a tile of TILE words, both powers of two, so that few words of it lie outside the box."""
    if kind == TURNED:
        return TURNED_TILE, TURNED_TILE
    width = min(max(_power(columns), 16), WIDTH)
    width = min(max(width, TILE // _power(rows)), TILE)
    return TILE // width, width


def _power(number: int) -> int:
    """The smallest power of two that is not smaller."""
    return 1 << max(number - 1, 0).bit_length()
