"""torch, ml_dtypes and transformers judge what the reference computes; the other backends are compared with the reference elsewhere."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from kernel_backends import Face, bits, to_numpy, to_torch

torch = pytest.importorskip("torch")
random = np.random.default_rng(7)
E4M3, E5M2, BF16 = (np.dtype(getattr(ml_dtypes, n)) for n in ("float8_e4m3fn", "float8_e5m2", "bfloat16"))


def numbers() -> np.ndarray:
    """float32 values of every size, no NaN."""
    values = random.integers(0, 2**32, 300_000, dtype=np.uint32).view(np.float32)
    spread = (random.standard_normal(300_000) * np.exp(random.uniform(-30, 30, 300_000))).astype(np.float32)
    return np.concatenate([values[~np.isnan(values)], spread, np.float32([464, 480, 61440, 65520, np.inf, -np.inf, -0.0])])


@pytest.mark.parametrize("target", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
def test_casts_of_numbers_are_those_of_ml_dtypes_and_of_torch(reference: Face, target: str) -> None:
    values = numbers()
    ours, lost = reference.cast(values, target)
    with np.errstate(over="ignore", invalid="ignore"):
        theirs = values.astype(ours.dtype)
    assert np.array_equal(bits(ours), bits(theirs))
    judged = np.isfinite(ours.astype(np.float32)) if target == "float8_e4m3fn" else slice(None)  # torch 2.13 saturates this one
    by_torch = to_numpy(torch.from_numpy(values).to(getattr(torch, target)))
    assert np.array_equal(bits(ours)[judged], bits(by_torch)[judged])
    assert lost == np.isfinite(values).sum() - np.isfinite(ours.astype(np.float32)).sum()


@pytest.mark.parametrize("source", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
def test_widening_is_that_of_torch(reference: Face, source: str) -> None:
    kind = np.dtype(getattr(ml_dtypes, source, None) or source)
    values = np.arange(256**kind.itemsize, dtype=f"u{kind.itemsize}").view(kind)
    ours, theirs = reference.cast(values, "float32")[0], to_numpy(to_torch(values).float())
    number = ~np.isnan(theirs)
    assert np.array_equal(ours[number], theirs[number]) and np.isnan(ours[~number]).all()


def test_blocks_at_the_edges_take_the_scale_of_their_partial_block(reference: Face) -> None:
    weight, scales = np.ones((200, 130), E4M3), np.float32([[1, 2], [3, 4]])
    result = reference.dequantise_blocks(weight, scales).astype(np.float32)
    assert result.shape == (200, 130)
    assert (result[:128, :128] == 1).all() and (result[:128, 128:] == 2).all()
    assert (result[128:, :128] == 3).all() and (result[128:, 128:] == 4).all()
    experts = reference.dequantise_blocks(np.ones((4, 200, 130), E4M3), np.stack([scales * (e + 1) for e in range(4)])).astype(np.float32)
    assert np.array_equal(experts, np.stack([result * (e + 1) for e in range(4)]))


@pytest.mark.parametrize("kind", [E4M3, E5M2])
def test_block_dequantisation_is_that_of_a_plain_torch_loop(reference: Face, kind: np.dtype) -> None:
    patterns = random.integers(0, 256, (3, 300, 200), dtype=np.uint8)
    patterns[np.isnan(patterns.view(kind).astype(np.float32))] = 0
    values, scales = patterns.view(kind), random.uniform(1e-4, 2, (3, 3, 2)).astype(np.float32)
    weight, result = to_torch(values), torch.empty(3, 300, 200, dtype=torch.bfloat16)
    for e in range(3):
        for r in range(0, 300, 128):
            for c in range(0, 200, 128):
                block = weight[e, r : r + 128, c : c + 128].float() * scales[e, r // 128, c // 128].item()
                result[e, r : r + 128, c : c + 128] = block.to(torch.bfloat16)
    assert np.array_equal(bits(reference.dequantise_blocks(values, scales)), bits(to_numpy(result)))


def test_quantised_blocks_are_as_close_as_float8_allows(reference: Face) -> None:
    values = (random.standard_normal((300, 200)) * 0.02).astype(np.float32)
    coded, scales = reference.quantise_blocks(values)
    assert np.array_equal(scales[0, 0], np.abs(values[:128, :128]).max() / np.float32(448))
    assert (np.abs(coded[:128, :128].astype(np.float32)).max()) == 448  # the whole range is used
    back = reference.dequantise_blocks(coded, scales, (128, 128), "float32")
    step = np.maximum(
        np.abs(values) * 2.0**-4, scales.repeat(128, 0)[:300].repeat(128, 1)[:, :200] * 2.0**-10
    )  # half a unit in the last place
    assert (np.abs(back - values) <= step * (1 + 1e-6)).all()


def test_a_quantised_weight_is_quantised_to_itself_again(reference: Face) -> None:
    coded, scales = reference.quantise_blocks(random.standard_normal((130, 140)).astype(np.float32))
    again, same_scales = reference.quantise_blocks(reference.dequantise_blocks(coded, scales, (128, 128), "float32"))
    assert np.array_equal(bits(coded), bits(again)) and np.allclose(
        scales, same_scales, rtol=2**-22, atol=0
    )  # amax / 448 * 448 rounds twice


@pytest.mark.oracle
def test_mxfp4_is_what_transformers_makes_of_gpt_oss_blocks(reference: Face) -> None:
    integration = pytest.importorskip("transformers.integrations.mxfp4")
    blocks = random.integers(0, 256, (2, 6, 8, 16), dtype=np.uint8)
    scales = random.integers(0, 255, (2, 6, 8)).astype(np.uint8)
    scales.flat[:255] = np.arange(255)[: scales.size]
    theirs = integration.convert_moe_packed_tensors(torch.from_numpy(blocks.copy()), torch.from_numpy(scales.copy()))
    ours = reference.dequantise_mxfp4(blocks, scales)
    assert ours.shape == (2, 6, 256)
    assert np.array_equal(bits(ours), bits(to_numpy(theirs.transpose(1, 2).contiguous())))  # transformers turns the matrices
