"""Families with experts, judged by transformers, by Megatron's own checkpoints and by real GPTModels."""

from __future__ import annotations

import json

import numpy as np
import pytest
from builders import ckpt, read_hf, same
from families import tiny

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.oracle

KINDS = ("mixtral", "qwen2_moe", "qwen3_moe", "qwen3_moe_some_dense")


def convert(*args):
    done = ckpt("convert", *args)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("to", ["torch_dist", "torch"])
def test_every_byte_comes_back_at_any_expert_layout(tmp_path, name, to):
    tiny.write(name, tmp_path / "hf", "bfloat16")
    convert(tmp_path / "hf", tmp_path / "run", "--to", to, "--tp", "2", "--ep", "2", "--etp", "1", "--verify")
    convert(tmp_path / "run", tmp_path / "back", "--to", "hf", "--verify")
    assert {p.name: p.read_bytes() for p in (tmp_path / "back").iterdir()} == {p.name: p.read_bytes() for p in (tmp_path / "hf").iterdir()}


@pytest.mark.case("E14")
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "qwen2_moe"])
def test_fused_and_per_expert_sources_give_the_same_result(tmp_path, name):
    tiny.write(name, tmp_path / "hub", "bfloat16")
    tiny.write(name, tmp_path / "fused", "bfloat16", save_original_format=False)
    assert any("gate_up_proj" in n for n in read_hf(tmp_path / "fused"))
    for form in ("hub", "fused"):
        convert(tmp_path / form, tmp_path / f"{form}-run", "--to", "torch_dist", "--verify")
        convert(tmp_path / f"{form}-run", tmp_path / f"{form}-back", "--to", "hf")
    assert same(read_hf(tmp_path / "hub-back"), read_hf(tmp_path / "hub")) and same(
        read_hf(tmp_path / "fused-back"), read_hf(tmp_path / "hub")
    )


@pytest.mark.case("E3")
@pytest.mark.case("E7")
def test_every_expert_is_stored_once_under_its_own_number(tmp_path):
    tiny.write("qwen3_moe", tmp_path / "hf", "bfloat16")
    source = read_hf(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "run", "--to", "torch", "--tp", "2", "--ep", "2", "--etp", "1")
    total = 0
    for rank in ((0, 0), (1, 1)):
        path = tmp_path / "run" / "release" / f"mp_rank_{rank[0]:02d}_{rank[1]:03d}" / "model_optim_rng.pt"
        model = torch.load(path, weights_only=False)["model"]
        for local in range(2):
            found = model[f"decoder.layers.1.mlp.experts.linear_fc2.weight{local}"]
            total += found.numel()
            expert = rank[1] * 2 + local
            assert np.array_equal(
                found.view(torch.int16).numpy().view(np.uint16), source[f"model.layers.1.mlp.experts.{expert}.down_proj.weight"]
            )
    assert total == 4 * 64 * 24
    convert(tmp_path / "run", tmp_path / "four", "--to", "torch", "--ep", "4", "--spec", "local")
    convert(tmp_path / "four", tmp_path / "back", "--to", "hf")
    assert same(read_hf(tmp_path / "back"), source)


@pytest.mark.case("E10")
def test_the_gate_of_a_shared_expert_is_kept(tmp_path):
    tiny.write("qwen2_moe", tmp_path / "hf", "bfloat16")
    convert(tmp_path / "hf", tmp_path / "run", "--to", "torch", "--tp", "2")
    for rank in range(2):
        model = torch.load(tmp_path / "run" / "release" / f"mp_rank_{rank:02d}" / "model_optim_rng.pt", weights_only=False)["model"]
        assert model["decoder.layers.0.mlp.shared_experts.gate_weight"].shape == (1, 64)


@pytest.mark.case("E11")
def test_dense_and_expert_layers_are_told_apart(tmp_path):
    tiny.write("qwen3_moe_some_dense", tmp_path / "hf", "bfloat16")
    convert(tmp_path / "hf", tmp_path / "run", "--to", "torch_dist")
    keys = json.loads(ckpt("inspect", tmp_path / "run", "--json", "--tensors").stdout)["tensors"]
    names = {k["name"] for k in keys}
    assert "decoder.layers.1.mlp.linear_fc1.weight" in names and "decoder.layers.0.mlp.router.weight" in names
    assert not any(n.startswith("decoder.layers.1.mlp.router") for n in names)


@pytest.mark.parametrize("name", ["mixtral_ep2_seq_bf16", "mixtral_ep2_tegrouped_bf16", "legacy_mixtral_ep2_seq_bf16"])
def test_what_megatron_lm_wrote_comes_out_exactly(shared, tmp_path, name):
    folder = shared / "real" / name
    for options in ((), ("--hf-config", folder)):
        out = tmp_path / f"out{len(options)}"
        convert(folder / "mcore", out, "--to", "hf", "--verify", *options)
        assert (out / "model.safetensors").read_bytes() == (folder / "expected.safetensors").read_bytes()


@pytest.mark.case("E12")
def test_grouped_sequential_and_numbered_experts_are_the_same_model(tmp_path):
    """GroupedMLP keeps weight1 as a view (experts, hidden, 2 ffn) and weight2 as (experts, ffn, hidden): each expert is transposed."""
    tiny.write("qwen3_moe", tmp_path / "hf")
    source = read_hf(tmp_path / "hf")
    for spec in ("te", "local"):
        convert(tmp_path / "hf", tmp_path / spec, "--to", "torch", "--spec", spec)
    path = tmp_path / "te" / "release" / "mp_rank_00" / "model_optim_rng.pt"
    state = torch.load(path, weights_only=False)
    model = state["model"]
    for layer in range(3):
        p = f"decoder.layers.{layer}.mlp.experts."
        fc1 = torch.stack([model.pop(f"{p}linear_fc1.weight{e}").t().contiguous() for e in range(4)])
        fc2 = torch.stack([model.pop(f"{p}linear_fc2.weight{e}").t().contiguous() for e in range(4)])
        model[p + "weight1"], model[p + "weight2"] = fc1.reshape(64, -1), fc2.reshape(-1, 64)
        assert torch.equal(
            model[p + "weight1"].view(4, 64, 48)[2].t(),
            torch.from_numpy(np.concatenate([source[f"model.layers.{layer}.mlp.experts.2.{x}_proj.weight"] for x in ("gate", "up")])),
        )
    torch.save(state, path)
    for spec in ("te", "local"):
        convert(tmp_path / spec, tmp_path / f"{spec}-back", "--to", "hf")
        assert same(read_hf(tmp_path / f"{spec}-back"), source)


@pytest.mark.case("E8")
def test_the_bias_of_the_router_stays_float32(tmp_path):
    """Megatron adds DeepSeek's correction to float32 scores; cast to bfloat16, other experts win."""
    tiny.write("deepseek_v3", tmp_path / "hf")
    done = convert(tmp_path / "hf", tmp_path / "run", "--to", "torch_dist", "--dtype", "bfloat16", "--verify")
    assert "stays float32" in done.stderr
    stored = {t["name"]: t["dtype"] for t in json.loads(ckpt("inspect", tmp_path / "run", "--json", "--tensors").stdout)["tensors"]}
    biases = {n: d for n, d in stored.items() if n.endswith("expert_bias")}
    assert biases and set(biases.values()) == {"float32"} and {d for n, d in stored.items() if n not in biases} == {"bfloat16"}
    convert(tmp_path / "run", tmp_path / "back", "--to", "hf", "--dtype", "float16", "--verify")
    source, back = read_hf(tmp_path / "hf"), read_hf(tmp_path / "back")
    for name in (n for n in source if n.endswith("e_score_correction_bias")):
        assert back[name].dtype == np.float32 and np.array_equal(back[name], source[name])


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "qwen2_moe", "deepseek_v3"])
def test_experts_are_fused_on_request_and_transformers_reads_the_same_model(tmp_path, name):
    model = tiny.write(name, tmp_path / "hub")
    convert(tmp_path / "hub", tmp_path / "run", "--to", "torch_dist")
    for number, source in enumerate(("run", "hub")):
        convert(tmp_path / source, tmp_path / f"fused{number}", "--to", "hf", "--moe-layout", "fused", "--verify")
        convert(tmp_path / f"fused{number}", tmp_path / f"hub{number}", "--to", "hf", "--moe-layout", "per-expert", "--verify")
        assert same(read_hf(tmp_path / f"hub{number}"), read_hf(tmp_path / "hub"))
    fused = read_hf(tmp_path / "fused0")
    assert same(fused, read_hf(tmp_path / "fused1")) and len(fused) < len(read_hf(tmp_path / "hub"))
    held = dict(model.state_dict())
    for key in (k for k in fused if k.endswith(("gate_up_proj", "down_proj"))):
        assert np.array_equal(fused[key], held[key].numpy()), key
    ids = torch.tensor([[3, 17, 101, 250, 508, 1]])
    with torch.no_grad():
        assert torch.equal(tiny.load(tmp_path / "fused0", name)(ids).logits, model(ids).logits)


def test_a_family_without_experts_has_nothing_to_fuse(tmp_path):
    tiny.write("llama", tmp_path / "hf")
    done = ckpt("convert", tmp_path / "hf", tmp_path / "out", "--to", "hf", "--moe-layout", "fused")
    assert done.returncode == 2 and "E410" in done.stderr and not (tmp_path / "out").exists()
