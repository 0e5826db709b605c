"""No torch, and memory bounded by the buffer: what the command line costs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from builders import CONFIG, dense_shapes, read_hf, same, write_hf

ROOT = Path(__file__).parents[1]
LIMIT = 64 * 2**20  # bytes; plus 4 KiB per tensor


def run(*args, check=True):
    """Run the CLI in a fresh process; returns (stdout, peak RSS in bytes, names of imported modules)."""
    # VmHWM belongs to this program alone; ru_maxrss would include the test runner that forked it
    code = (
        "import sys, json\nsys.argv[1:] = json.loads(sys.argv[1])\nfrom ckpt_tools.commands.main import main\ncode = main()\n"
        "peak = next(int(l.split()[1]) * 1024 for l in open('/proc/self/status') if l.startswith('VmHWM'))\n"
        "print(json.dumps([code, peak, sorted(m for m in sys.modules if '.' not in m)]), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps([str(a) for a in args])], cwd=ROOT, capture_output=True, text=True, check=False
    )
    status, rss, modules = json.loads(done.stderr.splitlines()[-1])
    assert not check or status == 0, done.stderr
    return done.stdout, rss, modules


@pytest.fixture(scope="module")
def big(tmp_path_factory):
    """A model of some 60 MB whose embedding alone is 100 buffers large."""
    folder = tmp_path_factory.mktemp("big") / "hf"
    sizes = {"hidden_size": 512, "head_dim": 128, "intermediate_size": 2048, "vocab_size": 13000, "num_hidden_layers": 1}
    config = {**CONFIG, **sizes}
    rng = np.random.default_rng(0)
    tensors = {n: rng.standard_normal(s, dtype=np.float32) for n, s in dense_shapes(config).items()}
    write_hf(folder, tensors=tensors, **sizes)
    return folder, tensors


def test_inspect_and_convert_never_import_torch(tmp_path, big):
    folder, _ = big
    for args in (
        ("inspect", folder),
        ("convert", folder, tmp_path / "run", "--to", "torch_dist", "--verify"),
        ("inspect", tmp_path / "run"),
        ("convert", tmp_path / "run", tmp_path / "out", "--to", "hf", "--verify"),
        ("--help",),
        ("convert", "--help"),
    ):
        _, _, modules = run(*args)
        assert not {"torch", "transformers", "megatron", "triton", "safetensors"} & set(modules), args


@pytest.mark.parametrize("options", [(), ("--verify",), ("--tp", "8"), ("--dtype", "bfloat16"), ("--threads", "4", "--buffer", "1MiB")])
def test_memory_does_not_grow_with_the_model(tmp_path, big, options):
    folder, tensors = big
    _, rss, _ = run("convert", folder, tmp_path / "run", "--to", "torch_dist", "--buffer", "64KiB", *options)
    assert rss < LIMIT + 4096 * len(tensors)
    _, rss, _ = run("convert", tmp_path / "run", tmp_path / "back", "--to", "hf")
    assert rss < LIMIT + 4096 * len(tensors)
    if "--dtype" not in options:
        assert same(read_hf(tmp_path / "back"), tensors)


def test_a_sparse_model_of_a_hundred_gigabytes_is_planned_in_bounded_memory(tmp_path):
    sizes = {
        "hidden_size": 8192,
        "head_dim": 128,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "intermediate_size": 28672,
        "vocab_size": 128256,
        "num_hidden_layers": 56,
    }
    shapes = dense_shapes({**CONFIG, **sizes})
    table, position = {}, 0
    for name, shape in shapes.items():
        size = int(np.prod(shape)) * 2
        table[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [position, position + size]}
        position += size
    assert position > 98e9
    header = json.dumps(table).encode()
    (tmp_path / "hf").mkdir()
    with open(tmp_path / "hf" / "model.safetensors", "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + position)
    (tmp_path / "hf" / "config.json").write_text(json.dumps({**CONFIG, **sizes, "torch_dtype": "bfloat16"}))
    stdout, rss, _ = run("convert", tmp_path / "hf", tmp_path / "run", "--to", "torch_dist", "--tp", "8", "--dry-run", "--json")
    answer = json.loads(stdout)
    assert answer["tensor_bytes"] > 98e9 and rss < LIMIT + 4096 * answer["tensors"]
