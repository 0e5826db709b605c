"""Which rank each mp_rank_XX folder belongs to, from the stored arguments or, where there are none, from what the files hold.

Sources: Megatron-LM checkpointing.py get_checkpoint_name, save_checkpoint; parallel_state.py (0.5 to 0.19).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..errors import CkptError
from ..layout_args import positive
from ..model_names import bare_name
from .pickles import TensorRef
from .torch_zip import TorchFile

FILE_NAME = "model_optim_rng.pt"
_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?$")
_MODEL_KEY = re.compile(r"model\d*")


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank's file: its place in the layout (etp = rank among those that share its experts) and its content."""

    tp: int
    pp: int
    ep: int
    etp: int
    file: TorchFile

    @property
    def name(self) -> str:
        """The rank's folder, as people see it."""
        return os.path.basename(os.path.dirname(self.file.path))


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is needed to understand the ranks: sizes of the layout, layers and experts (None: not told), whether linear_fc1 is [gate; up],
    whether the head is the embedding, attention heads (None: not told), checkpoint_version."""

    tp: int
    pp: int
    ep: int
    etp: int
    layers: int | None
    experts: int | None
    gated: bool
    tied: bool
    heads: int | None
    version: float


def rank_folders(directory: str) -> list[str]:
    """Names of the folders that hold a rank's model, in order of rank."""
    found = [n for n in os.listdir(directory) if _FOLDER.match(n) and os.path.exists(os.path.join(directory, n, FILE_NAME))]
    return sorted(found, key=_numbers)


def folder_name(tp: int, pp: int, ep: int, pipeline: bool, experts: bool) -> str:
    """mp_rank_TT[_PPP][_EEE], the numbers present only when the size is above 1 (source: get_checkpoint_name)."""
    return f"mp_rank_{tp:02d}{f'_{pp:03d}' if pipeline else ''}{f'_{ep:03d}' if experts else ''}"


def model_chunks(file: TorchFile) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """(number of the virtual stage, names to values) of a rank's file. E224 for what is not a Megatron-Core model."""
    state = file.value
    if not isinstance(state, dict):
        raise CkptError("E224", "a rank file does not hold a table", where=file.path, found=type(state).__name__)
    keys = sorted((k for k in state if isinstance(k, str) and _MODEL_KEY.fullmatch(k)), key=lambda k: int(k[5:] or 0))
    for number, key in enumerate(keys):
        chunk = state[key]
        if not isinstance(chunk, dict):
            raise CkptError("E224", f"{key} is not a table of tensors", where=file.path)
        if "language_model" in chunk:
            raise CkptError(
                "E224",
                "this checkpoint is from before Megatron-Core (language_model.*), which ckpt does not read",
                where=file.path,
                hint="Megatron-LM's tools/checkpoint/convert.py --loader legacy --saver core makes a Megatron-Core checkpoint of it",
            )
        yield number, chunk


def sizes_of(files: Mapping[str, TorchFile], directory: str) -> Sizes:
    """Sizes of layout and model from the args of the first file, or from names and shapes where there are none. files: folder -> file."""
    first = next(iter(files.values()))
    names = {bare_name(n): v for _, chunk in model_chunks(first) for n, v in chunk.items()}
    args = first.value.get("args")
    known: Mapping[str, Any] = args if isinstance(args, dict) else {}

    number = partial(positive, known)
    tp = number("tensor_model_parallel_size") or number("model_parallel_size")
    pp, ep = number("pipeline_model_parallel_size"), number("expert_model_parallel_size")
    if tp is None or (pp is None and ep is None):
        said = tp
        tp, pp, ep = _grid(files, names, directory)
        tp = said or tp
    pp, ep = pp or 1, ep or 1
    router = next((v for n, v in names.items() if n.endswith(".mlp.router.weight")), None)
    experts = number("num_experts") or number("num_moe_experts")
    if experts is None and isinstance(router, TensorRef) and router.shape:
        experts = router.shape[0]
    etp = number("expert_tensor_parallel_size") or (_expert_tp(files, tp, pp, ep) if experts and not known else tp)
    said_gated = [known[n] for n in ("swiglu", "gated_linear_unit", "quick_geglu") if known.get(n) is not None]
    gated = any(said_gated) if said_gated else None
    return Sizes(
        tp,
        pp,
        ep,
        etp,
        number("num_layers"),
        experts,
        _gated(names) if gated is None else bool(gated),
        bool(known) and not known.get("untie_embeddings_and_output_weights", False),
        number("num_attention_heads"),
        float(first.value.get("checkpoint_version", 0) or 0),
    )


def ranks_of(files: Mapping[str, TorchFile], sizes: Sizes, directory: str) -> tuple[Rank, ...]:
    """The ranks of all files. E223 naming the folders that are missing, E224 for folders that do not belong to the layout."""
    pipeline, spread = sizes.pp > 1, sizes.ep > 1
    if sizes.experts and sizes.tp % sizes.etp:
        raise CkptError(
            "E224",
            "the files do not tell the ranks of an expert apart, so some of them were overwritten when they were saved",
            where=directory,
            found=f"tp {sizes.tp}, etp {sizes.etp}",
        )
    grid = {
        folder_name(tp, pp, ep, pipeline, spread): (tp, pp, ep)
        for pp in range(sizes.pp)
        for tp in range(sizes.tp)
        for ep in range(sizes.ep)
    }
    said = f"tp {sizes.tp}, pp {sizes.pp}, ep {sizes.ep}, etp {sizes.etp} as the stored args say"
    strangers = [n for n in files if n not in grid]
    if strangers:
        raise CkptError(
            "E224", "there are rank folders that do not belong to the layout", where=directory, expected=said, found=_some(strangers)
        )
    missing = [n for n in _written(sizes) if n not in files]
    if missing:
        raise CkptError(
            "E223",
            f"{len(missing)} rank folders are missing",
            where=directory,
            expected=said,
            found=f"no {_some(missing)}",
            hint="the save did not end, or only part of it was copied",
        )
    ranks = (Rank(*grid[n], grid[n][0] % sizes.etp, file) for n, file in files.items())
    return tuple(sorted(ranks, key=lambda r: (r.pp, r.ep, r.tp)))


def _written(sizes: Sizes) -> Iterator[str]:
    """Folders that a complete save holds: of each stage, those of the ranks that are first in their data- or expert-data-parallel group."""
    for pp in range(sizes.pp):
        for rank in range(max(sizes.tp, sizes.ep * sizes.etp)):
            yield folder_name(rank % sizes.tp, pp, rank // sizes.etp % sizes.ep, sizes.pp > 1, sizes.ep > 1)


def _numbers(name: str) -> tuple[int, ...]:
    match = _FOLDER.match(name)
    return tuple(int(n or 0) for n in match.groups()) if match else ()


def _grid(files: Mapping[str, TorchFile], names: Mapping[str, Any], directory: str) -> tuple[int, int, int]:
    """(tp, pp, ep) from the names of the folders; a lone second number is an expert rank when the first rank holds both ends of a model."""
    found = [_numbers(n) for n in files]
    tp, second, third = (1 + max(n[i] for n in found) for i in range(3))
    widths = {sum(g is not None for g in match.groups()) for n in files if (match := _FOLDER.match(n))}
    if len(widths) != 1:
        raise CkptError("E224", "the names of the rank folders do not go together", where=directory, found=_some(list(files)))
    if widths != {2}:
        return tp, second, third
    first, last = (any(n.startswith(p) for n in names) for p in ("embedding.", "decoder.final_layernorm."))
    if not first:
        raise CkptError(
            "E224",
            "the second number of these folders is a pipeline or an expert rank, and neither args nor tensors tell which",
            where=directory,
            found=_some(list(files)),
            hint="save the checkpoint with its args",
        )
    return (tp, 1, second) if last else (tp, second, 1)


def _expert_tp(files: Iterable[str], tp: int, pp: int, ep: int) -> int:
    """Expert-tensor parallel size whose ranks write exactly the folders that are there; tp when several do."""
    present = set(files)
    for etp in sorted((n for n in range(1, tp + 1) if tp % n == 0), reverse=True):
        if set(_written(Sizes(tp, pp, ep, etp, None, None, True, False, None, 0.0))) == present:
            return etp
    return tp


def _gated(names: Mapping[str, Any]) -> bool:
    for name, ref in names.items():
        other = names.get(name.replace("linear_fc1.weight", "linear_fc2.weight"))
        if name.endswith("linear_fc1.weight") and isinstance(ref, TensorRef) and isinstance(other, TensorRef) and len(other.shape) == 2:
            return ref.shape[0] == 2 * other.shape[1]
    return True


def _some(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
