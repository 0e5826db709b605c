"""ckpt merge against PEFT's merge_and_unload and transformers' logits.

PEFT adds in the dtype of the loaded model and rounds the product first when the factors are half precision; ckpt adds in float32 and
rounds once. So PEFT works in float32 here and its result is rounded once to the base's dtype. Factors are small multiples of powers of
two where bytes are compared: every product and partial sum is then exact in float32, in whatever order it is computed.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
from builders import ckpt, same

from ckpt_tools import CkptError, open_checkpoint
from ckpt_tools.adapters.merge_plan import open_both, plan_merge
from ckpt_tools.options import ConvertOptions

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft", reason="PEFT is the judge of merged adapters")
pytestmark = pytest.mark.oracle
ATTENTION, MLP = ["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"]
IDS = torch.arange(3, 19)[None]
ADAPTERS = {
    "attention and mlp": {"r": 4, "lora_alpha": 8, "target_modules": ATTENTION + MLP},
    "rslora": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "use_rslora": True},
    "patterns": {
        "r": 2,
        "lora_alpha": 4,
        "target_modules": ["q_proj", "down_proj"],
        "rank_pattern": {"q_proj": 4, "model.layers.1.mlp.down_proj": 8},
        "alpha_pattern": {r"layers\.0\.self_attn\.q_proj": 16},
    },
    "embedding, head and norms": {
        "r": 2,
        "lora_alpha": 1,
        "target_modules": ["embed_tokens", "lm_head"],
        "modules_to_save": ["norm", "input_layernorm"],
    },
    "saved tables": {"r": 2, "lora_alpha": 2, "target_modules": ["o_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
}


def dyadic(tensor, seed, step=1 / 64):
    """Small multiples of a power of two in place of the tensor's values."""
    made = torch.randint(-8, 9, tensor.shape, generator=torch.Generator().manual_seed(seed))
    tensor.data.copy_((made * step).to(tensor.dtype))


def base_model(folder, dtype="bfloat16", **changes):
    config = transformers.LlamaConfig(
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=90,
        **{"num_hidden_layers": 2, "intermediate_size": 48, "tie_word_embeddings": False, **changes},
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(folder)
    return folder


def trained(base, folder, exact=True, dtype=torch.float32, **config):
    """An adapter that PEFT made and saved, with other values than those it starts from; returns PEFT's model, in float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = peft.get_peft_model(model, peft.LoraConfig(**config))
    for seed, (name, parameter) in enumerate(model.named_parameters()):
        if "lora_" in name or "modules_to_save" in name:
            if exact:
                dyadic(parameter, seed)
            else:
                parameter.data.normal_(std=0.05, generator=torch.Generator().manual_seed(seed))
    model.save_pretrained(folder)
    return model


def as_bytes(model, dtype=torch.bfloat16):
    return {n: t.to(dtype).contiguous().view(torch.int16).numpy().view(np.uint16) for n, t in model.state_dict().items()}


def merge(base, adapter, target, *options):
    done = ckpt("merge", base, adapter, target, *options)
    assert done.returncode == 0, done.stderr
    return transformers.AutoModelForCausalLM.from_pretrained(target)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return base_model(tmp_path_factory.mktemp("base") / "model")


@pytest.mark.case("M3")
@pytest.mark.parametrize("name", ADAPTERS)
def test_merged_weights_are_those_of_peft_rounded_once(base, tmp_path, name):
    judge = trained(base, tmp_path / "adapter", **ADAPTERS[name])
    merged = merge(base, tmp_path / "adapter", tmp_path / "out")
    expected = judge.merge_and_unload()
    assert same(as_bytes(merged), as_bytes(expected))
    assert not same(as_bytes(merged), as_bytes(transformers.AutoModelForCausalLM.from_pretrained(base)))
    expected.load_state_dict({n: t.to(torch.bfloat16).float() for n, t in expected.state_dict().items()})
    with torch.no_grad():
        assert torch.equal(
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)(IDS).logits, expected(IDS).logits
        )


@pytest.mark.case("M5")
def test_a_float32_base_gets_what_peft_computes(tmp_path):
    """Random factors: the two sums of four products are added in another order, so a result may differ by the last bits of float32
    numbers of magnitude below one."""
    base = base_model(tmp_path / "base", "float32")
    judge = trained(base, tmp_path / "adapter", exact=False, **ADAPTERS["attention and mlp"])
    with torch.no_grad():
        unmerged = judge(IDS).logits
    merged = merge(base, tmp_path / "adapter", tmp_path / "out")
    expected = judge.merge_and_unload().state_dict()
    for tensor_name, tensor in merged.state_dict().items():
        assert torch.allclose(tensor, expected[tensor_name], rtol=0, atol=2**-24), tensor_name
    with torch.no_grad():
        assert torch.allclose(merged(IDS).logits, unmerged, rtol=1e-4, atol=1e-5)  # the sums inside the model are ordered otherwise


def test_conv1d_weights_are_stored_the_other_way_round(tmp_path):
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=40, n_positions=32)
    transformers.GPT2LMHeadModel(config).to(torch.bfloat16).save_pretrained(tmp_path / "base")
    judge = trained(tmp_path / "base", tmp_path / "adapter", r=2, lora_alpha=4, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True)
    assert same(as_bytes(merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")), as_bytes(judge.merge_and_unload()))


def test_a_megatron_base_gives_the_same_merged_model(base, tmp_path):
    trained(base, tmp_path / "adapter", **ADAPTERS["attention and mlp"])
    assert ckpt("convert", base, tmp_path / "run", "--to", "torch_dist", "--tp", "2").returncode == 0
    from_run, from_hf = (merge(b, tmp_path / "adapter", tmp_path / t) for b, t in ((tmp_path / "run", "a"), (base, "b")))
    assert same(as_bytes(from_run), as_bytes(from_hf))
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()


def test_blocks_of_a_few_rows_give_the_same_bytes(base, tmp_path, monkeypatch):
    from ckpt_tools.adapters import merge as merging

    trained(base, tmp_path / "adapter", **ADAPTERS["embedding, head and norms"])
    for block, target in ((2**20, "whole"), (70, "rows")):
        monkeypatch.setattr(merging, "BLOCK", block)
        merging.merge(plan_merge(*open_both(base, tmp_path / "adapter"), options=ConvertOptions(to="hf")), str(tmp_path / target))
    assert (tmp_path / "whole" / "model.safetensors").read_bytes() == (tmp_path / "rows" / "model.safetensors").read_bytes()


@pytest.mark.case("M5")
def test_the_same_adapter_is_not_merged_twice(base, tmp_path):
    judge = trained(base, tmp_path / "adapter", **ADAPTERS["rslora"])
    merge(base, tmp_path / "adapter", tmp_path / "once")
    (entry,) = json.loads((tmp_path / "once" / "merged_adapters.json").read_text())["adapters"]
    assert (entry["name"], entry["r"], entry["lora_alpha"]) == ("adapter", 4, 8)
    said = ckpt("merge", tmp_path / "once", tmp_path / "adapter", tmp_path / "twice")
    assert said.returncode == 2 and "E547" in said.stderr and not (tmp_path / "twice").exists()
    # the record travels through Megatron's format, and another adapter may follow
    assert ckpt("convert", tmp_path / "once", tmp_path / "run", "--to", "torch_dist").returncode == 0
    assert "E547" in ckpt("merge", tmp_path / "run", tmp_path / "adapter", tmp_path / "twice").stderr
    del judge
    trained(tmp_path / "once", tmp_path / "second", **ADAPTERS["patterns"])
    merge(tmp_path / "once", tmp_path / "second", tmp_path / "both")
    assert len(json.loads((tmp_path / "both" / "merged_adapters.json").read_text())["adapters"]) == 2
    merge(tmp_path / "once", tmp_path / "adapter", tmp_path / "twice", "--again")


def test_tied_embeddings_come_apart_only_when_asked(tmp_path):
    base = base_model(tmp_path / "base", "float32", tie_word_embeddings=True)
    judge = trained(base, tmp_path / "adapter", r=2, lora_alpha=2, target_modules=["embed_tokens", "q_proj"])
    said = ckpt("merge", base, tmp_path / "adapter", tmp_path / "out")
    assert said.returncode == 2 and "E546" in said.stderr
    merged = merge(base, tmp_path / "adapter", tmp_path / "out", "--untie")
    assert merged.config.tie_word_embeddings is False
    with torch.no_grad():  # PEFT's own merge would change both tables; the adapter as it was trained changes one
        assert torch.allclose(merged(IDS).logits, judge(IDS).logits, rtol=1e-4, atol=1e-5)  # another order of sums
    trained(base, tmp_path / "other", r=2, lora_alpha=2, target_modules=["q_proj"])
    merged = merge(base, tmp_path / "other", tmp_path / "tied")
    assert merged.config.tie_word_embeddings is True and "lm_head.weight" not in open_checkpoint(tmp_path / "tied")


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"use_dora": True}, "E543"),
        ({"init_lora_weights": "pissa"}, "E543"),
        ({"peft_type": "LOHA"}, "E543"),
        ({"target_parameters": ["mlp.experts.down_proj"]}, "E543"),
        ({"trainable_token_indices": [1]}, "E543"),
        ({"r": 6}, "E544"),
        ({"lora_alpha": None}, "E544"),
        ({"rank_pattern": {"(": 3}}, "E544"),
    ],
    ids=str,
)
@pytest.mark.case("M5")
def test_what_is_no_plain_lora_or_contradicts_itself_is_refused(base, tmp_path, changes, code):
    trained(base, tmp_path / "adapter", **ADAPTERS["rslora"])
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(CkptError) as caught:
        plan_merge(*open_both(base, tmp_path / "adapter"), options=ConvertOptions(to="hf"))
    assert caught.value.code == code


def test_an_adapter_of_another_model_is_refused_whole(base, tmp_path):
    other = base_model(tmp_path / "other", num_hidden_layers=3)
    trained(other, tmp_path / "adapter", **ADAPTERS["rslora"])
    wider = base_model(tmp_path / "wider", intermediate_size=64)
    trained(wider, tmp_path / "wide", **ADAPTERS["attention and mlp"])
    for adapter, code in (("adapter", "E545"), ("wide", "E544")):
        said = ckpt("merge", base, tmp_path / adapter, tmp_path / "out")
        assert said.returncode == 2 and code in said.stderr and not (tmp_path / "out").exists()


def test_factors_that_are_not_numbers_are_refused(base, tmp_path):
    from safetensors.torch import load_file, save_file

    trained(base, tmp_path / "adapter", **ADAPTERS["rslora"])
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(path)
    next(iter(tensors.values()))[0, 0] = float("nan")
    save_file(tensors, path)
    said = ckpt("merge", base, tmp_path / "adapter", tmp_path / "out")
    assert said.returncode == 2 and "NaN" in said.stderr and list(tmp_path.glob("*out*")) == []


def test_inspect_says_what_an_adapter_changes_and_what_merge_would_refuse(base, tmp_path):
    trained(base, tmp_path / "adapter", **ADAPTERS["saved tables"])
    done = ckpt("inspect", tmp_path / "adapter", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["format"] == "peft" and found["adapter"]["targets"] == ["o_proj"] and found["adapter"]["modules"] == 2
    assert (found["adapter"]["r"], found["adapter"]["alpha"], found["adapter"]["not_plain"]) == (2, 2, None)
    assert len(found["adapter"]["saved"]) == 2
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "use_dora": True}))
    assert "DoRA" in ckpt("inspect", tmp_path / "adapter", "--format", "table").stdout


def test_an_adapter_beside_the_weights_comes_along_when_asked_and_is_named_when_not(base, tmp_path):
    """ms-swift keeps adapter and model in one checkpoint-N; an adapter_config.json alone would make transformers look for the adapter."""
    import shutil

    trained(base, tmp_path / "adapter", **ADAPTERS["rslora"])
    shutil.copytree(base, tmp_path / "both")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(tmp_path / "adapter" / name, tmp_path / "both")
    done = ckpt("convert", tmp_path / "both", tmp_path / "without", "--to", "torch_dist")
    assert done.returncode == 0 and "--adapter takes it along" in done.stderr
    assert list((tmp_path / "without").rglob("adapter*")) == []
    for source, target, form in (("both", "run", "torch_dist"), ("run", "split", "split"), ("split", "back", "hf")):
        done = ckpt("convert", tmp_path / source, tmp_path / target, "--to", form, "--adapter", "--verify")
        assert done.returncode == 0, done.stderr
        assert (tmp_path / target / "adapter_model.safetensors").read_bytes() == (
            tmp_path / "adapter" / "adapter_model.safetensors"
        ).read_bytes()
    model = peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(base), tmp_path / "back")
    assert len(model.peft_config) == 1


def test_an_adapter_of_single_experts_is_added_to_those_experts(tmp_path):
    """Experts as modules of their own: the names of older transformers, and those that ms-swift and mcore-bridge export."""
    from safetensors.numpy import load_file, save_file

    random = np.random.default_rng(0)
    base, factors = {}, {}
    for expert in range(4):
        for part, (rows, columns) in {"gate_proj": (12, 8), "up_proj": (12, 8), "down_proj": (8, 12)}.items():
            module = f"model.layers.0.mlp.experts.{expert}.{part}"
            base[f"{module}.weight"] = (random.integers(-8, 9, (rows, columns)) / 8).astype(np.float32)
            if expert in (1, 3):
                factors[f"{module}.lora_A"] = (random.integers(-8, 9, (2, columns)) / 8).astype(np.float32)
                factors[f"{module}.lora_B"] = (random.integers(-8, 9, (rows, 2)) / 8).astype(np.float32)
    (tmp_path / "base").mkdir()
    (tmp_path / "adapter").mkdir()
    save_file(base, tmp_path / "base" / "model.safetensors")
    (tmp_path / "base" / "config.json").write_text(json.dumps({"model_type": "qwen3_moe"}))
    save_file({f"base_model.model.{n}.weight": t for n, t in factors.items()}, tmp_path / "adapter" / "adapter_model.safetensors")
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 6}))
    done = ckpt("merge", tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    expected = {
        n: t + 3 * (factors[m + ".lora_B"] @ factors[m + ".lora_A"]) if (m := n.removesuffix(".weight")) + ".lora_A" in factors else t
        for n, t in base.items()
    }
    assert same(load_file(tmp_path / "out" / "model.safetensors"), expected)
