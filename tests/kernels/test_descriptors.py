"""Tables for the Triton kernel: many boxes share a launch, words are as wide as everything is aligned, any number of axes is served."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from kernel_backends import Face, InterpretedTriton

from ckpt_tools.kernels import tables
from ckpt_tools.kernels.descriptors import COLUMNS, OUTER, SCATTERED, STRAIGHT, TURNED, launches


def widths(moves: object, source: int = 0, target: int = 0) -> list[tuple[int, int]]:
    return [(launch.kind, launch.item * launch.lanes) for launch in launches(moves, [source] * 9, [target] * 9)]


def test_all_boxes_of_a_kind_go_in_one_launch() -> None:
    cuts = tables.cut_columns((512,) * 8, 4096, 2)
    (launch,) = launches(cuts, [0], [0] * 8)
    assert launch.rows.shape == (8, COLUMNS) and launch.kind == STRAIGHT
    assert launch.tiles.sum() * prod(launch.tile) * launch.item == 8 * 512 * 4096 * 2  # no lane idles when the sizes are round
    (launch,) = launches(tables.interleaved_rows((512, 128, 128), 8, 8192, 2), [0] * 3, [0])
    assert launch.tiles.sum() * prod(launch.tile) * launch.item == 8 * (512 + 128 + 128) * 8192
    experts = tables.grouped_experts(64, 1536, 2048, 2)
    (launch,) = launches(experts, [0] * 64, [0])
    assert len(launch.rows) == 64 and launch.kind == TURNED


def test_words_are_as_wide_as_offsets_strides_sizes_and_addresses_allow() -> None:
    row = tables.cut_columns((512, 512), 64, 2)
    assert widths(row) == [(STRAIGHT, 16)]
    assert (
        widths(row, source=8) == [(STRAIGHT, 8)] and widths(row, target=2) == [(STRAIGHT, 2)] and widths(row, source=1) == [(STRAIGHT, 1)]
    )
    assert widths(tables.cut_columns((510, 514), 64, 2)) == [(STRAIGHT, 4)]  # 1020 and 1028 bytes
    assert widths(tables.grouped_experts(2, 64, 64, 2)) == [(TURNED, 16)]
    assert widths(tables.grouped_experts(2, 62, 64, 2)) == [(TURNED, 4)]
    assert widths([tables.box(0, 0, 0, 0, (64,), (4,), (6,), 2)]) == [(SCATTERED, 2)]


def test_a_long_single_row_uses_whole_tiles() -> None:
    (launch,) = launches([tables.box(0, 0, 0, 0, (2**20,), (1,), (1,), 1)], [0], [0])
    assert launch.tile[0] == 1 and launch.tiles.sum() == 2**20 // (8 * launch.tile[1])


def test_boxes_with_more_axes_than_a_row_of_the_table_are_cut(reference: Face, interpreter: InterpretedTriton) -> None:
    shape = (2, 3, 2, 3, 2, 2, 3, 2)
    strides = [int(np.prod(shape[:axis])) for axis in range(8)]  # the axes lie the other way round, so that none can be joined
    move = tables.box(0, 0, 0, 0, shape, tuple(strides), tuple(int(np.prod(shape[axis + 1 :])) for axis in range(8)), 1)
    assert len(move.shape) == 8 > OUTER + 2
    source, one, two = (
        np.arange(prod(shape), dtype=np.uint16).astype(np.uint8),
        np.zeros(prod(shape), np.uint8),
        np.zeros(prod(shape), np.uint8),
    )
    reference.move([move], [source], [one])
    assert np.array_equal(one, source.reshape(shape, order="F").reshape(-1))
    assert np.array_equal(one, interpreter.call("move", ([move], [source], [two]))[0])


def test_nothing_to_move_makes_no_launch() -> None:
    assert launches([tables.box(0, 0, 0, 0, (0, 4), (4, 1), (4, 1), 1)], [0], [0]) == []


@pytest.mark.parametrize("item", [3, 16])
def test_elements_of_other_sizes_are_refused(item: int) -> None:
    from ckpt_tools.errors import CkptError

    with pytest.raises(CkptError, match="cannot be moved"):
        tables.box(0, 0, 0, 0, (4,), (item,), (item,), item)
