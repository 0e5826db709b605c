"""What is put into legacy rank files for the optimizer is, tensor by tensor, what Megatron-Core itself put there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from optimizer.conftest import JOBS, Runs

from ckpt_tools.checkpoint import open_checkpoint
from ckpt_tools.dtypes import dtype
from ckpt_tools.execution import execute
from ckpt_tools.formats import torch_zip_writer
from ckpt_tools.formats.torch_legacy import Legacy
from ckpt_tools.layout_args import source_layout
from ckpt_tools.memory.names import Rank
from ckpt_tools.model_names import GROUPED, SEQUENTIAL
from ckpt_tools.optimizer.entries import FULLY_RESHARDABLE, NON_DISTRIBUTED, optimizer_entries
from ckpt_tools.optimizer.legacy_entries import DISTRIBUTED, INDEXED, RankOptimizer, rank_optimizer
from ckpt_tools.optimizer.order import rank_parameters
from ckpt_tools.optimizer.reading import model_of, read_optimizer
from ckpt_tools.planning import Placement, Plan, TargetFile, build_moves
from ckpt_tools.views import as_mcore

pytestmark = pytest.mark.oracle


def written(runs: Runs, name: str, target: Path) -> dict[str, tuple[Any, Any, Path]]:
    """Rank folder -> (optimizer value, content of distrib_optim.pt) as written through rank_optimizer at the layout of the source, and the
    source's rank folder. Read back with torch."""
    checkpoint = open_checkpoint(str(runs.run(name, "legacy")))
    view = as_mcore(checkpoint)
    state = read_optimizer(checkpoint, view)
    args = checkpoint.args or {}
    layout = source_layout(args)
    distributed = state.kind == "distrib_optim"
    entries = optimizer_entries(state, FULLY_RESHARDABLE if distributed else NON_DISTRIBUTED, weights=view.tensors, layout=layout)
    model = model_of(view, layout)
    files: list[TargetFile] = []
    placements: list[Placement] = []

    def lay(value: Any, path: str) -> None:
        laid = torch_zip_writer.layout(value, Path(path).stem)
        for start, _, hole in laid.holes:
            assert isinstance(hole.tag, tuple)
            for fill in hole.tag:
                placements.append(Placement(fill.name, fill.offset, fill.shape, len(files), start + fill.start, hole.dtype, fill.strides))
                assert entries.dtypes[fill.name] == hole.dtype and dtype(hole.dtype).itemsize
        files.append(TargetFile(path, laid.size, laid.literals))

    assert isinstance(checkpoint.details, Legacy)
    for rank in checkpoint.details.ranks:
        chunks = rank_parameters(
            model, Rank(rank.tp, rank.pp, rank.ep, rank.etp), "local", GROUPED if JOBS[name].get("grouped") else SEQUENTIAL
        )
        made: RankOptimizer = rank_optimizer(
            entries,
            chunks,
            layout,
            DISTRIBUTED if distributed else INDEXED,
            args=args,
            bucket_size=JOBS[name].get("bucket_size"),
            first_stage=rank.pp == 0,
            dense=rank.ep == 0,
        )
        lay({"optimizer": made.optimizer}, f"{rank.name}/model_optim_rng.pt")
        if made.distrib is not None:
            lay(made.distrib, f"{rank.name}/distrib_optim.pt")
    moves = build_moves(entries.tensors, placements)
    execute(Plan({}, {}, moves.sources(), tuple(files), (), tuple(moves.moves)), target)
    result = {}
    for rank in checkpoint.details.ranks:
        own, real = target / rank.name, Path(rank.file.path).parent
        distrib = torch.load(own / "distrib_optim.pt", weights_only=True) if (own / "distrib_optim.pt").exists() else None
        result[rank.name] = (torch.load(own / "model_optim_rng.pt", weights_only=True)["optimizer"], distrib, real)
    return result


def assert_same(found: Any, real: Any, where: str = "") -> None:
    """Same structure, same types of containers, same tensors bit by bit."""
    if isinstance(real, torch.Tensor):
        assert found.dtype == real.dtype and found.shape == real.shape and found.equal(real.detach()), where
    elif isinstance(real, dict):
        assert found.keys() == real.keys(), where
        for key in real:
            assert_same(found[key], real[key], f"{where}[{key!r}]")
    elif isinstance(real, list):
        assert len(found) == len(real), where
        for number, (a, b) in enumerate(zip(found, real, strict=True)):
            assert_same(a, b, f"{where}[{number}]")
    else:
        assert found == real, where


@pytest.mark.parametrize("name", [n for n, job in JOBS.items() if job.get("legacy")])
def test_rank_files_hold_what_megatron_core_wrote(runs: Runs, tmp_path: Path, name: str):
    for folder, (optimizer, distrib, real) in written(runs, name, tmp_path / "out").items():
        assert_same(optimizer, torch.load(real / "model_optim_rng.pt", weights_only=False)["optimizer"], folder)
        if (real / "distrib_optim.pt").exists():
            states = torch.load(real / "distrib_optim.pt", weights_only=True)
            assert_same(distrib, states, folder)
        else:
            assert distrib is None
