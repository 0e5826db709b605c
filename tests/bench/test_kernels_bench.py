"""The kernels against copying: what fraction of the device's copy bandwidth they reach, next to plain torch (slicing, cat, transpose).

    python -m pytest tests/bench/test_kernels_bench.py -s
    CKPT_BENCH_MB=2048    # bytes moved per case (default 256 on a CPU, 4096 on a GPU)

Copy bandwidth = one contiguous copy of the same bytes on the same device, timed in turn with the cases. Plain torch and the casts allocate
their results, as such code does. On a GPU the times come from CUDA events after a warm-up. Figures are medians; nothing is asserted about
speed, only that the bytes are right. The Triton lines need a GPU.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest

from ckpt_tools.errors import CkptError
from ckpt_tools.kernels import Backend, backend, tables
from ckpt_tools.planning import Move

torch = pytest.importorskip("torch")
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
SIZE = int(os.environ.get("CKPT_BENCH_MB", "4096" if ON_GPU else "256")) * 2**20
ROUNDS = 20 if ON_GPU else 7
Case = tuple[str, tuple[Move, ...], list[Any], list[Any], Callable[[list[Any]], list[Any]]]


def seconds(work: Callable[[], object]) -> float:
    """How long one call takes; on a GPU by events on its stream."""
    if not ON_GPU:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    work()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / 1000


def weights(rows: int, columns: int, count: int = 1) -> list[Any]:
    """bfloat16 matrices with random bits."""
    return [torch.randint(-(2**15), 2**15, (rows, columns), dtype=torch.int16, device=DEVICE).view(torch.bfloat16) for _ in range(count)]


def cases() -> list[Case]:
    """(name, table, sources, targets, the same in plain torch)."""
    hidden, dim, groups, per_group = 4096, 128, 8, 4
    layers = max(1, SIZE // 2 // (hidden * hidden * 2))
    q, k, v = (weights(n * dim * layers, hidden)[0] for n in (groups * per_group, groups, groups))

    def interleave(s: list[Any]) -> list[Any]:
        q, k, v = (t.view(groups * layers, -1, hidden) for t in s)
        return [torch.cat([q, k, v], 1).view(-1, hidden)]

    qkv = tables.interleaved_rows((per_group * dim, dim, dim), groups * layers, hidden * 2, 2)
    ffn = SIZE // 2 // (hidden * 2) // 16 * 16
    row = weights(hidden, ffn)
    experts = max(1, SIZE // 2 // (1536 * hidden * 2))
    return [
        (
            "q, k, v -> linear_qkv",
            qkv,
            [q, k, v],
            [torch.empty(len(q) + len(k) + len(v), hidden, dtype=q.dtype, device=DEVICE)],
            interleave,
        ),
        (
            "linear_fc2: TP1 -> TP8 (columns)",
            tables.cut_columns((ffn // 8,) * 8, hidden, 2),
            row,
            [torch.empty(hidden, ffn // 8, dtype=q.dtype, device=DEVICE) for _ in range(8)],
            lambda s: [p.contiguous() for p in s[0].chunk(8, 1)],
        ),
        (
            "experts -> GroupedMLP weight1 (transpose)",
            tables.grouped_experts(experts, 1536, hidden, 2),
            weights(1536, hidden, experts),
            [torch.empty(hidden, experts * 1536, dtype=q.dtype, device=DEVICE)],
            lambda s: [torch.stack([e.t() for e in s]).view(hidden, -1)],
        ),
    ]


def backends() -> list[tuple[str, Backend]]:
    found = [("torch", backend("torch"))]
    if ON_GPU:
        try:
            found.append(("triton", backend("triton")))
        except CkptError as error:
            print(f"no Triton: {error.what}")
    else:
        found.append(("numpy", backend("numpy")))
    return found


def as_numpy(tensors: list[Any]) -> list[Any]:
    return [t.view(torch.int16).numpy() for t in tensors]


def test_moves_against_a_copy() -> None:
    print(
        f"\n{torch.cuda.get_device_name() if ON_GPU else 'CPU'}, torch {torch.__version__}, {SIZE / 2**20:.0f} MiB read + written per case"
    )
    for name, table, sources, targets, plain in cases():
        nbytes = sum(t.nbytes for t in targets)
        block = torch.empty(nbytes, dtype=torch.uint8, device=DEVICE), torch.ones(nbytes, dtype=torch.uint8, device=DEVICE)
        runs: dict[str, Callable[[], object]] = {"copy": lambda block=block: block[0].copy_(block[1])}
        for label, kernels in backends():
            given = (as_numpy(sources), as_numpy(targets)) if label == "numpy" else (sources, targets)
            runs[label] = lambda kernels=kernels, given=given: kernels.move(table, *given)  # noqa: B023  - called within this round
        runs["torch slicing + cat"] = lambda: plain(sources)  # noqa: B023
        expected = plain(sources)
        for label, work in runs.items():
            if label not in ("copy", "torch slicing + cat"):
                for target in targets:
                    target.zero_()
                work()
                assert all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(targets, expected, strict=True)), (
                    name,
                    label,
                )
        times: dict[str, list[float]] = {label: [] for label in runs}
        for _ in range(ROUNDS):
            for label, work in runs.items():
                times[label].append(seconds(work))
        copy = statistics.median(times["copy"])
        print(f"{name}: copy {2 * nbytes / copy / 1e9:.1f} GB/s")
        for label in list(runs)[1:]:
            print(f"  {label:20} {100 * copy / statistics.median(times[label]):5.0f} % of copy bandwidth")


def test_casts_and_dequantisation_against_a_copy() -> None:
    rows, columns = SIZE // 6 // 4096 // 128 * 128, 4096
    wide = torch.randn(rows, columns, device=DEVICE)
    coded, scales = backend("torch").quantise_blocks(wide)
    print()
    for label, kernels in backends():
        given: dict[str, Any] = {"wide": wide, "coded": coded, "scales": scales}
        if label == "numpy":
            import ml_dtypes

            given = {"wide": wide.numpy(), "coded": coded.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn), "scales": scales.numpy()}
        works = (
            ("float32 -> bfloat16", 6, lambda k=kernels, g=given: k.cast(g["wide"], "bfloat16")),
            ("float8 blocks -> bfloat16", 3, lambda k=kernels, g=given: k.dequantise_blocks(g["coded"], g["scales"])),
            ("float32 -> float8 blocks", 5, lambda k=kernels, g=given: k.quantise_blocks(g["wide"])),
        )
        for name, per_element, work in works:
            nbytes = rows * columns * per_element
            block = torch.empty(nbytes // 2, dtype=torch.uint8, device=DEVICE), torch.ones(nbytes // 2, dtype=torch.uint8, device=DEVICE)
            work()
            pairs = [(seconds(lambda block=block: block[0].copy_(block[1])), seconds(work)) for _ in range(ROUNDS)]
            copy, spent = (statistics.median(column) for column in zip(*pairs, strict=True))
            print(f"{label:7} {name:26} {nbytes / spent / 1e9:7.2f} GB/s, {100 * copy / spent:5.0f} % of copy bandwidth")
