"""`ckpt families` tells what the families say of themselves."""

from __future__ import annotations

import json

from builders import ckpt

from ckpt_tools.families import FAMILIES


def test_every_family_is_listed_with_what_was_verified():
    done = ckpt("families", "--json")
    answer = json.loads(done.stdout)
    assert answer["schema"] == "ckpt.families/1" and [f["name"] for f in answer["families"]] == list(FAMILIES)
    assert all(f["verified"] in ("logits", "names", "round trip") and f["sources"] for f in answer["families"])
    lines = ckpt("families").stdout.splitlines()
    assert len(lines) == 1 + len(FAMILIES) and lines[0].split("\t") == ["family", "model types", "verified", "note"]


def test_one_family_by_name_or_model_type():
    assert "KimiK2ForCausalLM" in ckpt("families", "kimi_k2").stdout
    done = ckpt("families", "deepseek_v4")
    assert done.returncode == 2 and "E310" in done.stderr and "deepseek_v3" in done.stderr
