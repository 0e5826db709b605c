"""A minimal trainer on megatron-core: how a GPT model is built, trained, saved and resumed, in as little code as that takes.

    python -m ckpt_tools.resume.trainer JOBS.json               one process
    torchrun --nproc-per-node 4 -m ckpt_tools.resume.trainer JOBS.json

Read loop.py first: it is the whole story. The other modules each do one thing for it. Megatron-LM's own pretrain script does the same
with many more options; where a step follows it, the comment names the function. CPU and gloo by default, CUDA and NCCL where there are.
"""
