"""Kinds of optimizer state told from keys and shapes alone, when the common state does not name them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import write_torch_dist

from ckpt_tools.inspection.overview import inspect, open_for_inspection
from ckpt_tools.optimizer.kinds import OptimizerState

WEIGHT = {"decoder.final_layernorm.weight": np.ones(6, np.float32)}
BUCKET = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0."


def state(
    tmp_path: Path, tensors: dict[str, np.ndarray], objects: dict[str, Any] | None = None, common: dict[str, Any] | None = None
) -> OptimizerState:
    write_torch_dist(tmp_path, {**WEIGHT, **tensors}, argparse.Namespace(), objects=objects, common=common)
    return inspect(open_for_inspection(tmp_path)).optimizer


def by_parameter(*states: str, shape: tuple[int, ...] = (6,)) -> dict[str, np.ndarray]:
    return {f"optimizer.state.{s}.decoder.final_layernorm.weight": np.ones(shape, np.float32) for s in states}


@pytest.mark.parametrize(
    ("states", "shape", "kind"),
    [
        (("exp_avg", "exp_avg_sq", "fp32_param"), (6,), "float16"),
        (("exp_avg", "exp_avg_sq"), (6,), "float32"),
        (("exp_avg", "exp_avg_sq", "param"), (6,), "fully_reshardable"),
        (("exp_avg", "exp_avg_sq", "fp32_param"), (1, 6), "fully_sharded_model_space"),
    ],
)
def test_state_by_parameter_can_be_resharded(tmp_path: Path, states: tuple[str, ...], shape: tuple[int, ...], kind: str) -> None:
    found = state(tmp_path, by_parameter(*states, shape=shape))
    assert (found.kind, found.states, found.reshardable) == (kind, tuple(sorted(states)), True)
    assert (found.tensors, found.nbytes) == (len(states), 24 * len(states))


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (None, "bucket_space"),
        ("dp_reshardable", "dp_reshardable"),
        ("fully_sharded_bucket_space", "fully_sharded_bucket_space"),
    ],
)
@pytest.mark.parametrize("prefix", ["", "chained_0."])
def test_flat_buffers_cannot(tmp_path: Path, content: str | None, kind: str, prefix: str) -> None:
    common = {"content_metadata": {"distrib_optim_sharding_type": content}} if content else None
    found = state(tmp_path, {prefix + BUCKET + s: np.ones(9, np.float32) for s in ("exp_avg", "exp_avg_sq", "param")}, common=common)
    assert (found.kind, found.reshardable) == (kind, False) and "data-parallel" in found.why
    assert found.states == ("exp_avg", "exp_avg_sq", "param")


def test_gathered_objects_cannot(tmp_path: Path) -> None:
    objects = {f"optimizer.distributed.dp_group_idx_0.{n}/shard_0_1": [1] for n in ("param_state", "optimizer")}
    found = state(tmp_path, {}, objects)
    assert (found.kind, found.reshardable) == ("dp_zero_gather_scatter", False) and found.nbytes > 0


def test_keys_that_nobody_knows_are_not_judged(tmp_path: Path) -> None:
    found = state(tmp_path, {"optimizer.velvet": np.ones(2, np.float32)})
    assert (found.kind, found.reshardable) == ("unknown", None)


@pytest.mark.parametrize(("overlap", "warned"), [(True, True), (False, False)])
def test_the_shift_that_releases_write_with_several_buckets_is_mentioned_only_then(tmp_path: Path, overlap: bool, warned: bool) -> None:
    args = argparse.Namespace(overlap_grad_reduce=overlap, pipeline_model_parallel_size=1, untie_embeddings_and_output_weights=True)
    write_torch_dist(tmp_path, {**WEIGHT, **by_parameter("exp_avg", "param")}, args)
    assert ("shift" in inspect(open_for_inspection(tmp_path)).optimizer.why) == warned
