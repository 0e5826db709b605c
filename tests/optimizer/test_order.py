"""Canonical names are put into the order in which real GPTModels registered their parameters."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from oracle import launch

from ckpt_tools.model_names import SEQUENTIAL, TE_GROUPED
from ckpt_tools.optimizer.order import registration_key

pytestmark = pytest.mark.oracle
DENSE: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "num_query_groups": 1, "ffn_hidden_size": 24, "add_bias_linear": False,
    "normalization": "RMSNorm",
}  # fmt: skip
MOE = DENSE | {"num_moe_experts": 2, "moe_ffn_hidden_size": 12, "moe_shared_expert_intermediate_size": 8}
MLA = DENSE | {
    "multi_latent_attention": True, "kv_lora_rank": 8, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4, "v_head_dim": 8, "num_query_groups": 2,
}  # fmt: skip
LOCAL: list[dict[str, Any]] = [
    {"name": "qk norms", "spec": "local", "config": DENSE | {"qk_layernorm": True, "add_qkv_bias": True}},
    {"name": "biases", "spec": "local", "config": DENSE | {"add_bias_linear": True, "normalization": "LayerNorm"}},
    {"name": "experts", "spec": "local", "config": MOE | {"moe_shared_expert_gate": True}, "experts": 2},
    {"name": "mtp", "spec": "local", "config": DENSE | {"mtp_num_layers": 1}, "mtp": True},
]
TE: list[dict[str, Any]] = [
    *({**m, "name": f"te {m['name']}", "spec": "te"} for m in LOCAL),
    {"name": "te grouped", "spec": "te", "config": MOE | {"moe_grouped_gemm": True}, "experts": 2, "grouped": True},
    {"name": "te mla", "spec": "te", "config": MLA | {"q_lora_rank": 8, "qk_layernorm": True}, "mla": True},
    {"name": "te mla without q lora", "spec": "te", "config": MLA | {"q_lora_rank": None}, "mla": True},
]


def check(models: list[dict[str, Any]], tmp_path: Path, version: str, fake_te: Path | None) -> None:
    out = tmp_path / "orders.json"
    job = {"models": models, "fake_te": str(fake_te) if fake_te else None, "output": str(out)}
    assert launch.run("parameter_orders", [job], tmp_path, version) == [None]
    for model in models:
        real = canonical([n for n, _ in json.loads(out.read_text())[model["name"]]], model["spec"])
        experts = TE_GROUPED if model.get("grouped") else SEQUENTIAL
        assert sorted(sorted(real), key=lambda n: registration_key(n, model["spec"], experts)) == real, model["name"]


def canonical(names: list[str], spec: str) -> list[str]:
    """Module names as canonical ones, by hand. The stand-in for Transformer Engine registers a fused norm after the matrix; the real
    LayerNormLinear does it first (transformer_engine/pytorch/module/layernorm_linear.py), so there the norm is moved."""
    result: list[str] = []
    moe = any(".mlp.router." in n for n in names)
    for name in names:
        if spec == "local":
            name = name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
            name = name if moe else name.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
        name = name.replace("mtp_model_layer.", "transformer_layer.")
        name = re.sub(r"local_experts\.(\d+)\.(linear_fc\d\.\w+)", r"\2\1", name)
        module, _, last = name.rpartition(".")
        if spec == "te" and last.startswith("layer_norm_"):
            first = next(i for i, n in enumerate(result) if n.startswith(f"{module}.") and n.rpartition(".")[2] in ("weight", "bias"))
            result.insert(first, name)
        else:
            result.append(name)
    return result


@pytest.mark.parametrize("version", ["0.16.1", "0.19.2"])
def test_local_specs(tmp_path: Path, version: str):
    if not launch.available(version):
        pytest.skip(f"megatron-core {version} is not here")
    check(LOCAL, tmp_path, version, None)


@pytest.mark.parametrize("version", ["0.16.1", "0.19.2"])
def test_transformer_engine_specs(shared: Path, tmp_path: Path, version: str):
    if not launch.available(version):
        pytest.skip(f"megatron-core {version} is not here")
    check(TE, tmp_path, version, shared / "oracles" / "megatron")
