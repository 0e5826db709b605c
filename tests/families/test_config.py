"""config.json <-> Megatron arguments, judged by transformers' config classes, Megatron's own argument loader and real checkpoints
(cases C1 D3 D4 J4 K1 K3)."""

from __future__ import annotations

import ast
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_tools.errors import CkptError
from ckpt_tools.families import FAMILIES
from ckpt_tools.families.config import args_from_config, config_from_args, infer_family, padded_vocab
from ckpt_tools.families.config_computed import COMPUTED
from ckpt_tools.families.config_kinds import AnyRule, Choice, Computed, Constant, Derived, Refuse, Rule, extend
from ckpt_tools.families.config_rules import BASE_RULES, LLAMA_RULES, MISTRAL_RULES, QWEN2_RULES, QWEN3_RULES
from ckpt_tools.families.config_scalars import KINDS
from ckpt_tools.families.megatron_args import checkpoint_args, effective_args

ROOT = Path(__file__).parents[2]
RULES: dict[str, tuple[AnyRule, ...]] = {"llama": LLAMA_RULES, "mistral": MISTRAL_RULES, "qwen2": QWEN2_RULES, "qwen3": QWEN3_RULES}
CLASSES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}

LLAMA3_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
# As the files on the hub say it (transformers 4 spelling), some fields left out as those files do.
HUB: dict[str, dict[str, Any]] = {
    "llama-2": {
        "architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096,
        "initializer_range": 0.02, "intermediate_size": 11008, "max_position_embeddings": 4096, "model_type": "llama", "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 32, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": None,
        "tie_word_embeddings": False, "torch_dtype": "float16", "transformers_version": "4.31.0.dev0", "use_cache": True, "vocab_size": 32000,
    },
    "llama-3.1": {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
        "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": LLAMA3_SCALING, "rope_theta": 500000.0,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.42.3", "use_cache": True, "vocab_size": 128256,
    },
    "llama-3.2": {
        "architectures": ["LlamaForCausalLM"], "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
        "intermediate_size": 8192, "max_position_embeddings": 131072, "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 16,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_scaling": {**LLAMA3_SCALING, "factor": 32.0}, "rope_theta": 500000.0,
        "tie_word_embeddings": True, "torch_dtype": "bfloat16", "vocab_size": 128256,
    },
    "mistral-7b": {
        "architectures": ["MistralForCausalLM"], "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
        "max_position_embeddings": 32768, "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "vocab_size": 32000,
    },
    "mistral-nemo": {
        "architectures": ["MistralForCausalLM"], "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120, "initializer_range": 0.02,
        "intermediate_size": 14336, "max_position_embeddings": 131072, "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 40,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "sliding_window": None, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "vocab_size": 131072,
    },
    "qwen2.5": {
        "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02,
        "intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 21, "model_type": "qwen2", "num_attention_heads": 14,
        "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768,
        "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_sliding_window": False, "vocab_size": 151936,
    },
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 1024, "initializer_range": 0.02, "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28,
        "model_type": "qwen3", "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
        "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "use_sliding_window": False, "vocab_size": 151936,
    },
}  # fmt: skip
# Further forms, as changes to one of the above.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2 with windows on the upper layers": ("qwen2.5", {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 10}),
    "qwen2 with windows everywhere": ("qwen2.5", {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 0}),
    "qwen3 with an own layer pattern": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 14},
    ),
    "qwen2 with yarn": ("qwen2.5", {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}),
    "llama with yarn and its own numbers": (
        "llama-2",
        {
            "rope_scaling": {
                "rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 2048, "mscale": 0.7, "mscale_all_dim": 0.5,
                "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False,
            },
        },
    ),
    "llama with linear scaling": ("llama-2", {"rope_scaling": {"type": "linear", "factor": 2.5}, "rope_theta": 10000.0}),
    "llama with biases everywhere": ("llama-3.1", {"attention_bias": True, "mlp_bias": True}),
    "llama without kv heads, as the first ones": ("llama-2", {"num_key_value_heads": None}),
    "llama with a fractional rope base": ("llama-2", {"rope_theta": 26214.5}),
}  # fmt: skip
CONFIGS = HUB | {
    name: {k: v for k, v in {**HUB[of], **change}.items() if v is not None or k in HUB[of]} for name, (of, change) in VARIANTS.items()
}


def rules_of(config: dict[str, Any]) -> tuple[AnyRule, ...]:
    return RULES[config["model_type"]]


def hf_class(config: dict[str, Any]) -> Any:
    import transformers

    return getattr(transformers, CLASSES[config["model_type"]] + "Config")


def write(args: dict[str, Any], family: str, **options: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    return config_from_args(args, RULES[family], architectures=[CLASSES[family] + "ForCausalLM"], model_type=family, **options)


def meaning(config: dict[str, Any]) -> dict[str, Any]:
    """What transformers understands, less what has no place in a Megatron checkpoint."""
    from copy import deepcopy

    values = hf_class(config).from_dict(deepcopy(config)).to_dict()
    for name in (
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "transformers_version",
        "pretraining_tp",
        "_name_or_path",
        "max_window_layers",
    ):
        values.pop(name, None)
    rope = values["rope_parameters"]
    rope.pop("type", None)  # an older name that transformers keeps beside rope_type
    for name, default in {"beta_fast": 32, "beta_slow": 1}.items():
        if rope["rope_type"] == "yarn":
            rope.setdefault(name, default)
    if values["model_type"] == "qwen2":  # no head_dim of its own; the model computes the same number
        values.setdefault("head_dim", values["hidden_size"] // values["num_attention_heads"])
    return values


def v5(config: dict[str, Any]) -> dict[str, Any]:
    """The file that transformers 5 writes for this model."""
    from copy import deepcopy

    return json.loads(hf_class(config).from_dict(deepcopy(config)).to_json_string())


# ---- both directions, judged by transformers ------------------------------------------------------------------------------------------


@pytest.mark.oracle
@pytest.mark.parametrize("spelling", ["v4", "v5"])
@pytest.mark.parametrize("name", CONFIGS)
def test_config_to_args_to_config_means_the_same_to_transformers(name: str, spelling: str) -> None:
    args, _ = args_from_config(CONFIGS[name], rules_of(CONFIGS[name]))
    written, _ = write(args, CONFIGS[name]["model_type"], spelling=spelling)
    assert ("torch_dtype" in written, "rope_scaling" in written) == ((True, True) if spelling == "v4" else (False, False))
    assert meaning(written) == meaning(CONFIGS[name])


@pytest.mark.oracle
@pytest.mark.parametrize("name", CONFIGS)
def test_both_spellings_give_the_same_arguments(name: str) -> None:
    rules = rules_of(CONFIGS[name])
    assert args_from_config(v5(CONFIGS[name]), rules)[0] == args_from_config(CONFIGS[name], rules)[0]


@pytest.mark.oracle
@pytest.mark.parametrize("name", CONFIGS)
def test_a_template_comes_back_byte_for_byte_in_either_spelling(name: str) -> None:
    family = CONFIGS[name]["model_type"]
    args, _ = args_from_config(CONFIGS[name], RULES[family])
    for template in (CONFIGS[name], v5(CONFIGS[name]), {"auto_map": {"AutoModel": "x.Y"}, **CONFIGS[name], "zebra": [1, {"b": None}]}):
        written, notes = write(args, family, template=template)
        assert json.dumps(written, indent=2) == json.dumps(template, indent=2)
        assert not [n for n in notes if "changed" in n]


OPTIONAL = ["num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "rope_scaling", "tie_word_embeddings", "torch_dtype", "hidden_act",
            "initializer_range", "attention_dropout", "sliding_window", "use_sliding_window", "max_window_layers", "attention_bias", "mlp_bias",
            "max_position_embeddings"]  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(name=st.sampled_from(list(CONFIGS)), absent=st.sets(st.sampled_from(OPTIONAL)), nulls=st.sets(st.sampled_from(OPTIONAL)))
def test_a_template_comes_back_whatever_it_leaves_out(name: str, absent: set[str], nulls: set[str]) -> None:
    template = {k: (None if k in nulls else v) for k, v in CONFIGS[name].items() if k not in absent}
    try:
        args, _ = args_from_config(template, rules_of(template), allow_unrepresentable=True)
    except CkptError as error:  # a window that some layers use and the config lacks, and the like: malformed, said so
        assert error.code == "E311"
        return
    written, _ = write(args, template["model_type"], template=template)
    assert json.dumps(written) == json.dumps(template)


@settings(max_examples=100, deadline=None)
@given(
    family=st.sampled_from(list(RULES)), groups=st.integers(1, 9), per_group=st.integers(1, 9), head_dim=st.integers(1, 300), ffn=st.integers(1, 5000),
    layers=st.integers(1, 99), vocab=st.integers(1, 300000), tied=st.booleans(), theta=st.sampled_from([10000, 500000.0, 123456.5]),
    spelling=st.sampled_from(["v4", "v5"]), eps=st.sampled_from([1e-5, 1e-6, 3e-7]),
)  # fmt: skip
def test_any_sizes_survive_the_way_through_config_json(
    family: str,
    groups: int,
    per_group: int,
    head_dim: int,
    ffn: int,
    layers: int,
    vocab: int,
    tied: bool,
    theta: float,
    spelling: str,
    eps: float,
) -> None:
    heads = groups * per_group
    config = {
        "model_type": family, "num_hidden_layers": layers, "hidden_size": heads * 8, "intermediate_size": ffn, "num_attention_heads": heads,
        "num_key_value_heads": groups, "head_dim": head_dim, "vocab_size": vocab, "tie_word_embeddings": tied, "rope_theta": theta,
        "rms_norm_eps": eps, "max_position_embeddings": 77, "sliding_window": None, "torch_dtype": "float32", "hidden_act": "silu",
    }  # fmt: skip
    args, notes = args_from_config(config, RULES[family])
    assert not notes
    assert (args["kv_channels"], args["num_query_groups"], args["untie_embeddings_and_output_weights"]) == (head_dim, groups, not tied)
    written, _ = write(args, family, spelling=spelling)
    assert args_from_config(written, RULES[family])[0] == args


# ---- single fields --------------------------------------------------------------------------------------------------------------------


def test_d3_head_dim_is_what_the_config_declares_and_the_quotient_only_when_it_declares_none() -> None:
    config = {**HUB["llama-2"], "hidden_size": 8, "num_attention_heads": 4, "num_key_value_heads": 2}
    assert args_from_config({**config, "head_dim": 4}, LLAMA_RULES)[0]["kv_channels"] == 4
    args, notes = args_from_config(config, LLAMA_RULES)
    assert args["kv_channels"] == 2
    assert any("no head_dim: 2 taken" in n for n in notes)


def test_d4_qwen2_has_qkv_biases_though_its_config_never_says_so_and_llama_has_none() -> None:
    qwen, _ = args_from_config(HUB["qwen2.5"], QWEN2_RULES)
    llama, _ = args_from_config(HUB["llama-2"], LLAMA_RULES)
    assert (qwen["add_qkv_bias"], qwen["add_bias_linear"]) == (True, False)
    assert (llama["add_qkv_bias"], llama["add_bias_linear"]) == (False, False)
    assert "attention_bias" not in write(qwen, "qwen2")[0]


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 500000, "rope_scaling": LLAMA3_SCALING},
        {"rope_theta": 500000.0, "rope_scaling": {**{k: v for k, v in LLAMA3_SCALING.items() if k != "rope_type"}, "type": "llama3"}},
        {"rope_parameters": {**LLAMA3_SCALING, "rope_theta": 500000.0}},
        {"rope_theta": 500000.0, "rope_parameters": LLAMA3_SCALING},
        {"rope_theta": 1.0, "rope_parameters": {**LLAMA3_SCALING, "rope_theta": 500000.0}},
    ],
)
def test_k1_rope_is_found_in_every_place_where_it_can_stand(rope: dict[str, Any]) -> None:
    config = {k: v for k, v in HUB["llama-3.1"].items() if not k.startswith("rope")} | rope
    args, notes = args_from_config(config, LLAMA_RULES)
    assert (args["rotary_base"], args["use_rope_scaling"], args["rope_scaling_factor"]) == (500000, True, 8.0)
    assert type(args["rotary_base"]) is int  # Megatron's --rotary-base is an int option
    assert not [n for n in notes if "rope_theta" in n]


def test_k1_no_rope_field_at_all_is_a_stated_default() -> None:
    args, notes = args_from_config({k: v for k, v in HUB["llama-3.1"].items() if not k.startswith("rope")}, LLAMA_RULES)
    assert args["rotary_base"] == 10000
    assert any("no rope_theta: 10000.0 taken" in n for n in notes)


@pytest.mark.parametrize(
    ("given_", "expected"),
    [({"torch_dtype": "bfloat16"}, "bfloat16"), ({"dtype": "float16"}, "float16"), ({"dtype": "torch.float32"}, "float32"), ({}, None)],
)
def test_k3_dtype_is_read_in_both_spellings_and_left_to_the_tensors_when_there_is_none(
    given_: dict[str, str], expected: str | None
) -> None:
    args, _ = args_from_config({k: v for k, v in HUB["llama-2"].items() if k != "torch_dtype"} | given_, LLAMA_RULES)
    assert args.get("params_dtype") == expected
    assert (args.get("bf16"), args.get("fp16")) == ((expected == "bfloat16", expected == "float16") if expected else (None, None))


def test_k3_two_dtypes_that_disagree_are_said_and_both_become_what_the_tensors_are() -> None:
    template = {**HUB["llama-2"], "torch_dtype": "bfloat16", "dtype": "float32"}
    args, notes = args_from_config(template, LLAMA_RULES)
    assert any("float32" in n and "bfloat16" in n for n in notes)
    written, told = write({**args, "params_dtype": "float16"}, "llama", template=template)
    assert (written["dtype"], written["torch_dtype"]) == ("float16", "float16")
    assert any("params_dtype 'float16'" in n for n in told)
    assert template["dtype"] == "float32"  # the template itself is not touched


def test_a_dtype_that_only_one_spelling_names_is_changed_there_and_not_added_elsewhere() -> None:
    args, _ = args_from_config(HUB["llama-2"], LLAMA_RULES)
    written, _ = write({**args, "params_dtype": "float32"}, "llama", template=HUB["llama-2"])
    assert written == {**HUB["llama-2"], "torch_dtype": "float32"}
    assert list(written) == list(HUB["llama-2"])


def test_a_field_that_no_shape_depends_on_is_changed_with_a_note_in_the_templates_spelling() -> None:
    template = HUB["llama-3.1"]
    args, _ = args_from_config(template, LLAMA_RULES)
    written, notes = write({**args, "rotary_base": 10000, "layernorm_epsilon": 1e-6}, "llama", template=template)
    assert written == {**template, "rope_theta": 10000.0, "rms_norm_eps": 1e-6}
    assert sum("changed" in n for n in notes) == 2
    new, _ = write({**args, "rotary_base": 10000, "use_rope_scaling": False}, "llama", template=v5(template))
    assert new == {**v5(template), "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}


SIZES = [("num_layers", 31), ("hidden_size", 2048), ("ffn_hidden_size", 1), ("num_attention_heads", 16), ("num_query_groups", 4), ("kv_channels", 64),
         ("vocab_size", 128000), ("untie_embeddings_and_output_weights", False), ("swiglu", False), ("add_bias_linear", True)]  # fmt: skip


@pytest.mark.parametrize(("argument", "value"), SIZES)
def test_a_size_on_which_template_and_checkpoint_disagree_is_an_error_with_both_numbers(argument: str, value: Any) -> None:
    args, _ = args_from_config(HUB["llama-3.1"], LLAMA_RULES)
    with pytest.raises(CkptError) as caught:
        write({**args, argument: value}, "llama", template={**HUB["llama-3.1"], "vocab_size": 100 if argument == "vocab_size" else 128256})
    assert caught.value.code == "E302"
    assert f"{argument} {value!r}" in (caught.value.found or "")
    assert f"{argument} {100 if argument == 'vocab_size' else args[argument]!r}" in (caught.value.expected or "")


def test_a_table_longer_than_the_tokenizer_keeps_the_hf_vocab_size() -> None:
    args, _ = args_from_config(HUB["qwen2.5"], QWEN2_RULES)
    written, notes = write({**args, "vocab_size": 151665, "padded_vocab_size": 152064}, "qwen2", template=HUB["qwen2.5"])
    assert written == HUB["qwen2.5"]
    assert any("151936" in n and "151665" in n for n in notes)
    with pytest.raises(CkptError):  # more rows than the checkpoint has
        write({**args, "vocab_size": 151665, "padded_vocab_size": 151680}, "qwen2", template=HUB["qwen2.5"])


def test_c1_padding_is_a_matter_of_divisor_and_tp() -> None:
    assert [padded_vocab(100, 8, tp) for tp in (1, 2, 4)] == [104, 112, 128]
    assert padded_vocab(50257, 128, 1) == 50304
    assert padded_vocab(128256, 128, 8) == 129024
    with pytest.raises(CkptError):
        padded_vocab(100, 0, 1)


# ---- what Megatron cannot hold, and what is malformed ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rope_scaling": {**LLAMA3_SCALING, "original_max_position_embeddings": 64}}, ["8192", "64"]),
        ({"rope_scaling": {**LLAMA3_SCALING, "high_freq_factor": 3.5}}, ["high_freq_factor 4", "high_freq_factor 3.5"]),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ["dynamic"]),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0, "short_factor": [1.0], "long_factor": [1.0]}}, ["longrope"]),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, "attention_factor": 2.0}}, ["attention_factor", "2"]),
        ({"attention_bias": True}, ["attention_bias True", "mlp_bias False"]),
        ({"hidden_act": "gelu"}, ["gelu", "silu"]),
    ],
)  # fmt: skip
def test_what_megatron_cannot_hold_is_refused_with_its_values_and_kept_in_the_hf_config_when_forced(
    change: dict[str, Any], words: list[str]
) -> None:
    config = {**HUB["llama-3.1"], **change}
    with pytest.raises(CkptError) as caught:
        args_from_config(config, LLAMA_RULES)
    assert caught.value.code == "E305"
    assert all(word in str(caught.value) for word in words)
    args, notes = args_from_config(config, LLAMA_RULES, allow_unrepresentable=True)
    assert any("kept in the HF config only" in n for n in notes)
    written, _ = write(args, "llama", template=config)
    assert written == config


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"hidden_size": "4096"}, "'4096'"),
        ({"num_attention_heads": True}, "True"),
        ({"num_hidden_layers": -1}, "-1"),
        ({"vocab_size": 0}, "0"),
        ({"rms_norm_eps": float("nan")}, "nan"),
        ({"rope_scaling": [1]}, "rope_scaling is not an object"),
        ({"rope_scaling": {"type": "linear"}}, "needs a positive factor"),
        ({"rope_parameters": {"rope_theta": "1"}}, "rope_parameters.rope_theta"),
        ({"hidden_size": 4097}, "4097 and 32"),
    ],
)
def test_a_malformed_config_is_an_error_that_names_the_field(change: dict[str, Any], words: str) -> None:
    with pytest.raises(CkptError) as caught:
        args_from_config({**HUB["llama-2"], **change}, LLAMA_RULES)
    assert caught.value.code == "E311"
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        {"layer_types": ["full_attention"]},
        {"layer_types": ["linear_attention"] * 24},
        {"layer_types": ["sliding_attention"] * 24},
        {"layer_types": 3},
    ],
)
def test_layer_types_that_do_not_fit_the_model_are_malformed(change: dict[str, Any]) -> None:
    with pytest.raises(CkptError, match=r"layer|unusable"):
        args_from_config({**HUB["qwen2.5"], **change}, QWEN2_RULES)


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("llama", {"normalization": "LayerNorm"}),
        ("llama", {"apply_layernorm_1p": True}),
        ("llama", {"qk_layernorm": True}),
        ("llama", {"num_experts": 8}),
        ("llama", {"add_qkv_bias": True}),
        ("llama", {"position_embedding_type": "learned_absolute"}),
        ("llama", {"window_size": (4095, 0)}),
        ("mistral", {"window_size": (4095, 4095)}),
        ("qwen2", {"add_qkv_bias": False}),
        ("qwen3", {"add_qkv_bias": True}),
        ("llama", {"swiglu": False}),
    ],
)
def test_arguments_that_a_config_of_the_family_cannot_say_are_refused(family: str, change: dict[str, Any]) -> None:
    source = next(c for c in HUB.values() if c["model_type"] == family)
    with pytest.raises(CkptError) as caught:
        write({**args_from_config(source, RULES[family])[0], **change}, family)
    assert caught.value.code == "E305"
    assert str(next(iter(change.values()))) in str(caught.value) or "biases" in str(caught.value)


def test_arguments_without_a_size_are_not_guessed() -> None:
    args, _ = args_from_config(HUB["llama-2"], LLAMA_RULES)
    for name in ("num_layers", "hidden_size", "ffn_hidden_size", "vocab_size"):
        with pytest.raises(CkptError) as caught:
            write({k: v for k, v in args.items() if k != name}, "llama")
        assert caught.value.code == "E301"
        with pytest.raises(CkptError):
            checkpoint_args({k: v for k, v in args.items() if k not in (name, "hidden_size")}, layout={}, iteration=1)


# ---- real checkpoints -----------------------------------------------------------------------------------------------------------------

READ_ARGS = """
import json, pathlib, sys, types
import torch
for name in ("Namespace",):
    pass
state = torch.load(sys.argv[1], map_location="cpu", weights_only=False)
plain = lambda v: str(v) if isinstance(v, torch.dtype) else v if v is None or type(v) in (bool, int, float, str, list, tuple) else None
print(json.dumps({k: plain(v) for k, v in vars(state["args"]).items()}))
"""


def real_variants(shared: Path) -> list[Path]:
    """Folders of checkpoints whose arguments lie in a file that torch.load reads."""
    found = sorted(
        p
        for p in (shared / "real").iterdir()
        if list(p.glob("mcore/*/common.pt")) or list(p.glob("mcore/*/mp_rank_00*/model_optim_rng.pt"))
    )
    assert len(found) > 10
    return found


def stored_args(variant: Path) -> dict[str, Any]:
    file = next(iter([*variant.glob("mcore/*/common.pt"), *variant.glob("mcore/*/mp_rank_00*/model_optim_rng.pt")]))
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", READ_ARGS, str(file)], capture_output=True, text=True, check=True)
    return json.loads(run.stdout.splitlines()[-1])


def canonical_names(variant: Path) -> set[str]:
    """Megatron names that the HF tensors of a variant must have come from, as far as families differ by them."""
    from safetensors import safe_open

    with safe_open(variant / "expected.safetensors", "np") as file:
        names = set(file.keys())
    ends = {
        "q_proj.bias": "linear_qkv.bias",
        "o_proj.bias": "linear_proj.bias",
        "q_norm.weight": "q_layernorm.weight",
        "q_proj.weight": "linear_qkv.weight",
    }
    moe = {"decoder.layers.0.mlp.router.weight"} if any(".gate.weight" in n for n in names) else set()
    return moe | {
        f"decoder.layers.{n.split('.')[2]}.self_attention.{m}" for n in names for e, m in ends.items() if n.endswith("self_attn." + e)
    }


@pytest.mark.oracle
def test_the_config_of_real_checkpoints_is_rebuilt_from_their_own_arguments(shared: Path) -> None:
    seen = set()
    for variant in real_variants(shared):
        config, args = json.loads((variant / "config.json").read_text()), stored_args(variant)
        if "mixtral" in variant.name:
            assert infer_family(args, canonical_names(variant))[0] == "mixtral"
            continue
        family, why = infer_family(args, canonical_names(variant))
        assert (family, bool(why)) == (config["model_type"], True)
        seen.add(family)
        written, _ = write(args, family)
        # Megatron-LM was started from converted weights with its own initialisation, so only this field cannot come back
        told, asked = ({k: v for k, v in meaning(c).items() if k != "initializer_range"} for c in (written, config))
        assert told == asked, variant.name
        args["init_method_std"] = config["initializer_range"]
        again, notes = write(args, family, template=config)
        assert json.dumps(again) == json.dumps(config), (variant.name, notes)
    assert seen >= {"llama", "qwen2"}


def test_the_family_is_told_from_arguments_and_names() -> None:
    layer = "decoder.layers.0.self_attention."
    for hub, names in {
        "llama-2": set(),
        "mistral-7b": set(),
        "qwen2.5": {layer + "linear_qkv.bias"},
        "qwen3": {layer + "q_layernorm.weight"},
    }.items():
        args, _ = args_from_config(HUB[hub], rules_of(HUB[hub]))
        assert infer_family(args, names)[0] == HUB[hub]["model_type"]
    args, _ = args_from_config(HUB["llama-2"], LLAMA_RULES)
    assert infer_family(args, {layer + "linear_qkv.bias", layer + "linear_proj.bias"})[0] == "llama"
    for change in ({"swiglu": False}, {"normalization": "LayerNorm"}, {"multi_latent_attention": True}):
        with pytest.raises(CkptError) as caught:
            infer_family({**args, **change}, set())
        assert caught.value.code == "E310"


def test_older_names_of_arguments_are_understood() -> None:
    args, _ = args_from_config(HUB["llama-2"], LLAMA_RULES)
    old = {
        k: v
        for k, v in args.items()
        if k not in ("layernorm_epsilon", "add_bias_linear", "kv_channels", "position_embedding_type", "num_query_groups")
    }
    old |= {
        "norm_epsilon": 1e-5,
        "disable_bias_linear": True,
        "use_rotary_position_embeddings": True,
        "group_query_attention": False,
        "num_query_groups": 1,
    }
    assert write(old, "llama") == write(args, "llama")


# ---- the arguments stored in a checkpoint, judged by Megatron itself ------------------------------------------------------------------

MCORE019 = Path(sys.prefix) / "mcore019"
TRAINING = MCORE019 / "megatron" / "training"
needs_training = pytest.mark.skipif(
    not TRAINING.is_dir(), reason="megatron-core 0.19.2, which ships megatron.training, is not unpacked in the environment"
)


@needs_training
def test_every_attribute_that_megatrons_loader_reads_is_stored() -> None:
    read = set()
    for node in ast.walk(ast.parse((TRAINING / "checkpointing.py").read_text())):
        if not isinstance(node, ast.Call):
            continue
        name, literals = getattr(node.func, "id", None), [a.value for a in node.args if isinstance(a, ast.Constant)]
        if name in ("_set_arg", "_compare") or (
            name in ("getattr", "hasattr") and getattr(node.args[0], "id", "") in ("checkpoint_args", "ckpt_args")
        ):
            read.update(v for v in literals if isinstance(v, str))
    assert {
        "rotary_base",
        "padded_vocab_size",
        "consumed_train_samples",
        "no_save_optim",
        "tensor_model_parallel_size",
    } < read  # the parse works
    stored = checkpoint_args(args_from_config(HUB["llama-2"], LLAMA_RULES)[0], layout={}, iteration=1)
    # left out: what would be negated again, what only tests a name of checkpoints before 3.0, and values of getattr's default
    assert read - stored.keys() - {"disable_bias_linear", "model_parallel_size", "vanilla"} == set()


LOAD_ARGS = """
import argparse, json, os, pathlib, sys
from ckpt_tools.resume.trainer import cpu_shim
cpu_shim.install()
import torch
from megatron.training import arguments, checkpointing
from megatron.training.argument_utils import core_transformer_config_from_args, gpt_config_from_args
for job in json.load(open(sys.argv[1])):
    folder = pathlib.Path(job["run"]) / "iter_0000007"
    folder.mkdir(parents=True)
    stored = {k: tuple(v) if k == "window_size" and v else v for k, v in job["args"].items()}
    stored = {k: getattr(torch, v) if k in job["dtypes"] else v for k, v in stored.items()}
    torch.save({"args": argparse.Namespace(**stored), "checkpoint_version": 3.0, "iteration": 7}, folder / "common.pt")
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}))
    (folder.parent / "latest_checkpointed_iteration.txt").write_text("7")
    sys.argv = ["train", "--use-checkpoint-args", "--use-mp-args-from-checkpoint-args", "--load", job["run"], "--micro-batch-size", "1", "--train-iters", "1", "--lr", "0",
                "--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "9", "--distributed-backend", "gloo", "--transformer-impl", "local",
                "--no-masked-softmax-fusion", "--no-gradient-accumulation-fusion", "--no-persist-layer-norm", "--no-rope-fusion", *job["flags"]]
    args = arguments.parse_args()
    checkpointing.load_args_from_checkpoint(args)
    arguments.validate_args(args)
    config = core_transformer_config_from_args(args)
    gpt = gpt_config_from_args(args)
    out = {k: getattr(config, k) for k in ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "add_qkv_bias",
           "add_bias_linear", "qk_layernorm", "layernorm_epsilon", "normalization", "gated_linear_unit", "window_size", "window_attn_skip_freq", "attention_dropout",
           "hidden_dropout", "num_moe_experts", "tensor_model_parallel_size", "pipeline_model_parallel_size", "init_method_std", "rotary_interleaved")}
    out |= {k: getattr(gpt, k) for k in ("rotary_base", "rotary_percent", "position_embedding_type", "rope_scaling", "share_embeddings_and_output_weights", "vocab_size",
            "should_pad_vocab", "seq_len_interpolation_factor")}
    out |= {"params_dtype": str(config.params_dtype), "activation": config.activation_func.__name__, "seq_length": args.seq_length, "iteration": args.iteration}
    out |= {k: v for k, v in vars(config).items() if k.startswith("yarn_")}
    print("RESULT" + json.dumps(out))
"""


def in_megatron(script: str, jobs: list[dict[str, Any]], folder: Path, mcore: Path | None) -> list[dict[str, Any]]:
    (folder / "jobs.json").write_text(json.dumps(jobs))
    path = os.pathsep.join(str(p) for p in (mcore, ROOT / "tests") if p)
    world = {"WORLD_SIZE": str(max([j.get("world", 1) for j in jobs])), "RANK": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, str(folder / "jobs.json")],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, **world},
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return [json.loads(line[6:]) for line in run.stdout.splitlines() if line.startswith("RESULT")]


@needs_training
def test_stored_arguments_of_a_source_are_kept_and_its_run_is_not() -> None:
    args, _ = args_from_config(HUB["llama-2"], LLAMA_RULES)
    source = {
        **args,
        "seed": 5,
        "consumed_train_samples": 20,
        "tensor_model_parallel_size": 8,
        "attention_backend": object(),
        "tokenizer_type": "HuggingFaceTokenizer",
    }
    stored = checkpoint_args(source, layout={"tensor_model_parallel_size": 2, "context_parallel_size": 2}, iteration=3)
    assert (stored["seed"], stored["tokenizer_type"]) == (5, "HuggingFaceTokenizer")
    assert (stored["consumed_train_samples"], stored["tensor_model_parallel_size"], stored["world_size"]) == (0, 2, 4)
    assert (stored["no_save_optim"], stored["no_save_rng"]) == (True, True)
    assert "attention_backend" not in stored
    assert checkpoint_args(source, layout={}, iteration=3, weights_only=False)["consumed_train_samples"] == 20


def test_effective_args_leave_the_mapping_given_to_them_alone() -> None:
    args = {"num_attention_heads": 4, "hidden_size": 32, "num_experts": 0}
    assert effective_args(args)["kv_channels"] == 8
    assert args == {"num_attention_heads": 4, "hidden_size": 32, "num_experts": 0}


# ---- rope, number by number -----------------------------------------------------------------------------------------------------------

ROPE = """
import json, sys
from ckpt_tools.resume.trainer import cpu_shim
cpu_shim.install()
import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
for job in json.load(open(sys.argv[1])):
    a = job["args"]
    shared = dict(kv_channels=a["kv_channels"], rotary_percent=a["rotary_percent"], rotary_base=a["rotary_base"], use_cpu_initialization=True,
                  seq_len_interpolation_factor=a["rotary_seq_len_interpolation_factor"])
    scale = 1.0
    if a["position_embedding_type"] == "yarn":
        emb, scale = YarnRotaryEmbedding(**shared, scaling_factor=a["rotary_scaling_factor"], original_max_position_embeddings=a["yarn_original_max_position_embeddings"],
            beta_fast=a["yarn_beta_fast"], beta_slow=a["yarn_beta_slow"], mscale=a["mscale"], mscale_all_dim=a["mscale_all_dim"],
            correction_range_round_to_int=a["yarn_correction_range_round_to_int"])(2)
    else:
        emb = RotaryEmbedding(**shared, rope_scaling=a["use_rope_scaling"], rope_scaling_factor=a["rope_scaling_factor"] or 8.0)(2)
    print("RESULT" + json.dumps({"angles": emb[1, 0, 0, : a["kv_channels"] // 2].tolist(), "scale": scale}))
"""


@pytest.mark.oracle
@pytest.mark.slow
@pytest.mark.parametrize("mcore", [None, MCORE019], ids=["installed", "0.19.2"])
def test_the_rotary_frequencies_of_megatron_core_are_those_of_transformers(tmp_path: Path, mcore: Path | None) -> None:
    if mcore is not None and not mcore.is_dir():
        pytest.skip("megatron-core 0.19.2 is not unpacked in the environment")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    names = list(CONFIGS)
    jobs = [{"args": args_from_config(CONFIGS[n], rules_of(CONFIGS[n]))[0]} for n in names]
    for name, got in zip(names, in_megatron(ROPE, jobs, tmp_path, mcore), strict=True):
        config = hf_class(CONFIGS[name]).from_dict(json.loads(json.dumps(CONFIGS[name])))
        if config.rope_parameters["rope_type"] == "default":
            dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
            frequencies, scale = [config.rope_parameters["rope_theta"] ** (-i / dim) for i in range(0, dim, 2)], 1.0
        else:
            config.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
            inverse, scale = ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]](config, "cpu")
            frequencies = inverse.tolist()
        assert math.isclose(got["scale"], scale, rel_tol=1e-6), name
        assert got["angles"] == pytest.approx(frequencies, rel=2e-6), name  # float32, computed in different orders


# ---- the kinds that families with experts need ----------------------------------------------------------------------------------------

EXPERTS: tuple[AnyRule, ...] = (
    Rule(("num_experts_per_tok",), "moe_router_topk"),
    Rule(("moe_intermediate_size",), "moe_ffn_hidden_size", shape=True),
)
QWEN3_MOE = extend(
    QWEN3_RULES,
    *EXPERTS,
    Rule(("num_experts", "num_local_experts"), "num_experts", shape=True),
    Rule(("norm_topk_prob",), "moe_router_pre_softmax", kind="not", type="bool", default=False),
    Computed("sparse_step", ("decoder_sparse_step", "mlp_only_layers"), ("moe_layer_freq",), shape=True),
)
DEEPSEEK = extend(
    tuple(r for r in BASE_RULES if not (isinstance(r, Rule) and r.hf in (("head_dim",), ("num_key_value_heads",)))),
    *EXPERTS,
    Rule(("n_routed_experts",), "num_experts", shape=True),
    Rule(
        ("n_shared_experts",),
        "moe_shared_expert_intermediate_size",
        kind="times",
        operand=("moe_intermediate_size", "moe_ffn_hidden_size"),
        shape=True,
    ),
    Rule(("n_group",), "moe_router_num_groups", absent=1, default=1),
    Rule(("num_nextn_predict_layers",), "mtp_num_layers", absent=0, default=0),
    Rule(("kv_lora_rank",), "kv_lora_rank", shape=True),
    Rule(("q_lora_rank",), "q_lora_rank", nullable=True, default=None),
    Constant("multi_latent_attention", True),
    Constant("qk_layernorm", True),
    Refuse(("norm_topk_prob",), (True,), "Megatron renormalises the scores of the chosen experts", default=True),
    Computed("first_dense", ("first_k_dense_replace", "mlp_layer_types"), ("moe_layer_freq",), shape=True),
)


@pytest.mark.oracle
@pytest.mark.parametrize("step", [{}, {"decoder_sparse_step": 2}, {"mlp_only_layers": [1, 2]}])
def test_qwen3_moe_can_be_said_with_the_same_kinds(step: dict[str, Any]) -> None:
    from transformers import Qwen3MoeConfig

    real = Qwen3MoeConfig(
        num_hidden_layers=6, num_experts=16, num_experts_per_tok=4, moe_intermediate_size=96, norm_topk_prob=True, head_dim=64, **step
    )
    config = json.loads(real.to_json_string())
    args, _ = args_from_config(config, QWEN3_MOE)
    assert (args["num_experts"], args["moe_router_pre_softmax"]) == (16, False)
    sparse = [(i + 1) % real.decoder_sparse_step == 0 and i not in real.mlp_only_layers for i in range(6)]
    assert args["moe_layer_freq"] == (1 if all(sparse) else [int(s) for s in sparse])
    written, _ = config_from_args(args, QWEN3_MOE, architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe")
    again = Qwen3MoeConfig.from_dict(written)
    assert [(i + 1) % again.decoder_sparse_step == 0 and i not in again.mlp_only_layers for i in range(6)] == sparse
    for name in (
        "num_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "norm_topk_prob",
        "head_dim",
        "rope_parameters",
        "layer_types",
    ):
        assert getattr(again, name, None) == getattr(real, name, None)
    assert config_from_args(args, QWEN3_MOE, architectures=[], model_type="", template=config)[0] == config
    # Megatron says a frequency as one number, counted from layer 0; a template that says the same is left alone
    same, _ = (
        config_from_args({**args, "moe_layer_freq": 1}, QWEN3_MOE, architectures=[], model_type="", template=config)
        if all(sparse)
        else (config, ())
    )
    assert same == config


@given(value=st.integers(1, 10**6), operand=st.integers(1, 10**6))
def test_every_scalar_kind_runs_backwards(value: int, operand: int) -> None:
    for name, kind in KINDS.items():
        start = bool(value % 2) if name == "not" else value
        assert kind.backward(kind.forward(start, operand), operand) == start


def test_one_size_given_twice_with_different_numbers_is_an_error() -> None:
    config = {**v5(HUB["qwen3"]), "num_experts": 8, "num_local_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 3}
    with pytest.raises(CkptError) as caught:
        args_from_config(config, QWEN3_MOE)
    assert caught.value.code == "E302"
    assert "num_experts 8, num_local_experts 16" in str(caught.value)


def test_a_familys_own_rule_replaces_the_base_rule_for_the_same_argument() -> None:
    rules = extend(
        (Rule(("a",), "x"), Constant("y", 1), Choice(("c",), (("v", (("z", 1),)),), "why")),
        Rule(("b",), "x", default=Derived("q")),
        Constant("z", 2),
    )
    assert [getattr(r, "arg", None) for r in rules] == ["y", "x", "z"]
    assert all(len([r for r in rules if isinstance(r, Constant) and r.arg == "add_qkv_bias"]) <= 1 for rules in RULES.values())
    used = {r.name for family in FAMILIES.values() for r in family.rules if isinstance(r, Computed)}
    assert used == set(COMPUTED)


def test_rules_cost_no_numpy_and_no_torch_to_import() -> None:
    code = "import sys, ckpt_tools.families.config_rules, ckpt_tools.families.config; print([m for m in ('numpy', 'torch', 'transformers', 'safetensors') if m in sys.modules])"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True
    )
    assert run.stdout.strip() == "[]"


def test_layers_without_rotation_are_not_converted_as_a_llama() -> None:
    """The public names of smollm3 are llama's: named --family llama, it would rotate layers that must not be rotated."""
    config = {**HUB["llama-2"], "model_type": "smollm3", "no_rope_layers": [1, 0] * 16}
    with pytest.raises(CkptError) as caught:
        args_from_config(config, LLAMA_RULES)
    assert caught.value.code == "E305" and "smollm3" in str(caught.value)
    args, _ = args_from_config(config, FAMILIES["smollm3"].rules)
    assert args["no_rope_freq"] == [0, 1] * 16
    with pytest.raises(CkptError):
        write({**args_from_config(HUB["llama-2"], LLAMA_RULES)[0], "no_rope_freq": 4}, "llama")


def test_fields_that_a_named_family_does_not_read_are_told() -> None:
    from ckpt_tools.families.config import unread_fields

    config = {**HUB["llama-2"], "model_type": "another", "logit_scale": 0.0625, "use_parallel_residual": True, "clip_qkv": None}
    assert unread_fields(config, LLAMA_RULES) == ["logit_scale", "use_parallel_residual"]
    assert unread_fields(HUB["llama-3.1"], LLAMA_RULES) == []
