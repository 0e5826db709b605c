"""Runs that real megatron-core trained, once for all tests of this folder, and how to compare with what their ranks had in memory."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracle import launch
from safetensors.numpy import load_file

from ckpt_tools.lazy import LazyTensor
from ckpt_tools.naming import stored_key

FORMS = ["dp_reshardable", "fully_reshardable", "dp_zero_gather_scatter"]
# name -> what tests/oracle/optimizer_runs.py trains, on four ranks; sizes no multiples of 64, so that gaps and padding show
JOBS: dict[str, dict[str, Any]] = {
    "tp2dp2": {"dtype": "bfloat16", "tp": 2, "bucket_size": 9000, "forms": FORMS, "legacy": True},
    "pp2dp2_tied": {"dtype": "float32", "tied": True, "pp": 2, "forms": FORMS, "legacy": True},
    "pp2vpp2dp2": {"dtype": "bfloat16", "pp": 2, "vpp": 2, "forms": FORMS, "legacy": True},
    "tp2pp2_plain": {"dtype": "bfloat16", "tp": 2, "pp": 2, "optimizer": "plain", "forms": ["plain"], "legacy": True},
    "tp2pp2_plain_float32": {"dtype": "float32", "tp": 2, "pp": 2, "optimizer": "plain", "forms": ["plain"], "legacy": True},
    "ep2dp4": {"dtype": "bfloat16", "ep": 2, "experts": 4, "bucket_size": 9000, "forms": FORMS, "legacy": True},
    "ep2dp4_grouped": {"dtype": "bfloat16", "ep": 2, "experts": 4, "grouped": True, "forms": ["dp_reshardable"], "legacy": True},
    "ep2_grouped_plain": {
        "dtype": "bfloat16",
        "ep": 2,
        "experts": 4,
        "grouped": True,
        "optimizer": "plain",
        "forms": ["plain"],
        "legacy": True,
    },
    "tp2dp2_0.19.2": {"version": "0.19.2", "dtype": "bfloat16", "tp": 2, "bucket_size": 9000, "forms": FORMS, "legacy": True},
    "ep2dp4_0.19.2": {"version": "0.19.2", "dtype": "bfloat16", "ep": 2, "experts": 4, "bucket_size": 9000, "forms": FORMS, "legacy": True},
}


def hf_config(dtype: str, tied: bool) -> dict[str, Any]:
    """config.json of the tiny model: hidden 48, ffn 72, 4 heads in 2 groups, 4 layers, 90 tokens."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "intermediate_size": 72,
        "vocab_size": 90,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "dtype": dtype,
    }


@dataclass(frozen=True)
class Runs:
    """folder holds one folder per job; hf: (dtype, tied) -> folder with config.json."""

    folder: Path
    hf: dict[tuple[str, bool], Path]

    def job(self, name: str) -> dict[str, Any]:
        """The job for the oracle."""
        job = JOBS[name]
        return {**job, "hf": str(self.hf[job["dtype"], job.get("tied", False)]), "output": str(self.folder / name)}

    def run(self, name: str, form: str) -> Path:
        """Run folder of one saved form; skips where its megatron-core is not here."""
        if not launch.available(JOBS[name].get("version", "0.16.1")):
            pytest.skip(f"no megatron-core for {name}")
        return self.folder / name / form


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """All JOBS, trained by megatron-core on four ranks."""
    pytest.importorskip("megatron.core")
    base = tmp_path_factory.mktemp("optimizer")
    hf = {}
    for dtype in ("bfloat16", "float32"):
        for tied in (False, True):
            folder = hf[dtype, tied] = base / f"hf_{dtype}_{tied}"
            folder.mkdir()
            (folder / "config.json").write_text(json.dumps(hf_config(dtype, tied)))
    made = Runs(base, hf)
    for version in ("0.16.1", "0.19.2"):
        names = [n for n, job in JOBS.items() if job.get("version", "0.16.1") == version]
        if launch.available(version):
            outcomes = launch.run("optimizer_runs", [made.job(n) for n in names], base, version, ranks=4)
            assert outcomes == [None] * len(names), next(o for o in outcomes if o)
    return made


def truth(folder: Path, steps: int) -> dict[tuple[str, str], np.ndarray]:
    """(state, torch_dist key) -> whole tensor, put together from what the ranks wrote; every element must be there."""
    whole: dict[tuple[str, str], np.ndarray] = {}
    for path in sorted(folder.glob(f"truth_{steps}_*.safetensors")):
        for name, value in load_file(path).items():
            state, key, shape, offset = name.split("|")
            array = whole.setdefault((state, key), np.full(tuple(map(int, shape.split("."))), np.nan, np.float32))
            array[tuple(slice(o, o + n) for o, n in zip(map(int, offset.split(".")), value.shape))] = value
    assert whole and not any(np.isnan(a).any() for a in whole.values())
    return whole


def expected(whole: dict[tuple[str, str], np.ndarray], state: str, name: str) -> np.ndarray:
    """The part of the truth that is canonical tensor `name`; a local spec calls the norm before experts linear_fc1's."""
    key, index = stored_key(name, stacked=True)
    if (state, key) not in whole:
        key = key.replace("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight")
    return whole[state, key][index]


def differing(tensors: dict[str, dict[str, Any]], whole: dict[tuple[str, str], np.ndarray]) -> dict[str, int]:
    """`state name` -> number of elements that differ from the truth, for tensors with any."""
    result = {}
    for state, named in tensors.items():
        for name, tensor in named.items():
            wrong = int(np.count_nonzero(expected(whole, state, name) != LazyTensor(tensor).numpy()))
            if wrong:
                result[f"{state} {name}"] = wrong
    return result
