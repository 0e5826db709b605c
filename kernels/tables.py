"""Descriptor tables: the block operations of convert and reshard as moves of strided boxes, made by pure functions.

A table is a tuple of `planning.Move`: array number and byte offset on both sides, shape, byte strides. Every table can be read in both
directions (`reversed_moves`), so an operation is declared once. No array library is imported here.

    >>> q_k_v = interleaved_rows((2 * 4, 4, 4), groups=2, row=8 * 2, item=2)     # 4 query heads, 2 groups, head dim 4, hidden 8, bfloat16
    >>> [(m.source, m.target, m.shape) for m in q_k_v]
    [(0, 0, (2, 64)), (1, 0, (2, 32)), (2, 0, (2, 32))]
    >>> [(m.source, m.target) for m in reversed_moves(q_k_v)]
    [(0, 0), (0, 1), (0, 2)]
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import prod

from ..dtypes import DTYPES
from ..errors import CkptError
from ..planning import Move, merge_axes
from ..tensors import Shape

# Moves carry a dtype only for its size: one unsigned integer per size keeps floating point out of the way.
_WORDS = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64"}


def box(
    source: int, source_offset: int, target: int, target_offset: int, shape: Shape, source_strides: Shape, target_strides: Shape, item: int
) -> Move:
    """One row of a table. Offsets and strides in bytes, shape in elements of `item` bytes (1, 2, 4 or 8; else E206)."""
    if item not in _WORDS:
        raise CkptError("E206", f"elements of {item} bytes cannot be moved", expected="1, 2, 4 or 8 bytes")
    shape, source_strides, target_strides = merge_axes(shape, source_strides, target_strides, item, item)
    return Move(source, source_offset, target, target_offset, shape, source_strides, target_strides, _WORDS[item], _WORDS[item])


def interleaved_rows(rows: Sequence[int], groups: int, row: int, item: int) -> tuple[Move, ...]:
    """Sources i [groups * rows[i], row] -> target 0 [groups * sum(rows), row]: `groups` times (rows of source 0, rows of source 1, ...).

    row = bytes per row (bytes per element for vectors). Query, key, value -> linear_qkv: rows (R * d, d, d) and the number of query groups.
    Gate and up -> linear_fc1: rows (F, F) and one group; alternating gate and up rows: rows (1, 1) and F groups.
    """
    _positive(rows=min(rows, default=0), groups=groups, row=row)
    if row % item:
        raise CkptError("E490", "a row is not a whole number of elements", expected=f"a multiple of {item} bytes", found=f"{row}")
    moves, total, above = [], sum(rows), 0
    for number, count in enumerate(rows):
        moves.append(box(number, 0, 0, above * row, (groups, count * (row // item)), (count * row, item), (total * row, item), item))
        above += count
    return tuple(moves)


def cut_columns(columns: Sequence[int], rows: int, item: int) -> tuple[Move, ...]:
    """Source 0 [rows, sum(columns)] -> targets i [rows, columns[i]], all contiguous (row-parallel weights over tensor-parallel ranks)."""
    _positive(columns=min(columns, default=0), rows=rows)
    moves, total, left = [], sum(columns), 0
    for number, count in enumerate(columns):
        moves.append(box(0, left * item, number, 0, (rows, count), (total * item, item), (count * item, item), item))
        left += count
    return tuple(moves)


def grouped_experts(experts: int, out_features: int, in_features: int, item: int) -> tuple[Move, ...]:
    """Sources number e [out, in], one per expert -> target 0, the memory of GroupedMLP's weight1 or weight2: [experts, in, out].

    weight1 has the shape [hidden, experts * 2 * ffn] but is used as a view (experts, hidden, 2 * ffn): it is no concatenation of columns.
    Source: Megatron-Core 0.16.1, transformer/moe/experts.py.
    """
    _positive(experts=experts, out_features=out_features, in_features=in_features)
    size = out_features * in_features * item
    return tuple(
        box(e, 0, 0, e * size, (in_features, out_features), (item, in_features * item), (out_features * item, item), item)
        for e in range(experts)
    )


def reversed_moves(moves: Iterable[Move]) -> tuple[Move, ...]:
    """The table that moves everything back: split for merge, de-interleave for interleave."""
    return tuple(
        replace(
            m,
            source=m.target,
            source_offset=m.target_offset,
            source_strides=m.target_strides,
            source_dtype=m.target_dtype,
            target=m.source,
            target_offset=m.source_offset,
            target_strides=m.source_strides,
            target_dtype=m.source_dtype,
        )
        for m in moves
    )


def item_of(move: Move) -> int:
    """Bytes per element of a move. E490 when it is not a plain move of bytes (it casts or adds)."""
    source, target = DTYPES[move.source_dtype], DTYPES[move.target_dtype]
    if move.add or source is not target:
        raise CkptError(
            "E490",
            "a move of bytes was asked to cast",
            expected="the same dtype on both sides",
            found=f"{source.name} -> {target.name}, add {move.add}",
        )
    if source.itemsize not in _WORDS:
        raise CkptError("E206", f"elements of {source.itemsize} bytes cannot be moved", expected="1, 2, 4 or 8 bytes", found=source.name)
    return source.itemsize


def check_moves(moves: Iterable[Move], sources: Sequence[int], targets: Sequence[int]) -> None:
    """CkptError E490 naming the first move that leaves its arrays; sources and targets = bytes per array."""
    for move in moves:
        item = item_of(move)
        for side, number, offset, strides, sizes in (
            ("source", move.source, move.source_offset, move.source_strides, sources),
            ("target", move.target, move.target_offset, move.target_strides, targets),
        ):
            if not len(strides) == len(move.shape) or min(move.shape, default=1) < 0 or not 0 <= number < len(sizes):
                raise CkptError("E490", f"a move names no {side} array or has ill-formed axes", found=repr(move))
            if not prod(move.shape):
                continue
            reach = [(n - 1) * s for n, s in zip(move.shape, strides, strict=True)]
            first, last = offset + sum(min(r, 0) for r in reach), offset + sum(max(r, 0) for r in reach) + item
            if first < 0 or last > sizes[number]:
                raise CkptError(
                    "E490",
                    f"a move leaves its {side} array",
                    expected=f"bytes 0 to {sizes[number]} of array {number}",
                    found=f"{first} to {last}",
                )
            if any(v % item for v in (offset, *strides)):
                raise CkptError(
                    "E490", f"a move is not aligned to its elements in the {side}", expected=f"multiples of {item} bytes", found=repr(move)
                )


def _positive(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise CkptError("E490", f"a table needs {name} of at least 1", found=str(size))
