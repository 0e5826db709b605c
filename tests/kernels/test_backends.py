"""Every backend gives the bytes of the numpy reference: moves, casts, float8 blocks, MXFP4."""

from __future__ import annotations

from math import prod

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_backends import Face, bits

from ckpt_tools.errors import CkptError
from ckpt_tools.kernels import tables
from ckpt_tools.kernels.floats import FORMATS
from ckpt_tools.kernels.shapes import scale_shape
from ckpt_tools.planning import Move

TYPES = {
    name: np.dtype(getattr(ml_dtypes, name, None) or name) for name in ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
}
few = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
random = np.random.default_rng(0)


def same(ours: object, theirs: object) -> bool:
    if isinstance(ours, tuple | list):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    if isinstance(ours, np.ndarray):
        return ours.shape == theirs.shape and ours.dtype == theirs.dtype and np.array_equal(bits(ours), bits(theirs))
    return ours == theirs


def every_pattern(name: str) -> np.ndarray:
    """All patterns of a 1- or 2-byte float; for float32 random ones, normal numbers of every size, and the edges of the small formats."""
    kind = TYPES[name]
    if kind.itemsize < 4:
        return np.arange(256**kind.itemsize, dtype=f"u{kind.itemsize}").view(kind)
    patterns = random.integers(0, 2**32, 20_000, dtype=np.uint32).view(np.float32)
    spread = (random.standard_normal(20_000) * np.exp(random.uniform(-25, 25, 20_000))).astype(np.float32)
    edges = np.float32(
        [
            0,
            -0.0,
            np.inf,
            -np.inf,
            448,
            464,
            464.00003,
            480,
            57344,
            61440,
            61439.996,
            65504,
            65519.996,
            65520,
            3.3961776e38,
            1e-45,
            2**-9,
            2**-10,
        ]
    )
    neighbours = np.concatenate([np.nextafter(edges, np.float32(0)), np.nextafter(edges, np.float32(np.inf))])
    nan = np.uint32([0x7F800001, 0xFF800001, 0x7FC00000, 0xFFC00001, 0x7FFFFFFF, 0x7FA5A5A5, 0xFFF00000]).view(np.float32)
    return np.concatenate([patterns, spread, edges, -edges, neighbours, nan])


@pytest.mark.parametrize("target", TYPES)
@pytest.mark.parametrize("source", TYPES)
@pytest.mark.parametrize("add", [0.0, 1.0])
def test_casts_are_equal_in_every_bit_nan_included(reference: Face, other: Face, source: str, target: str, add: float) -> None:
    values = every_pattern(source)
    assert same(reference.cast(values, target, add), other.cast(values, target, add))


@pytest.mark.parametrize("target", ["float32", "bfloat16", "float16", "float8_e4m3fn"])
def test_float64_is_rounded_once_by_every_backend(reference: Face, other: Face, target: str) -> None:
    values = np.concatenate([random.standard_normal(999), [1 + 2.0**-8 + 2.0**-40, 1e300, 1e-320, -np.inf, 448.00000001]])
    assert same(reference.cast(values, target), other.cast(values, target))


@st.composite
def strided_moves(draw: st.DrawFn) -> tuple[int, list[Move], list[int], list[int]]:
    """(item size, moves of one table, bytes of its sources, bytes of its targets): boxes with any axis order, holes and offsets."""
    item = draw(st.sampled_from([1, 2, 4, 8]))
    axes = draw(st.integers(1, 8))
    moves, sources, targets = [], [], []
    for number in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.integers(1, 3 if axes > 3 else 40)) for _ in range(axes))
        sides = []
        for sizes in (sources, targets):
            strides, step = [0] * axes, item
            for axis in draw(st.permutations(range(axes))) if draw(st.booleans()) else range(axes - 1, -1, -1):
                strides[axis], step = step, step * (shape[axis] + draw(st.integers(0, 2)))
            offset = draw(st.integers(0, 9)) * item
            sizes.append(offset + step)
            sides.append((offset, tuple(strides)))
        moves.append(tables.box(number, sides[0][0], number, sides[1][0], shape, sides[0][1], sides[1][1], item))
    return item, moves, sources, targets


@few
@given(case=strided_moves(), seed=st.integers(0, 2**32 - 1))
def test_moves_of_any_boxes_touch_what_they_should_and_nothing_else(reference: Face, other: Face, case, seed: int) -> None:
    item, moves, sources, targets = case
    fill = np.random.default_rng(seed)
    arrays = [fill.integers(0, 256, n, dtype=np.uint8) for n in sources]
    one, two = ([np.full(n, 0xEE, np.uint8) for n in targets] for _ in range(2))
    assert same(reference.move(moves, arrays, one), other.move(moves, arrays, two))
    assert all(t.tobytes().count(0xEE) >= t.size - prod(m.shape) * item for t, m in zip(one, moves, strict=True))


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32", "float8_e4m3fn", "uint8"])
def test_query_key_value_interleave_as_megatron_has_them_and_come_back(reference: Face, other: Face, name: str) -> None:
    heads, groups, dim, hidden = 4, 2, 4, 8
    kind = TYPES.get(name, np.dtype("u1"))
    q, k, v = (random.integers(0, 256, (n * dim, hidden * kind.itemsize), dtype=np.uint8).view(kind) for n in (heads, groups, groups))
    table = tables.interleaved_rows((heads // groups * dim, dim, dim), groups, hidden * kind.itemsize, kind.itemsize)
    merged = other.move(table, [q, k, v], [np.zeros((2 * (8 + 4 + 4), hidden), kind)])[0]
    expected = np.concatenate([q[:8], k[:4], v[:4], q[8:], k[4:], v[4:]])
    assert same(expected, merged)
    assert same([q, k, v], other.move(tables.reversed_moves(table), [merged], [np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)]))
    assert same(expected, reference.move(table, [q, k, v], [np.zeros_like(merged)])[0])


def test_gate_and_up_merge_in_halves_or_alternating(other: Face) -> None:
    gate, up = (random.integers(0, 2**16, (6, 5), dtype=np.uint16) for _ in range(2))
    halves = other.move(tables.interleaved_rows((6, 6), 1, 10, 2), [gate, up], [np.zeros((12, 5), np.uint16)])[0]
    assert same(np.concatenate([gate, up]), halves)
    turns = other.move(tables.interleaved_rows((1, 1), 6, 10, 2), [gate, up], [np.zeros((12, 5), np.uint16)])[0]
    assert same(np.stack([gate, up], 1).reshape(12, 5), turns)


def test_columns_are_cut_and_joined(other: Face) -> None:
    whole = random.integers(0, 2**16, (7, 12), dtype=np.uint16)
    table = tables.cut_columns((4, 4, 4), 7, 2)
    parts = other.move(table, [whole], [np.zeros((7, 4), np.uint16) for _ in range(3)])
    assert same([np.ascontiguousarray(whole[:, i : i + 4]) for i in (0, 4, 8)], parts)
    assert same(whole, other.move(tables.reversed_moves(table), parts, [np.zeros_like(whole)])[0])


@pytest.mark.parametrize("item", [1, 2, 4])
@pytest.mark.parametrize(("hidden", "ffn"), [(8, 6), (80, 65)])
def test_grouped_experts_are_a_view_and_not_a_concatenation_of_columns(other: Face, hidden: int, ffn: int, item: int) -> None:
    experts = [random.integers(0, 200, (2 * ffn, hidden)).astype(f"u{item}") for _ in range(4)]
    table = tables.grouped_experts(4, 2 * ffn, hidden, item)
    weight1 = other.move(table, experts, [np.zeros((hidden, 4 * 2 * ffn), f"u{item}")])[0]
    view = weight1.reshape(4, hidden, 2 * ffn)
    assert all(np.array_equal(view[e].T, experts[e]) for e in range(4))
    assert same(experts, other.move(tables.reversed_moves(table), [weight1], [np.zeros_like(e) for e in experts]))


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("target", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    ("shape", "block"), [((200, 130), (128, 128)), ((3, 70, 33), (32, 16)), ((2, 2, 5, 7), (3, 5)), ((9, 140), (9, 140))]
)
def test_block_dequantisation_is_equal_in_every_bit(
    reference: Face, other: Face, name: str, target: str, shape: tuple, block: tuple
) -> None:
    values = random.integers(0, 256, shape, dtype=np.uint8).view(TYPES[name])
    scales = np.exp(random.uniform(-9, 9, scale_shape(shape, block))).astype(np.float32)
    scales.flat[0] = np.inf  # 0 * inf is NaN, with bits that processors disagree about
    assert same(reference.dequantise_blocks(values, scales, block, target), other.dequantise_blocks(values, scales, block, target))


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("target", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize(("shape", "block"), [((200, 130), (128, 128)), ((2, 33, 20), (16, 9))])
def test_block_quantisation_is_equal_in_every_bit(reference: Face, other: Face, name: str, target: str, shape: tuple, block: tuple) -> None:
    wide = (random.standard_normal(shape) * np.exp(random.uniform(-40, 40, shape))).astype(np.float32)
    wide.flat[:4] = [np.nan, np.inf, -np.inf, -np.nan]
    wide[..., -1:] = 0  # with the first block shape, a block of zeros at the edge
    values, _ = reference.cast(wide, name)
    assert same(reference.quantise_blocks(values, block, target), other.quantise_blocks(values, block, target))


def test_blocks_of_numbers_too_small_for_a_scale_are_equal(reference: Face, other: Face) -> None:
    values = np.full((3, 3), 1e-43, np.float32)
    result = reference.quantise_blocks(values, (2, 2))
    assert same(result, other.quantise_blocks(values, (2, 2)))
    assert np.isfinite(result[1]).all() and (result[1] > 0).all()


@pytest.mark.parametrize("target", TYPES)
def test_mxfp4_is_equal_in_every_bit_for_every_scale(reference: Face, other: Face, target: str) -> None:
    blocks = random.integers(0, 256, (2, 256, 16), dtype=np.uint8)
    scales = np.stack([np.arange(256, dtype=np.uint8)] * 2)
    assert same(reference.dequantise_mxfp4(blocks, scales, target), other.dequantise_mxfp4(blocks, scales, target))


def test_empty_operands_are_no_work(other: Face) -> None:
    assert other.cast(np.zeros((0, 3), np.float32), "bfloat16")[0].shape == (0, 3)
    assert other.dequantise_blocks(np.zeros((0, 4), TYPES["float8_e4m3fn"]), np.zeros((0, 1), np.float32)).shape == (0, 4)
    assert other.move([], [], []) == []


@pytest.mark.parametrize(
    "change", [{"source_offset": -1}, {"source_offset": 3}, {"target_offset": 4}, {"source": 1}, {"target_strides": (-1,)}]
)
def test_a_move_that_leaves_its_arrays_is_refused(reference: Face, other: Face, change: dict) -> None:
    from dataclasses import replace

    table = [replace(tables.box(0, 0, 0, 0, (4,), (1,), (1,), 1), **change)]
    for backend in (reference, other):
        with pytest.raises((CkptError, AssertionError), match=r"E490|leaves|names no"):
            backend.move(table, [np.zeros(6, np.uint8)], [np.zeros(6, np.uint8)])


def test_what_the_kernels_cannot_compute_with_is_named(reference: Face) -> None:
    with pytest.raises(CkptError, match="do not compute with int32"):
        reference.dequantise_blocks(np.zeros((2, 2), np.int32), np.ones((1, 1), np.float32))
    with pytest.raises(CkptError, match="scales do not fit"):
        reference.dequantise_blocks(np.zeros((200, 130), TYPES["float8_e4m3fn"]), np.ones((1, 1), np.float32))
    with pytest.raises(CkptError, match="not MXFP4"):
        reference.dequantise_mxfp4(np.zeros((2, 15), np.uint8), np.zeros(2, np.uint8))


def test_the_table_of_formats_is_that_of_ml_dtypes() -> None:
    for name, kind in FORMATS.items():
        info = ml_dtypes.finfo(TYPES[name])
        assert (kind.bits, kind.mantissa, kind.largest) == (info.bits, info.nmant, float(info.max))
