"""Optimizer state of checkpoints that Megatron-LM itself wrote is the one its ranks had in memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from ckpt_tools.checkpoint import Checkpoint, open_checkpoint
from ckpt_tools.lazy import LazyTensor
from ckpt_tools.optimizer.reading import OptimizerState, read_optimizer
from ckpt_tools.optimizer.values import compare_masters
from ckpt_tools.views import View, as_mcore

WITH_MEMORY = {
    "llama_pp2_bf16": "float16", "llama_te_tp2_bf16": "float16", "llama_tp2_bf16": "float16", "llama_tp2_trained_bf16": "float16",
    "llama_tp2pp2_bf16": "float16", "llama_two_iterations_bf16": "float16", "llama_vpp2_bf16": "float16", "mc019_llama_tp1_bf16": "float16",
    "qwen2_tied_tp2_bf16": "float16", "mixtral_ep2_seq_bf16": "float16", "mixtral_ep2_tegrouped_bf16": "float16",
    "legacy_llama_tp2pp2_bf16": "float16", "legacy_llama_vpp2_bf16": "float16", "legacy_mixtral_ep2_seq_bf16": "float16",
}  # fmt: skip
DISTRIBUTED = {
    "llama_dp2_distopt_dpreshard_bf16": "dp_reshardable",
    "llama_dp2_distopt_fullyreshard_bf16": "fully_reshardable",
    "legacy_llama_dp2_distopt_bf16": "distrib_optim",
    "mc013_llama_tp2dp2_distopt_modelspace_bf16": "fully_sharded_model_space",
    "mc019_llama_dp2_distopt_dpreshard_bf16": "dp_reshardable",
}


def read(shared: Path, name: str) -> tuple[Checkpoint, View, OptimizerState]:
    checkpoint = open_checkpoint(str(shared / "real" / name / "mcore"))
    view = as_mcore(checkpoint)
    return checkpoint, view, read_optimizer(checkpoint, view)


def numbers(state: OptimizerState) -> dict[tuple[str, str], np.ndarray]:
    return {(s, n): LazyTensor(t).numpy() for s, named in state.tensors.items() for n, t in named.items()}


def expected(shared: Path, name: str, view: View) -> dict[tuple[str, str], np.ndarray]:
    """expected_optim.safetensors under canonical names: fused by hand, as the model's own weights are."""
    stored = load_file(shared / "real" / name / "expected_optim.safetensors")
    result = {}
    for state in ("exp_avg", "exp_avg_sq", "main"):
        hf = {n.removeprefix(f"{state}/"): v for n, v in stored.items() if n.startswith(f"{state}/")}
        for canonical in view.tensors:
            result["param" if state == "main" else state, canonical] = fused(hf, canonical, view)
    return result


def fused(hf: dict[str, np.ndarray], name: str, view: View) -> np.ndarray:
    """One canonical tensor out of HF tensors. qkv: per group its queries, then k, then v; fc1: gate over up."""
    if not name.startswith("decoder.layers."):
        source = {
            "embedding.word_embeddings.weight": "model.embed_tokens.weight",
            "decoder.final_layernorm.weight": "model.norm.weight",
            "output_layer.weight": "lm_head.weight",
        }[name]
        return hf[source]
    _, _, layer, rest = name.split(".", 3)
    base = f"model.layers.{layer}."
    if rest in ("self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias"):
        kind = rest.rpartition(".")[2]
        q, k, v = (hf[f"{base}self_attn.{p}_proj.{kind}"] for p in "qkv")
        groups = int(view.args["num_query_groups"])
        parts = [p.reshape(groups, -1, *p.shape[1:]) for p in (q, k, v)]
        return np.concatenate(parts, axis=1).reshape(-1, *q.shape[1:])
    if rest.startswith("mlp.experts."):
        matrix, expert = rest.removeprefix("mlp.experts.").split(".weight")
        w = f"{base}block_sparse_moe.experts.{expert}."
        return hf[f"{w}w2.weight"] if matrix == "linear_fc2" else np.concatenate([hf[f"{w}w1.weight"], hf[f"{w}w3.weight"]])
    if rest == "mlp.linear_fc1.weight":
        return np.concatenate([hf[f"{base}mlp.gate_proj.weight"], hf[f"{base}mlp.up_proj.weight"]])
    return hf[
        base
        + {
            "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
            "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
            "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
            "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
            "mlp.linear_fc2.weight": "mlp.down_proj.weight",
            "mlp.router.weight": "block_sparse_moe.gate.weight",
        }[rest]
    ]


@pytest.mark.parametrize("name", WITH_MEMORY)
def test_state_is_what_was_in_memory(shared: Path, name: str):
    _, view, state = read(shared, name)
    found, wanted = numbers(state), expected(shared, name, view)
    assert state.kind == WITH_MEMORY[name]
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():  # padding rows of the vocabulary are not in HF's tensors
        assert np.array_equal(found[key][: len(value)], value), key
    assert state.step == (10 if "two_iterations" in name else 5)
    assert not state.problems


@pytest.mark.parametrize("name", DISTRIBUTED)
def test_distributed_state_fits_its_model_and_its_float32_weights_are_those_of_the_plain_run(shared: Path, name: str):
    _, view, state = read(shared, name)
    wanted = expected(shared, "llama_tp2_bf16", view)
    assert state.kind == DISTRIBUTED[name]
    assert state.step == 5
    assert len(state.groups) == 2
    assert compare_masters(state.tensors["param"], view.tensors, sample=None) == []
    found = numbers(state)
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        if key[0] == "param":
            assert np.array_equal(found[key][: len(value)], value), key


def test_flat_buffers_and_named_tensors_of_one_run_are_the_same_bytes(shared: Path):
    """The same state saved three ways by Megatron-Core 0.16.1."""
    flat = numbers(read(shared, "llama_dp2_distopt_dpreshard_bf16")[2])
    for other in ("llama_dp2_distopt_fullyreshard_bf16", "legacy_llama_dp2_distopt_bf16"):
        named = numbers(read(shared, other)[2])
        assert flat.keys() == named.keys()
        assert all(flat[k].tobytes() == named[k].tobytes() for k in named), other


def test_flat_buffers_of_0_19_hold_the_moments_of_the_plain_run(shared: Path):
    _, view, state = read(shared, "mc019_llama_dp2_distopt_dpreshard_bf16")
    found, wanted = numbers(state), expected(shared, "mc019_llama_tp1_bf16", view)
    assert all(np.array_equal(found[k][: len(v)], v) for k, v in wanted.items())


def test_model_space_is_rebuilt_as_the_library_that_wrote_it_cut_it(shared: Path):
    """By hand: the last axis of each grid cell is one rank's flattened shard (megatron-core 0.13.1)."""
    checkpoint, _, state = read(shared, "mc013_llama_tp2dp2_distopt_modelspace_bf16")
    found = numbers(state)
    stored = checkpoint["optimizer.state.exp_avg.decoder.layers.mlp.linear_fc2.weight"].numpy()  # (layers, 1, tp, 64 * 40)
    for layer in range(4):
        whole = np.concatenate([stored[layer, 0, tp].reshape(64, 40) for tp in range(2)], axis=1)
        assert np.array_equal(found["exp_avg", f"decoder.layers.{layer}.mlp.linear_fc2.weight"], whole)
    stored = checkpoint["optimizer.state.exp_avg_sq.decoder.layers.mlp.linear_fc1.weight"].numpy()  # (layers, 2 halves x tp, 1, 40 * 64)
    for layer in range(4):
        whole = np.concatenate([stored[layer, part, 0].reshape(40, 64) for part in range(4)])
        assert np.array_equal(found["exp_avg_sq", f"decoder.layers.{layer}.mlp.linear_fc1.weight"], whole)


def test_a_checkpoint_without_optimizer_has_none(shared: Path):
    checkpoint = open_checkpoint(str(shared / "real" / "weightsonly_llama_tp2_bf16" / "mcore"))
    assert read_optimizer(checkpoint, as_mcore(checkpoint)).kind == "none"
