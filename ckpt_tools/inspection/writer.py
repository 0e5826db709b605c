"""Who wrote a checkpoint: the parallel layout of the run, and which release of megatron-core, as far as the files tell."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..checkpoint import Checkpoint
from ..formats.hf import HfFolder
from ..formats.torch_dist import TorchDist
from ..optimizer.kinds import param_groups

_BLOB = re.compile(r"__([0-9]{1,9})_([0-9]{1,9})\.distcp\Z")
_LAYOUT: tuple[tuple[str, str], ...] = (
    ("tp", "tensor_model_parallel_size"),
    ("pp", "pipeline_model_parallel_size"),
    ("vpp", "virtual_pipeline_model_parallel_size"),
    ("cp", "context_parallel_size"),
    ("ep", "expert_model_parallel_size"),
    ("etp", "expert_tensor_parallel_size"),
    ("dp", "data_parallel_size"),
    ("world_size", "world_size"),
    ("first_stage_layers", "decoder_first_pipeline_num_layers"),
    ("last_stage_layers", "decoder_last_pipeline_num_layers"),
    ("pipeline_layout", "pipeline_model_parallel_layout"),
    ("sequence_parallel", "sequence_parallel"),
)
# Arguments of Megatron-LM that a release added and all later ones have, two of each: tags core_v0.9.0 to core_v0.19.0, and the arguments
# in checkpoints that 0.13.1, 0.16.1 and 0.19.2 wrote.
_ARGUMENTS: tuple[tuple[int, tuple[str, str]], ...] = (
    (9, ("ckpt_format", "align_grad_reduce")),
    (10, ("check_for_spiky_loss", "memory_snapshot_path")),
    (11, ("attention_backend", "exp_avg_dtype")),
    (12, ("check_for_large_grads", "fp8_recipe")),
    (13, ("enable_experimental", "enable_msc")),
    (14, ("save_retain_interval", "multiple_validation_sets")),
    (15, ("dist_ckpt_optim_fully_reshardable", "fp4_recipe")),
    (16, ("attention_output_gate", "apply_wd_to_qk_layernorm")),
    (17, ("dist_ckpt_workers", "async_strategy")),
    (18, ("async_ckpt_use_cpu_shm", "ckpt_load_validate_sharding_integrity")),
    (19, ("dsa_kernel_backend", "dataloader_inter_document_masking")),
)


@dataclass(frozen=True, slots=True)
class Clue:
    """A fact about the files and the releases 0.`oldest` to 0.`newest` (None: no bound) that do it; `usual`: only by default."""

    text: str
    oldest: int | None = None
    newest: int | None = None
    usual: bool = False


@dataclass(frozen=True, slots=True)
class Writer:
    """Who wrote it.

    software   "megatron-core 0.16", "megatron-core 0.13 to 0.15", "transformers 5.24.0", "ckpt or another converter", ...; None: unknown.
    clues      what that was concluded from.
    layout     sizes of the run by ckpt's names (tp, pp, ...); `layout_from`: "args", "rng_state" or None.
    producer   megatron-lm, ms-swift, ...: whose folder layout it is.
    files      number of files with tensors, and of the ranks that wrote them (None when their names do not say).
    """

    software: str | None
    clues: tuple[str, ...]
    layout: dict[str, Any]
    layout_from: str | None
    producer: str | None
    files: int
    file_bytes: int
    ranks: int | None


def written_by(checkpoint: Checkpoint, weights: Checkpoint) -> Writer:
    """What is known about the writer of a checkpoint; `weights` is the one that holds its weights, when those lie beside it."""
    layout, layout_from = _layout(checkpoint)
    details = checkpoint.details if checkpoint.details is not None else weights.details
    files = details.files if details is not None else ()
    size = sum(os.stat(f).st_size for f in files if os.path.isfile(f))
    ranks = _ranks(files)
    software, clues = None, tuple[str, ...]()
    if isinstance(details, TorchDist):
        software, clues = _megatron(checkpoint, details, ranks)
    elif checkpoint.args is not None:
        release = megatron_lm_release(checkpoint.args)
        software = None if release is None else f"Megatron-LM 0.{release}"
        clues = ("told by its arguments",) if release is not None else ()
    elif isinstance(details, HfFolder):
        software, clues = _hugging_face(details)
    return Writer(software, clues, layout, layout_from, checkpoint.location.producer, len(files), size, len(ranks) or None)


def _layout(checkpoint: Checkpoint) -> tuple[dict[str, Any], str | None]:
    args = checkpoint.args
    if args is not None and any(arg in args for _, arg in _LAYOUT):
        found = {name: args[arg] for name, arg in _LAYOUT if isinstance(args.get(arg), bool | int | str)}
        return {n: v for n, v in found.items() if v is not False and v != ""}, "args"
    # Megatron keeps one random state per pipeline and tensor rank: the grid of that object is the layout.
    grid = next((o.grid for o in checkpoint.objects.values() if o.key == "rng_state" and len(o.grid) >= 2), None)
    return ({"tp": grid[1], "pp": grid[0]}, "rng_state") if grid else ({}, None)


def _ranks(files: Iterable[str]) -> Counter[int]:
    """Files per rank, from names like __3_1.distcp."""
    names = (_BLOB.match(os.path.basename(f)) for f in files)
    return Counter(int(m[1]) for m in names if m)


def _megatron(checkpoint: Checkpoint, details: TorchDist, ranks: Mapping[int, int]) -> tuple[str | None, tuple[str, ...]]:
    stored = {o.key for o in details.objects.values()}
    if details.common_source == "common.pt" and "common_state" in stored:
        return "ckpt or another converter", ("both common.pt and a common_state object are there, which no megatron-core writes",)
    if details.common is None and not details.backend:
        return "torch.distributed.checkpoint", ("no metadata.json and no common state",)
    clues = _clues(checkpoint, details, ranks)
    if not details.has_plans:  # habits of megatron-core say nothing about another writer
        clues = [c for c in clues if not c.usual]
    oldest, newest = 0, 10**6
    kept = []
    for clue in sorted(clues, key=lambda c: c.usual):
        low, high = max(oldest, clue.oldest or 0), min(newest, clue.newest if clue.newest is not None else 10**6)
        if low > high and clue.usual:
            continue
        oldest, newest = low, high
        kept.append(clue.text)
    if oldest > newest:
        return "unclear: the files contradict each other", tuple(kept)
    release = _releases(oldest, newest)
    if not details.has_plans:
        without = "no all_local_plans in .metadata, which megatron-core writes"
        return f"another writer, laid out as by {release}" if release else None, (without, *kept)
    return release, tuple(kept)


def _releases(oldest: int, newest: int) -> str | None:
    if not oldest and newest == 10**6:
        return None
    if oldest == newest:
        return f"megatron-core 0.{oldest}"
    if not oldest:
        return f"megatron-core 0.{newest} or older"
    return f"megatron-core 0.{oldest} or newer" if newest == 10**6 else f"megatron-core 0.{oldest} to 0.{newest}"


def _clues(checkpoint: Checkpoint, details: TorchDist, ranks: Mapping[int, int]) -> list[Clue]:
    """Sources: Megatron-LM tags core_v0.6.0 to core_v0.19.0, and checkpoints written by 0.13.1, 0.16.1 and 0.19.2."""
    common = details.common or {}
    clues = []
    if details.common_source == "common_state":
        clues.append(Clue("the common state is an object instead of common.pt", 19))
    elif details.common_source == "common.pt":
        clues.append(Clue("common.pt", None, 18))
    if "common_backend" in details.backend:
        clues.append(Clue("common_backend in metadata.json", None, 18))
    if details.original_shapes:
        clues.append(Clue("mcore_data in .metadata", 8, 15))
    content = common.get("content_metadata")
    if isinstance(content, Mapping):
        clues.append(_content(content))
    elif common.get("args") is not None:
        clues.append(Clue("no content_metadata", None, 12, usual=True))
    groups = list(param_groups(common.get("optimizer")))
    if groups:
        known = any("default_config" in g for g in groups)
        text = "default_config in param_groups"
        clues.append(Clue(text, 16) if known else Clue(f"no {text}", None, 15, usual=True))
    if ranks and details.has_plans:
        most = max(ranks.values())
        clues.append(Clue(f"{most} files per rank", None, 16, usual=True) if most > 1 else Clue("one file per rank", 17, None, usual=True))
    if os.path.isfile(os.path.join(details.directory, "integrity.json")):
        clues.append(Clue("integrity.json", 18))
    args = checkpoint.args
    release = megatron_lm_release(args) if args is not None else None
    if release is not None:
        clues.append(Clue(f"arguments as in Megatron-LM 0.{release}", release, release, usual=True))
    return clues


def _content(content: Mapping[Any, Any]) -> Clue:
    if content.get("distrib_optim_sharding_type") in ("fully_reshardable", "dp_reshardable"):
        return Clue(f"{content['distrib_optim_sharding_type']} in content_metadata", 15)
    added = next((n for n in ("chained_optim_avoid_prefix", "singleton_local_shards") if n in content), None)
    if added:
        return Clue(f"{added} in content_metadata", 14)
    return Clue("no singleton_local_shards in content_metadata", 13, 13)


def megatron_lm_release(args: Mapping[str, Any]) -> int | None:
    """N when the arguments are those of Megatron-LM 0.N: all that releases up to it added are there, none that later ones did."""
    state = [all(n in args for n in names) for _, names in _ARGUMENTS]
    newest = max((i for i, has in enumerate(state) if has), default=-1)
    later = [n for _, names in _ARGUMENTS[newest + 1 :] for n in names]
    if newest < 1 or not all(state[:newest]) or any(n in args for n in later):
        return None
    return _ARGUMENTS[newest][0]


def _hugging_face(details: HfFolder) -> tuple[str | None, tuple[str, ...]]:
    version = (details.config or {}).get("transformers_version")
    if isinstance(version, str) and version:
        return f"transformers {version}", ("transformers_version in config.json",)
    if details.metadata is None and details.weight_map is not None:
        return None, ("the files carry no __metadata__, which transformers writes",)
    return None, ()
