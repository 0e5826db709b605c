"""The older decoders with LayerNorm and plain MLPs: GPT-2, GPT-NeoX (Pythia), StarCoder2, Nemotron."""

from __future__ import annotations

from . import rope
from .config_kinds import Computed, Constant, Derived, Refuse, Rule, Written, extend
from .config_rules import BASE_RULES
from .deepseek import length
from .dense import EMBEDDING, HEAD, HF_LAYER, LAYER, QKV, linear, norms
from .family import Family
from .mappings import Copy, Mapping, Vocab, joined_qkv, qkv

LAYERNORM = Constant("normalization", "LayerNorm")
EVERY_BIAS = (Constant("add_bias_linear", True), Constant("add_qkv_bias", True))
MLP_ARGS = ("swiglu", "squared_relu", "quick_geglu", "openai_gelu", "gated_linear_unit", "activation_func")
SOURCES = ("transformers 5.24: models/{0}", "Megatron-LM 0.16.1, 0.19.2: models/gpt, transformer")


def plain(field: str, default: str) -> Computed:
    """An MLP without a gate; its activation under its HF field."""
    return Computed("activation", (field,), MLP_ARGS, (field, default, False))


def epsilon(field: str, default: float = 1e-5) -> Rule:
    """The epsilon of norms under the family's name for it."""
    return Rule((field,), "layernorm_epsilon", type="float", default=default, older=("norm_epsilon",))


STARCODER2 = Family(
    name="starcoder2",
    model_types=("starcoder2",),
    architectures=("Starcoder2ForCausalLM",),
    rules=extend(
        BASE_RULES,
        *length(4096),
        LAYERNORM,
        *EVERY_BIAS,
        epsilon("norm_epsilon"),
        plain("hidden_act", "gelu_pytorch_tanh"),
        Rule(("tie_word_embeddings",), "untie_embeddings_and_output_weights", kind="not", type="bool", default=True, shape=True),
        Rule(("sliding_window",), "window_size", kind="window", default=None, nullable=True, quiet=True),
        Refuse(("use_bias",), (True, None), "Megatron-Core has biases on every linear layer of this family"),
    ),
    tensors=(
        EMBEDDING,
        QKV,
        qkv(HF_LAYER + "self_attn", "bias"),
        *linear(HF_LAYER + "self_attn.o_proj", "self_attention.linear_proj", ("H", "A*d")),
        *linear(HF_LAYER + "mlp.c_fc", "mlp.linear_fc1", ("F", "H")),
        *linear(HF_LAYER + "mlp.c_proj", "mlp.linear_fc2", ("H", "F")),
        *norms(HF_LAYER + "input_layernorm", HF_LAYER + "post_attention_layernorm", "model.norm", biased=True),
        HEAD,
    ),
    verified="logits",
    sources=tuple(s.format("starcoder2") for s in SOURCES),
)

NEMOTRON = Family(
    name="nemotron",
    model_types=("nemotron",),
    architectures=("NemotronForCausalLM",),
    rules=extend(
        BASE_RULES,
        *length(4096),
        LAYERNORM,
        Constant("layernorm_zero_centered_gamma", True),
        Constant("apply_layernorm_1p", True),
        epsilon("norm_eps"),
        plain("hidden_act", "relu2"),
        Computed("rope", rope.FIELDS, rope.ARGS, (10000.0, 0.5)),
        Computed("biases", ("attention_bias", "mlp_bias"), ("add_bias_linear", "add_qkv_bias"), ("attention_bias", "mlp_bias"), shape=True),
    ),
    tensors=(
        EMBEDDING,
        QKV,
        *linear(HF_LAYER + "self_attn.o_proj", "self_attention.linear_proj", ("H", "A*d"), biased=False),
        *linear(HF_LAYER + "mlp.up_proj", "mlp.linear_fc1", ("F", "H"), biased=False),
        *linear(HF_LAYER + "mlp.down_proj", "mlp.linear_fc2", ("H", "F"), biased=False),
        *norms(HF_LAYER + "input_layernorm", HF_LAYER + "post_attention_layernorm", "model.norm", biased=True),
        HEAD,
    ),
    verified="logits",
    sources=tuple(s.format("nemotron") for s in SOURCES),
)

NEOX = "gpt_neox.layers.{l}."
GPT_NEOX = Family(
    name="gpt_neox",
    model_types=("gpt_neox",),
    architectures=("GPTNeoXForCausalLM",),
    rules=extend(
        BASE_RULES,
        *length(2048),
        LAYERNORM,
        *EVERY_BIAS,
        epsilon("layer_norm_eps"),
        plain("hidden_act", "gelu"),
        Rule(("num_attention_heads",), "num_query_groups", quiet=True, forward=True),
        Rule(("head_dim",), "kv_channels", default=Derived("hidden_size", "num_attention_heads"), shape=True, sparse=True, quiet=True),
        Computed("rope", (*rope.FIELDS, "rotary_pct", "rotary_emb_base"), rope.ARGS, (10000.0, 0.25)),
        Refuse(("use_parallel_residual",), (False,), "Megatron-Core adds attention and MLP one after the other", default=True),
        Refuse(("attention_bias",), (True, None), "Megatron-Core has biases on every linear layer of this family"),
        Written("use_parallel_residual", False),
    ),
    tensors=(
        Vocab(("gpt_neox.embed_in.weight",), "embedding.word_embeddings.weight"),
        *linear(NEOX + "attention.query_key_value", "self_attention.linear_qkv", ("A*d+2*G*d", "H")),  # per head [q, k, v], as Megatron's
        *linear(NEOX + "attention.dense", "self_attention.linear_proj", ("H", "A*d")),
        *linear(NEOX + "mlp.dense_h_to_4h", "mlp.linear_fc1", ("F", "H")),
        *linear(NEOX + "mlp.dense_4h_to_h", "mlp.linear_fc2", ("H", "F")),
        *norms(NEOX + "input_layernorm", NEOX + "post_attention_layernorm", "gpt_neox.final_layer_norm", biased=True),
        Vocab(("embed_out.weight",), "output_layer.weight", when="untied"),
    ),
    renamed=((r"lm_head\.weight", "embed_out.weight"),),
    verified="logits",
    note="use_parallel_residual true, which most of its models have, is refused: Megatron-Core has no parallel residual",
    sources=tuple(s.format("gpt_neox") for s in SOURCES),
)

GPT = "transformer.h.{l}."
POSITIONS: Mapping = Copy(("transformer.wpe.weight",), "embedding.position_embeddings.weight", ("max_position_embeddings", "H"))
GPT2 = Family(
    name="gpt2",
    model_types=("gpt2",),
    architectures=("GPT2LMHeadModel",),
    rules=(
        *(
            r
            for r in extend(
                BASE_RULES,
                Rule(("n_layer", "num_hidden_layers"), "num_layers", default=12, shape=True),
                Rule(("n_embd", "hidden_size"), "hidden_size", default=768, shape=True),
                Rule(("n_head", "num_attention_heads"), "num_attention_heads", default=12, shape=True),
                Rule(("n_head", "num_attention_heads"), "num_query_groups", default=12, quiet=True, forward=True),
                Rule(("n_positions", "max_position_embeddings", "n_ctx"), "max_position_embeddings", default=1024, shape=True),
                Rule(("n_positions", "max_position_embeddings", "n_ctx"), "seq_length", default=1024, quiet=True, forward=True),
                Computed("gpt2_sizes", ("n_inner",), ("ffn_hidden_size", "kv_channels"), shape=True),
                Computed("learned_positions", (), rope.ARGS),
                Constant("add_position_embedding", True, binding=False),
                LAYERNORM,
                *EVERY_BIAS,
                epsilon("layer_norm_epsilon"),
                plain("activation_function", "gelu_new"),
                Rule(
                    ("tie_word_embeddings",),
                    "untie_embeddings_and_output_weights",
                    kind="not",
                    type="bool",
                    default=True,
                    shape=True,
                    quiet=True,
                ),
                Refuse(("scale_attn_weights",), (True, None), "Megatron-Core divides attention scores by the root of the head's width"),
                Refuse(("scale_attn_by_inverse_layer_idx",), (False, None), "ckpt does not map this scaling"),
                Rule(("attn_pdrop",), "attention_dropout", type="float", default=0.1, quiet=True),
                Rule(("resid_pdrop",), "hidden_dropout", type="float", default=0.1, quiet=True),
            )
        ),
    ),
    tensors=(
        Vocab(("transformer.wte.weight",), "embedding.word_embeddings.weight"),
        POSITIONS,
        joined_qkv(GPT + "attn.c_attn.weight", LAYER + "self_attention.linear_qkv.weight", transposed=True),
        joined_qkv(GPT + "attn.c_attn.bias", LAYER + "self_attention.linear_qkv.bias"),
        *linear(GPT + "attn.c_proj", "self_attention.linear_proj", ("H", "A*d"), transposed=True),
        *linear(GPT + "mlp.c_fc", "mlp.linear_fc1", ("F", "H"), transposed=True),
        *linear(GPT + "mlp.c_proj", "mlp.linear_fc2", ("H", "F"), transposed=True),
        *norms(GPT + "ln_1", GPT + "ln_2", "transformer.ln_f", biased=True),
        Vocab(("lm_head.weight",), "output_layer.weight", when="untied"),
    ),
    renamed=((r"^((?:h\.\d+|wte|wpe|ln_f)\..*)", r"transformer.\1"),),
    verified="logits",
    sources=tuple(s.format("gpt2") for s in SOURCES),
)
