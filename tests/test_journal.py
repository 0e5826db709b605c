"""A run that was killed is taken up where it ended, and what cannot be trusted is written again."""

from __future__ import annotations

import os

import numpy as np
import pytest
from builders import CONFIG, dense_shapes, write_hf

from ckpt_tools import blocks, execution, journal
from ckpt_tools.conversion import plan
from ckpt_tools.errors import CkptError
from ckpt_tools.execution import execute

SIZES = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 512, "vocab_size": 2048}


@pytest.fixture
def source(tmp_path, monkeypatch):
    """About 5 MB, cut into many tasks."""
    monkeypatch.setattr(blocks, "TASK_BYTES", 256 * 1024)
    rng = np.random.default_rng(1)
    tensors = {n: rng.standard_normal(s, dtype=np.float32) for n, s in dense_shapes({**CONFIG, **SIZES}).items()}
    write_hf(tmp_path / "hf", shards=3, tensors=tensors, **SIZES)
    return tmp_path / "hf"


def files(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


class Stopped(BaseException):
    """Ends a run at a chosen place, as Ctrl-C does."""


def stop_after(count):
    """An on_progress that ends the run at its `count`th task."""
    seen = []

    def progress(done):
        seen.append(done)
        if len(seen) == count:
            raise Stopped

    return progress


def interrupted(made, out, count, **options):
    with pytest.raises(Stopped):
        execute(made, out, threads=1, resume=True, on_progress=stop_after(count), **options)


def test_what_was_written_is_not_written_again_and_the_result_is_the_same(source, tmp_path):
    made = plan(source, "torch_dist")
    execute(made, tmp_path / "whole")
    total = len(execution.make_tasks(made.moves, made.buffer))
    for count in (1, total // 2, total):
        out = tmp_path / f"out{count}"
        interrupted(made, out, count)
        assert not out.exists()
        progress = []
        result = execute(made, out, threads=1, resume=True, on_progress=progress.append)
        assert len(progress) == total - count and result.resumed > 0
        assert files(out) == files(tmp_path / "whole")
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["hf", "whole", *(f"out{c}" for c in (1, total // 2, total))])


def test_a_run_without_resume_leaves_nothing_and_one_with_it_starts_over_for_another_plan(source, tmp_path):
    made = plan(source, "torch_dist")
    with pytest.raises(Stopped):
        execute(made, tmp_path / "out", threads=1, on_progress=stop_after(2))
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]
    interrupted(made, tmp_path / "out", 2)
    result = execute(plan(source, "hf"), tmp_path / "out", resume=True)
    assert result.resumed == 0 and (tmp_path / "out" / "config.json").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "out"]


def test_after_a_restart_of_the_machine_only_what_was_flushed_counts(source, tmp_path, monkeypatch):
    made = plan(source, "torch_dist")
    execute(made, tmp_path / "whole")
    monkeypatch.setattr(execution, "FLUSH_BYTES", 10**12)
    interrupted(made, tmp_path / "out", 3)
    monkeypatch.setattr(journal, "boot", lambda: "another")
    with open(tmp_path / ".out.ckpt-partial" / made.targets[0].path, "r+b") as file:  # what a power cut may leave
        file.write(b"\0" * 1000)
    result = execute(made, tmp_path / "out", resume=True)
    assert result.resumed == 0 and files(tmp_path / "out") == files(tmp_path / "whole")


def test_flushed_tasks_count_after_a_restart(source, tmp_path, monkeypatch):
    made = plan(source, "torch_dist")
    tasks = execution.make_tasks(made.moves, made.buffer)
    kept = journal.create(str(tmp_path / "journal"), made)
    for number in range(3):
        kept.record(number, number)
    kept.synced(2)
    kept.close()
    monkeypatch.setattr(journal, "boot", lambda: "another")
    for _ in range(2):
        found = journal.take_up(str(tmp_path / "journal"), made, len(tasks))
        assert found is not None and found.done == {0: 0, 1: 1}
        found.close()


@pytest.mark.parametrize("damage", [b"", b"{}\n", b"\xff\xfe\n", b"done 0 0\n", b"[1]\n", b'{"schema": "ckpt.journal/1"}\n'])
def test_a_damaged_journal_is_not_believed(source, tmp_path, damage):
    made = plan(source, "torch_dist")
    interrupted(made, tmp_path / "out", 2)
    (tmp_path / ".out.ckpt-journal").write_bytes(damage)
    assert execute(made, tmp_path / "out", resume=True).resumed == 0


@pytest.mark.parametrize("line", ["done 999999 0", "done -1 0", "synced 7", "done 0", "nonsense", "done 1"])
def test_records_after_a_malformed_one_are_not_believed(source, tmp_path, line):
    made = plan(source, "torch_dist")
    tasks = len(execution.make_tasks(made.moves, made.buffer))
    kept = journal.create(str(tmp_path / "journal"), made)
    kept.record(0, 0)
    kept.close()
    with open(tmp_path / "journal", "a") as file:
        file.write(f"{line}\ndone 2 0\n")
    found = journal.take_up(str(tmp_path / "journal"), made, tasks)
    assert found is not None and found.done == {0: 0}
    found.close()


def test_a_source_that_changed_is_converted_anew(source, tmp_path):
    interrupted(plan(source, "torch_dist"), tmp_path / "out", 2)
    shard = sorted(source.glob("*.safetensors"))[0]
    os.utime(shard)
    assert execute(plan(source, "torch_dist"), tmp_path / "out", resume=True).resumed == 0


def test_a_source_that_changes_meanwhile_leaves_nothing_to_take_up(source, tmp_path):
    made = plan(source, "torch_dist")
    shard = sorted(source.glob("*.safetensors"))[0]
    with pytest.raises(CkptError) as caught:
        execute(made, tmp_path / "out", resume=True, on_progress=lambda _: os.utime(shard))
    assert caught.value.code == "E406" and [p.name for p in tmp_path.iterdir()] == ["hf"]
