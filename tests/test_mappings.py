"""A mapping and its inverse are the identity, for any sizes; every element of both sides belongs to exactly one piece."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_tools.families import FAMILIES
from ckpt_tools.families.dimensions import dimensions
from ckpt_tools.families.family import bind, expand
from ckpt_tools.families.mappings import Copy, Rows, Vocab

DENSE = ("llama", "mistral", "qwen2", "qwen3")


@st.composite
def arguments(draw):
    groups, per_group = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    vocab = draw(st.integers(1, 40))
    return {
        "num_layers": draw(st.integers(1, 3)),
        "hidden_size": draw(st.integers(1, 9)),
        "num_attention_heads": groups * per_group,
        "num_query_groups": groups,
        "group_query_attention": True,
        "kv_channels": draw(st.integers(1, 5)),
        "ffn_hidden_size": draw(st.integers(1, 9)),
        "vocab_size": vocab,
        "padded_vocab_size": vocab + draw(st.integers(0, 9)),
        "untie_embeddings_and_output_weights": draw(st.booleans()),
        "num_experts": None,
    }


def slices(offset, shape):
    return tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))


@settings(max_examples=60)
@given(arguments(), st.sampled_from(DENSE))
def test_hf_to_megatron_and_back_is_the_identity(args, name):
    dims = dimensions(args)
    for binding in expand(FAMILIES[name], dims):
        mapping = binding.mapping
        hf = [np.random.default_rng(i).integers(0, 2**31, s) for i, s in enumerate(mapping.hf_shapes(dims))]
        mcore = np.full(mapping.mcore_shape(dims), -1)
        seen = [np.zeros(a.shape, int) for a in hf]
        for piece in mapping.pieces(dims):
            part = hf[piece.source][slices(piece.hf, piece.shape)]
            seen[piece.source][slices(piece.hf, piece.shape)] += 1
            axes = piece.axes or tuple(range(part.ndim))
            moved = np.transpose(part, [a for a in axes if a >= 0]).reshape([1 if a < 0 else part.shape[a] for a in axes])
            target = slices(piece.mcore, moved.shape)
            assert (mcore[target] == -1).all()
            mcore[target] = moved
        assert all((s == 1).all() for s in seen)
        assert (mcore == -1).sum() == mcore.size - sum(a.size for a in hf)
        back = [np.empty_like(a) for a in hf]
        for piece in mapping.pieces(dims):
            back[piece.source][slices(piece.hf, piece.shape)] = mcore[slices(piece.mcore, piece.shape)]
        assert all(np.array_equal(a, b) for a, b in zip(hf, back, strict=True))


@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 4))
def test_qkv_rows_follow_megatrons_formula(groups, per_group, d):
    """row(q,a,c) = (g(R+2)+j)d+c, row(k,g,c) = (g(R+2)+R)d+c, row(v,g,c) = (g(R+2)+R+1)d+c (Megatron-Core attention.py)."""
    args = {
        "num_layers": 1,
        "hidden_size": 1,
        "num_attention_heads": groups * per_group,
        "num_query_groups": groups,
        "kv_channels": d,
        "ffn_hidden_size": 1,
        "vocab_size": 1,
    }
    dims = dimensions(args)
    mapping = next(m for m in FAMILIES["llama"].tensors if m.mcore.endswith("linear_qkv.weight"))
    where = [{}, {}, {}]
    for piece in mapping.pieces(dims):
        where[piece.source].update({piece.hf[0] + i: piece.mcore[0] + i for i in range(piece.shape[0])})
    for head in range(groups * per_group):
        g, j = divmod(head, per_group)
        assert all(where[0][head * d + c] == (g * (per_group + 2) + j) * d + c for c in range(d))
    for g in range(groups):
        assert all(where[1][g * d + c] == (g * (per_group + 2) + per_group) * d + c for c in range(d))
        assert all(where[2][g * d + c] == (g * (per_group + 2) + per_group + 1) * d + c for c in range(d))


@pytest.mark.parametrize("name", DENSE)
def test_every_hf_name_of_a_family_is_claimed_once(name):
    args = {
        "num_layers": 2,
        "hidden_size": 4,
        "num_attention_heads": 2,
        "ffn_hidden_size": 4,
        "vocab_size": 3,
        "untie_embeddings_and_output_weights": True,
    }
    dims = dimensions(args)
    names = [n for b in expand(FAMILIES[name], dims) for n in b.hf]
    assert len(names) == len(set(names))
    bound = bind(FAMILIES[name], dims, names, "hf", "here")
    assert [n for b in bound.bindings for n in b.hf] == names


def test_mappings_are_hashable_data():
    assert {Copy(("a",), "b", ("H",)), Vocab(("a",), "b"), Rows(("a",), "b", ("1",), ())}
