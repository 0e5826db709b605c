"""The target appears whole or not at all."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ckpt_tools.errors import CkptError
from ckpt_tools.staging import Staging, overlaps


def names(path):
    return sorted(os.listdir(path))


def test_nothing_shows_before_commit_and_nothing_is_left_after(tmp_path):
    with Staging(str(tmp_path / "out")) as staging:
        (tmp_path / ".out.ckpt-partial" / "a").write_text("1")
        assert "out" not in names(tmp_path)
        staging.commit()
    assert names(tmp_path) == ["out"] and (tmp_path / "out" / "a").read_text() == "1"


def test_leaving_without_commit_removes_everything(tmp_path):
    with pytest.raises(ZeroDivisionError), Staging(str(tmp_path / "out")) as staging:
        open(os.path.join(staging.path, "a"), "w").close()
        raise ZeroDivisionError
    assert names(tmp_path) == []


def test_a_filled_target_is_refused_and_kept(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").write_text("old")
    with pytest.raises(CkptError) as caught, Staging(str(tmp_path / "out")):
        pass
    assert caught.value.code == "E407" and names(tmp_path / "out") == ["old"]


def test_overwrite_keeps_the_old_result_until_the_new_one_is_complete(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").write_text("old")
    with Staging(str(tmp_path / "out"), overwrite=True) as staging:
        open(os.path.join(staging.path, "new"), "w").close()
        assert names(tmp_path / "out") == ["old"]
        staging.commit()
    assert names(tmp_path) == ["out"] and names(tmp_path / "out") == ["new"]


def test_a_second_writer_is_told_that_the_target_is_in_use(tmp_path):
    code = f"""
import sys
from ckpt_tools.staging import Staging
from ckpt_tools.errors import CkptError
try:
    with Staging({str(tmp_path / "out")!r}): pass
except CkptError as error:
    sys.exit(error.code)
"""
    with Staging(str(tmp_path / "out")):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "E408" in done.stderr


def test_what_a_killed_run_left_is_cleared(tmp_path):
    partial = tmp_path / ".out.ckpt-partial"
    partial.mkdir()
    (partial / "stale").write_text("x")
    with Staging(str(tmp_path / "out")) as staging:
        assert os.listdir(staging.path) == []
        staging.commit()
    assert names(tmp_path) == ["out"]


def test_overlap_sees_through_links(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert overlaps(str(tmp_path / "link" / "b" / "out"), str(tmp_path / "a"))
    assert not overlaps(str(tmp_path / "ab"), str(tmp_path / "a"))
