"""Two slots under way: blocks come out in order and whole, buffers are not reused too early, and errors say what did not fit."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from ckpt_tools.errors import CkptError
from ckpt_tools.kernels import backend

torch = pytest.importorskip("torch")
BLOCK = 4096


def devices() -> list[str]:
    return ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.mark.parametrize("device", devices())
def test_a_file_is_cast_through_the_device_block_by_block(tmp_path: Path, device: str) -> None:
    from ckpt_tools.kernels.stream import stream

    values = np.random.default_rng(0).standard_normal(10_001).astype(np.float32)
    source, target = tmp_path / "float32", tmp_path / "bfloat16"
    source.write_bytes(values.tobytes())
    kernels, log = backend("torch"), []
    with source.open("rb") as read, target.open("wb") as write:

        def fill(offset: int, buffer: torch.Tensor) -> int:
            log.append(("fill", offset))
            return os.preadv(read.fileno(), [memoryview(buffer.numpy())], offset)

        def work(block: torch.Tensor) -> torch.Tensor:
            return kernels.cast(block.view(torch.float32), "bfloat16")[0].view(torch.uint8)

        def drain(offset: int, result: torch.Tensor) -> None:
            log.append(("drain", offset))
            os.pwrite(write.fileno(), memoryview(result.numpy()), offset // 2)

        offsets = range(0, values.nbytes, BLOCK)
        stream(offsets, fill, work, drain, device=device, in_bytes=BLOCK, out_bytes=BLOCK // 2)
    assert target.read_bytes() == backend("numpy").cast(values, "bfloat16")[0].tobytes()
    assert [o for what, o in log if what == "drain"] == list(offsets)
    assert log[:3] == [("fill", 0), ("fill", BLOCK), ("drain", 0)]  # a second block is on its way before the first is waited for


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_any_number_of_blocks(count: int) -> None:
    from ckpt_tools.kernels.stream import stream

    out: list[int] = []

    def fill(item: int, buffer: torch.Tensor) -> int:
        buffer[0] = item
        return 1

    stream(
        range(count), fill, lambda block: block + 1, lambda item, result: out.append(int(result[0])), device="cpu", in_bytes=1, out_bytes=1
    )
    assert out == [i + 1 for i in range(count)]


def test_what_does_not_fit_its_buffer_is_refused() -> None:
    from ckpt_tools.kernels.stream import stream

    with pytest.raises(CkptError, match="block does not fit"):
        stream([0], lambda item, buffer: 5, lambda block: block, lambda item, result: None, device="cpu", in_bytes=4, out_bytes=4)
    with pytest.raises(CkptError, match="result of a block"):
        stream([0], lambda item, buffer: 4, lambda block: block.repeat(2), lambda item, result: None, device="cpu", in_bytes=4, out_bytes=4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_message_says_so() -> None:
    from ckpt_tools.kernels.stream import stream

    with pytest.raises(CkptError, match="no GPU"):
        stream([0], lambda item, buffer: 0, lambda block: block, lambda item, result: None, device="cuda", in_bytes=4, out_bytes=4)
