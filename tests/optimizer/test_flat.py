"""Flat ranges of row-major tensors: few boxes, every element once, in order."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tools.errors import CkptError
from ckpt_tools.lazy import read_box
from ckpt_tools.optimizer.flat import Flat, boxes_of_range, flat_of, make_flat, unflatten
from ckpt_tools.tensors import Chunk, Extent, TensorMetadata

SHAPES = st.lists(st.integers(1, 6), min_size=0, max_size=4).map(tuple)


@st.composite
def ranges(draw):
    shape = draw(SHAPES)
    start = draw(st.integers(0, prod(shape)))
    return shape, start, draw(st.integers(start, prod(shape)))


@given(ranges())
def test_a_range_is_few_boxes_whose_elements_are_the_range_in_order(case):
    shape, start, stop = case
    boxes = boxes_of_range(shape, start, stop)
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    numbers = np.arange(prod(shape)).reshape(shape)
    found = [numbers[tuple(slice(o, o + n) for o, n in zip(*box))].ravel() for box in boxes]
    assert np.concatenate([np.empty(0, int), *found]).tolist() == list(range(start, stop))


def test_a_range_outside_the_tensor_is_refused():
    with pytest.raises(ValueError, match="not a range"):
        boxes_of_range((2, 3), 4, 7)


@given(ranges(), st.data())
def test_a_tensor_cut_out_of_scattered_flat_pieces_is_the_tensor(tmp_path_factory, case, data):
    """The pieces of a buffer lie anywhere in a file, in any order; a tensor that starts anywhere in the buffer is read through them."""
    shape, lead, _ = case
    total = lead + prod(shape) + 3
    cuts = sorted(data.draw(st.sets(st.integers(1, total - 1), max_size=5)) | {0, total})
    spans = data.draw(st.permutations(list(pairwise(cuts))))
    values = np.arange(total, dtype=np.float32)
    path = tmp_path_factory.mktemp("flat") / "pieces.bin"
    pieces, at = [], 0
    with path.open("wb") as file:
        for begin, end in spans:
            file.write(values[begin:end].tobytes())
            pieces.append((begin, end - begin, Extent(str(path), at, (end - begin) * 4, (4,))))
            at += (end - begin) * 4
    flat = make_flat("buffer", "float32", total, pieces)
    tensor = TensorMetadata("t", "float32", shape, tuple(flat.chunks(shape, lead)))
    assert np.array_equal(read_box(tensor, (0,) * len(shape), shape), values[lead : lead + prod(shape)].reshape(shape))


def test_overlapping_pieces_are_refused():
    with pytest.raises(CkptError, match="overlap"):
        make_flat("buffer", "float32", 10, [(0, 5, None), (4, 2, None)])


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), st.data())
def test_model_space_is_put_back_into_its_shape(tmp_path_factory, rows, columns, height, width, data):
    """A (rows x height, columns x width) tensor stored as a grid of flattened shards, each cut where data-parallel ranks meet."""
    whole = np.arange(rows * height * columns * width, dtype=np.float32).reshape(rows * height, columns * width)
    path = tmp_path_factory.mktemp("space") / "shards.bin"
    chunks, at = [], 0
    with path.open("wb") as file:
        for r in range(rows):
            for c in range(columns):
                local = whole[r * height : (r + 1) * height, c * width : (c + 1) * width].ravel()
                cut = data.draw(st.integers(0, local.size))
                for begin, end in ((0, cut), (cut, local.size)):
                    if end > begin:
                        file.write(local[begin:end].tobytes())
                        chunks.append(Chunk((r, c, begin), (1, 1, end - begin), Extent(str(path), at, (end - begin) * 4, (4, 4, 4))))
                        at += (end - begin) * 4
    stored = TensorMetadata("t", "float32", (rows, columns, height * width), tuple(chunks))
    tensor = unflatten(stored, whole.shape)
    assert np.array_equal(read_box(tensor, (0, 0), whole.shape), whole)


def test_a_grid_that_does_not_divide_the_tensor_is_an_error():
    stored = TensorMetadata("t", "float32", (2, 6), ())
    with pytest.raises(CkptError) as caught:
        unflatten(stored, (5, 3))
    assert caught.value.code == "E226"


def test_bucket_space_rows_of_ranks_are_one_buffer():
    """fully_sharded_bucket_space: (data-parallel rank, elements of that rank)."""
    chunks = (Chunk((1, 0), (1, 4), Extent("f", 100, 16, (16, 4))), Chunk((0, 0), (1, 4), Extent("f", 0, 16, (16, 4))))
    flat = flat_of(TensorMetadata("t", "float32", (2, 4), chunks))
    assert flat == Flat("t", "float32", 8, ((0, 4, Extent("f", 0, 16, (16, 4))), (4, 4, Extent("f", 100, 16, (16, 4)))))
