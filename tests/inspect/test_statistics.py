"""Streaming statistics, judged by torch and numpy on whole arrays, for every dtype and for bytes that lie in any order."""

from __future__ import annotations

import itertools
import math
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_tools import statistics as module
from ckpt_tools.checkpoint import open_checkpoint
from ckpt_tools.statistics import _blocks, statistics, statistics_of
from ckpt_tools.tensors import Chunk, Extent, TensorMetadata

FLOATS = (
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
)


@pytest.mark.oracle
@pytest.mark.parametrize("name", FLOATS)
def test_floats_of_every_width_as_torch_sees_them(tmp_path: Path, name: str) -> None:
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(1)
    dtype = getattr(torch, name)
    if name == "float64":
        values = torch.randn(3000, dtype=dtype)
        values[:4] = torch.tensor([math.nan, math.inf, -math.inf, 0.0], dtype=dtype)
    else:  # bit patterns, so that subnormals, infinities and NaNs of every kind are among them
        size = dtype.itemsize
        raw = np.random.default_rng(2).integers(0, 256, (70_001, size), np.uint8) if size > 1 else np.arange(256, dtype=np.uint8)
        values = torch.from_numpy(raw.reshape(-1).copy()).view(dtype)
    save_file({"w": values}, tmp_path / "w.safetensors")
    found = dict(statistics(open_checkpoint(tmp_path / "w.safetensors").locate_all()))["w"]
    wide = values.double()
    finite = wide[torch.isfinite(wide)]
    assert (found.count, found.nans, found.infinities) == (wide.numel(), int(wide.isnan().sum()), int(wide.isinf().sum()))
    assert found.zeros == int((wide == 0).sum())
    assert (found.minimum, found.maximum) == (float(finite.min()), float(finite.max()))
    assert found.mean == pytest.approx(float(finite.mean()), rel=1e-9, abs=1e-300), "sums of float64 in another order"


@pytest.mark.oracle
@pytest.mark.parametrize("name", ["bool", "uint8", "int8", "int16", "int32", "int64"])
def test_integers_are_exact(tmp_path: Path, name: str) -> None:
    import torch
    from safetensors.torch import save_file

    dtype = getattr(torch, name)
    values = (
        torch.randint(0, 2, (501,)).to(dtype)
        if name == "bool"
        else torch.randint(*(0, 200) if name == "uint8" else (-100, 100), (501,)).to(dtype)
    )
    save_file({"w": values}, tmp_path / "w.safetensors")
    found = statistics_of(open_checkpoint(tmp_path / "w.safetensors").located("w"))
    wide = values.long()
    assert (found.minimum, found.maximum, found.zeros) == (int(wide.min()), int(wide.max()), int((wide == 0).sum()))
    assert found.mean == pytest.approx(float(wide.double().mean())) and (found.nans, found.infinities) == (0, 0)
    assert isinstance(found.minimum, int)


@pytest.mark.oracle
def test_pieces_and_transposed_bytes_of_a_distributed_checkpoint(tmp_path: Path) -> None:
    import torch
    import torch.distributed.checkpoint as dcp

    values = torch.arange(6 * 5, dtype=torch.float32).reshape(6, 5)
    dcp.save({"w": values.t(), "zero_d": torch.tensor(3.0)}, storage_writer=dcp.FileSystemWriter(tmp_path / "d"), no_dist=True)
    found = dict(statistics(open_checkpoint(tmp_path / "d").locate_all()))
    assert (found["w"].minimum, found["w"].maximum, found["w"].mean, found["w"].zeros, found["w"].count) == (0.0, 29.0, 14.5, 1, 30)
    assert (found["zero_d"].minimum, found["zero_d"].count) == (3.0, 1)


def test_nothing_finite_nothing_at_all_and_numbers_too_large_to_add() -> None:
    empty = statistics_of(TensorMetadata("w", "float32", (0, 3), ()))
    assert (empty.count, empty.minimum, empty.mean, empty.zeros) == (0, None, None, 0)
    padding = statistics_of(TensorMetadata("w", "float32", (2, 3), (Chunk((0, 0), (2, 3), None),)))
    assert (padding.count, padding.minimum, padding.maximum, padding.mean, padding.zeros) == (6, 0.0, 0.0, 0.0, 6)


def test_a_sum_beyond_float64_gives_no_mean(tmp_path: Path) -> None:
    np.full(4, 1e308).tofile(tmp_path / "raw")
    extent = Extent(str(tmp_path / "raw"), 0, 32, (8,))
    found = statistics_of(TensorMetadata("w", "float64", (4,), (Chunk((0,), (4,), extent),)))
    assert (found.minimum, found.maximum, found.mean, found.infinities) == (1e308, 1e308, None, 0)


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and byte strides of a box whose elements do not overlap: axes in any order, holes between them."""
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=4)))
    strides, step = [0] * len(shape), 2
    for axis in draw(st.permutations(range(len(shape)))):
        strides[axis] = step
        step *= shape[axis] + draw(st.integers(0, 2))
    return shape, tuple(strides)


@settings(max_examples=60, deadline=None)
@given(box=boxes(), block=st.sampled_from([2, 8, 64, 2**20]))
def test_blocks_hold_every_element_of_a_box_exactly_once(tmp_path_factory: pytest.TempPathFactory, box: tuple, block: int) -> None:
    shape, strides = box
    places = [sum(i * s for i, s in zip(index, strides, strict=True)) // 2 for index in itertools.product(*map(range, shape))]
    assert len(set(places)) == len(places)
    path = tmp_path_factory.mktemp("box") / "raw"
    np.arange(max(places) + 3, dtype=np.uint16).tofile(path)
    fd, before = os.open(path, os.O_RDONLY), module.BLOCK_BYTES
    try:
        module.BLOCK_BYTES = block
        found = [int(v) for part in _blocks(fd, Extent(str(path), 0, 0, strides), shape, 2) for v in part]
        sizes = [part.size * 2 for part in _blocks(fd, Extent(str(path), 0, 0, strides), shape, 2)]
    finally:
        module.BLOCK_BYTES = before
        os.close(fd)
    assert sorted(found) == sorted(places) and max(sizes) <= block
