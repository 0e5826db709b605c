"""A failing disk, too few open files, a source that changes or vanishes: an error that names the file, and nothing half-written."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from builders import CONFIG, dense_shapes, write_hf

from ckpt_tools.conversion import plan
from ckpt_tools.errors import CkptError
from ckpt_tools.execution import execute
from ckpt_tools.source_files import SPARE

ROOT = Path(__file__).parents[2]


@pytest.fixture
def source(tmp_path):
    write_hf(tmp_path / "hf", shards=4)
    return tmp_path / "hf"


@pytest.mark.parametrize("resume", [False, True])
def test_a_disk_that_fails_to_read_names_the_file(source, tmp_path, monkeypatch, resume):
    made = plan(source, "torch_dist")
    real, calls = os.preadv, []

    def failing(fd, buffers, offset):
        calls.append(offset)
        if len(calls) == 3:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(CkptError) as caught:
        execute(made, tmp_path / "out", resume=resume)
    assert caught.value.code == "E901" and "Input/output error" in str(caught.value) and ".safetensors" in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


def test_a_disk_that_fails_to_write_is_no_bug_of_ckpt(source, tmp_path, monkeypatch):
    made = plan(source, "torch_dist")

    def failing(fd):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(CkptError) as caught:
        execute(made, tmp_path / "out")
    assert caught.value.code == "E409" and [p.name for p in tmp_path.iterdir()] == ["hf"]


def test_a_source_that_is_cut_short_while_it_is_read_is_noticed(source, tmp_path):
    made = plan(source, "torch_dist")
    shard = sorted(source.glob("*.safetensors"))[-1]
    with pytest.raises(CkptError) as caught:
        execute(made, tmp_path / "out", threads=1, on_progress=lambda _: os.truncate(shard, 100))
    assert caught.value.code == "E406" and [p.name for p in tmp_path.iterdir()] == ["hf"]


def test_a_source_that_is_replaced_before_the_run_is_noticed(source, tmp_path):
    made = plan(source, "torch_dist")
    shard = sorted(source.glob("*.safetensors"))[0]
    data = shard.read_bytes()
    shard.unlink()
    with pytest.raises(CkptError) as caught:
        execute(made, tmp_path / "out")
    assert caught.value.code == "E406"
    shard.write_bytes(data)  # same size and bytes, but another file
    with pytest.raises(CkptError) as caught:
        execute(made, tmp_path / "out")
    assert caught.value.code == "E406" and [p.name for p in tmp_path.iterdir()] == ["hf"]


def limited(soft: int, hard: int, *arguments: object) -> subprocess.CompletedProcess[str]:
    code = (
        f"import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))\n"
        f"sys.argv[1:] = {[str(a) for a in arguments]!r}\n"
        "from ckpt_tools.commands.main import main\nsys.exit(main())"
    )
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)


def test_more_files_than_a_process_may_open_by_default(tmp_path):
    """A shard per tensor: 39 shards, while 30 files may be open until more are asked for."""
    tensors = {n: np.zeros(s, np.float32) for n, s in dense_shapes(CONFIG).items()}
    write_hf(tmp_path / "hf", shards=len(tensors), tensors=tensors)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    done = limited(30, hard, "convert", tmp_path / "hf", tmp_path / "out", "--to", "torch_dist", "--verify")
    assert done.returncode == 0, done.stderr
    done = limited(30, len(tensors) + SPARE - 1, "convert", tmp_path / "hf", tmp_path / "out2", "--to", "torch_dist")
    assert done.returncode == 2 and "E901" in done.stderr and "ulimit" in done.stderr, done.stderr
    assert not (tmp_path / "out2").exists()


def test_a_file_that_the_system_refuses_is_no_bug(tmp_path):
    """A folder where a file should be: whatever reads it, the system's own word is shown."""
    write_hf(tmp_path / "hf")
    os.unlink(tmp_path / "hf" / "config.json")
    (tmp_path / "hf" / "config.json").mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "ckpt_tools", "convert", str(tmp_path / "hf"), str(tmp_path / "out"), "--to", "torch_dist"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and "bug" not in done.stderr, done.stderr
