"""Box arithmetic: every element once, views point at the same bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tools.errors import CkptError
from ckpt_tools.tensors import Chunk, Extent, TensorMetadata, check_tiling, contiguous_strides, intersect, tiling_error, unfolded_alike

shapes = st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple)


@st.composite
def tilings(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    """A shape and boxes that tile it, made by cutting one box again and again."""
    shape = draw(shapes)
    boxes = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 8))):
        index = draw(st.integers(0, len(boxes) - 1))
        offset, size = boxes[index]
        axis = draw(st.integers(0, len(shape) - 1))
        if size[axis] < 2:
            continue
        at = draw(st.integers(1, size[axis] - 1))
        boxes[index] = (offset, (*size[:axis], at, *size[axis + 1 :]))
        boxes.append(((*offset[:axis], offset[axis] + at, *offset[axis + 1 :]), (*size[:axis], size[axis] - at, *size[axis + 1 :])))
    return shape, draw(st.permutations(boxes))


def counts(shape, boxes):
    grid = np.zeros(shape, int)
    for offset, size in boxes:
        grid[tuple(slice(o, o + n) for o, n in zip(offset, size))] += 1
    return grid


@given(tilings())
def test_boxes_that_tile_a_tensor_are_accepted(tiling):
    assert tiling_error(*tiling) is None


@given(tilings(), st.data())
def test_a_missing_or_doubled_box_is_always_found(tiling, data):
    shape, boxes = tiling
    index = data.draw(st.integers(0, len(boxes) - 1))
    wrong = boxes + [boxes[index]] if data.draw(st.booleans()) else boxes[:index] + boxes[index + 1 :]
    assert tiling_error(shape, wrong) is not None


@given(shapes, st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=6), st.data())
def test_the_verdict_equals_counting_every_element(shape, _, data):
    boxes = []
    for _ in range(data.draw(st.integers(0, 5))):
        offset = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
        boxes.append((offset, tuple(data.draw(st.integers(0, n - o)) for o, n in zip(offset, shape))))
    assert (tiling_error(shape, boxes) is None) == bool((counts(shape, boxes) == 1).all())


def test_the_error_names_the_uncovered_rows():
    tensor = TensorMetadata("w", "float32", (48, 8), (Chunk((0, 0), (16, 8), None), Chunk((32, 0), (16, 8), None)))
    with pytest.raises(CkptError, match="do not make up") as caught:
        check_tiling(tensor, "run")
    assert "16:32" in caught.value.what


@given(shapes, st.data())
def test_a_cut_chunk_reads_the_same_elements(shape, data):
    array = np.arange(int(np.prod(shape)), dtype=np.int32).reshape(shape)
    order = data.draw(st.permutations(range(len(shape))))
    stored = np.ascontiguousarray(array.transpose(order)).transpose(np.argsort(order))  # strided storage
    chunk = Chunk((0,) * len(shape), shape, Extent("f", 0, array.nbytes, stored.strides))
    offset = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    size = tuple(data.draw(st.integers(1, n - o)) for o, n in zip(offset, shape))
    part = chunk.cut(offset, size)
    raw = stored.transpose(order).tobytes()
    seen = np.ndarray(size, np.int32, raw, part.extent.offset, part.extent.strides)
    assert np.array_equal(seen, array[tuple(slice(o, o + n) for o, n in zip(offset, size))])


@given(tilings(), st.integers(1, 3), st.data())
def test_an_axis_becomes_two_and_the_elements_stay_where_they_are(tiling, inner, data):
    shape, boxes = tiling
    axis = data.draw(st.integers(0, len(shape) - 1))

    def wide(sizes):
        return tuple(n * inner if i == axis else n for i, n in enumerate(sizes))

    array = np.arange(int(np.prod(wide(shape))), dtype=np.int32).reshape(wide(shape))
    whole = Chunk((0,) * len(shape), array.shape, Extent("f", 0, array.nbytes, array.strides))
    tensor = TensorMetadata("w", "int32", array.shape, tuple(whole.cut(wide(o), wide(n)) for o, n in boxes))
    folded = tensor.unfolded(axis, inner)
    assert folded.shape == array.shape and folded.numel == array.size
    check_tiling(folded, "f")
    taken = array.reshape(folded.global_shape)
    for chunk in folded.chunks:
        seen = np.ndarray(chunk.local_shape, np.int32, array.tobytes(), chunk.extent.offset, chunk.extent.strides)
        assert np.array_equal(seen, taken[tuple(slice(o, o + n) for o, n in zip(chunk.global_offset, chunk.local_shape))])
    if inner > 1:
        assert [t.global_shape for t in unfolded_alike(tensor, folded)] == [folded.global_shape] * 2


def test_an_axis_that_cannot_be_divided_is_named():
    with pytest.raises(CkptError, match="cannot be divided by 2"):
        TensorMetadata("w", "int32", (4, 3), ()).unfolded(1, 2)
    with pytest.raises(CkptError, match="begins inside"):
        TensorMetadata("w", "int32", (4, 4), (Chunk((0, 1), (4, 2), None),)).unfolded(1, 2)
    with pytest.raises(CkptError, match="two shapes"):
        unfolded_alike(TensorMetadata("w", "int32", (4, 4), ()), TensorMetadata("w", "int32", (4, 2, 3), ()))


@given(shapes, st.data())
def test_intersection_is_what_both_boxes_cover(shape, data):
    def box():
        offset = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
        return offset, tuple(data.draw(st.integers(1, n - o)) for o, n in zip(offset, shape))

    a, b = box(), box()
    both = counts(shape, [a]) + counts(shape, [b]) == 2
    common = intersect(*a, *b)
    assert np.array_equal(both, counts(shape, [common] if common else []) == 1)


def test_strides_are_row_major():
    assert contiguous_strides((2, 3, 4), 2) == (24, 8, 2)
    assert contiguous_strides((), 4) == ()
