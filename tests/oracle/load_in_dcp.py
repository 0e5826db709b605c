"""Loads torch_dist folders with plain torch.distributed.checkpoint, megatron never imported, and writes down what it found.

    python tests/oracle/load_in_dcp.py JOBS.json

JOBS.json is a list of {"checkpoint": iteration folder, "output": folder}. Each job gets OUTPUT/tensors.safetensors (every tensor of
the folder, whole, under its stored key) and OUTPUT/report.json: the objects, and common.pt as torch.load reads it with weights_only
and nothing but argparse.Namespace allowed. The first failing job ends the process; so does a folder whose metadata needs megatron
to be unpickled.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any


def load(job: dict[str, Any]) -> None:
    """One job."""
    import torch
    from safetensors.torch import save_file
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    folder, output = Path(job["checkpoint"]), Path(job["output"])
    reader = checkpoint.FileSystemReader(folder)
    stored = reader.read_metadata().state_dict_metadata
    state: dict[str, Any] = {
        key: torch.full(entry.size, 77, dtype=entry.properties.dtype) if isinstance(entry, TensorStorageMetadata) else None
        for key, entry in stored.items()
    }
    tensors = {key: value for key, value in state.items() if value is not None}
    checkpoint.load(state, storage_reader=reader, no_dist=True)
    if any(name.partition(".")[0] == "megatron" for name in sys.modules):
        raise RuntimeError(f"reading {folder} imported megatron")
    common: dict[str, Any] = {}
    if (folder / "common.pt").exists():
        with torch.serialization.safe_globals([argparse.Namespace]):
            common = torch.load(folder / "common.pt", weights_only=True)
    output.mkdir(parents=True, exist_ok=True)
    save_file(tensors, output / "tensors.safetensors")
    report = {
        "objects": {key: repr(value)[:200] for key, value in state.items() if key not in tensors},
        "common": {key: repr(value) for key, value in common.items() if key != "args"},
        "args": {name: repr(value) for name, value in sorted(vars(common["args"]).items())} if "args" in common else None,
    }
    (output / "report.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    jobs = Path(sys.argv[1])
    for number, one in enumerate(json.loads(jobs.read_text()), 1):
        load(one)
        jobs.with_suffix(".done").write_text(str(number))
