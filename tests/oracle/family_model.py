"""Loads what ckpt wrote for any family into the GPTModel that megatron-core builds from the checkpoint's own `args`, on one CPU process.

    [CKPT_TEST_SPEC=te] python tests/oracle/family_model.py JOBS.json

A "checkpoint" with mp_rank_00 in it is of the legacy format: its file is loaded by torch and compared with the model's state_dict.

JOBS.json is a list of {"checkpoint": iteration folder, "output": folder, "ids": [[token, ...]] or null}. Each job writes OUTPUT/report.json:
{"missing": [wanted, not stored], "unexpected": [stored, not wanted], "error": null or the traceback's end}, and with the local spec
OUTPUT/logits.safetensors. A job that fails says so in its report and the next one runs.

The configuration follows core_transformer_config_from_args and the GPT builder of megatron.training 0.19.2: every field of TransformerConfig
that `args` has under the same name is taken. Fields for which Megatron-LM has no argument (an activation by name) are what its users' own
model builders pass. CKPT_TEST_SPEC=te builds Megatron's Transformer Engine specs over a stand-in that has parameters only (te_names).
"""

from __future__ import annotations

import dataclasses
import json
import os
import traceback
from argparse import Namespace
from pathlib import Path
from typing import Any

import gpt_model

from ckpt_tools.resume.trainer import cpu_shim

TE = os.environ.get("CKPT_TEST_SPEC") == "te"


def activations() -> dict[str, Any]:
    """Activation functions by the names under which ckpt stores them."""
    import torch.nn.functional as F
    from megatron.core.activations import squared_relu

    try:
        from megatron.core.activations import quick_gelu
    except ImportError:
        from megatron.core.fusions.fused_bias_geglu import quick_gelu
    return {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "quick_gelu": quick_gelu,
        "squared_relu": squared_relu,
        "relu": F.relu,
    }


def configuration(args: Namespace) -> Any:
    """TransformerConfig or MLATransformerConfig of `args`, in float32 on one rank."""
    import torch
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    kind = MLATransformerConfig if getattr(args, "multi_latent_attention", False) else TransformerConfig
    names = {f.name for f in dataclasses.fields(kind)}
    fields = {name: getattr(args, name) for name in names if getattr(args, name, None) is not None or name == "q_lora_rank"}
    for name in [n for n in fields if "parallel" in n or "pipeline" in n or n.startswith(("fp8", "fp4", "num_layers_in"))]:
        del fields[name]
    fields["num_moe_experts"] = getattr(args, "num_experts", None)
    fields["layernorm_zero_centered_gamma"] = TE and zero_centred(args)
    fields["num_query_groups"] = args.num_query_groups if getattr(args, "group_query_attention", False) else None
    fields["bf16"] = fields["fp16"] = False
    fields["params_dtype"] = torch.float32
    known = activations()
    if getattr(args, "swiglu", False):
        fields |= {"gated_linear_unit": True, "activation_func": known["silu"]}
    elif getattr(args, "squared_relu", False):
        fields["activation_func"] = known["squared_relu"]
    elif getattr(args, "quick_geglu", False):
        fields |= {"gated_linear_unit": True, "activation_func": known["quick_gelu"]}
    else:
        name = getattr(args, "activation_func", "gelu")
        fields["activation_func"] = known[name] if isinstance(name, str) else name
    fields |= {
        "use_cpu_initialization": True, "perform_initialization": False, "gradient_accumulation_fusion": False, "bias_activation_fusion": False,
        "bias_dropout_fusion": False, "masked_softmax_fusion": False, "apply_rope_fusion": False, "persist_layer_norm": False,
        "attention_softmax_in_fp32": True, "hidden_dropout": 0.0, "attention_dropout": 0.0,
    }  # fmt: skip
    if fields["num_moe_experts"]:
        fields |= {"moe_grouped_gemm": TE, "moe_token_dispatcher_type": "allgather", "moe_router_load_balancing_type": "none", "moe_router_dtype": "fp32"}
        fields.pop("moe_permute_fusion", None)
    if kind is MLATransformerConfig:
        fields["rope_type"] = "yarn" if args.position_embedding_type == "yarn" or getattr(args, "rope_type", None) == "yarn" else "rope"
    config = kind(**{k: v for k, v in fields.items() if k in names})
    yarn = {"rotary_scaling_factor": "yarn_rotary_scaling_factor", "mscale": "yarn_mscale", "mscale_all_dim": "yarn_mscale_all_dim"}
    for name, value in vars(args).items():  # 0.16.1 reads yarn's numbers off the config without declaring them
        if name in yarn or name.startswith("yarn_"):
            setattr(config, yarn.get(name, name), value)
    return config


def zero_centred(args: Namespace) -> bool:
    """Whether norms multiply by 1 + weight."""
    return bool(getattr(args, "layernorm_zero_centered_gamma", False) or getattr(args, "apply_layernorm_1p", False))


def build(args: Namespace) -> Any:
    """The GPTModel."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec

    config = configuration(args)
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=TE, normalization=config.normalization)
    more = {}
    if getattr(args, "mtp_num_layers", None):
        more["mtp_block_spec"] = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=TE)
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        parallel_output=False,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        rope_scaling_factor=args.rope_scaling_factor or 8.0,
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
        **more,
    ).eval()


def load(job: dict[str, Any]) -> dict[str, Any]:
    """Load one checkpoint; the report."""
    import torch
    from megatron.core import dist_checkpointing, parallel_state
    from safetensors.torch import save_file

    legacy = Path(job["checkpoint"], "mp_rank_00", "model_optim_rng.pt")
    if legacy.exists():
        return load_legacy(torch.load(legacy, weights_only=False))
    common = dist_checkpointing.load_common_state_dict(job["checkpoint"])
    args = common["args"]
    model = build(args)
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    metadata = dict(dist_checkpointing.load_content_metadata(preloaded_state_dict=common) or {})
    metadata["dp_cp_group"] = parallel_state.get_data_parallel_group(with_context_parallel=True)
    request = model.sharded_state_dict(metadata=metadata)
    if not TE:  # where they are wanted, they must be there: Megatron does not load without them
        request = {key: value for key, value in request.items() if "_extra_state" not in key}
    state, not_asked_for, not_stored = dist_checkpointing.load(request, job["checkpoint"], strict="return_all")
    model.load_state_dict(state, strict=False)
    left = sorted(name for name, parameter in model.named_parameters() if torch.isnan(parameter).any())
    for name in [n for n, _ in model.named_parameters() if not TE and zero_centred(args) and norm_weight(n)]:
        model.get_parameter(name).data.add_(1)  # the local spec's norms know no 1 + weight
    report = {
        "missing": sorted(map(str, not_stored)) + left,
        "unexpected": sorted(str(n) for n in not_asked_for if "_extra_state" not in str(n) and "common_state" not in str(n)),
    }
    if not TE and job["ids"]:
        save_file({"logits": gpt_model.logits([model], torch.tensor(job["ids"])).contiguous()}, Path(job["output"]) / "logits.safetensors")
    return report


def load_legacy(state: dict[str, Any]) -> dict[str, Any]:
    """The report on one rank's file of the legacy format: names and shapes, and with the local spec (the stand-in for Transformer Engine
    has an order of its own) their order."""
    model = build(state["args"])
    wanted, stored = ({n: tuple(t.shape) for n, t in s.items() if "_extra_state" not in n} for s in (model.state_dict(), state["model"]))
    wrong = sorted(n for n in wanted.keys() & stored.keys() if wanted[n] != stored[n])
    if not wrong and wanted.keys() == stored.keys():
        model.load_state_dict(state["model"], strict=False)
        wrong = [] if TE or list(wanted) == list(stored) else [f"order: {list(stored)}"]
    return {"missing": sorted(wanted.keys() - stored.keys()), "unexpected": sorted(stored.keys() - wanted.keys()) + wrong}


def norm_weight(name: str) -> bool:
    """Whether a parameter is the weight of a norm."""
    return name.endswith(("norm.weight", "layer_norm_weight"))


def report(job: dict[str, Any]) -> None:
    """One job, whatever comes of it."""
    output = Path(job["output"])
    output.mkdir(parents=True, exist_ok=True)
    try:
        found = load(job) | {"error": None}
    except Exception:
        found = {"missing": [], "unexpected": [], "error": traceback.format_exc()[-3000:]}
    (output / "report.json").write_text(json.dumps(found, indent=1))


def start(job: dict[str, Any]) -> None:
    """Processes and groups are made with the first job."""
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        gpt_model.split_ranks(1, 1)
    report(job)


if __name__ == "__main__":
    if TE:
        import sys

        sys.path.insert(0, str(Path(__file__).parent / "te_names"))
    cpu_shim.install()
    gpt_model.run_jobs(start)
