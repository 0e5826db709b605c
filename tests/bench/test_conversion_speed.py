"""Conversions against `cp -r` of the same bytes and against the peers, pair by pair in one run.

    make bench            # or: python -m pytest tests/bench/test_conversion_speed.py --benchmark-only -s
    CKPT_BENCH_GB=0.3     # smaller models for a quick look; CKPT_BENCH_ROUNDS=7 for steadier figures

Each round runs cp and ckpt one after the other, in alternating order, outputs removed and `sync` called before each; every result is
compared byte for byte. Figures are medians of the per-round ratios. cp does not flush to disk; ckpt is measured without and with it.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
from builders import CONFIG, dense_shapes

ROOT = Path(__file__).parents[2]
SIZE = float(os.environ.get("CKPT_BENCH_GB", "1.2"))
ROUNDS = int(os.environ.get("CKPT_BENCH_ROUNDS", "5"))
MODELS = {
    "small: 310 tensors": {
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "vocab_size": 151936,
    },
    "wide: 147 tensors": {
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "vocab_size": 128256,
    },
    "many: 3000 tensors": {
        "hidden_size": 256,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "intermediate_size": 1536,
        "num_hidden_layers": 333,
        "vocab_size": 32000,
    },
}


def write_model(folder: Path, sizes: dict) -> Path:
    """Random bf16 weights in shards of 500 MB, about CKPT_BENCH_GB (layers are dropped or kept to fit)."""
    from ckpt_tools.formats.safetensors import layout_file  # the layout is judged elsewhere; here only bytes matter

    config = {**CONFIG, **sizes, "torch_dtype": "bfloat16"}
    per_layer = sum(
        s[0] * (s[1] if len(s) > 1 else 1) * 2 for n, s in dense_shapes({**config, "num_hidden_layers": 1}).items() if ".layers." in n
    )
    config["num_hidden_layers"] = max(2, min(config["num_hidden_layers"], int(SIZE * 1e9 / per_layer)))
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    shapes, shards, size = dense_shapes(config), [[]], 0
    for name, shape in shapes.items():
        nbytes = shape[0] * (shape[1] if len(shape) > 1 else 1) * 2
        if shards[-1] and size + nbytes > 500e6:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += nbytes
    weight_map, block = {}, os.urandom(1 << 20)
    for i, names in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        laid = layout_file([(n, "bfloat16", shapes[n]) for n in names], {"format": "pt"})
        with open(folder / file, "wb") as out:
            out.write(laid.header)
            left, turn = laid.size - len(laid.header), 0
            while left:
                turn = (turn + 4099) % 65536  # no two blocks alike
                part = (block[turn:] + block[:turn])[: min(left, 1 << 20)]
                out.write(part)
                left -= len(part)
        weight_map |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map}))
    return folder


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory):
    """An HF folder, the torch_dist folder made of it, and its name."""
    base = tmp_path_factory.mktemp("bench")
    folder = write_model(base / "hf", MODELS[request.param])
    subprocess.run(
        [sys.executable, "-m", "ckpt_tools", "convert", folder, base / "run", "--to", "torch_dist"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    yield request.param, folder, base / "run"
    shutil.rmtree(base)


# Peak memory is VmHWM, which belongs to the program alone; ru_maxrss would include the test runner that forked it.
PEAK = "\nimport sys\nprint('peak', next(l.split()[1] for l in open('/proc/self/status') if l.startswith('VmHWM')), file=sys.stderr)"


def measured(command: list[str]) -> tuple[float, float, float]:
    """(wall s, CPU s, peak MB or 0) of a process of its own, outputs flushed away before it starts."""
    os.sync()
    start = time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    error = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0, error.decode()[-2000:]
    peak = [int(line.split()[1]) for line in error.decode().splitlines() if line.startswith("peak ")]
    return time.perf_counter() - start, usage.ru_utime + usage.ru_stime, (peak[-1] if peak else 0) / 1024


def pairs(benchmark, source: Path, out: Path, command: list[str], check) -> None:
    """Rounds of cp and ours in turn; ratios go to the benchmark's extra_info and to stdout."""
    copy = out.parent / "copy"
    walls, cpus, peaks, seconds = [], [], [], []

    def once(number: int) -> None:
        order = ["cp", "ckpt"] if number % 2 else ["ckpt", "cp"]
        results = {}
        for who in order:
            shutil.rmtree(copy, ignore_errors=True)
            shutil.rmtree(out, ignore_errors=True)
            results[who] = measured(["cp", "-r", str(source), str(copy)] if who == "cp" else command)
            if who == "ckpt":
                check(out)
        walls.append(results["ckpt"][0] / results["cp"][0])
        cpus.append(results["ckpt"][1] / results["cp"][1])
        peaks.append(results["ckpt"][2])
        seconds.append(results["ckpt"][0])

    once(0)  # the page cache is warm and its pages are touched afterwards
    for kept in (walls, cpus, peaks, seconds):
        kept.clear()
    numbers = iter(range(1, 1000))
    benchmark.pedantic(lambda: once(next(numbers)), rounds=ROUNDS, iterations=1)
    shutil.rmtree(copy, ignore_errors=True)
    shutil.rmtree(out, ignore_errors=True)
    info = {
        "wall/cp": statistics.median(walls),
        "cpu/cp": statistics.median(cpus),
        "peak MB": max(peaks),
        "seconds": statistics.median(seconds),
    }
    benchmark.extra_info.update({k: round(v, 2) for k, v in info.items()})
    wall = f"wall {info['wall/cp']:.2f}x cp [{min(walls):.2f}-{max(walls):.2f}]"
    print(f"\n{benchmark.name}: {wall}, CPU {info['cpu/cp']:.2f}x, {info['seconds']:.2f} s, peak {info['peak MB']:.0f} MB", flush=True)


def ckpt(*args: object) -> list[str]:
    """Command line of ckpt in a program that tells its peak memory."""
    run = "from ckpt_tools.commands.main import main\ncode = main()"
    return [sys.executable, "-c", f"import sys\nsys.argv[1:] = {list(map(str, args))!r}\n{run}{PEAK}\nsys.exit(code)"]


def same_shards(source: Path):
    """A check that the folder made holds the same safetensors bytes."""

    def check(out: Path) -> None:
        for file in source.glob("*.safetensors"):
            subprocess.run(["cmp", file, out / file.name], check=True)

    return check


@pytest.mark.parametrize(
    "options",
    [("--no-fsync",), ("--no-fsync", "--threads", "1"), ("--fsync",), ("--no-fsync", "--verify"), ("--no-fsync", "--tp", "8")],
    ids=" ".join,
)
def test_hf_to_torch_dist(benchmark, model, tmp_path, options):
    name, folder, run = model
    benchmark.name = f"HF -> torch_dist, {name}, {' '.join(options)}"

    def check(out: Path) -> None:
        if "--tp" not in options:
            for file in run.rglob("*.distcp"):
                subprocess.run(["cmp", file, out / file.relative_to(run)], check=True)

    pairs(benchmark, folder, tmp_path / "out", ckpt("convert", folder, tmp_path / "out", "--to", "torch_dist", *options), check)


@pytest.mark.parametrize("options", [("--no-fsync",), ("--no-fsync", "--threads", "1")], ids=" ".join)
def test_torch_dist_to_hf(benchmark, model, tmp_path, options):
    name, folder, run = model
    benchmark.name = f"torch_dist -> HF, {name}, {' '.join(options)}"
    pairs(benchmark, run, tmp_path / "out", ckpt("convert", run, tmp_path / "out", "--to", "hf", *options), same_shards(folder))


PEERS = {
    "safetensors load + save": """
from safetensors.torch import load_file, save_file
import glob, os
for f in sorted(glob.glob(src + "/*.safetensors")):
    save_file(load_file(f), os.path.join(dst, os.path.basename(f)), {"format": "pt"})
""",
    "transformers load + save": """
from transformers import AutoModelForCausalLM
AutoModelForCausalLM.from_pretrained(src).save_pretrained(dst, max_shard_size="500MB")
""",
    "torch DCP save": """
from safetensors.torch import load_file
import glob, torch.distributed.checkpoint as dcp
state = {}
for f in sorted(glob.glob(src + "/*.safetensors")):
    state.update(load_file(f))
dcp.save(state, checkpoint_id=dst, no_dist=True)
""",
}


@pytest.mark.parametrize("peer", PEERS)
def test_peers(benchmark, model, tmp_path, peer):
    name, folder, _ = model
    if not name.startswith("small"):
        pytest.skip("peers are measured on one model")
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    benchmark.name = f"{peer}, {name}"
    code = f"import sys, os\nsrc, dst = {str(folder)!r}, {str(tmp_path / 'out')!r}\nos.makedirs(dst)\n{PEERS[peer]}"
    pairs(benchmark, folder, tmp_path / "out", [sys.executable, "-P", "-W", "ignore", "-c", code + PEAK], lambda _: None)
