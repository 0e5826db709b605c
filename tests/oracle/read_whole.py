"""Reads checkpoints whole with torch and the classes of megatron-core, and writes down which of them could not be read and why.

    python tests/oracle/read_whole.py JOBS.json

JOBS.json is a list of {"checkpoint": iteration folder, "output": file}. OUTPUT is a JSON object: "error" (null, or what a reader said),
"tensors" (how many were read). torch_dist folders are read by torch's DCP (every tensor, every object) and torch.load (common.pt);
legacy ones by torch.load of every file.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def torch_dist(folder: Path) -> int:
    """Every tensor and object of a torch_dist folder; the number of tensors."""
    import torch
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    reader = checkpoint.FileSystemReader(folder)
    stored = reader.read_metadata().state_dict_metadata
    state: dict[str, Any] = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype) if isinstance(entry, TensorStorageMetadata) else None
        for key, entry in stored.items()
    }
    tensors = sum(value is not None for value in state.values())
    checkpoint.load(state, storage_reader=reader, no_dist=True)
    json.loads((folder / "metadata.json").read_text())
    if (folder / "common.pt").exists():
        torch.load(folder / "common.pt", weights_only=False)
    elif not any(key.startswith("common_state/") for key in stored):
        raise FileNotFoundError("neither common.pt nor common_state")
    return tensors


def legacy(folder: Path) -> int:
    """Every file of every rank; the number of model tensors."""
    import torch

    found = 0
    for path in sorted(folder.glob("mp_rank_*/*.pt")):
        state = torch.load(path, weights_only=False)
        found += sum(len(v) for k, v in state.items() if str(k).startswith("model"))
    return found


def main(jobs: Path) -> None:
    """All jobs; a checkpoint that cannot be read does not end the program."""
    for number, job in enumerate(json.loads(jobs.read_text()), 1):
        folder = Path(job["checkpoint"])
        report: dict[str, Any] = {"error": None, "tensors": 0}
        try:
            report["tensors"] = legacy(folder) if any(folder.glob("mp_rank_*")) else torch_dist(folder)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # torch's CheckpointException is no Exception
            report["error"] = f"{type(error).__name__}: {error}"[-500:]
        Path(job["output"]).write_text(json.dumps(report))
        jobs.with_suffix(".done").write_text(str(number))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
