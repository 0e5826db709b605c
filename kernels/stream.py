"""A stream of host bytes through a device with two slots: while the device works on one, the host fills and drains the other.

Imports torch. The code is the same on a CPU and on a GPU; only pinned memory and the CUDA stream and event of a slot are absent on the CPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch  # noqa: TID253  - nobody imports this module on the way of a conversion

from ..errors import CkptError

T = TypeVar("T")
Work = Callable[[torch.Tensor], torch.Tensor]


@dataclass(slots=True)
class _Slot(Generic[T]):
    """Pinned host buffers and a device buffer of one of the two blocks under way; `item` is None when it is free."""

    host_in: torch.Tensor
    host_out: torch.Tensor
    device: torch.Tensor
    stream: Any
    done: Any
    item: T | None = None
    size: int = 0
    keep: list[torch.Tensor] = field(default_factory=list)


def stream(
    items: Iterable[T],
    fill: Callable[[T, torch.Tensor], int],
    work: Work,
    drain: Callable[[T, torch.Tensor], None],
    *,
    device: str,
    in_bytes: int,
    out_bytes: int,
) -> None:
    """For each item in order: `fill` bytes in, `work` on the device, `drain` the result.

    fill(item, buffer)   writes into uint8 `buffer` of in_bytes and returns how many bytes it wrote.
    work(block)          gets those bytes as a uint8 tensor on the device and returns uint8 [at most out_bytes] there, not synchronising.
    drain(item, result)  gets the result on the host; the buffer is reused afterwards.
    Memory: twice (2 * in_bytes + out_bytes). E490 when a block does not fit its buffer, E901 without the device.
    """
    slots: list[_Slot[T]] = [_slot(torch.device(device), in_bytes, out_bytes) for _ in range(2)]
    turn = 0
    for item in items:
        slot = slots[turn]
        turn = 1 - turn
        _finish(slot, drain)
        used = fill(item, slot.host_in)
        if not 0 <= used <= in_bytes:
            raise CkptError("E490", "a block does not fit its buffer", expected=f"at most {in_bytes} bytes", found=str(used))
        _start(slot, item, used, work, out_bytes)
    for slot in (slots[turn], slots[1 - turn]):
        _finish(slot, drain)


def _slot(device: torch.device, in_bytes: int, out_bytes: int) -> _Slot[T]:
    cuda = device.type == "cuda"
    if cuda and not torch.cuda.is_available():
        raise CkptError("E901", "there is no GPU that torch can use", found=str(device))
    host_in, host_out = (torch.empty(n, dtype=torch.uint8, pin_memory=cuda) for n in (in_bytes, out_bytes))
    on_device = torch.empty(in_bytes, dtype=torch.uint8, device=device)
    return _Slot(host_in, host_out, on_device, torch.cuda.Stream(device) if cuda else None, torch.cuda.Event() if cuda else None)


@contextlib.contextmanager
def _on(slot: _Slot[T]) -> Iterator[None]:
    if slot.stream is None:
        yield
        return
    with torch.cuda.device(slot.stream.device), torch.cuda.stream(slot.stream):
        yield
        slot.done.record()


def _start(slot: _Slot[T], item: T, used: int, work: Work, out_bytes: int) -> None:
    """Queue copy in, work and copy out on the slot's stream."""
    with _on(slot):
        block = slot.device[:used]
        block.copy_(slot.host_in[:used], non_blocking=True)
        result = work(block)
        if result.dtype != torch.uint8 or result.dim() != 1 or result.numel() > out_bytes:
            raise CkptError(
                "E490",
                "the result of a block does not fit its buffer",
                expected=f"uint8, at most {out_bytes}",
                found=f"{result.dtype} {list(result.shape)}",
            )
        slot.host_out[: result.numel()].copy_(result, non_blocking=True)
        slot.item, slot.size, slot.keep = item, result.numel(), [result]  # the device must be done with `result` before it is freed


def _finish(slot: _Slot[T], drain: Callable[[T, torch.Tensor], None]) -> None:
    """Wait for the slot's block and hand it out."""
    if slot.item is None:
        return
    if slot.done is not None:
        slot.done.synchronize()
    item, slot.item, slot.keep = slot.item, None, []
    drain(item, slot.host_out[: slot.size])
