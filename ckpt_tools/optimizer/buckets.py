"""Where Megatron's data-parallel wrapper puts each parameter in its buffers: the layout of buckets, recomputed from sizes alone.

Sources: Megatron-LM distributed/param_and_grad_buffer.py and distributed_data_parallel.py (0.6 to 0.16), optimizer/param_layout.py (0.19).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

ALIGN = 64  # elements; the start of a parameter, since 0.8


@dataclass(frozen=True, slots=True)
class Item:
    """A parameter as the buffer sees it: elements, and whether it is an embedding shared between pipeline stages."""

    numel: int
    shared: bool = False


@dataclass(frozen=True, slots=True)
class Buckets:
    """The layout of one buffer, in elements.

    slots     per parameter, in the order given (registration order): (bucket, first element in the bucket).
    unpadded  elements of each bucket without the padding at its end;   padded  with it.
    """

    slots: tuple[tuple[int, int], ...]
    unpadded: tuple[int, ...]
    padded: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements of all buckets without the padding at their ends: what is stored when buckets are joined."""
        return sum(self.unpadded)

    def compact(self, index: int) -> int:
        """First element of a parameter in the joined buckets without padding: where it lies in a gathered ("world") tensor."""
        bucket, start = self.slots[index]
        return sum(self.unpadded[:bucket]) + start

    def full(self, index: int) -> int:
        """First element of a parameter in the joined buckets with padding: where it lies in memory."""
        bucket, start = self.slots[index]
        return sum(self.padded[:bucket]) + start


def end_divisor(dp: int, high_bandwidth: bool = False) -> int:
    """What the end of a bucket is padded to. dp: ranks that share the buffer (data x context parallel, or expert data parallel)."""
    return math.lcm(dp, 128, 2**16) if high_bandwidth else math.lcm(dp, 128)


def recompute(items: Sequence[Item], bucket_size: int | None, divisor: int, align: int = ALIGN) -> Buckets:
    """The layout from sizes: parameters in reverse registration order, `align` elements apart, a new bucket once `bucket_size` elements
    are reached (None: one bucket), a bucket of its own for every shared embedding, bucket ends padded to `divisor`."""
    slots: list[tuple[int, int]] = [(0, 0)] * len(items)
    unpadded: list[int] = []
    padded: list[int] = []
    position = 0  # in the bucket; buckets begin at multiples of `align`
    filled = False

    def close(end: int) -> None:
        nonlocal position, filled
        unpadded.append(end)
        padded.append(-(-end // divisor) * divisor)
        position, filled = 0, False

    for index in reversed(range(len(items))):
        item = items[index]
        position = -(-position // align) * align
        if item.shared and filled:
            close(position)
        slots[index] = (len(unpadded), position)
        position += item.numel
        filled = True
        if item.shared or (bucket_size is not None and position >= bucket_size):
            close(position)
    if filled:
        close(position)
    return Buckets(tuple(slots), tuple(unpadded), tuple(padded))


def fit(items: Sequence[Item], unpadded: Sequence[int], padded: Sequence[int], align: int = ALIGN) -> Buckets | None:
    """The only layout of these parameters whose buckets have the recorded sizes, or None when there is none.

    The end of each bucket is what its recorded size says, so neither bucket size nor data-parallel size need be known.
    """
    slots: list[tuple[int, int]] = [(0, 0)] * len(items)
    bucket, position, filled = 0, 0, False
    for index in reversed(range(len(items))):
        position = -(-position // align) * align
        if filled and bucket < len(unpadded) and position == unpadded[bucket]:
            bucket, position, filled = bucket + 1, 0, False
        if bucket >= len(unpadded):
            return None
        slots[index] = (bucket, position)
        position += items[index].numel
        filled = True
        if position > unpadded[bucket]:
            return None
        if position == unpadded[bucket]:
            bucket, position, filled = bucket + 1, 0, False
    if filled or bucket != len(unpadded) or len(padded) != len(unpadded) or any(p < u for u, p in zip(unpadded, padded, strict=True)):
        return None
    return Buckets(tuple(slots), tuple(unpadded), tuple(padded))


def default_bucket_size(dp: int) -> int:
    """Elements after which a bucket is closed when --ddp-bucket-size is not given and gradients are reduced during the backward pass."""
    return max(40_000_000, 1_000_000 * dp)
