"""The layout of gradient buckets is megatron-core's, and a recorded one is recognised without knowing how it came about."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle import launch

from ckpt_tools.optimizer.buckets import Item, end_divisor, fit, recompute

ITEMS = st.lists(st.builds(Item, st.integers(1, 400), st.booleans()), min_size=1, max_size=12)


@given(ITEMS, st.none() | st.integers(1, 900), st.integers(1, 9))
def test_a_layout_is_found_again_from_the_recorded_sizes_alone(items, bucket_size, dp):
    layout = recompute(items, bucket_size, end_divisor(dp))
    found = fit(items, layout.unpadded, layout.padded)
    assert found == layout


@pytest.mark.parametrize(
    ("unpadded", "padded"),
    [
        ((148,), (256,)),  # without the gap that aligns the second parameter
        ((164,), (128,)),  # padded to less than it holds
        ((48, 100, 8), (128, 128, 128)),  # a bucket too many
        ((48,), (128,)),  # a bucket too few
        ((100, 48), (128, 128)),  # the other way round
    ],
)
def test_sizes_of_other_parameters_do_not_fit(unpadded, padded):
    items = [Item(100), Item(48)]  # registered in this order: the buffer begins with the last
    assert fit(items, (164,), (256,)) is not None
    assert fit(items, (48, 100), (128, 128)) is not None
    assert fit(items, unpadded, padded) is None


@given(ITEMS, st.none() | st.integers(1, 900), st.integers(1, 9))
def test_parameters_do_not_overlap_and_joined_buckets_leave_out_the_end_padding_only(items, bucket_size, dp):
    layout = recompute(items, bucket_size, end_divisor(dp))
    spans = sorted((layout.compact(i), layout.compact(i) + item.numel) for i, item in enumerate(items))
    assert all(a[1] <= b[0] for a, b in pairwise(spans))
    assert spans[-1][1] <= layout.numel
    for index, (bucket, _) in enumerate(layout.slots):
        padding = sum(layout.padded[:bucket]) - sum(layout.unpadded[:bucket])
        assert layout.full(index) - layout.compact(index) == padding


@pytest.mark.oracle
def test_layouts_are_those_of_megatron_core(tmp_path: Path):
    """200 random buffers, laid out by the function that 0.19.2's distributed optimizer uses."""
    if not launch.available("0.19.2"):
        pytest.skip("megatron-core 0.19.2 is not here")
    rng = random.Random(7)
    wanted = [
        {
            "sizes": [[rng.choice([1, 48, 64, 100, 640, 2304, 4097]), rng.random() < 0.1] for _ in range(rng.randint(1, 14))],
            "bucket_size": rng.choice([None, 1, 500, 3000, 10**9]),
            "dp": rng.choice([1, 2, 3, 6, 7, 8, 96]),
            "high": rng.random() < 0.2,
        }
        for _ in range(200)
    ]
    out = tmp_path / "layouts.json"
    assert launch.run("parameter_orders", [{"layouts": wanted, "output": str(out)}], tmp_path, "0.19.2") == [None]
    for case, real in zip(wanted, json.loads(out.read_text())):
        items = [Item(size, shared) for size, shared in case["sizes"]]
        layout = recompute(items, case["bucket_size"], end_divisor(case["dp"], case["high"]))
        slots = [[layout.full(i), layout.full(i) + item.numel, layout.slots[i][0]] for i, item in enumerate(items)]
        assert slots == real["slots"]
        assert list(layout.unpadded) == real["unpadded"]
        assert [sum(layout.padded[: i + 1]) for i in range(len(layout.padded))] == real["ends"]
