"""Counts and distances are exact: compared with plain numpy on whole arrays."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest
from builders import CONFIG, fill, megatron_args, megatron_tensors, stack, write_hf, write_torch_dist
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_tools.diff import reading
from ckpt_tools.diff import values as values_module
from ckpt_tools.diff.compare import DiffOptions, diff
from ckpt_tools.diff.tolerance import parse_tolerance
from ckpt_tools.errors import CkptError

OTHER = {"model_type": "unheard_of", "architectures": None}


def pair(tmp_path, a, b, **options):
    for name, tensor in (("a", a), ("b", b)):
        write_hf(tmp_path / name, tensors={"w": np.ascontiguousarray(tensor)}, **OTHER)
    return diff(tmp_path / "a", tmp_path / "b", DiffOptions(**options))


def test_figures_are_those_of_numpy_also_when_read_in_small_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(values_module, "MEASURED_BYTES", 400)
    random = np.random.default_rng(3)
    a = random.normal(size=(50, 7, 9)).astype(np.float32)
    b = np.where(random.random(a.shape) < 0.3, a + random.normal(size=a.shape).astype(np.float32) * 1e-3, a).astype(np.float32)
    (found,) = pair(tmp_path, a, b).values
    apart = np.abs(a.astype(np.float64) - b.astype(np.float64))
    assert found.differing == np.count_nonzero(a != b) and found.count == a.size
    assert found.max_abs == apart.max() and found.max_abs_at == np.unravel_index(apart.argmax(), a.shape)
    assert found.first == tuple(np.argwhere(a != b)[0])
    assert found.max_rel == (apart / np.maximum(abs(a), abs(b)).astype(np.float64)).max()
    wide = [x.astype(np.float64).ravel() for x in (a, b)]
    # sums in another order: float64 rounding of 3150 terms
    assert found.cosine == pytest.approx(np.dot(*wide) / np.linalg.norm(wide[0]) / np.linalg.norm(wide[1]), abs=1e-12)
    assert sum(found.histogram.values()) == found.differing


@pytest.mark.parametrize("kind", [ml_dtypes.bfloat16, np.float16, np.float32, np.float64, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])
def test_ulps_are_steps_of_nextafter(tmp_path, kind):
    a = np.array([1.0, -1.0, 0.5], kind)
    b = a.copy()
    for _ in range(3):
        b[1] = np.nextafter(b[1], kind(-4))
    assert pair(tmp_path, a, b).values[0].max_ulp == 3


def test_across_zero_ulps_count_both_sides(tmp_path):
    a = np.array([np.nextafter(np.float32(0), np.float32(1))], np.float32)
    assert pair(tmp_path, a, -a).values[0].max_ulp == 2


def test_signed_zeros_and_nans_differ_by_their_bits_and_by_nothing_else(tmp_path):
    a = np.array([0.0, np.nan, 1.0], np.float32)
    b = np.array([-0.0, np.nan, 1.0], np.float32)
    (found,) = pair(tmp_path, a, b).values
    assert (found.differing, found.max_abs, found.max_ulp, found.first) == (1, 0.0, 0, (0,))
    b = np.array([0.0, 1.0, np.nan], np.float32)
    (found,) = pair(tmp_path / "second", a, b).values
    assert (found.differing, found.nan_a, found.nan_b, found.max_abs) == (2, 1, 1, np.inf)


def test_integers_do_not_overflow(tmp_path):
    limits = np.iinfo(np.int64)
    (found,) = pair(tmp_path, np.array([limits.min, 5]), np.array([limits.max, 5])).values
    assert found.max_ulp == 2**64 - 1 and found.max_abs == float(2**64)


def test_values_of_different_dtypes_are_compared_as_numbers(tmp_path):
    a = np.array([1.0, 2.0, np.nan], np.float32)
    found = pair(tmp_path, a, a.astype(np.float16))
    assert not found.values and [(u.a, u.b) for u in found.dtypes] == [("float32", "float16")] and not found.equal
    assert pair(tmp_path / "second", a, a.astype(np.float16), ignore=frozenset({"dtype"})).equal
    b = np.array([1.0, 2.0009765625, 4.0], np.float32)  # half an ulp of float16 above 2
    assert [v.differing for v in pair(tmp_path / "third", b, b.astype(np.float16)).values] == [1]


@pytest.mark.parametrize(
    ("text", "equal"), [("9e-4", False), ("1e-3", True), ("0.0005rel", False), ("0.2%", True), ("8191ulp", False), ("9000ulp", True)]
)
def test_a_tolerance_is_absolute_relative_or_in_ulps(tmp_path, text, equal):
    a = np.array([1.0, 4.0], np.float32)
    b = np.array([1.0009765625, 4.0], np.float32)  # 2**-10 more: 8192 ulps
    found = pair(tmp_path, a, b, tolerance=parse_tolerance(text))
    assert found.equal is equal, found
    assert found.differing == 1


@pytest.mark.parametrize("text", ["", "x", "-1", "1e400", "1 mm", "nan"])
def test_what_is_no_tolerance_is_refused(text):
    with pytest.raises(CkptError) as error:
        parse_tolerance(text)
    assert error.value.code == "E570"


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, 5), max_size=4), st.integers(1, 8), st.integers(1, 200))
def test_boxes_cover_a_tensor_once_and_in_order(shape, itemsize, limit):
    numbers = np.arange(int(np.prod(shape)) if shape else 1).reshape(shape)
    seen = []
    for offset, size in reading.boxes(tuple(shape), itemsize, limit):
        part = numbers[tuple(slice(o, o + n) for o, n in zip(offset, size))]
        assert part.size * itemsize <= max(limit, itemsize)
        seen += part.ravel().tolist()
    assert seen == list(range(numbers.size if 0 not in shape else 0))


# ---- what is compared with what ---------------------------------------------------------------------------------------------------


def test_vocabulary_padding_is_reported_and_is_no_difference(tmp_path):
    hf = write_hf(tmp_path / "hf")
    for name, rows, pad in (("small", 104, 0.0), ("large", 128, 7.0)):
        tensors = stack(megatron_tensors(hf, CONFIG, rows, pad), 4)
        write_torch_dist(tmp_path / name, tensors, megatron_args(CONFIG, padded_vocab_size=rows))
    found = diff(tmp_path / "small", tmp_path / "large")
    assert found.equal and any("4 in A and 28 in B" in n.text for n in found.notes)
    found = diff(tmp_path / "hf", tmp_path / "large")
    assert found.equal and any("28 padding rows after 100" in n.text for n in found.notes)


def test_a_vocabulary_nobody_knows_the_size_of_is_a_difference_of_shape(tmp_path):
    hf = write_hf(tmp_path / "hf")
    for name, rows in (("small", 104), ("large", 128)):
        write_torch_dist(tmp_path / name, stack(megatron_tensors(hf, CONFIG, rows), 4), megatron_args(CONFIG, vocab_size=None))
    found = diff(tmp_path / "small", tmp_path / "large")
    assert not found.equal and {u.name for u in found.shapes} == {"embedding.word_embeddings.weight", "output_layer.weight"}
    assert diff(tmp_path / "hf", tmp_path / "large").equal  # the HF side knows it


def test_missing_unexpected_and_misshapen_tensors_are_answers_and_not_errors(tmp_path):
    hf = write_hf(tmp_path / "hf")
    tensors = stack(megatron_tensors(hf, CONFIG), 4)
    del tensors["decoder.final_layernorm.weight"]
    tensors["decoder.something.weight"] = np.ones(3, np.float32)
    tensors["output_layer.weight"] = np.ones((100, 4), np.float32)
    write_torch_dist(tmp_path / "run", tensors, megatron_args(CONFIG))
    found = diff(tmp_path / "hf", tmp_path / "run")
    assert {m.name for m in found.only_a} == {"model.norm.weight", "lm_head.weight"}
    assert {m.name for m in found.only_b} == {"decoder.something.weight", "output_layer.weight"}
    assert any("keeps its Megatron name" in n.text for n in found.notes) and not found.values


def test_settings_that_change_what_the_model_computes_are_compared(tmp_path):
    hf = write_hf(tmp_path / "hf")
    tensors = stack(megatron_tensors(hf, CONFIG), 4)
    write_torch_dist(tmp_path / "run", tensors, megatron_args(CONFIG, rotary_base=10000, norm_epsilon=1e-6))
    found = diff(tmp_path / "hf", tmp_path / "run")
    assert [(u.name, u.a, u.b) for u in found.config] == [("layernorm_epsilon", "1e-05", "1e-06"), ("rotary_base", "500000", "10000")]
    assert not found.equal and diff(tmp_path / "hf", tmp_path / "run", DiffOptions(ignore=frozenset({"config"}))).equal
    write_hf(tmp_path / "other", rope_theta=10000.0, torch_dtype="bfloat16", bos_token_id=7)
    assert [u.name for u in diff(tmp_path / "hf", tmp_path / "other").config] == ["rotary_base"]


def test_a_tied_head_stored_again_is_a_difference_only_when_it_differs(tmp_path):
    tensors = write_hf(tmp_path / "a", tie_word_embeddings=True)
    write_hf(tmp_path / "b", tensors={**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}, tie_word_embeddings=True)
    found = diff(tmp_path / "a", tmp_path / "b")
    assert found.equal and any("equal to it" in n.text for n in found.notes)
    write_hf(tmp_path / "c", tensors={**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, tie_word_embeddings=True)
    assert not diff(tmp_path / "a", tmp_path / "c").equal


def test_copies_on_legacy_ranks_that_differ_are_told(tmp_path):
    from builders import write_legacy

    hf = write_hf(tmp_path / "hf")
    whole = megatron_tensors(hf, CONFIG)
    for rank in range(2):
        own = {}
        for name, tensor in whole.items():
            if name.endswith("linear_fc1.weight"):
                tensor = np.concatenate([np.split(half, 2)[rank] for half in np.split(tensor, 2)])
            elif name.endswith(("linear_qkv.weight", "word_embeddings.weight", "output_layer.weight")):
                tensor = np.split(tensor, 2)[rank]
            elif name.endswith(("linear_proj.weight", "linear_fc2.weight")):
                tensor = np.split(tensor, 2, axis=1)[rank]
            own[name] = tensor + (rank if name == "decoder.final_layernorm.weight" else 0)
        write_legacy(tmp_path / "run" / "iter_0000005" / f"mp_rank_{rank:02d}", own, megatron_args(CONFIG, tensor_model_parallel_size=2))
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("5")
    found = diff(tmp_path / "hf", tmp_path / "run")
    assert found.equal and any(n.kind == "warning" and "decoder.final_layernorm.weight" in n.text for n in found.notes)


def test_patterns_choose_tensors_and_must_match_something(tmp_path):
    write_hf(tmp_path / "a")
    write_hf(tmp_path / "b", tensors=fill({n: s.shape for n, s in write_hf(tmp_path / "x").items()}))
    assert diff(tmp_path / "a", tmp_path / "b", DiffOptions(pattern="*.layers.0.*")).tensors == 9
    with pytest.raises(CkptError) as error:
        diff(tmp_path / "a", tmp_path / "b", DiffOptions(pattern="nothing_like_it"))
    assert error.value.code == "E572"


# ---- the command ------------------------------------------------------------------------------------------------------------------


def test_the_exit_status_is_the_answer(tmp_path, run_ckpt):
    tensors = write_hf(tmp_path / "a")
    write_hf(tmp_path / "b", tensors={**tensors, "model.norm.weight": tensors["model.norm.weight"] * 2})
    assert run_ckpt("diff", tmp_path / "a", tmp_path / "a").rc == 0
    assert run_ckpt("diff", tmp_path / "a", tmp_path / "b").rc == 1
    assert run_ckpt("diff", tmp_path / "a", tmp_path / "absent").rc == 2
    assert run_ckpt("diff", tmp_path / "a", tmp_path / "b", "--optimizer").rc == 2


def test_json_holds_everything_and_strange_numbers_as_text(tmp_path, run_ckpt):
    tensors = write_hf(tmp_path / "a")
    bad = tensors["model.norm.weight"].copy()
    bad[0] = np.nan
    write_hf(tmp_path / "b", tensors={**tensors, "model.norm.weight": bad})
    done = run_ckpt("diff", tmp_path / "a", tmp_path / "b", "--json")
    answer = json.loads(done.out)
    assert answer["schema"] == "ckpt.diff/1" and answer["equal"] is False and done.rc == 1
    (values,) = answer["values"]
    assert values["max_abs"] == "inf" and values["nan_b"] == 1 and values["name"] == "model.norm.weight"


def test_tables_markdown_and_the_page_tell_the_same(tmp_path, run_ckpt):
    tensors = write_hf(tmp_path / "a")
    name = "model.layers.2.self_attn.o_proj.weight"
    hostile = {"evil\x1b[2J<script>alert(1)</script>": np.ones(2, np.float32)}
    write_hf(tmp_path / "b", tensors={**tensors, name: tensors[name] * np.float32(2), **hostile})
    page = tmp_path / "diff.html"
    plain = run_ckpt("diff", tmp_path / "a", tmp_path / "b", "--format", "table", "--report", page)
    assert plain.rc == 1 and "is A times 2" in plain.out and "1e+04 to 1e+05" in plain.out and "\x1b" not in plain.out
    text = page.read_text()
    assert "is A times 2" in text and "<svg" in text and "<script" not in text and "\x1b" not in text and "http" not in text
    assert run_ckpt("diff", tmp_path / "a", tmp_path / "b", "--report", page).rc == 2, "a report is never overwritten"
    markdown = run_ckpt("diff", tmp_path / "a", tmp_path / "b", "--md").out
    assert markdown.startswith("\n### Differences\n\n|") and f"| {name} |" in markdown and "&lt;script>" in markdown
    tsv = run_ckpt("diff", tmp_path / "a", tmp_path / "b").out.splitlines()
    assert tsv[0] == "kind\tname\ta\tb" and {line.count("\t") for line in tsv} == {3}
