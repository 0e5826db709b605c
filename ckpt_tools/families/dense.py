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


JOINED_FC1 = Copy((HF_LAYER + "mlp.gate_up_proj.weight",), LAYER + "mlp.linear_fc1.weight", ("2*F", "H"))  # HF has [gate; up] too


def norms(input_norm: str, mlp_norm: str, final: str, *, biased: bool) -> tuple[Mapping, ...]:
    """The norm before attention, the one before the MLP, the last one, by their HF names without `.weight`; biased: LayerNorm."""
    kinds = ("weight", "bias") if biased else ("weight",)
    return tuple(
        Copy((f"{hf}.{kind}",), f"{mcore}{joint}{kind}", ("H",))
        for hf, mcore, joint in (
            (input_norm, LAYER + "self_attention.linear_qkv", ".layer_norm_"),
            (mlp_norm, LAYER + "mlp.linear_fc1", ".layer_norm_"),
            (final, "decoder.final_layernorm", "."),
        )
        for kind in kinds
    )


def linear(hf: str, mcore: str, shape: tuple[str, str], *, biased: bool = True, transposed: bool = False) -> tuple[Mapping, ...]:
    """A linear layer of every decoder layer, with its bias; the shape is Megatron's (out, in)."""
    weight = Copy((hf + ".weight",), f"{LAYER}{mcore}.weight", shape, transposed=transposed)
    return (weight, Copy((hf + ".bias",), f"{LAYER}{mcore}.bias", shape[:1])) if biased else (weight,)
