"""The examples of the documentation run as they stand."""

from __future__ import annotations

import importlib.util
import re

import pytest
from conftest import ROOT


def test_the_library_page_runs_from_top_to_bottom(tmp_path, monkeypatch):
    text = (ROOT / "docs" / "library.md").read_text()
    (tmp_path / "fixtures").symlink_to(ROOT / "fixtures")
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    assert len(blocks) >= 6
    for block in blocks:
        needs = re.match(r"# needs: (.*)", block)
        if needs and any(importlib.util.find_spec(n.strip()) is None for n in needs[1].split(",")):
            continue
        try:
            exec(compile(block, "docs/library.md", "exec"), names)
        except Exception as error:
            pytest.fail(f"{error!r} in\n{block}")
