"""Deterministic data: a sample's number decides its tokens, and the count of consumed samples decides which come next.

This is the bookkeeping that a resume must get right: a run that continues goes on with the sample after the last one it consumed, whatever
the data-parallel size was.
"""

from __future__ import annotations

import torch


def sample(number: int, length: int, vocabulary: int, seed: int) -> torch.Tensor:
    """length + 1 tokens of sample `number`: an arithmetic progression, which a model can learn in a few steps, with some noise."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
    start, stride = torch.randint(vocabulary, (1,), generator=generator), torch.randint(1, 4, (1,), generator=generator)
    tokens = (start + stride * torch.arange(length + 1)) % vocabulary
    noise = torch.rand(length + 1, generator=generator) < 0.05
    return torch.where(noise, torch.randint(vocabulary, (length + 1,), generator=generator), tokens)


def own_samples(consumed: int, sequences: int, replica: int, replicas: int) -> list[int]:
    """Numbers of the samples that one data-parallel rank takes in the step after `consumed` samples."""
    share = sequences // replicas
    return list(range(consumed + replica * share, consumed + (replica + 1) * share))
