"""Public bug reports about half-made output: two writers, a full disk, a kill in the middle."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from builders import CONFIG, ckpt, dense_shapes, read_hf, read_torch_dist, same, write_hf

ROOT = Path(__file__).parents[2]
LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, 4 << 20))
sys.argv[1:] = ["convert", {source!r}, {target!r}, *{options!r}]
from ckpt_tools.commands.main import main
sys.exit(main())
"""
BIG = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 1024, "vocab_size": 4096}


def start(*args, **options):
    return subprocess.Popen(
        [sys.executable, "-m", "ckpt_tools", *map(str, args)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a test run in the background may have it ignored
        **options,
    )


def leftovers(folder):
    return [p.name for p in folder.iterdir() if "ckpt-" in p.name]


def big_hf(folder):
    """About 20 MB of random weights, so that a run can be caught in the middle."""
    config = {**CONFIG, **BIG}
    rng = np.random.default_rng(0)
    return write_hf(folder, tensors={n: rng.standard_normal(s, dtype=np.float32) for n, s in dense_shapes(config).items()}, **BIG)


@pytest.mark.case("A6")
def test_of_two_writers_one_wins_and_nobody_sees_a_half(tmp_path):
    tensors = write_hf(tmp_path / "hf")
    for turn in range(6):
        out = tmp_path / f"out{turn}"
        runs = [start("convert", tmp_path / "hf", out, "--to", "hf") for _ in range(2)]
        seen = 0
        while any(r.poll() is None for r in runs):
            if out.exists():
                seen += 1
                assert same(read_hf(out), tensors)
        codes = sorted(r.wait() for r in runs)
        texts = [r.communicate()[1] for r in runs]
        assert codes in ([0, 2], [0, 0]) and codes.count(0) == 1, texts
        assert any("E408" in t or "E407" in t for t in texts)
        assert same(read_hf(out), tensors) and not leftovers(tmp_path)


@pytest.mark.case("A7")
def test_a_full_disk_leaves_nothing_and_names_the_cause(tmp_path):
    big_hf(tmp_path / "hf")
    code = LIMITED.format(source=str(tmp_path / "hf"), target=str(tmp_path / "out"), options=["--to", "torch_dist"])
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "E409" in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf"]


@pytest.mark.case("A7")
def test_a_filesystem_without_room_is_refused_before_writing(tmp_path):
    target = Path("/dev/shm")
    if not target.is_dir() or os.statvfs(target).f_bavail * os.statvfs(target).f_frsize > 40 << 40:
        pytest.skip("needs a tmpfs to measure free space on")
    free = os.statvfs(target).f_bavail * os.statvfs(target).f_frsize
    rows = free // (8 * 4) + 1000
    header = json.dumps({"model.embed_tokens.weight": {"dtype": "F32", "shape": [rows, 8], "data_offsets": [0, rows * 32]}}).encode()
    (tmp_path / "hf").mkdir()
    with open(tmp_path / "hf" / "model.safetensors", "wb") as file:  # sparse: takes no room itself
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + rows * 32)
    (tmp_path / "hf" / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": rows}))
    done = ckpt("convert", tmp_path / "hf", target / f"ckpt-test-{os.getpid()}", "--to", "hf")
    assert done.returncode == 2 and "E409" in done.stderr and not (target / f"ckpt-test-{os.getpid()}").exists()


@pytest.mark.case("A7")
@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_killed_run_leaves_no_target_and_the_next_run_succeeds(tmp_path, sig):
    tensors = big_hf(tmp_path / "hf")
    caught = 0
    for _ in range(20):
        run = start("convert", tmp_path / "hf", tmp_path / "out", "--to", "torch_dist")
        partial = tmp_path / ".out.ckpt-partial"
        while run.poll() is None and not (partial / "release").exists():
            time.sleep(0.001)
        run.send_signal(sig)
        code = run.wait()
        run.communicate()
        if (tmp_path / "out").exists():  # it was faster than the signal: then it must be whole
            assert same(
                {"n": read_torch_dist(tmp_path / "out" / "release")["decoder.final_layernorm.weight"]}, {"n": tensors["model.norm.weight"]}
            )
            subprocess.run(["rm", "-r", str(tmp_path / "out")], check=True)
            continue
        caught += 1
        assert code in (-sig, 130, 143)
        if sig != signal.SIGKILL:
            assert not leftovers(tmp_path)
        if caught == 3:
            break
    assert caught
    assert ckpt("convert", tmp_path / "hf", tmp_path / "out", "--to", "torch_dist").returncode == 0 and not leftovers(tmp_path)


@pytest.mark.case("A7")
def test_overwrite_that_fails_keeps_the_old_result(tmp_path):
    tensors = write_hf(tmp_path / "small")
    assert ckpt("convert", tmp_path / "small", tmp_path / "out", "--to", "hf").returncode == 0
    before = {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}
    big_hf(tmp_path / "hf")
    code = LIMITED.format(source=str(tmp_path / "hf"), target=str(tmp_path / "out"), options=["--to", "hf", "--overwrite"])
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=False).returncode == 2
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} == before and not leftovers(tmp_path)
    assert ckpt("convert", tmp_path / "hf", tmp_path / "out", "--to", "hf", "--overwrite").returncode == 0
    assert len(read_hf(tmp_path / "out")) == len(tensors) and not leftovers(tmp_path)


def test_a_target_inside_the_source_is_refused(tmp_path):
    write_hf(tmp_path / "hf")
    done = ckpt("convert", tmp_path / "hf", tmp_path / "hf" / "out", "--to", "torch_dist")
    assert done.returncode == 2 and "overlaps" in done.stderr and not (tmp_path / "hf" / "out").exists()
