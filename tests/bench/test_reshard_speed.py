"""Changing the layout and the Megatron format, with and without optimizer state, against `cp -r` of the same bytes.

    python -m pytest tests/bench/test_reshard_speed.py --benchmark-only -s        # part of make bench; measured as test_conversion_speed.py

Models are made by torch's own DCP: float32 weights, and by parameter two moments and the optimizer's float32 weights. The first result
of each conversion is compared with the source by `ckpt diff`, later ones with the first, byte for byte.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from bench.test_conversion_speed import ROOT, SIZE, ckpt, pairs
from builders import CONFIG, megatron_args, megatron_tensors, stack, write_hf, write_torch_dist

pytest.importorskip("torch")
CHANGES = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 1536}
CHANGES |= {"vocab_size": 16000, "num_hidden_layers": max(4, int(SIZE / 1.2 * 24) // 4 * 4)}
GROUP = {"lr": 1e-3, "wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False, "step": 7}


@pytest.fixture(scope="module", params=["weights", "weights and optimizer"])
def runs(request, tmp_path_factory):
    """(what they hold, the run as torch_dist, the same as legacy TP2 PP2)."""
    base = tmp_path_factory.mktemp("bench")
    config = {**CONFIG, **CHANGES}
    weights = stack(megatron_tensors(write_hf(base / "hf", **CHANGES), config), config["num_hidden_layers"])
    tensors, common = dict(weights), {}
    if "optimizer" in request.param:
        for name, tensor in weights.items():
            tensors |= {f"optimizer.state.exp_avg.{name}": tensor / 8, f"optimizer.state.exp_avg_sq.{name}": tensor * tensor}
            tensors[f"optimizer.state.fp32_param.{name}"] = tensor
        common = {"optimizer": {"optimizer": {"param_groups": [GROUP]}}}
    write_torch_dist(base / "run", tensors, megatron_args(config), common=common)
    made = [sys.executable, "-m", "ckpt_tools", "convert", base / "run", base / "legacy", "--to", "torch", "--tp", "2", "--pp", "2"]
    subprocess.run(made, cwd=ROOT, check=True, capture_output=True)
    yield request.param, base / "run", base / "legacy"
    shutil.rmtree(base)


def same_as(source: Path, first: Path):
    """A check that a result holds what `source` does: the first one by ckpt diff, every other by the bytes of the first."""

    def check(out: Path) -> None:
        if first.exists():
            subprocess.run(["diff", "-r", first, out], check=True)
            return
        done = subprocess.run([sys.executable, "-m", "ckpt_tools", "diff", source, out], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        os.rename(out, first)

    return check


def test_legacy_tp2_pp2_to_tp4(benchmark, runs, tmp_path):
    what, _, legacy = runs
    benchmark.name = f"torch TP2 PP2 -> TP4, {what}"
    command = ckpt("reshard", legacy, tmp_path / "out", "--tp", 4, "--pp", 1, "--no-fsync")
    pairs(benchmark, legacy, tmp_path / "out", command, same_as(legacy, tmp_path / "first"))


def test_torch_dist_to_legacy(benchmark, runs, tmp_path):
    what, run, _ = runs
    benchmark.name = f"torch_dist -> torch TP2 PP2, {what}"
    command = ckpt("convert", run, tmp_path / "out", "--to", "torch", "--tp", 2, "--pp", 2, "--no-fsync")
    pairs(benchmark, run, tmp_path / "out", command, same_as(run, tmp_path / "first"))
