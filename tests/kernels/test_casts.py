"""Casts round to nearest even and keep NaNs; torch is the judge where it agrees with IEEE 754."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from ckpt_tools.kernels.casts import cast

torch = pytest.importorskip("torch")
BF16 = np.dtype(ml_dtypes.bfloat16)


def test_every_bfloat16_survives_float32_and_back():
    patterns = np.arange(65536, dtype=np.uint16).view(BF16)
    back = cast(cast(patterns, np.dtype(np.float32))[0], BF16)[0].view(np.uint16)
    nan = np.isnan(patterns.astype(np.float32))
    assert np.array_equal(back[~nan], patterns.view(np.uint16)[~nan])
    assert np.isnan(back.view(BF16)[nan].astype(np.float32)).all()
    assert np.array_equal(back[nan] | 0x40, patterns.view(np.uint16)[nan] | 0x40)  # payload kept, made quiet


def test_float32_to_bfloat16_is_torchs_rounding():
    bits = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint32)
    values = bits.view(np.float32)
    values = np.concatenate([values[~np.isnan(values)], np.float32([1.00390625, 1.01171875, 3.3895314e38, 1e-40, -0.0])])
    ours = cast(values, BF16)[0].view(np.uint16)
    theirs = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(ours, theirs)


@pytest.mark.parametrize("target", ["float16", "float32"])
def test_other_casts_are_torchs(target):
    values = np.float32([0.1, 1.00390625, 65504, 1e-8, -3.5, 6.1e-5, 2049])
    ours = cast(values, np.dtype(target))[0]
    assert np.array_equal(ours, torch.from_numpy(values).to(getattr(torch, target)).numpy())


def test_overflow_to_infinity_is_counted():
    result, lost = cast(np.float32([70000, 1, np.inf, np.nan]), np.dtype(np.float16))
    assert lost == 1 and np.isinf(result[0])


def test_float64_is_rounded_once():
    value = np.float64(1) + 2.0**-8 + 2.0**-40  # above the tie of bfloat16; rounding to float32 first would land on the tie
    assert cast(np.array([value]), BF16)[0].astype(np.float64)[0] == 1 + 2.0**-7


def test_an_offset_is_added_in_float32():
    assert np.array_equal(cast(np.array([0.5, -1], BF16), np.dtype(np.float32), add=1.0)[0], np.float32([1.5, 0]))
