"""The tensors of a Llama-shaped dense model, from which dense families are put together."""

from __future__ import annotations

from .mappings import Copy, Mapping, Rows, Vocab, gate_up, qkv

LAYER = "decoder.layers.{l}."
HF_LAYER = "model.layers.{l}."

EMBEDDING = Vocab(("model.embed_tokens.weight",), "embedding.word_embeddings.weight")
FINAL_NORM = Copy(("model.norm.weight",), "decoder.final_layernorm.weight", ("H",))
HEAD = Vocab(("lm_head.weight",), "output_layer.weight", when="untied")

QKV = qkv(HF_LAYER + "self_attn")
QKV_BIAS = qkv(HF_LAYER + "self_attn", "bias")
OPTIONAL_QKV_BIAS = qkv(HF_LAYER + "self_attn", "bias", optional=True)
PROJ = Copy((HF_LAYER + "self_attn.o_proj.weight",), LAYER + "self_attention.linear_proj.weight", ("H", "A*d"))
OPTIONAL_PROJ_BIAS = Copy((HF_LAYER + "self_attn.o_proj.bias",), LAYER + "self_attention.linear_proj.bias", ("H",), optional=True)
Q_NORM = Copy((HF_LAYER + "self_attn.q_norm.weight",), LAYER + "self_attention.q_layernorm.weight", ("d",))
K_NORM = Copy((HF_LAYER + "self_attn.k_norm.weight",), LAYER + "self_attention.k_layernorm.weight", ("d",))

FC1 = gate_up((HF_LAYER + "mlp.gate_proj.weight", HF_LAYER + "mlp.up_proj.weight"), LAYER + "mlp.linear_fc1.weight")
OPTIONAL_FC1_BIAS: Rows = gate_up(
    (HF_LAYER + "mlp.gate_proj.bias", HF_LAYER + "mlp.up_proj.bias"), LAYER + "mlp.linear_fc1.bias", bias=True, optional=True
)
FC2 = Copy((HF_LAYER + "mlp.down_proj.weight",), LAYER + "mlp.linear_fc2.weight", ("H", "F"))
OPTIONAL_FC2_BIAS = Copy((HF_LAYER + "mlp.down_proj.bias",), LAYER + "mlp.linear_fc2.bias", ("H",), optional=True)

INPUT_NORM = Copy((HF_LAYER + "input_layernorm.weight",), LAYER + "self_attention.linear_qkv.layer_norm_weight", ("H",))
MLP_NORM = Copy((HF_LAYER + "post_attention_layernorm.weight",), LAYER + "mlp.linear_fc1.layer_norm_weight", ("H",))


def dense(*attention: Mapping, mlp: tuple[Mapping, ...] = (FC1, FC2)) -> tuple[Mapping, ...]:
    """A whole dense decoder, in the order of transformers' modules: embedding, per layer (attention, mlp, the two norms), norm, head."""
    return (EMBEDDING, *attention, *mlp, INPUT_NORM, MLP_NORM, FINAL_NORM, HEAD)
