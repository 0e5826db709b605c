"""The processes of a run and Megatron's groups over them."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

LIMIT = timedelta(minutes=10)  # for one collective: what a rank may be late


def start_processes() -> None:
    """NCCL where there is CUDA, else gloo, over the ranks that torchrun started; without torchrun a group of one that opens no port."""
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    else:
        torch.set_num_threads(1)
    backend = "nccl" if cuda else "gloo"
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend, timeout=LIMIT)
    else:
        dist.init_process_group(backend, timeout=LIMIT, rank=0, world_size=1, store=dist.HashStore())


def split_ranks(args: Any, seed: int) -> None:
    """Megatron's tensor, pipeline and expert groups, and every random generator seeded as Megatron-LM does (_set_random_seed); what the
    model does not use is data parallel."""
    import random

    import numpy

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=args.virtual_pipeline_model_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        create_gloo_process_groups=True,
    )
    own = seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(own)
    numpy.random.seed(own)
    torch.manual_seed(own)
    tensor_parallel.model_parallel_cuda_manual_seed(own, force_reset_rng=True)


def rank() -> int:
    """This process' number."""
    return int(dist.get_rank())
