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


def test_the_readme_shows_what_the_commands_really_print(tmp_path):
    from readme_transcript import BLOCK, prepared, transcribe, without_times

    text = (ROOT / "README.md").read_text()
    assert len(BLOCK.findall(text)) >= 5
    assert without_times(transcribe(text, prepared(tmp_path))) == without_times(text), "python tests/readme_transcript.py rewrites it"


def test_the_readme_names_every_command():
    from ckpt_tools.commands.main import available

    text = (ROOT / "README.md").read_text()
    assert [e.name for e in available() if f"ckpt {e.name}" not in text] == []


def test_the_command_line_reference_is_that_of_the_program():
    from cli_reference import PAGE, reference

    assert PAGE.read_text() == reference(), "python tests/cli_reference.py rewrites it"


def test_the_tables_of_families_are_those_of_the_program():
    from family_table import PAGE, page, readme

    text = (ROOT / "README.md").read_text()
    assert PAGE.read_text() == page() and text == readme(text), "python tests/family_table.py rewrites them"
