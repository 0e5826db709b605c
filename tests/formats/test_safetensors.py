"""The safetensors container: what the official library accepts and refuses is the judge."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from ckpt_tools.errors import CkptError
from ckpt_tools.formats.safetensors import layout_file, read_header


def raw(table, data=b"", length=None):
    header = json.dumps(table).encode() if isinstance(table, dict) else table
    return (len(header) if length is None else length).to_bytes(8, "little") + header + data


def entry(*offsets, shape=(2,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


BROKEN = {
    "one byte short": raw({"a": entry(0, 8)}, bytes(7)),
    "trailing bytes": raw({"a": entry(0, 8)}, bytes(24)),
    "overlap": raw({"a": entry(0, 8), "b": entry(4, 12)}, bytes(12)),
    "alias": raw({"a": entry(0, 8), "b": entry(0, 8)}, bytes(8)),
    "hole": raw({"a": entry(0, 8), "b": entry(12, 20)}, bytes(20)),
    "backwards": raw({"a": entry(8, 0)}, bytes(8)),
    "wrong size": raw({"a": entry(0, 8, shape=(3,))}, bytes(8)),
    "overflowing shape": raw({"a": entry(0, 8, shape=(2**62, 8))}, bytes(8)),
    "length 2**40": raw({}, length=2**40),
    "length 2**64-1": raw({}, length=2**64 - 1),
    "length beyond the file": raw({}, length=3),
    "length 0": raw(b"", length=0),
    "length 1": raw(b"{", length=1),
    "empty file": b"",
    "eight bytes": bytes(8),
    "old writer's broken header": raw(b'{},"__metadata__":{}}'),
    "negative offset": raw({"a": entry(-8, 0)}, bytes(8)),
    "unknown dtype": raw({"a": entry(0, 8, dtype="F33")}, bytes(8)),
    "deep nesting": raw(b"[" * 50000),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_the_library_refuses_is_refused_with_the_files_name(tmp_path, name):
    path = tmp_path / "model.safetensors"
    path.write_bytes(BROKEN[name])
    with pytest.raises((SafetensorError, ValueError, OverflowError)), safe_open(path, "np"):
        pass
    with pytest.raises(CkptError) as caught:
        read_header(str(path))
    assert str(path) in str(caught.value) and caught.value.code in ("E210", "E211")


@pytest.mark.parametrize(
    "text", [b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1234\n", b"<!DOCTYPE html><html>404</html>"]
)
def test_placeholders_are_called_by_their_name(tmp_path, text):
    path = tmp_path / "model.safetensors"
    path.write_bytes(text)
    with pytest.raises(CkptError) as caught:
        read_header(str(path))
    assert caught.value.code == "E205"


def test_shuffled_headers_zero_tensors_scalars_and_empty_shapes_are_legal(tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_bytes(
        raw({"b": entry(8, 16), "a": entry(0, 8), "none": entry(16, 16, shape=(0, 4)), "one": entry(16, 20, shape=())}, bytes(20))
    )
    header = read_header(str(path))
    assert header.tensors["b"].chunks[0].extent.offset == header.data_offset + 8
    assert header.tensors["one"].global_shape == ()
    for table in ({}, {"__metadata__": {"format": "pt"}}):
        path.write_bytes(raw(table))
        assert read_header(str(path)).tensors == {}


def test_duplicate_keys_pass_the_library_but_not_us(tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_bytes(
        raw(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', bytes(8))
    )
    with pytest.raises(CkptError, match="twice"):
        read_header(str(path))


names = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=12).filter(lambda n: n != "__metadata__")
arrays = st.tuples(st.sampled_from(["float32", "float16", "int8", "uint8", "int64", "bool"]), st.lists(st.integers(0, 4), max_size=3))


@given(st.dictionaries(names, arrays, max_size=6), st.sampled_from([None, {"format": "pt"}]))
def test_a_file_of_the_library_is_laid_out_byte_for_byte(tmp_path_factory, tensors, metadata):
    path = tmp_path_factory.mktemp("st") / "a.safetensors"
    rng = np.random.default_rng(0)
    values = {n: rng.integers(0, 2, shape).astype(kind) for n, (kind, shape) in tensors.items()}
    save_file(values, path, metadata)
    laid = layout_file([(n, kind, tuple(shape)) for n, (kind, shape) in tensors.items()], metadata)
    content = bytearray(laid.size)
    content[: len(laid.header)] = laid.header
    for name, (offset, size) in laid.places.items():
        content[offset : offset + size] = values[name].tobytes()
    assert bytes(content) == path.read_bytes()


@given(st.binary(max_size=200))
def test_garbage_never_raises_anything_but_a_ckpt_error(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("st") / "a.safetensors"
    path.write_bytes(data)
    try:
        read_header(str(path))
    except CkptError:
        pass
