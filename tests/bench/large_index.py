"""Make a torch_dist folder with a huge index and almost no bytes on disk, the way torch and megatron-core pickle one.

python tests/bench/large_index.py DIR [TENSORS] [CHUNKS]
"""

from __future__ import annotations

import json
import pickle
import sys
from argparse import Namespace
from pathlib import Path

import torch
from torch.distributed.checkpoint import filesystem as fs
from torch.distributed.checkpoint import metadata as md
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType


def make(root: Path, tensors: int, chunks: int) -> Path:
    """A run folder whose iteration 1 has `tensors` tensors of `chunks` pieces in sparse files; returns it."""
    folder = root / "iter_0000001"
    folder.mkdir(parents=True)
    rows, columns, length = 64, 1024, 64 * 1024 * 2 + 1500
    named, storage, plans = {}, {}, []
    sizes = dict.fromkeys(range(chunks), 0)
    for number in range(tensors):
        key = f"decoder.layers.{number // 12}.mlp.experts.experts.{number % 12}.linear_fc2.weight"
        shape = torch.Size((rows * chunks, columns))
        properties = md.TensorProperties(torch.bfloat16)
        boxes = [md.ChunkStorageMetadata(torch.Size((rows * i, 0)), torch.Size((rows, columns))) for i in range(chunks)]
        named[key] = md.TensorStorageMetadata(properties, shape, boxes)
        for rank, box in enumerate(boxes):
            index = md.MetadataIndex(key, box.offsets)
            storage[index] = fs._StorageInfo(f"__{rank}_0.distcp", sizes[rank], length)
            sizes[rank] += length
            plan = TensorWriteData(md.ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)), properties, torch.Size(shape))
            plans.append(WriteItem(md.MetadataIndex(key, torch.Size(box.offsets)), WriteItemType.SHARD, tensor_data=plan))
    whole = md.Metadata(named, None, storage, md.StorageMeta())
    whole.all_local_plans = [SavePlan(plans)]  # megatron-core's writers add it, doubling the file
    (folder / ".metadata").write_bytes(pickle.dumps(whole))
    for rank, size in sizes.items():
        with open(folder / f"__{rank}_0.distcp", "wb") as file:
            file.truncate(size)
    args = Namespace(num_layers=tensors // 12, hidden_size=columns, num_attention_heads=8, tensor_model_parallel_size=chunks)
    torch.save({"args": args, "iteration": 1}, folder / "common.pt")
    backend = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}
    (folder / "metadata.json").write_text(json.dumps(backend))
    (root / "latest_checkpointed_iteration.txt").write_text("1")
    return root


if __name__ == "__main__":
    make(Path(sys.argv[1]), *(int(n) for n in sys.argv[2:] or ("20000", "4")))
