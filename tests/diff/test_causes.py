"""Each planted fault is named: B is A with one thing done wrong, as converters have done it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from builders import CONFIG, dense_shapes, megatron_args, megatron_tensors, stack, write_hf, write_torch_dist
from ml_dtypes import bfloat16

from ckpt_tools.diff.compare import diff

Tensors = dict[str, np.ndarray]
L0 = "model.layers.0."
GROUPS, PER, SIZE = 2, 2, 4  # of the fixture: query groups, query heads in each, head size


def model(seed: int = 0, **changes: Any) -> Tensors:
    """Random weights, so that no two rows are alike."""
    random = np.random.default_rng(seed)
    return {n: random.normal(size=s).astype(np.float32) for n, s in dense_shapes({**CONFIG, **changes}).items()}


def changed(**new: Callable[[np.ndarray], np.ndarray]) -> Callable[[Tensors], Tensors]:
    """A fault that replaces the tensors whose name ends in the key (underscores for dots)."""

    def fault(tensors: Tensors) -> Tensors:
        out = dict(tensors)
        for end, change in new.items():
            for name in tensors:
                if name.endswith(f"{end}.weight"):
                    out[name] = np.ascontiguousarray(change(tensors[name]))
        return out

    return fault


def exchange(a: str, b: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {n: tensors[n.replace(a, "#").replace(b, a).replace("#", b)] for n in tensors}


def shift_layers(tensors: Tensors) -> Tensors:
    last = CONFIG["num_hidden_layers"] - 1
    return {
        n: tensors.get(n.replace(f"layers.{i}.", f"layers.{i + 1}."), t) for n, t in tensors.items() for i in [layer_of(n)] if i <= last
    }


def layer_of(name: str) -> int:
    return int(name.split("layers.")[1].split(".")[0]) if "layers." in name else -1


def qkv_joined(tensors: Tensors) -> Tensors:
    """linear_qkv written as [q; k; v] and read as interleaved by group."""
    out = dict(tensors)
    for layer in range(CONFIG["num_hidden_layers"]):
        names = [f"model.layers.{layer}.self_attn.{x}_proj.weight" for x in "qkv"]
        fused = np.concatenate([tensors[n] for n in names]).reshape(GROUPS, PER + 2, SIZE, -1)
        for name, part in zip(names, (fused[:, :PER], fused[:, PER:-1], fused[:, -1:])):
            out[name] = part.reshape(tensors[name].shape).copy()
    return out


def qkv_read_as_joined(tensors: Tensors) -> Tensors:
    """linear_qkv written interleaved and cut as [q; k; v]."""
    out = dict(tensors)
    for layer in range(CONFIG["num_hidden_layers"]):
        names = [f"model.layers.{layer}.self_attn.{x}_proj.weight" for x in "qkv"]
        q, k, v = (tensors[n].reshape(GROUPS, -1, SIZE, 8) for n in names)
        fused = np.concatenate([q, k, v], axis=1).reshape(-1, 8)
        for name, rows in zip(names, np.split(fused, [GROUPS * PER * SIZE, GROUPS * (PER + 1) * SIZE])):
            out[name] = rows.copy()
    return out


def by_rank(tensors: Tensors) -> Tensors:
    """linear_fc1 of two ranks joined as [gate0; up0; gate1; up1] and read as [gate; up]."""
    out = dict(tensors)
    for layer in range(CONFIG["num_hidden_layers"]):
        names = [f"model.layers.{layer}.mlp.{x}_proj.weight" for x in ("gate", "up")]
        halves = [np.split(tensors[n], 2) for n in names]
        joined = np.concatenate([h[r] for r in range(2) for h in halves])
        for name, rows in zip(names, np.split(joined, 2)):
            out[name] = rows.copy()
    return out


def pairs(q: np.ndarray) -> np.ndarray:
    """Rows of each head from halves to pairs."""
    return q.reshape(-1, 2, SIZE // 2, q.shape[1]).swapaxes(1, 2).reshape(q.shape)


def shards(rows: np.ndarray) -> np.ndarray:
    a, b, c, d = np.split(rows, 4)
    return np.concatenate([a, c, b, d])


def flip(tensor: np.ndarray) -> np.ndarray:
    bits = tensor.copy().view(np.uint32)
    bits[3, 2] ^= 1 << 22
    return bits.view(np.float32)


def zero_rows(tensor: np.ndarray) -> np.ndarray:
    out = tensor.copy()
    out[50:60] = 0
    return out


def moved_rows(tensor: np.ndarray) -> np.ndarray:
    return tensor[np.random.default_rng(5).permutation(len(tensor))]


def truncated(tensor: np.ndarray) -> np.ndarray:
    return (tensor.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


FAULTS: dict[str, tuple[Callable[[Tensors], Tensors], str, str]] = {
    # fault -> (how B is made from A, kind, words of the sentence)
    "square matrix transposed": (lambda t: {n: (a.T.copy() if a.shape == (8, 8) else a) for n, a in t.items()}, "transposed", ""),
    "oblong matrix transposed": (changed(down_proj=lambda a: a.T), "transposed", "transposed"),
    "gate and up exchanged": (exchange("gate_proj", "up_proj"), "gate-up-swapped", "gate and up"),
    "gate and up joined rank by rank": (by_rank, "gate-up-by-rank", "2 tensor-parallel ranks"),
    "qkv not interleaved": (qkv_joined, "qkv-not-interleaved", "one after the other where they should be interleaved"),
    "qkv cut as if not interleaved": (qkv_read_as_joined, "qkv-not-interleaved", "interleaved by query group where"),
    "rotary pairs": (changed(q_proj=pairs, k_proj=pairs), "rotary-order", "in pairs, as Meta's"),
    "off by one layer": (shift_layers, "layers-shifted", "l+1"),
    "two layers exchanged": (exchange("layers.1.", "layers.2."), "layers-swapped", "layers 1 and 2"),
    "q and o exchanged": (
        lambda t: {n: t[n.replace("k_proj", "#").replace("v_proj", "k_proj").replace("#", "v_proj")] for n in t},
        "tensors-swapped",
        "k_proj.weight and ",
    ),
    "rows permuted": (changed(embed_tokens=moved_rows), "rows-permuted", "all rows of A in another order"),
    "columns permuted": (changed(o_proj=lambda a: moved_rows(a.T).T), "columns-permuted", "all columns"),
    "shards of two ranks exchanged": (changed(down_proj=lambda a: shards(a.T).T), "shards-swapped", "parts 1 and 2 of 4 along its columns"),
    "shards of rows exchanged": (changed(lm_head=shards), "shards-swapped", "parts 1 and 2 of 4 along its rows"),
    "cast through bfloat16": (
        lambda t: {n: a.astype(bfloat16).astype(np.float32) for n, a in t.items()},
        "cast-bfloat16",
        "through bfloat16",
    ),
    "cast through float16": (
        lambda t: {n: a.astype(np.float16).astype(np.float32) for n, a in t.items()},
        "cast-float16",
        "through float16",
    ),
    "cut off to bfloat16": (lambda t: {n: truncated(a) for n, a in t.items()}, "truncated-bfloat16", "cut off"),
    "stored in bfloat16": (lambda t: {n: a.astype(bfloat16) for n, a in t.items()}, "cast", "A rounded to bfloat16"),
    "scaled": (changed(o_proj=lambda a: a * np.float32(1 / np.sqrt(8))), "scaled", "A times 0.353553"),
    "sign changed": (changed(o_proj=lambda a: -a), "scaled", "sign changed"),
    "norms around zero": (changed(layernorm=lambda a: a - np.float32(1)), "shifted", "minus 1"),
    "rows zero": (changed(embed_tokens=zero_rows), "zeros", "10 of 100 rows (50 to 59)"),
    "tensor zero": (changed(lm_head=np.zeros_like), "zeros", "all zeros"),
    "one bit": (changed(lm_head=flip), "bit-flip", "[3, 2]"),
    "big-endian": (changed(lm_head=lambda a: a.byteswap()), "byte-order", "big-endian"),
    "rows of one language only": (
        changed(embed_tokens=lambda a: np.concatenate([a[:90], np.random.default_rng(9).normal(size=(10, 8)).astype(np.float32)])),
        "some-rows",
        "10 of 100 rows (90 to 99)",
    ),
    "another step": (lambda t: {n: a + np.float32(1e-3) * model(7)[n] for n, a in t.items()}, "drifted", "another training step"),
    "another model": (lambda t: model(7), "unrelated", "another model"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(tmp_path, fault):
    make, kind, words = FAULTS[fault]
    tensors = model()
    write_hf(tmp_path / "a", tensors=tensors)
    write_hf(tmp_path / "b", tensors=make(tensors))
    found = diff(tmp_path / "a", tmp_path / "b")
    assert not found.equal
    causes = {c.kind: c for c in found.causes}
    assert kind in causes, found.causes
    assert words in causes[kind].text
    differing = {v.name for v in found.values} | {u.name for u in found.shapes}
    if fault not in ("off by one layer", "another step", "another model"):
        assert set(causes[kind].tensors) == differing, "one cause tells all"
    if fault == "off by one layer":  # the last layer has no next one and stayed what it was
        assert {layer_of(n) for n in causes[kind].tensors} == {0, 1, 2}


def megatron(tensors: Tensors) -> Tensors:
    return megatron_tensors(tensors, CONFIG)


MEGATRON_FAULTS: dict[str, tuple[str, Callable[[np.ndarray], np.ndarray], str]] = {
    "gate and up exchanged": ("mlp.linear_fc1.weight", lambda a: np.concatenate(np.split(a, 2)[::-1]), "gate-up-swapped"),
    "gate and up joined rank by rank": (
        "mlp.linear_fc1.weight",
        lambda a: a.reshape(2, 2, 8, 8).swapaxes(0, 1).reshape(a.shape),
        "gate-up-by-rank",
    ),
    "qkv one after the other": (
        "self_attention.linear_qkv.weight",
        lambda a: np.concatenate([p.reshape(-1, 8) for p in np.split(a.reshape(GROUPS, PER + 2, SIZE, 8), [PER, PER + 1], axis=1)]),
        "qkv-not-interleaved",
    ),
    "rotary pairs": (
        "self_attention.linear_qkv.weight",
        lambda a: np.concatenate([np.concatenate([pairs(g[: (PER + 1) * SIZE]), g[(PER + 1) * SIZE :]]) for g in np.split(a, GROUPS)]),
        "rotary-order",
    ),
}


@pytest.mark.parametrize("fault", MEGATRON_FAULTS)
def test_a_fault_between_megatron_checkpoints_is_named_under_megatron_names(tmp_path, fault):
    part, change, kind = MEGATRON_FAULTS[fault]
    good = stack(megatron(model()), CONFIG["num_hidden_layers"])
    key = f"decoder.layers.{part}"
    write_torch_dist(tmp_path / "a", good, megatron_args(CONFIG))
    write_torch_dist(tmp_path / "b", {**good, key: np.stack([change(t) for t in good[key]])}, megatron_args(CONFIG))
    found = diff(tmp_path / "a", tmp_path / "b")
    assert found.naming == "mcore" and [c.kind for c in found.causes] == [kind]
    assert set(found.causes[0].tensors) == {f"decoder.layers.{i}.{part}" for i in range(4)}


def test_experts_under_the_wrong_numbers_are_named(tmp_path):
    random = np.random.default_rng(1)
    tensors = {f"model.layers.0.mlp.experts.{e}.down_proj.weight": random.normal(size=(4, 6)).astype(np.float32) for e in range(4)}
    write_hf(tmp_path / "a", tensors=tensors, model_type="unheard_of", architectures=None)
    write_hf(tmp_path / "b", tensors=exchange("experts.1.", "experts.3.")(tensors), model_type="unheard_of", architectures=None)
    (cause,) = diff(tmp_path / "a", tmp_path / "b").causes
    assert (cause.kind, cause.text) == ("experts-swapped", "has experts 1 and 3 exchanged") and len(cause.tensors) == 2


def test_the_same_bits_labelled_otherwise_are_named(tmp_path):
    tensors = {n: a.astype(np.float16) for n, a in model().items()}
    write_hf(tmp_path / "a", tensors=tensors)
    write_hf(tmp_path / "b", tensors={n: a.view(bfloat16) for n, a in tensors.items()})
    found = diff(tmp_path / "a", tmp_path / "b")
    assert [c.kind for c in found.causes] == ["relabelled"] and len(found.dtypes) == len(tensors)


def test_tensors_under_other_names_are_recognised_by_what_they_hold(tmp_path):
    tensors = model()
    write_hf(tmp_path / "a", tensors=tensors)
    write_hf(tmp_path / "b", tensors={n.replace("self_attn", "attention"): t for n, t in tensors.items()})
    found = diff(tmp_path / "a", tmp_path / "b")
    assert len(found.only_a) == len(found.only_b) == 16
    renamed = [c for c in found.causes if c.kind == "renamed"]
    assert sum(len(c.tensors) for c in renamed) == 16 and "layers.*.self_attn.q_proj.weight" in " ".join(c.text for c in renamed)
    assert found.only_a[0].nearest[0] == found.only_a[0].name.replace("self_attn", "attention")
