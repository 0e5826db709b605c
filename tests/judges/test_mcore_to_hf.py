"""What megatron-core wrote comes out as exactly the tensors it was made from, and transformers loads it with nothing missing or unexpected."""

from __future__ import annotations

from pathlib import Path

import pytest
from builders import ckpt, read_hf, same
from judges.shared_cases import IDS
from oracle import hf_weights, launch

pytestmark = pytest.mark.oracle
REAL = [
    "llama_dp2_distopt_dpreshard_bf16", "llama_dp2_distopt_fullyreshard_bf16", "llama_pp2_bf16", "llama_te_tp2_bf16", "llama_tp2_bf16",
    "llama_tp2_trained_bf16", "llama_tp2pp2_bf16", "llama_two_iterations_bf16", "llama_vpp2_bf16", "mc013_llama_tp2dp2_distopt_modelspace_bf16",
    "mc019_llama_dp2_distopt_dpreshard_bf16", "mc019_llama_tp1_bf16", "qwen2_tied_tp2_bf16", "release_llama_tp1_bf16", "weightsonly_llama_tp2_bf16",
]  # fmt: skip


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("config", ["own arguments", "--hf-config"])
def test_checkpoints_of_real_runs_give_exactly_the_expected_tensors(shared, tmp_path, name, config):
    folder = shared / "real" / name
    options = ["--hf-config", folder] if config == "--hf-config" else []
    done = ckpt("convert", folder / "mcore", tmp_path / "out", "--to", "hf", "--verify", *options)
    assert done.returncode == 0, done.stderr
    if config == "--hf-config":
        assert (tmp_path / "out" / "model.safetensors").read_bytes() == (folder / "expected.safetensors").read_bytes()
        assert (tmp_path / "out" / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    from safetensors.torch import load_file

    found, expected = load_file(tmp_path / "out" / "model.safetensors"), load_file(folder / "expected.safetensors")
    assert found.keys() == expected.keys()
    assert all(found[n].dtype == expected[n].dtype and found[n].equal(expected[n]) for n in expected)


MADE = [
    {"model": "llama", "tp": 1}, {"model": "llama", "tp": 2}, {"model": "qwen2", "pp": 2}, {"model": "qwen3", "per_layer": True}, {"model": "mistral"},
    {"model": "llama_tied_scaled_rope"}, {"model": "qwen2_5", "iteration": "release"}, {"model": "llama", "pp": 2, "first_stage_layers": 1},
    {"model": "llama", "pp": 2, "vpp": 2}, {"model": "llama", "optimizer": "plain"},
]  # fmt: skip


@pytest.fixture(scope="module")
def saved(models, tmp_path_factory):
    """Run folders that real GPTModels saved, per version and job."""
    base = tmp_path_factory.mktemp("saved")
    made: dict[tuple[str, int], Path] = {}
    for version in ("0.16.1", "0.19.2"):
        if not launch.available(version):
            continue
        for ranks in (1, 2):
            chosen = [i for i, job in enumerate(MADE) if job.get("tp", 1) * job.get("pp", 1) == ranks]
            jobs = [{**MADE[i], "hf": str(models[MADE[i]["model"]][0]), "output": str(base / f"{version}-{i}")} for i in chosen]
            outcomes = launch.run("save_in_mcore", jobs, base, version, ranks)
            assert outcomes == [None] * len(jobs)
            made |= {(version, i): base / f"{version}-{i}" for i in chosen}
    return made


@pytest.mark.slow
@pytest.mark.parametrize("version", ["0.16.1", "0.19.2"])
def test_checkpoints_saved_by_real_models_come_back_exactly(models, saved, tmp_path, version):
    if (version, 0) not in saved:
        pytest.skip(f"megatron-core {version} is not installed here")
    import torch
    import transformers

    for number, job in enumerate(MADE):
        folder, logits = models[job["model"]]
        for way, options in (("config", ("--hf-config", folder)), ("args", ())):
            out = tmp_path / f"{number}{way}"
            done = ckpt("convert", saved[version, number], out, "--to", "hf", *options)
            assert done.returncode == 0, done.stderr
            assert same(read_hf(out), read_hf(folder)), (job, way)
            if way == "args" and job["model"] == "mistral":
                continue  # written as llama, which it is without a window; its arguments cannot tell
            kind = transformers.AutoModelForCausalLM
            model, info = kind.from_pretrained(out, output_loading_info=True, dtype=torch.float32)
            assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
            with torch.no_grad():
                assert torch.equal(model.eval()(torch.tensor(IDS)).logits, logits) or way == "args"
                assert (model(torch.tensor(IDS)).logits - logits).abs().max() < 1e-4, (job, way)


def test_the_committed_checkpoint_of_megatron_core_converts_on_a_strangers_machine(fixtures, tmp_path):
    run = fixtures / "mcore"
    if not (run / "expected.safetensors").exists():
        pytest.skip("fixtures/mcore holds no checkpoint")
    assert hf_weights is not None
    done = ckpt("convert", run / "run", tmp_path / "out", "--to", "hf", "--verify")
    assert done.returncode == 0, done.stderr
    from safetensors.torch import load_file

    found, expected = load_file(tmp_path / "out" / "model.safetensors"), load_file(run / "expected.safetensors")
    assert found.keys() == expected.keys() and all(found[n].equal(expected[n]) for n in expected)
