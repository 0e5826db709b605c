"""Lists the parameters of real GPTModels in registration order, and lays out buckets with megatron-core's own function.

    python tests/oracle/parameter_orders.py JOBS.json

A job {"models": [{"name", "spec": "local" | "te", "config": {TransformerConfig fields}, "experts", "grouped", "tied", "mtp"}], "fake_te":
folder of a module fake_te that stands in for Transformer Engine's module interface, or null, "output": file} writes name -> [[parameter,
shape], ...]. A job {"layouts": [{"sizes": [[elements, shared], ...], "bucket_size", "dp", "high": false}], "output": file} writes, per
layout, {"slots": [[start, end, bucket], ...] in registration order, "unpadded", "ends"}; it needs megatron-core 0.19.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def list_parameters(job: dict[str, Any]) -> None:
    """Registration orders."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    answer = {}
    for wanted in job["models"]:
        fields = dict(wanted["config"], use_cpu_initialization=True, activation_func=torch.nn.functional.silu, gated_linear_unit=True)
        mla = wanted.get("mla", False)
        config = (MLATransformerConfig if mla else TransformerConfig)(**fields)
        choices = {"num_experts": wanted.get("experts"), "moe_grouped_gemm": wanted.get("grouped", False), "multi_latent_attention": mla}
        choices["qk_layernorm"] = config.qk_layernorm
        if wanted["spec"] == "local":
            spec = gpt_layer_specs.get_gpt_layer_local_spec(**choices, normalization="RMSNorm")
        else:
            spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(**choices)
        extra = {}
        if wanted.get("mtp"):
            extra["mtp_block_spec"] = gpt_layer_specs.get_gpt_mtp_block_spec(config, spec, use_transformer_engine=wanted["spec"] == "te")
        model = GPTModel(
            config, spec, 64, 32, position_embedding_type="rope", share_embeddings_and_output_weights=wanted.get("tied", False), **extra
        )
        answer[wanted["name"]] = [[n, list(p.shape)] for n, p in model.named_parameters()]
    Path(job["output"]).write_text(json.dumps(answer))


def lay_out(job: dict[str, Any]) -> None:
    """Bucket layouts."""
    import torch
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    answer = []
    for wanted in job["layouts"]:
        parameters = []
        for size, shared in wanted["sizes"]:
            parameter = torch.nn.Parameter(torch.empty(size, device="meta"))
            if shared:
                parameter.shared_embedding = True  # type: ignore[attr-defined]
            parameters.append(parameter)
        config = DistributedDataParallelConfig(use_distributed_optimizer=True, pad_buckets_for_high_nccl_busbw=wanted.get("high", False))
        layout = DistributedOptimizer._compute_per_buffer_param_layout(parameters, wanted["bucket_size"], wanted["dp"], config)
        answer.append(
            {
                "slots": [list(layout.param_index_map[p]) for p in parameters],
                "unpadded": list(layout.per_bucket_numel_unpadded),
                "ends": [end for _, end in layout.bucket_indices],
            }
        )
    Path(job["output"]).write_text(json.dumps(answer))


def main() -> None:
    """All jobs of the file named on the command line, in one process."""
    import gpt_model

    from ckpt_tools.resume.trainer import cpu_shim

    path = Path(sys.argv[1])
    jobs = json.loads(path.read_text())
    folder = next((j["fake_te"] for j in jobs if j.get("fake_te")), None)
    if folder:
        sys.path.insert(0, folder)
        import fake_te

        fake_te.install()
    cpu_shim.install()
    gpt_model.start_processes()
    for number, job in enumerate(jobs, 1):
        (list_parameters if "models" in job else lay_out)(job)
        path.with_suffix(".done").write_text(str(number))


if __name__ == "__main__":
    main()
