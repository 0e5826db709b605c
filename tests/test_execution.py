"""The engine moves exactly the planned elements, whatever the strides, dtypes, buffers and threads."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckpt_tools import engine
from ckpt_tools.errors import CkptError
from ckpt_tools.execution import execute
from ckpt_tools.planning import Move, Placement, Plan, TargetFile, build_moves, from_json, to_json
from ckpt_tools.tensors import Chunk, Extent, TensorMetadata


def write(path, array):
    """Store an array (any strides) and return the extent that describes it."""
    base = array
    path.write_bytes(b"xyz" + np.ascontiguousarray(base).tobytes())
    return Extent(str(path), 3, array.nbytes, np.ascontiguousarray(base).strides)


@st.composite
def problems(draw):
    rank = draw(st.integers(1, 3))
    shape = tuple(draw(st.integers(1, 40)) for _ in range(rank))
    return shape, draw(st.permutations(range(rank))), draw(st.integers(0, 3)), draw(st.sampled_from([64, 100, 4096])), draw(st.data())


@settings(max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(problems())
def test_every_element_arrives_where_the_plan_says(tmp_path_factory, problem):
    shape, order, cuts, buffer, data = problem
    tmp = tmp_path_factory.mktemp("move")
    array = np.arange(int(np.prod(shape)), dtype=np.uint16).reshape(shape)
    stored = np.ascontiguousarray(array.transpose(order))
    (tmp / "src").mkdir()
    (tmp / "src" / "a").write_bytes(b"#" * 5 + stored.tobytes())
    strides = tuple(stored.strides[list(order).index(i)] for i in range(len(shape)))
    tensor = TensorMetadata(
        "t", "uint16", shape, (Chunk((0,) * len(shape), shape, Extent(str(tmp / "src" / "a"), 5, stored.nbytes, strides)),)
    )
    boxes = [((0,) * len(shape), shape)]
    for _ in range(cuts):
        offset, size = boxes.pop(0)
        axis = data.draw(st.integers(0, len(shape) - 1))
        half = size[axis] // 2
        if not half:
            boxes.append((offset, size))
            continue
        boxes.append((offset, (*size[:axis], half, *size[axis + 1 :])))
        boxes.append(((*offset[:axis], offset[axis] + half, *offset[axis + 1 :]), (*size[:axis], size[axis] - half, *size[axis + 1 :])))
    position, placements = 1, []
    for offset, size in boxes:
        placements.append(Placement("t", offset, size, 0, position, "uint16"))
        position += int(np.prod(size)) * 2
    builder = build_moves({"t": tensor}, placements)
    plan = Plan({"path": str(tmp / "src")}, {}, builder.sources(), (TargetFile("out", position),), (), tuple(builder.moves), (), 1, buffer)
    assert from_json(to_json(plan)) == plan
    execute(plan, tmp / "dst", threads=2, fsync=False)
    raw = (tmp / "dst" / "out").read_bytes()
    for (offset, size), placement in zip(boxes, placements):
        got = np.frombuffer(raw, np.uint16, int(np.prod(size)), placement.offset).reshape(size)
        assert np.array_equal(got, array[tuple(slice(o, o + n) for o, n in zip(offset, size))])


@pytest.mark.parametrize("pieces", [2, 3, 8])
def test_column_pieces_are_gathered_into_whole_rows(tmp_path, pieces):
    array = np.arange(96 * 48, dtype=np.float32).reshape(96, 48)
    (tmp_path / "src").mkdir()
    chunks, step = [], 48 // pieces
    for i in range(pieces):
        extent = write(tmp_path / "src" / f"{i}", array[:, i * step : (i + 1) * step])
        chunks.append(Chunk((0, i * step), (96, step), extent))
    builder = build_moves(
        {"t": TensorMetadata("t", "float32", (96, 48), tuple(chunks))}, [Placement("t", (0, 0), (96, 48), 0, 7, "float32")]
    )
    plan = Plan({}, {}, builder.sources(), (TargetFile("out", 7 + array.nbytes),), (), tuple(builder.moves), (), 1, 1024)
    execute(plan, tmp_path / "dst", fsync=False)
    assert (tmp_path / "dst" / "out").read_bytes()[7:] == array.tobytes()


def test_a_source_that_changed_after_planning_is_refused_and_nothing_appears(tmp_path):
    (tmp_path / "src").mkdir()
    extent = write(tmp_path / "src" / "a", np.zeros(8, np.float32))
    builder = build_moves(
        {"t": TensorMetadata("t", "float32", (8,), (Chunk((0,), (8,), extent),))}, [Placement("t", (0,), (8,), 0, 0, "float32")]
    )
    plan = Plan({}, {}, builder.sources(), (TargetFile("out", 32),), (), tuple(builder.moves))
    (tmp_path / "src" / "a").write_bytes(b"x" * 10)
    with pytest.raises(CkptError) as caught:
        execute(plan, tmp_path / "dst")
    assert caught.value.code == "E406"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["src"]


def test_a_hole_in_the_source_is_an_error_of_the_plan(tmp_path):
    extent = write(tmp_path / "a", np.zeros((4, 4), np.float32))
    tensor = TensorMetadata("t", "float32", (8, 4), (Chunk((0, 0), (4, 4), extent),))
    with pytest.raises(CkptError) as caught:
        build_moves({"t": tensor}, [Placement("t", (0, 0), (8, 4), 0, 0, "float32")])
    assert caught.value.code == "E404"


def test_a_cast_of_more_elements_than_a_buffer(tmp_path):
    values = np.random.default_rng(0).standard_normal(300_001).astype(np.float32)
    (tmp_path / "src").mkdir()
    extent = write(tmp_path / "src" / "a", values)
    builder = build_moves(
        {"t": TensorMetadata("t", "float32", values.shape, (Chunk((0,), values.shape, extent),))},
        [Placement("t", (0,), values.shape, 0, 0, "float16")],
    )
    plan = Plan({}, {}, builder.sources(), (TargetFile("out", values.size * 2),), (), tuple(builder.moves), (), 1, 65536)
    execute(plan, tmp_path / "dst", fsync=False)
    assert (tmp_path / "dst" / "out").read_bytes() == values.astype(np.float16).tobytes()


@pytest.mark.parametrize("kind", [np.float32, np.float16])
@pytest.mark.parametrize("turns", [2, 3])
@pytest.mark.parametrize("cut", [False, True])
def test_columns_that_take_turns_are_woven_in_memory_and_written_in_rows(tmp_path, monkeypatch, kind, turns, cut):
    """Matrices (rows, columns), each the n-th of every `turns` columns of the transposed target; `cut`: each in two pieces of rows."""
    rows, columns = 90, 70
    (tmp_path / "src").mkdir()
    arrays = [np.random.default_rng(n).standard_normal((rows, columns)).astype(np.float32) for n in range(turns)]
    chunks = []
    for number, array in enumerate(arrays):
        for first, last in ((0, 40), (40, rows)) if cut else ((0, rows),):
            extent = write(tmp_path / "src" / f"{number}.{first}", array[first:last])
            chunks.append(Chunk((first, 0), (last - first, columns), extent).moved((0, first, number), (1, 0, -1)))
    tensor = TensorMetadata("t", "float32", (columns, rows, turns), tuple(chunks), (columns, rows * turns))
    whole = Placement("t", (0, 0, 0), tensor.global_shape, 0, 8, np.dtype(kind).name)
    builder = build_moves({"t": tensor}, [whole])
    expected = np.stack(arrays, -1).transpose(1, 0, 2).astype(kind).tobytes()
    plan = Plan({}, {}, builder.sources(), (TargetFile("out", 8 + len(expected)),), (), tuple(builder.moves), (), 1, 4096)
    written = []
    pwrite = engine.os.pwrite
    monkeypatch.setattr(engine, "TILE_BYTES", 20_000)
    monkeypatch.setattr(engine.os, "pwrite", lambda fd, data, at: written.append(len(data)) or pwrite(fd, data, at))
    execute(plan, tmp_path / "dst", threads=1, fsync=False)
    assert (tmp_path / "dst" / "out").read_bytes()[8:] == expected
    assert len(written) < 1000, "element after element would be thousands of writes"


def test_a_column_whose_turns_are_not_all_there_is_written_all_the_same(tmp_path):
    (tmp_path / "src").mkdir()
    array = np.arange(30, dtype=np.float32).reshape(6, 5)
    extent = write(tmp_path / "src" / "a", array)
    chunks = (Chunk((0, 0), (6, 5), extent).moved((0, 0, 0), (0, 1, -1)), Chunk((0, 0, 1), (6, 5, 1), None))
    builder = build_moves({"t": TensorMetadata("t", "float32", (6, 5, 2), chunks)}, [Placement("t", (0, 0, 0), (6, 5, 2), 0, 0, "float32")])
    plan = Plan({}, {}, builder.sources(), (TargetFile("out", 240),), (), tuple(builder.moves), (), 1, 4096)
    execute(plan, tmp_path / "dst", fsync=False)
    assert (tmp_path / "dst" / "out").read_bytes() == np.stack([array, np.zeros_like(array)], -1).tobytes()


def test_moves_are_hashable_pure_data():
    move = Move(0, 0, 0, 0, (1,), (4,), (4,), "float32", "float32")
    assert {move} and move.nbytes == 4
