"""What was merged into a model, kept beside its config, so that nothing is added twice."""

from __future__ import annotations

import json
import os
from typing import Any

from ..errors import CkptError
from ..formats.hf import read_json
from .peft import Adapter

NAME = "merged_adapters.json"
SCHEMA = "ckpt.merged/1"


def merged_into(folder: str | None) -> list[dict[str, Any]]:
    """The record of a model's folder: one entry per adapter merged into it, oldest first."""
    path = os.path.join(folder or "", NAME)
    if folder is None or not os.path.exists(path):
        return []
    entries = read_json(path).get("adapters")
    if not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries):
        raise CkptError("E216", "the record of merged adapters is not readable", where=path)
    return entries


def refuse_second(entries: list[dict[str, Any]], digest: str, folder: str | None) -> None:
    """CkptError E547 when the adapter with this digest is in the record."""
    for entry in entries:
        if entry.get("sha256") == digest:
            raise CkptError(
                "E547",
                "this adapter is part of these weights already",
                where=os.path.join(folder or "", NAME),
                found=f"{entry.get('name')}, sha256 {digest[:16]}",
                hint="merge into the base model, or --again to add it once more",
            )


def record_bytes(entries: list[dict[str, Any]], adapter: Adapter, digest: str) -> bytes:
    """The record with this adapter added."""
    entry = {
        "name": os.path.basename(os.path.abspath(adapter.directory)),
        "sha256": digest,
        "r": adapter.config.get("r"),
        "lora_alpha": adapter.config.get("lora_alpha"),
        "modules": len(adapter.pairs),
        "replaced": len(adapter.saved),
    }
    return (json.dumps({"schema": SCHEMA, "adapters": [*entries, entry]}, indent=2) + "\n").encode()
