"""A few real training steps on the CPU: megatron-core's data-parallel wrapper, pipeline schedule and optimizer around given GPTModels.

It exists to give checkpoints an optimizer state that Megatron itself wrote, and to prove that cpu_shim is enough to train.
"""

from __future__ import annotations

from typing import Any


def train(chunks: list[Any], steps: int, learning_rate: float, distributed_optimizer: bool = False) -> tuple[Any, list[float]]:
    """Train `chunks` (built in this process' layout) in place on fixed tokens; the optimizer, and each step's loss on the last stage.

    Adam, two microbatches of (2, 32) tokens a step, data parallel over the remaining ranks; stages but the last get no losses. With
    learning_rate 0 the weights keep every bit.
    """
    import torch
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func

    config = chunks[0].config
    wrapping = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=distributed_optimizer)
    wrapped = [DistributedDataParallel(config, wrapping, chunk.train()) for chunk in chunks]
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=learning_rate,
            min_lr=learning_rate,
            weight_decay=0.0,
            clip_grad=1.0,
            bf16=config.params_dtype == torch.bfloat16,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=distributed_optimizer,
        ),
        wrapped,
    )
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    length, batch, vocabulary = 32, 2, 500
    positions = torch.arange(length)[None].expand(batch, -1)
    mask = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)[None, None]
    replica = parallel_state.get_data_parallel_rank()

    def forward(batches: Any, model: Any) -> tuple[Any, Any]:
        ids, labels = next(batches)

        def loss(output: Any) -> tuple[Any, dict[str, Any]]:
            mean = output.float().mean()
            return mean, {"loss": mean.detach()}

        return model(ids, positions, mask, labels=labels), loss

    schedule = get_forward_backward_func()
    losses = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(1000 * replica + step)
        tokens = [torch.randint(0, vocabulary, (batch, length + 1), generator=generator) for _ in range(2)]
        for model in wrapped:
            model.zero_grad_buffer()
        optimizer.zero_grad()
        answers = schedule(
            forward_step_func=forward,
            data_iterator=[iter([(ids[:, :-1], ids[:, 1:]) for ids in tokens]) for _ in wrapped],
            model=wrapped,
            num_microbatches=len(tokens),
            seq_length=length,
            micro_batch_size=batch,
            forward_only=False,
        )
        updated, _, _ = optimizer.step()
        if not updated:
            raise RuntimeError("the optimizer skipped its step")
        if answers:
            losses.append(float(sum(answer["loss"] for answer in answers) / len(answers)))
    for chunk in chunks:
        chunk.eval()
    return optimizer, losses
