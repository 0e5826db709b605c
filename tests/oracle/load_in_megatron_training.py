"""Loads torch_dist checkpoints the way a Megatron-LM job does: its own argument parser, --use-checkpoint-args, its own load_checkpoint.

    PYTHONPATH=(megatron-core 0.19.2) python tests/oracle/load_in_megatron_training.py JOBS.json

Works with megatron.training, which the megatron-core wheel ships from 0.19. JOBS.json is a list of {"run": run folder, "output": folder,
"arguments": [more command-line arguments]}. Nothing about the model is given on the command line except what --use-checkpoint-args does not
cover in Megatron-LM itself (`arguments`: --norm-epsilon, --qk-layernorm, --use-rope-scaling, ...). One process, one model-parallel rank.
OUTPUT/rank0.safetensors holds the parameters under global layer numbers, OUTPUT/report.json the iteration and what was taken from `args`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gpt_model

_HOW_TO_RUN = (
    "--use-checkpoint-args --use-cpu-initialization --distributed-backend gloo --transformer-impl local --attention-backend unfused "
    "--no-persist-layer-norm --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-swiglu-fusion --no-rope-fusion "
    "--tokenizer-type NullTokenizer --vocab-size 509 --micro-batch-size 1 --mock-data --train-iters 1 --lr 0 --ckpt-format torch_dist "
    "--no-load-optim --no-load-rng --dist-ckpt-strictness raise_unexpected"
)


def load(job: dict[str, Any]) -> None:
    """One job."""
    from megatron.core import __version__, num_microbatches_calculator
    from megatron.training import arguments, checkpointing, global_vars
    from safetensors.torch import save_file

    gpt_model.split_ranks(1, 1)
    sys.argv = ["train", *_HOW_TO_RUN.split(), "--load", job["run"], *job.get("arguments", [])]
    args = arguments.parse_args()
    before = dict(vars(args))
    args, _ = checkpointing.load_args_from_checkpoint(args)
    taken = {name: value for name, value in vars(args).items() if value != before.get(name)}
    arguments.validate_args(args)
    global_vars.unset_global_variables()
    global_vars.set_args(args)
    num_microbatches_calculator.unset_num_microbatches_calculator()
    num_microbatches_calculator.init_num_microbatches_calculator(0, None, args.global_batch_size, args.micro_batch_size, 1)
    config = arguments.core_transformer_config_from_args(args)
    chunks = gpt_model.model_chunks(args, config)
    for parameter in chunks[0].parameters():
        parameter.data.fill_(float("nan"))
    iteration, _ = checkpointing.load_checkpoint(chunks, None, None)
    names = gpt_model.global_names(chunks[0])
    output = Path(job["output"])
    output.mkdir(parents=True, exist_ok=True)
    held = {names[name]: parameter.detach().clone().contiguous() for name, parameter in chunks[0].named_parameters()}
    save_file(held, output / "rank0.safetensors", {"tp_rank": "0", "tp": "1", "pp_rank": "0", "pp": "1"})
    report = {
        "megatron_core": __version__,
        "iteration": iteration,
        "padded_vocab_size": args.padded_vocab_size,
        "taken": {name: str(value) for name, value in sorted(taken.items())},
    }
    (output / "report.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":  # megatron-core's writer starts processes that import this file again
    gpt_model.run_jobs(load)
