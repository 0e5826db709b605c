"""The experiment on real megatron-core, as a function of its settings."""

from __future__ import annotations

import pytest

from ckpt_tools.resume.experiment import verify
from ckpt_tools.resume.settings import Settings, parse_stage


@pytest.fixture
def experiment(tmp_path):
    """experiment("hf", "reshard:tp=2", steps=4) -> Verified: the experiment with these stages and settings."""
    pytest.importorskip("torch")
    pytest.importorskip("megatron.core")

    def run(*stages, **settings):
        folder = tmp_path / "made"
        folder.mkdir()
        return verify(Settings(via=tuple(map(parse_stage, stages)), **{"steps": 4, **settings}), folder)

    return run


def verdicts(found):
    """(component, when) -> verdict."""
    return {(row.component, row.when): row.verdict for row in found.rows}


@pytest.fixture
def told():
    return verdicts
