"""LoRA adapters in Megatron's modules: fused ones are taken apart for PEFT, or added to the weights as Megatron would add them.

Checkpoints are written by torch's DCP under the names that Megatron-Bridge (LoRA, CanonicalLoRA) and ms-swift give the factors. Judges:
PEFT loads and applies the exported adapter; and the products are added to Megatron's fused tensors by plain numpy.
"""

from __future__ import annotations

import argparse
import json

import numpy as np
import pytest
from builders import CONFIG, ckpt, dense_shapes, megatron_args, megatron_tensors, read_hf, same, stack, write_hf, write_torch_dist

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.oracle
LAYERS, RANK, ALPHA = CONFIG["num_hidden_layers"], 2, 4
MODULES = {  # module of a layer: rows, columns
    "self_attention.linear_qkv": (32, 8),
    "self_attention.linear_proj": (8, 16),
    "mlp.linear_fc1": (32, 8),
    "mlp.linear_fc2": (8, 16),
}
NAMES = {
    "bridge": ("adapter.linear_in.weight", "adapter.linear_out.weight"),
    "swift": ("lora_A.default.weight", "lora_B.default.weight"),
}


def small(shape, seed):
    """Multiples of 1/8, so that products and sums are exact in float32 whatever their order."""
    return (np.random.default_rng(seed).integers(-8, 9, shape) / 8).astype(np.float32)


def factors(modules=MODULES, rank=RANK):
    """(layer, module) -> A, B."""
    return {
        (layer, module): (small((rank, columns), 10 * layer + i), small((rows, rank), 500 + 10 * layer + i))
        for layer in range(LAYERS)
        for i, (module, (rows, columns)) in enumerate(modules.items())
    }


def named(pairs, naming):
    tensors = {}
    for (layer, module), pair in pairs.items():
        for end, factor in zip(NAMES[naming], pair, strict=True):
            tensors[f"decoder.layers.{layer}.{module}.{end}"] = factor
    return tensors


def arguments(**changes):
    return argparse.Namespace(**{**vars(megatron_args(CONFIG)), "lora_rank": RANK, "lora_alpha": ALPHA, **changes})


@pytest.fixture
def base(tmp_path):
    write_hf(tmp_path / "base", tensors={n: small(s, 1000 + i) for i, (n, s) in enumerate(dense_shapes(CONFIG).items())})
    return tmp_path / "base"


def done(*args):
    finished = ckpt(*args)
    assert finished.returncode == 0, finished.stderr
    return finished


def added_by_megatron(base, pairs):
    """Megatron's fused weights with scale * B A added, by numpy."""
    tensors = megatron_tensors(read_hf(base), CONFIG)
    for (layer, module), (a, b) in pairs.items():
        tensors[f"decoder.layers.{layer}.{module}.weight"] = tensors[f"decoder.layers.{layer}.{module}.weight"] + ALPHA / RANK * (b @ a)
    return tensors


@pytest.mark.case("M1")
@pytest.mark.parametrize("naming", NAMES)
@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "per layer"])
def test_an_adapter_of_fused_modules_becomes_one_that_peft_applies(base, tmp_path, naming, stacked):
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    pairs = factors()
    tensors = named(pairs, naming)
    write_torch_dist(tmp_path / "run", stack(tensors, LAYERS) if stacked else tensors, arguments())
    done("convert", tmp_path / "run", tmp_path / "peft", "--to", "peft", "--hf-config", base, "--verify")
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert sorted(config["target_modules"]) == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert (config["r"], config["lora_alpha"]) == (RANK, ALPHA)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(model, tmp_path / "peft").merge_and_unload()
    merged = {n: t.numpy() for n, t in model.state_dict().items()}
    assert same(megatron_tensors(merged, CONFIG), added_by_megatron(base, pairs))


@pytest.mark.case("M1")
def test_factors_of_fused_rows_go_to_query_key_and_value_in_megatron_order(base, tmp_path):
    from safetensors.numpy import load_file

    pairs = factors()
    write_torch_dist(tmp_path / "run", stack(named(pairs, "bridge"), LAYERS), arguments())
    done("convert", tmp_path / "run", tmp_path / "peft", "--to", "peft", "--hf-config", base)
    found = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    a, b = pairs[1, "self_attention.linear_qkv"]
    groups = np.split(b, 2)  # per query group: two query heads, a key head, a value head of four rows each
    expected = {"q": [g[:8] for g in groups], "k": [g[8:12] for g in groups], "v": [g[12:] for g in groups]}
    for part, rows in expected.items():
        name = f"base_model.model.model.layers.1.self_attn.{part}_proj"
        assert np.array_equal(found[f"{name}.lora_A.weight"], a)
        assert np.array_equal(found[f"{name}.lora_B.weight"], np.concatenate(rows))


@pytest.mark.case("M3")
@pytest.mark.parametrize("naming", NAMES)
def test_merge_takes_an_adapter_of_megatron_as_it_is(base, tmp_path, naming):
    pairs = factors()
    write_torch_dist(tmp_path / "run", stack(named(pairs, naming), LAYERS), arguments())
    done("merge", base, tmp_path / "run", tmp_path / "merged")
    assert same(megatron_tensors(read_hf(tmp_path / "merged"), CONFIG), added_by_megatron(base, pairs))
    done("convert", base, tmp_path / "model", "--to", "torch_dist")
    done("merge", tmp_path / "model", tmp_path / "run", tmp_path / "again")
    assert same(read_hf(tmp_path / "again"), read_hf(tmp_path / "merged"))


def test_adapters_that_keep_query_key_value_gate_and_up_apart(base, tmp_path):
    """CanonicalLoRA: a module may be missing, and each has factors of its own, its rows already in HF order."""
    from safetensors.numpy import load_file

    rows = {"self_attention.linear_qkv.adapter.adapter_q": 16, "self_attention.linear_qkv.adapter.adapter_v": 8}
    rows |= {"mlp.linear_fc1.adapter.adapter_gate": 16, "mlp.linear_fc1.adapter.adapter_up": 16}
    names = ["self_attn.q_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"]
    tensors = {}
    for layer in range(LAYERS):
        for i, (module, size) in enumerate(rows.items()):
            tensors[f"decoder.layers.{layer}.{module}.linear_in.weight"] = small((RANK, 8), 10 * layer + i)
            tensors[f"decoder.layers.{layer}.{module}.linear_out.weight"] = small((size, RANK), 700 + 10 * layer + i)
    folder = write_torch_dist(tmp_path / "run", stack(tensors, LAYERS), megatron_args(CONFIG))
    (folder / "run_config.yaml").write_text(
        "model:\n  alpha: 7\npeft:\n  _target_: megatron.bridge.peft.canonical_lora.CanonicalLoRA\n  alpha: 6\n"
    )
    done("convert", tmp_path / "run", tmp_path / "peft", "--to", "peft", "--hf-config", base)
    found = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    assert len(found) == 2 * LAYERS * len(rows)
    for module, name in zip(rows, names, strict=True):
        for end, which in (("in", "A"), ("out", "B")):
            expected = tensors[f"decoder.layers.2.{module}.linear_{end}.weight"]
            assert np.array_equal(found[f"base_model.model.model.layers.2.{name}.lora_{which}.weight"], expected)
    assert json.loads((tmp_path / "peft" / "adapter_config.json").read_text())["lora_alpha"] == 6


def test_only_the_modules_that_have_factors_are_targets(base, tmp_path):
    pairs = {k: v for k, v in factors().items() if k in ((0, "self_attention.linear_proj"), (3, "mlp.linear_fc2"))}
    write_torch_dist(tmp_path / "run", named(pairs, "bridge"), arguments())
    done("convert", tmp_path / "run", tmp_path / "peft", "--to", "peft", "--hf-config", base)
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert config["target_modules"] == ["model.layers.0.self_attn.o_proj", "model.layers.3.mlp.down_proj"]


@pytest.mark.case("M5")
def test_what_the_scale_is_must_be_known(base, tmp_path):
    write_torch_dist(tmp_path / "run", named(factors(), "bridge"), megatron_args(CONFIG))
    said = ckpt("merge", base, tmp_path / "run", tmp_path / "out")
    assert said.returncode == 2 and "E544" in said.stderr and "--lora-alpha" in said.stderr
    done("merge", base, tmp_path / "run", tmp_path / "out", "--lora-alpha", ALPHA)
    assert same(megatron_tensors(read_hf(tmp_path / "out"), CONFIG), added_by_megatron(base, factors()))


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda t: t.pop("decoder.layers.1.mlp.linear_fc2.adapter.linear_out.weight"), "E544"),
        (lambda t: t.update({"decoder.layers.1.mlp.linear_fc2.adapter.linear_in.weight": small((RANK, 8), 1)}), "E544"),
        (lambda t: t.update({"decoder.layers.1.mlp.linear_fc2.weight": small((8, 16), 1)}), "E543"),
        (lambda t: t.update({f"decoder.layers.1.mlp.odd.{e}": small((2, 2), 1) for e in NAMES["bridge"]}), "E545"),
        (lambda t: t.update({f"decoder.layers.1.mlp.experts.linear_fc1.{e}": small((2, 2), 1) for e in NAMES["bridge"]}), "E543"),
    ],
    ids=["half", "width", "weights beside", "unknown module", "experts"],
)
def test_what_does_not_fit_is_refused(base, tmp_path, change, code):
    tensors = named(factors(), "bridge")
    change(tensors)
    write_torch_dist(tmp_path / "run", tensors, arguments())
    said = ckpt("convert", tmp_path / "run", tmp_path / "out", "--to", "peft", "--hf-config", base)
    assert said.returncode == 2 and code in said.stderr and not (tmp_path / "out").exists(), said.stderr


def test_a_checkpoint_without_adapter_is_not_exported_as_one(base, tmp_path):
    done("convert", base, tmp_path / "run", "--to", "torch_dist")
    assert "E543" in ckpt("convert", tmp_path / "run", tmp_path / "out", "--to", "peft").stderr


# ---- from PEFT to Megatron -----------------------------------------------------------------------------------------------------------


def peft_adapter(base, folder, **config):
    """An adapter that PEFT saved, with values of its own."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = peft.get_peft_model(model, peft.LoraConfig(r=RANK, lora_alpha=ALPHA, **config))
    for seed, (name, parameter) in enumerate(model.named_parameters()):
        if "lora_" in name:
            parameter.data.copy_(torch.from_numpy(small(tuple(parameter.shape), seed)))
    model.save_pretrained(folder)
    return model


@pytest.mark.case("M1")
def test_an_adapter_of_peft_goes_to_megatron_and_back(base, tmp_path):
    """PEFT trains a first factor per module, so fused modules keep their parts: nothing is approximated."""
    from safetensors.numpy import load_file

    peft_adapter(base, tmp_path / "adapter", target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"])
    said = done("convert", tmp_path / "adapter", tmp_path / "run", "--to", "torch_dist", "--hf-config", base, "--verify")
    assert "CanonicalLoRA" in said.stderr and "verified" in said.stdout
    done("convert", tmp_path / "run", tmp_path / "back", "--to", "peft")  # the base's config travels along
    old, new = (load_file(tmp_path / f / "adapter_model.safetensors") for f in ("adapter", "back"))
    assert same(old, new)
    old, new = (json.loads((tmp_path / f / "adapter_config.json").read_text()) for f in ("adapter", "back"))
    assert all(old[k] == new[k] for k in ("r", "lora_alpha", "peft_type", "use_rslora")) and set(old["target_modules"]) == set(
        new["target_modules"]
    )


@pytest.mark.case("M1")
def test_an_adapter_trained_in_megatron_comes_back_fused_and_megatron_loads_it(base, tmp_path):
    pytest.importorskip("megatron.core")
    from builders import read_torch_dist
    from oracle import launch

    pairs = stack(named(factors(), "bridge"), LAYERS)
    write_torch_dist(tmp_path / "run", pairs, arguments())
    done("convert", tmp_path / "run", tmp_path / "peft", "--to", "peft", "--hf-config", base)
    done("convert", tmp_path / "peft", tmp_path / "back", "--to", "torch_dist", "--hf-config", base, "--as-iteration", "5", "--verify")
    assert same(read_torch_dist(tmp_path / "back" / "iter_0000005"), pairs)
    job = {"checkpoint": str(tmp_path / "back" / "iter_0000005"), "output": str(tmp_path / "got")}
    assert launch.run("load_state_in_mcore", [job], tmp_path) == [None]
    got = torch.load(tmp_path / "got" / "state.pt", weights_only=False)
    assert same({n: t.numpy() for n, t in got["tensors"].items()}, pairs)
    assert (got["common"]["args"].lora_rank, got["common"]["args"].lora_alpha) == (RANK, ALPHA)


def test_adapters_of_some_layers_keep_a_key_per_layer(base, tmp_path):
    from safetensors.numpy import load_file

    peft_adapter(base, tmp_path / "adapter", target_modules=["o_proj", "down_proj"], layers_to_transform=[1, 3])
    done("convert", tmp_path / "adapter", tmp_path / "run", "--to", "torch_dist", "--hf-config", base)
    done("convert", tmp_path / "run", tmp_path / "back", "--to", "peft")
    assert same(*(load_file(tmp_path / f / "adapter_model.safetensors") for f in ("adapter", "back")))


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        {"target_modules": ["q_proj", "o_proj"], "rank_pattern": {"o_proj": 4}},
        {"target_modules": ["q_proj", "lm_head"]},
        {"target_modules": ["q_proj"], "use_dora": True},
    ],
    ids=["embedding", "saved", "ranks", "head", "dora"],
)
def test_what_adapters_of_megatron_cannot_hold_is_refused(base, tmp_path, config):
    peft_adapter(base, tmp_path / "adapter", **config)
    said = ckpt("convert", tmp_path / "adapter", tmp_path / "run", "--to", "torch_dist", "--hf-config", base)
    assert said.returncode == 2 and "E543" in said.stderr and not (tmp_path / "run").exists()


EXPERTS, WIDTH, LAYERS_WITH_EXPERTS = 4, 16, 2
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": 8, "intermediate_size": WIDTH, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": EXPERTS, "num_experts_per_tok": 2, "vocab_size": 100,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": False,
    "sliding_window": None, "torch_dtype": "float32",
}  # fmt: skip


def mixtral_weights():
    shapes = {"model.embed_tokens.weight": (100, 8), "model.norm.weight": (8,), "lm_head.weight": (100, 8)}
    for layer in range(LAYERS_WITH_EXPERTS):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.self_attn.{p}_proj.weight": (r, 8) for p, r in (("q", 8), ("k", 4), ("v", 4), ("o", 8))}
        shapes |= {f"{at}.input_layernorm.weight": (8,), f"{at}.post_attention_layernorm.weight": (8,)}
        shapes[f"{at}.block_sparse_moe.gate.weight"] = (EXPERTS, 8)
        for expert in range(EXPERTS):
            where = f"{at}.block_sparse_moe.experts.{expert}"
            shapes |= {f"{where}.w1.weight": (WIDTH, 8), f"{where}.w2.weight": (8, WIDTH), f"{where}.w3.weight": (WIDTH, 8)}
    return {n: small(s, 100 + i) for i, (n, s) in enumerate(shapes.items())}


@pytest.fixture
def experts(tmp_path):
    """A base with experts, a Megatron adapter of all of them as megatron-core stores it (axes: layer, expert), and what both make together."""

    def make(naming):
        weights = mixtral_weights()
        (tmp_path / "moe").mkdir()
        write_hf(tmp_path / "moe", tensors=weights)
        (tmp_path / "moe" / "config.json").write_text(json.dumps(MIXTRAL))
        stored = {}
        for i, (module, (rows, columns)) in enumerate({"linear_fc1": (2 * WIDTH, 8), "linear_fc2": (8, WIDTH)}.items()):
            a, b = small((2, EXPERTS, RANK, columns), 900 + i), small((2, EXPERTS, rows, RANK), 950 + i)
            for end, factor in zip(NAMES[naming], (a, b), strict=True):
                stored[f"decoder.layers.mlp.experts.experts.{module}.{end}"] = factor
            for layer in range(2):
                for expert in range(EXPERTS):
                    where = f"model.layers.{layer}.block_sparse_moe.experts.{expert}"
                    delta = ALPHA / RANK * (b[layer, expert] @ a[layer, expert])
                    for part, rows_of in (("w1", delta[:WIDTH]), ("w3", delta[WIDTH:])) if module == "linear_fc1" else (("w2", delta),):
                        weights[f"{where}.{part}.weight"] = weights[f"{where}.{part}.weight"] + rows_of
        write_torch_dist(tmp_path / "run", stored, arguments())
        return tmp_path / "moe", tmp_path / "run", weights

    return make


@pytest.mark.case("M1")
@pytest.mark.parametrize("naming", NAMES)
def test_adapters_of_experts_are_added_expert_by_expert_and_go_to_peft_and_back(experts, tmp_path, naming):
    base, run, expected = experts(naming)
    done("merge", base, run, tmp_path / "merged")
    assert same(read_hf(tmp_path / "merged"), expected)
    done("convert", run, tmp_path / "peft", "--to", "peft", "--hf-config", base, "--verify")
    done("merge", base, tmp_path / "peft", tmp_path / "again")
    assert same(read_hf(tmp_path / "again"), expected)
    done("convert", tmp_path / "peft", tmp_path / "back", "--to", "torch_dist", "--hf-config", base, "--verify")
    done("merge", base, tmp_path / "back", tmp_path / "third")
    assert same(read_hf(tmp_path / "third"), expected)
    from builders import read_torch_dist

    stored = read_torch_dist(tmp_path / "back" / "release")
    assert stored["decoder.layers.mlp.experts.experts.linear_fc1.adapter.linear_out.weight"].shape == (2, EXPERTS, 2 * WIDTH, RANK)


def test_factors_of_some_experts_alone_are_refused_for_megatron(experts, tmp_path):
    from safetensors.numpy import load_file, save_file

    base, run, _ = experts("bridge")
    done("convert", run, tmp_path / "peft", "--to", "peft", "--hf-config", base)
    path = tmp_path / "peft" / "adapter_model.safetensors"
    save_file({n: t for n, t in load_file(path).items() if "experts.2." not in n}, path)
    finished = ckpt("convert", tmp_path / "peft", tmp_path / "out", "--to", "torch_dist", "--hf-config", base)
    assert finished.returncode == 2 and "only some experts" in finished.stderr and not (tmp_path / "out").exists()
