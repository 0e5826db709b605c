"""Ways to spoil a checkpoint that real Megatron-Core wrote, or the HF weights it was made of: one small change each."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import load_file, save_file

TRACKER = "latest_checkpointed_iteration.txt"
DENSE, LEGACY, MIXTRAL, WEIGHTS = "llama_tp2_bf16", "legacy_llama_tp2pp2_bf16", "mixtral_ep2_seq_bf16", "weightsonly_llama_tp2_bf16"
NORM = "decoder.final_layernorm.weight"
FC2 = "decoder.layers.1.mlp.linear_fc2.weight"


class Mutation(NamedTuple):
    """source: folder in shared/real, or "hf" / "shards" for its HF weights in one file or two; change: what is done to the copy; code:
    the finding; options: of the command."""

    source: str
    change: Callable[[Path], Any]
    code: str
    options: tuple[str, ...] = ()


def copied(source: Path, target: Path) -> Path:
    """A writable copy."""
    shutil.copytree(source, target)
    for path in target.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    target.chmod(0o755)
    return target


def hf_copy(source: Path, target: Path, *, shards: int) -> Path:
    """The HF weights of a real checkpoint as an HF folder."""
    target.mkdir()
    shutil.copyfile(source / "config.json", target / "config.json")
    if shards == 1:
        shutil.copyfile(source / "expected.safetensors", target / "model.safetensors")
        return target
    tensors = load_file(source / "expected.safetensors")
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :]), 1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({n: tensors[n] for n in part}, target / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    write_index(target, weight_map, sum(t.nbytes for t in tensors.values()))
    return target


def write_index(folder: Path, weight_map: dict[str, str], total: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))


def iteration(run: Path) -> Path:
    """The iteration folder of a run."""
    return next(p for p in sorted(run.iterdir()) if p.is_dir())


# ---- changes of files ---------------------------------------------------------------------------------------------------------------


def text(name: str, content: str | bytes) -> Callable[[Path], Any]:
    def change(folder: Path) -> None:
        path = next(iter(folder.glob(name)), folder / name)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())

    return change


def delete(pattern: str) -> Callable[[Path], Any]:
    def change(folder: Path) -> None:
        path = sorted(folder.glob(pattern))[-1]
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return change


def cut(pattern: str, keep: float) -> Callable[[Path], Any]:
    """Keep this share of a file's bytes; above 1 the number of bytes that are taken off its end."""

    def change(folder: Path) -> None:
        path = sorted(folder.glob(pattern))[0]
        data = path.read_bytes()
        path.write_bytes(data[: int(len(data) * keep)] if keep < 1 else data[: -int(keep)])

    return change


def append(pattern: str, data: bytes) -> Callable[[Path], Any]:
    def change(folder: Path) -> None:
        path = sorted(folder.glob(pattern))[0]
        path.write_bytes(path.read_bytes() + data)

    return change


def replaced(pattern: str, old: bytes, new: bytes) -> Callable[[Path], Any]:
    """Bytes of a file exchanged for as many others, so that every length in it stays true."""
    assert len(old) == len(new)

    def change(folder: Path) -> None:
        path = sorted(folder.glob(pattern))[0]
        data = path.read_bytes()
        assert old in data
        path.write_bytes(data.replace(old, new))

    return change


def rename(old: str, new: str) -> Callable[[Path], Any]:
    def change(folder: Path) -> None:
        (folder / old).rename(folder / new)

    return change


def both(*changes: Callable[[Path], Any]) -> Callable[[Path], Any]:
    def change(folder: Path) -> None:
        for one in changes:
            one(folder)

    return change


def copy_over(source: str, target: str) -> Callable[[Path], Any]:
    return lambda folder: shutil.copyfile(folder / source, folder / target)


def integrity(wrong: bool) -> Callable[[Path], Any]:
    """Megatron's integrity.json with a sum that is not right, or a file that is not there."""

    def change(run: Path) -> None:
        folder = iteration(run)
        files = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}
        if wrong:
            files[".metadata"] = files["metadata.json"]
        else:
            files["__9_9.distcp"] = files["metadata.json"]
        (folder / "integrity.json").write_text(json.dumps({"algorithm": "sha256", "files": files}))

    return change


# ---- changes of values --------------------------------------------------------------------------------------------------------------


def poke(name: str, change: Callable[[np.ndarray], Any]) -> Callable[[Path], Any]:
    """Change a tensor where it is stored. name: canonical ("exp_avg/..." for optimizer state); change gets its bits, in place: uint16 for
    bfloat16, the array itself for the others."""

    def poked(run: Path) -> None:
        from ckpt_tools import as_mcore, open_checkpoint
        from ckpt_tools.lazy import read_box
        from ckpt_tools.optimizer import reading

        checkpoint = open_checkpoint(run)
        view = as_mcore(checkpoint)
        state, _, parameter = name.rpartition("/")
        tensors = reading.read_optimizer(checkpoint, view).tensors[state] if state else view.tensors
        tensor = tensors[parameter]
        values = read_box(tensor, (0,) * len(tensor.global_shape), tensor.global_shape).copy()
        change(values.view(np.uint16) if tensor.dtype == "bfloat16" else values)
        for chunk in tensor.chunks:
            part = values[tuple(slice(o, o + n) for o, n in zip(chunk.global_offset, chunk.local_shape))]
            with open(chunk.extent.path, "r+b") as file:
                for index in np.ndindex(part.shape):
                    file.seek(chunk.extent.offset + sum(i * s for i, s in zip(index, chunk.extent.strides)))
                    file.write(part[index].tobytes())

    return poked


def put(index: Any, value: float) -> Callable[[np.ndarray], Any]:
    """Set elements to a number (as bfloat16 bits where the array holds those)."""

    def change(values: np.ndarray) -> None:
        number = np.float32(value)
        values[index] = number.view(np.uint32) >> 16 if values.dtype == np.uint16 else number

    return change


def flip(values: np.ndarray) -> None:
    values[(3,) * values.ndim] ^= 64


def twice(values: np.ndarray) -> None:
    half = len(values) // 2
    values[half : 2 * half] = values[:half]


def one_rank_drifts(run: Path) -> None:
    """Change a norm in the file of the second tensor-parallel rank only."""
    from ckpt_tools import open_checkpoint

    replica = next(r for r in open_checkpoint(run).details.replicas if r.name == NORM)
    extent = replica.copy.chunks[0].extent
    with open(extent.path, "r+b") as file:
        file.seek(extent.offset)
        file.write(b"\x12\x34")


def expert_copied(run: Path) -> None:
    """Expert 2 of a layer becomes expert 1."""
    from ckpt_tools import as_mcore, open_checkpoint

    name = "decoder.layers.1.mlp.experts.linear_fc2.weight"
    tensors = as_mcore(open_checkpoint(run))
    source = tensors[f"{name}1"].numpy().view(np.uint16)
    poke(f"{name}2", lambda values: np.copyto(values, source))(run)


# ---- changes of HF folders ----------------------------------------------------------------------------------------------------------


def config(**changes: Any) -> Callable[[Path], Any]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        value = {**json.loads(path.read_text()), **changes}
        path.write_text(json.dumps({k: v for k, v in value.items() if v is not None}))

    return change


def index(change: Callable[[dict[str, str]], Any], total: Any = None) -> Callable[[Path], Any]:
    def changed(folder: Path) -> None:
        path = folder / "model.safetensors.index.json"
        value = json.loads(path.read_text())
        change(value["weight_map"])
        if total is not None:
            value["metadata"]["total_size"] = total
        path.write_text(json.dumps(value))

    return changed


def tensors(change: Callable[[dict[str, np.ndarray]], Any], metadata: dict[str, str] | None = {"format": "pt"}) -> Callable[[Path], Any]:  # noqa: B006
    def changed(folder: Path) -> None:
        path = sorted(folder.glob("*.safetensors"))[0]
        held = load_file(path)
        change(held)
        save_file({n: np.ascontiguousarray(t) for n, t in held.items()}, path, metadata)

    return changed


def header(old: bytes, new: bytes) -> Callable[[Path], Any]:
    return replaced("model.safetensors", old, new)


def stale_twin(folder: Path) -> None:
    """model.norm.weight in the other shard as well, with other numbers."""
    holder = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]["model.norm.weight"]
    other = next(p for p in folder.glob("*.safetensors") if p.name != holder)
    held = load_file(other)
    save_file({**held, "model.norm.weight": load_file(folder / holder)["model.norm.weight"] * 0}, other, {"format": "pt"})


def beside(folder: Path, source: Path) -> None:
    """HF weights at the root of a run."""
    shutil.copyfile(source / "expected.safetensors", folder / "model.safetensors")
    shutil.copyfile(source / "config.json", folder / "config.json")
