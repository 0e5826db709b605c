"""torch.save files and .distcp entries: what torch and megatron-core write we read, what we write they read."""

from __future__ import annotations

import argparse
import enum
import io
import os
import pickle
import random
import struct
import subprocess
import sys
import zipfile
from collections import OrderedDict
from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_tools.dtypes import DTYPES
from ckpt_tools.errors import CkptError
from ckpt_tools.formats import torch_zip_writer
from ckpt_tools.formats.dcp_metadata import metadata_object
from ckpt_tools.formats.pickle_writer import dump
from ckpt_tools.formats.pickles import DTypeRef, Namespace, NumpyArray, Record, Size, TensorRef, TensorSpec, load
from ckpt_tools.formats.torch_zip import open_torch_file, read_directory, read_tensor_entry
from ckpt_tools.formats.torch_zip_writer import dump_file, layout, tensor_blob

ROOT = Path(__file__).resolve().parents[2]
WHOLE = sorted(n for n, d in DTYPES.items() if d.bits % 8 == 0 and hasattr(torch, n))
SHAPES = [(), (3,), (0, 4), (2, 3, 5), (1, 2, 1, 3, 1)]


class Backend(enum.Enum):
    auto = 5


def raw_of(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def random_tensor(dtype, shape):
    size = prod(shape) * DTYPES[dtype].itemsize
    values = os.urandom(size) if dtype != "bool" else bytes(random.choices((0, 1), k=size))
    return torch.frombuffer(bytearray(values), dtype=torch.uint8).view(getattr(torch, dtype)).reshape(shape) if size else torch.empty(shape, dtype=getattr(torch, dtype))


def entry_of(path, offset=0, length=None):
    with open(path, "rb") as file:
        length = os.fstat(file.fileno()).st_size - offset if length is None else length
        return read_tensor_entry(file.fileno(), offset, length, str(path))


def failure(path, **options):
    with pytest.raises(CkptError) as caught:
        open_torch_file(path, **options)
    assert str(path) in caught.value.where
    return caught.value


# ------------------------------------------------------------------------------------------------------- torch writes, we read


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", WHOLE)
def test_every_dtype_and_shape_that_torch_saves(tmp_path, dtype, shape):
    tensor = random_tensor(dtype, shape)
    torch.save({"a": tensor, "b": [tensor]}, tmp_path / "x.pt")
    file = open_torch_file(tmp_path / "x.pt")
    ref = file.value["a"]
    assert (ref.dtype, ref.shape, ref.strides) == (dtype, shape, tensor.stride())
    assert file.value["b"][0] is ref or file.value["b"][0] == ref
    assert file.read(ref) == raw_of(tensor)
    start, strides = file.extent(ref)
    assert strides == tuple(s * tensor.element_size() for s in tensor.stride())
    assert (tmp_path / "x.pt").read_bytes()[start : start + len(raw_of(tensor))] == raw_of(tensor)


VIEWS = {
    "transposed": lambda t: t.t(),
    "row": lambda t: t[2],
    "column": lambda t: t[:, 1],
    "every other": lambda t: t[::2, 1::2],
    "expanded": lambda t: t[0, 0].expand(3, 2),
    "one element expanded": lambda t: t[3:4, 3].expand(5),
    "block": lambda t: t[1:3, 2:5],
    "permuted": lambda t: t.reshape(2, 2, 6).permute(2, 0, 1),
    "empty slice": lambda t: t[4:],
    "scalar": lambda t: t[1, 1],
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_into_larger_storages(tmp_path, name):
    view = VIEWS[name](torch.arange(24, dtype=torch.int16).reshape(4, 6))
    torch.save(view, tmp_path / "x.pt")
    file = open_torch_file(tmp_path / "x.pt")
    assert file.read(file.value) == raw_of(view)
    entry = entry_of(tmp_path / "x.pt")
    assert (entry.shape, entry.strides, entry.data_offset) == (tuple(view.shape), tuple(2 * s for s in view.stride()), file.extent(file.value)[0])


def test_parameters_modules_and_optimizers(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    marked = torch.nn.Parameter(torch.ones(2))
    marked.tensor_model_parallel = True
    tagged = torch.ones(2)
    tagged.partition_dim = 0
    value = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "p": model[0].weight, "f": frozen, "m": marked, "t": tagged}
    torch.save(value, tmp_path / "x.pt")
    file = open_torch_file(tmp_path / "x.pt")
    read = file.value
    assert type(read["model"]) is OrderedDict and list(read["model"]) == list(value["model"])
    assert read["model"]._metadata == value["model"]._metadata
    for name, tensor in value["model"].items():
        assert file.read(read["model"][name]) == raw_of(tensor)
    assert read["optimizer"]["param_groups"] == value["optimizer"]["param_groups"]
    assert file.read(read["optimizer"]["state"][0]["exp_avg"]) == raw_of(value["optimizer"]["state"][0]["exp_avg"])
    assert (read["p"].parameter, read["p"].requires_grad) == (True, True) and (read["f"].parameter, read["f"].requires_grad) == (True, False)
    assert file.read(read["p"]) == raw_of(model[0].weight.detach())
    assert type(read["m"]) is TensorRef and type(read["t"]) is TensorRef


def megatron_like():
    return {
        "args": argparse.Namespace(tensor_model_parallel_size=2, params_dtype=torch.bfloat16, attention_backend=Backend.auto, lr=np.float64(1e-4)),
        "iteration": 7,
        "checkpoint_version": 3.0,
        "rng_state": [
            {
                "random_rng_state": random.Random(1).getstate(),
                "np_rng_state": np.random.RandomState(1).get_state(),
                "torch_rng_state": torch.get_rng_state(),
                "rng_tracker_states": {"model-parallel-rng": torch.arange(16, dtype=torch.uint8)},
            }
        ],
        "model": OrderedDict(a=torch.randn(2, 3), b=torch.randn(4).to(torch.bfloat16), c=torch.randn(2).to(torch.float8_e4m3fn)),
        "optimizer": {"param_groups": [{"params": [0, 1], "betas": (0.9, 0.95)}], (torch.bfloat16, torch.float32): {"param": torch.ones(3)}},
        "size": torch.Size([1, 2]),
        "device": torch.device("cpu"),
        "generator": None,
    }


def test_a_megatron_rank_file(tmp_path):
    value = megatron_like()
    torch.save(value, tmp_path / "model_optim_rng.pt")
    file = open_torch_file(str(tmp_path / "model_optim_rng.pt"))
    read = file.value
    assert type(read["args"]) is Namespace and read["args"]["tensor_model_parallel_size"] == 2
    assert read["args"]["params_dtype"] == DTypeRef("bfloat16") and repr(read["args"]["attention_backend"]).endswith("Backend(5)")
    assert read["args"]["lr"].item() == 1e-4 and read["iteration"] == 7 and read["size"] == (1, 2)
    state = read["rng_state"][0]
    assert state["random_rng_state"] == value["rng_state"][0]["random_rng_state"]
    assert np.array_equal(state["np_rng_state"][1].to_numpy(), value["rng_state"][0]["np_rng_state"][1])
    assert file.read(state["torch_rng_state"]) == raw_of(value["rng_state"][0]["torch_rng_state"])
    assert read["optimizer"][DTypeRef("bfloat16"), DTypeRef("float32")]["param"].shape == (3,)


def test_a_file_inside_a_file_at_an_odd_offset(tmp_path):
    stream = io.BytesIO()
    tensor = torch.arange(7, dtype=torch.float64)
    torch.save(tensor, stream)
    record = stream.getvalue()
    (tmp_path / "x.distcp").write_bytes(b"?" * 13 + record + b"!" * 3000)
    entry = entry_of(tmp_path / "x.distcp", 13, len(record))
    data = (tmp_path / "x.distcp").read_bytes()
    assert data[entry.data_offset : entry.data_offset + 56] == raw_of(tensor)
    file = open_torch_file(tmp_path / "x.distcp", 13, len(record))
    assert file.read(file.value) == raw_of(tensor)
    assert all(result.ok for result in file.check_crc())


def test_all_reference_checkpoints_open(shared):
    paths = sorted((shared / "real").rglob("*.pt"))
    assert paths
    for path in paths:
        file = open_torch_file(path)
        compare(file, file.value, torch.load(path, weights_only=False, map_location="cpu"))


def compare(file, ours, theirs):
    """Every tensor, number and string of a loaded file equals ours."""
    if isinstance(theirs, torch.Tensor):
        assert file.read(ours) == raw_of(theirs.detach()) and ours.shape == tuple(theirs.shape)
    elif isinstance(theirs, argparse.Namespace):
        compare(file, dict(ours), vars(theirs))
    elif isinstance(theirs, dict):
        assert len(ours) == len(theirs)
        for (a, left), (b, right) in zip(ours.items(), theirs.items()):
            compare(file, a, b)
            compare(file, left, right)
    elif isinstance(theirs, list | tuple):
        assert len(ours) == len(theirs)
        for left, right in zip(ours, theirs):
            compare(file, left, right)
    elif isinstance(theirs, np.ndarray):
        assert np.array_equal(ours.to_numpy(), theirs)
    elif isinstance(theirs, np.generic):
        assert ours.item() == theirs.item()
    elif isinstance(theirs, torch.dtype):
        assert str(theirs) == repr(ours)
    elif isinstance(theirs, enum.Enum):
        assert type(ours) is Record and ours.args == (theirs.value,)
    elif isinstance(theirs, int | float | str | bytes | None):
        assert ours == theirs
    else:
        assert type(ours) is Record or repr(ours)


def test_all_reference_records_are_located_as_torch_reads_them(shared):
    seen = 0
    for path in sorted((shared / "real").rglob(".metadata")):
        metadata = load(path.read_bytes(), where=str(path), policy="metadata")
        for index, info in list(metadata.storage_data.items())[::9]:
            place = path.parent / info.relative_path
            record = place.read_bytes()[info.offset : info.offset + info.length]
            if index.offset is None:
                open_torch_file(place, info.offset, info.length)
                continue
            tensor = torch.load(io.BytesIO(record), weights_only=True)
            entry = entry_of(place, info.offset, info.length)
            assert entry.shape == tuple(tensor.shape) and f"torch.{entry.dtype}" == str(tensor.dtype)
            start = entry.data_offset - info.offset
            if tensor.is_contiguous():
                assert record[start : start + tensor.nbytes] == raw_of(tensor)
            seen += 1
    assert seen > 50


# ------------------------------------------------------------------------------------------------------- we write, torch reads


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", WHOLE)
def test_one_tensor_as_torch_loads_it(tmp_path, dtype, shape):
    tensor = random_tensor(dtype, shape)
    blob = tensor_blob(dtype, shape)
    data = blob.head + raw_of(tensor) + blob.tail
    assert (len(data), blob.data_offset % 64, blob.nbytes) == (blob.size, 0, len(raw_of(tensor)))
    loaded = torch.load(io.BytesIO(data), weights_only=True)
    assert loaded.dtype == tensor.dtype and loaded.shape == tensor.shape and loaded.is_contiguous() and raw_of(loaded) == raw_of(tensor)
    (tmp_path / "x").write_bytes(b"." * 64 + data)
    entry = entry_of(tmp_path / "x", 64)
    assert (entry.dtype, entry.shape, entry.data_offset) == (dtype, shape, 64 + blob.data_offset)
    torch.save(tensor, tmp_path / "theirs")
    assert entry.strides == entry_of(tmp_path / "theirs").strides


def spec(tensor, hole=False, **options):
    return TensorSpec(str(tensor.dtype)[6:], tuple(tensor.shape), None if hole else raw_of(tensor.detach()), **options)


def test_what_torch_accepts_without_trust(tmp_path):
    """weights_only=True, nothing registered: containers, tensors, dtypes, sizes, sets, bytes."""
    weight = torch.randn(3, 2)
    model = OrderedDict(weight=spec(weight), bias=spec(torch.ones(2).to(torch.float8_e5m2)))
    model._metadata = OrderedDict({"": {"version": 1}})
    value = {
        "model": model,
        "parameter": spec(weight, parameter=True, requires_grad=True),
        "numbers": [1, -1, 2**31, 2**80, 1.5, True, None],
        "bytes": b"\x00\xff",
        "array": bytearray(b"ab"),
        "set": {1, 2},
        "dtype": DTypeRef("bfloat16"),
        "size": Size((1, 2)),
        ("a", 1): "é",
    }
    (tmp_path / "x.pt").write_bytes(dump_file(value, "x"))
    loaded = torch.load(tmp_path / "x.pt", weights_only=True)
    assert torch.equal(loaded["model"]["weight"], weight) and loaded["model"]._metadata == model._metadata
    assert isinstance(loaded["parameter"], torch.nn.Parameter) and loaded["parameter"].requires_grad and torch.equal(loaded["parameter"], weight)
    assert loaded["model"]["bias"].dtype == torch.float8_e5m2
    for key in ("numbers", "bytes", "array", "set", ("a", 1)):
        assert loaded[key] == value[key]
    assert loaded["dtype"] is torch.bfloat16 and loaded["size"] == torch.Size([1, 2])
    mapped = torch.load(tmp_path / "x.pt", weights_only=True, mmap=True)
    assert torch.equal(mapped["model"]["weight"], weight) and mapped["model"]["weight"].data_ptr() % 64 == 0


def test_a_file_read_and_written_again_loads_the_same(tmp_path):
    value = megatron_like()
    value["generator"] = torch.Generator().manual_seed(3)
    torch.save(value, tmp_path / "a.pt")
    file = open_torch_file(tmp_path / "a.pt")
    made = layout(file.value, "b")
    out = bytearray(made.size)
    for at, data in made.literals:
        out[at : at + len(data)] = data
    for at, size, ref in made.holes:
        assert type(ref) is TensorRef and size == len(file.read(ref))
        out[at : at + size] = file.read(ref)
    (tmp_path / "b.pt").write_bytes(out)
    again = torch.load(tmp_path / "b.pt", weights_only=False)
    same(again, torch.load(tmp_path / "a.pt", weights_only=False))


def same(left, right):
    assert type(left) is type(right)
    if isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype and left.shape == right.shape and raw_of(left) == raw_of(right)
    elif isinstance(left, torch.Generator):
        assert torch.equal(left.get_state(), right.get_state())
    elif isinstance(left, dict):
        assert list(left) == list(right)
        for key in left:
            same(left[key], right[key])
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for a, b in zip(left, right):
            same(a, b)
    elif isinstance(left, argparse.Namespace):
        same(vars(left), vars(right))
    elif isinstance(left, np.ndarray):
        assert left.dtype == right.dtype and np.array_equal(left, right)
    else:
        assert left == right


def test_reference_files_read_and_written_again_load_the_same(shared, tmp_path):
    for number, path in enumerate(sorted((shared / "real").rglob("common.pt"))[:6]):
        file = open_torch_file(path)
        made = layout(file.value, "common")
        out = bytearray(made.size)
        for at, data in (*made.literals, *((at, file.read(ref)) for at, _, ref in made.holes)):
            out[at : at + len(data)] = data
        (tmp_path / f"{number}.pt").write_bytes(out)
        same(torch.load(tmp_path / f"{number}.pt", weights_only=False), torch.load(path, weights_only=False))


def test_the_layout_says_where_everything_goes():
    tag = object()
    made = layout([TensorSpec("bfloat16", (3,), None, tag), TensorSpec("int8", (2,), b"ab"), TensorSpec("int8", (0,), None)], base=128)
    assert [(size, hole.tag) for _, size, hole in made.holes] == [(6, tag), (0, None)] and all(at % 64 == 0 for at, _, _ in made.holes)
    parts = sorted([(at, len(data)) for at, data in made.literals] + [(at, size) for at, size, _ in made.holes])
    position = 128
    for at, size in parts:
        assert at == position
        position += size
    assert position == 128 + made.size
    for wrong in (lambda: layout([], base=1), lambda: dump_file([TensorSpec("int8", (1,))]), lambda: layout([TensorSpec("int8", (2,), b"a")])):
        with pytest.raises(CkptError) as caught:
            wrong()
        assert caught.value.code == "E490"


def test_python_s_zipfile_finds_nothing_wrong():
    data = dump_file({"a": TensorSpec("int8", (2,), b"ab"), "b": 1}, "common")
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None
        assert archive.read("common/data/0") == b"ab"
        assert archive.read("common/version") == b"3\n" and archive.read("common/byteorder") == b"little"


# ------------------------------------------------------------------------------------------------------------------- zip64


def test_a_tensor_beyond_4_gib_that_torch_maps(tmp_path):
    count = 2**31 + 5  # bfloat16: a little more than 4 GiB, in a sparse file
    blob = tensor_blob("bfloat16", (count,))
    with open(tmp_path / "big", "wb") as file:
        file.write(blob.head)
        file.seek(blob.data_offset + blob.nbytes - 2)
        file.write(b"\x80\x3f")  # 1.0
        file.write(blob.tail)
    assert os.path.getsize(tmp_path / "big") == blob.size
    tensor = torch.load(tmp_path / "big", weights_only=True, mmap=True)
    assert tensor.shape == (count,) and tensor[-1].item() == 1.0 and tensor[0].item() == 0.0
    entry = entry_of(tmp_path / "big")
    assert entry.shape == (count,) and entry.data_offset == blob.data_offset
    with zipfile.ZipFile(tmp_path / "big") as archive:
        assert archive.getinfo("archive/data/0").file_size == 2 * count


def test_records_behind_4_gib(tmp_path):
    """Two tensors, the header of the second one beyond 4 GiB."""
    made = layout({"a": TensorSpec("int8", (2**32 + 3,)), "b": TensorSpec("int16", (2,), b"\x01\x00\x02\x00")}, "x")
    with open(tmp_path / "x.pt", "wb") as file:
        for at, data in made.literals:
            file.seek(at)
            file.write(data)
    file = open_torch_file(tmp_path / "x.pt")
    assert file.read(file.value["b"]) == b"\x01\x00\x02\x00" and file.records["data/1"].data_offset > 2**32
    loaded = torch.load(tmp_path / "x.pt", weights_only=True, mmap=True)
    assert loaded["b"].tolist() == [1, 2] and loaded["a"].shape == (2**32 + 3,)
    with pytest.raises(CkptError) as caught:
        file.read(file.value["a"])
    assert caught.value.code == "E502"


def test_more_records_than_a_plain_zip_can_count(tmp_path):
    (tmp_path / "x.pt").write_bytes(dump_file([TensorSpec("int8", (1,), b"a") for _ in range(65_600)]))
    loaded = torch.load(tmp_path / "x.pt", weights_only=True)
    assert len(loaded) == 65_600 and loaded[-1].item() == ord("a")
    file = open_torch_file(tmp_path / "x.pt")
    assert len(file.value) == 65_600 and file.read(file.value[-1]) == b"a"


# ---------------------------------------------------------------------------------------------- distributed checkpoints as a whole


def write_folder(folder, tensors, objects):
    """A torch_dist folder made only with the functions under test. tensors: name -> (tensor, rows per piece)."""
    folder.mkdir()
    index, places, data = [], [], bytearray()
    for name, value in objects.items():
        record = dump_file([value])
        places.append((name, None, "__0_0.distcp", len(data), len(record)))
        data += record
    for name, (tensor, rows) in tensors.items():
        boxes = []
        for start in range(0, tensor.shape[0], rows) if tensor.ndim else [0]:
            piece = tensor[start : start + rows] if tensor.ndim else tensor
            offset = (start, *[0] * (tensor.ndim - 1)) if tensor.ndim else ()
            blob = tensor_blob(str(tensor.dtype)[6:], tuple(piece.shape))
            data += bytes(-len(data) % 64)
            places.append((name, offset, "__0_0.distcp", len(data), blob.size))
            data += blob.head + raw_of(piece) + blob.tail
            boxes.append((offset, tuple(piece.shape)))
        index.append((name, str(tensor.dtype)[6:], tuple(tensor.shape), boxes))
    (folder / "__0_0.distcp").write_bytes(data)
    metadata = metadata_object(index, objects, places)
    (folder / ".metadata").write_bytes(dump(metadata))
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}')
    (folder / "common.pt").write_bytes(dump_file({"iteration": 7, "args": Namespace({"tp": 2})}, "common"))
    return load((folder / ".metadata").read_bytes(), where=".metadata", policy="metadata"), metadata


def some_tensors():
    return {
        "decoder.layers.self_attention.linear_qkv.weight": (torch.randn(6, 4).to(torch.bfloat16), 2),
        "decoder.layers.mlp.linear_fc1.weight": (torch.randn(5, 3, 2), 2),
        "scalar": (torch.tensor(3.5), 1),
        "fp8": (torch.randn(4, 4).to(torch.float8_e4m3fn), 3),
        "count": (torch.arange(4), 4),
    }


def test_torch_dcp_reads_our_index_and_records(tmp_path):
    tensors = some_tensors()
    read, written = write_folder(tmp_path / "x", tensors, {"rng": {"a": [1]}})
    assert [vars(i) for i in read.storage_data.values()] == [vars(i) for i in written.storage_data.values()]
    assert [(i.fqn, i.offset) for i in read.storage_data] == [(i.fqn, i.offset) for i in written.storage_data]
    assert read.state_dict_metadata["scalar"].properties == written.state_dict_metadata["scalar"].properties
    target = {name: torch.zeros_like(tensor) for name, (tensor, _) in tensors.items()}
    target["rng"] = None
    dcp.load(target, checkpoint_id=tmp_path / "x", no_dist=True)
    for name, (tensor, _) in tensors.items():
        assert raw_of(target[name]) == raw_of(tensor), name
    assert target["rng"] == [{"a": [1]}]
    metadata = dcp.FileSystemReader(tmp_path / "x").read_metadata()
    entry = metadata.state_dict_metadata["fp8"]
    assert entry.properties.dtype is torch.float8_e4m3fn and entry.size == torch.Size([4, 4]) and len(entry.chunks) == 2


def same_index(read, theirs):
    """The fields of a Metadata that torch unpickled equal ours."""
    assert list(read.state_dict_metadata) == list(theirs.state_dict_metadata)
    for fqn, expected in theirs.state_dict_metadata.items():
        ours = read.state_dict_metadata[fqn]
        assert type(ours).__name__ == type(expected).__name__
        if hasattr(expected, "chunks"):
            assert ours.size == tuple(expected.size) and f"torch.{ours.properties.dtype}" == str(expected.properties.dtype)
            assert ours.properties.requires_grad == expected.properties.requires_grad and ours.properties.layout == "strided"
            assert [(c.offsets, c.sizes) for c in ours.chunks] == [(tuple(c.offsets), tuple(c.sizes)) for c in expected.chunks]
    assert len(read.storage_data) == len(theirs.storage_data)
    for (index, info), (i, n) in zip(read.storage_data.items(), theirs.storage_data.items()):
        assert (index.fqn, index.offset, index.index) == (i.fqn, None if i.offset is None else tuple(i.offset), i.index)
        assert (info.relative_path, info.offset, info.length) == (n.relative_path, n.offset, n.length)
    assert read.planner_data == theirs.planner_data and read.version == getattr(theirs, "version", None)
    assert hasattr(read, "all_local_plans") == hasattr(theirs, "all_local_plans")
    assert getattr(read, "mcore_data", None) == getattr(theirs, "mcore_data", None)


def test_reference_indexes_read_as_torch_reads_them_and_survive_a_round_trip(shared):
    pytest.importorskip("megatron.core")
    for path in sorted((shared / "real").rglob(".metadata")):
        theirs = pickle.loads(path.read_bytes())
        read = load(path.read_bytes(), where=str(path), policy="metadata")
        same_index(read, theirs)
        again = pickle.loads(dump(read))
        assert again.state_dict_metadata == theirs.state_dict_metadata and again.storage_data == theirs.storage_data
        assert again.planner_data == theirs.planner_data and again.version == theirs.version


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_an_index_of_plain_torch_in_any_protocol_it_can_have(tmp_path, protocol):
    state = {"model": {"weight": torch.randn(3, 2), "scalar": torch.tensor(1)}, "epoch": 3, "wide": torch.zeros(1, 2, 1, 2, 1)}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    theirs = dcp.FileSystemReader(tmp_path).read_metadata()
    assert theirs.planner_data["model.weight"] == ("model", "weight")
    for value in (pickle.dumps(theirs, protocol), pickle._dumps(theirs, protocol)):
        read = load(value, where=".metadata", policy="metadata")
        same_index(read, theirs)
        assert pickle.loads(dump(read)).storage_data == theirs.storage_data
        for end in range(0, len(value), 7):
            with pytest.raises(CkptError) as caught:
                load(value[:end], where=".metadata", policy="metadata")
            assert caught.value.code == "E203" and ".metadata" in caught.value.where


def test_plans_in_the_middle_of_an_index_are_not_skipped(tmp_path):
    """The plans are left out only when all that is needed came before them."""
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
    from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

    theirs = Metadata({}, None, {})
    theirs.all_local_plans = [SavePlan([WriteItem(MetadataIndex("a"), WriteItemType.SHARD)])]
    theirs.mcore_data = {"a": {"nd_reformulated_orig_global_shape": (1, 2)}}
    read = load(pickle.dumps(theirs), where=".metadata", policy="metadata")
    assert read.mcore_data == theirs.mcore_data and read.all_local_plans[0].name == "SavePlan"


MCORE = """
import sys, warnings
warnings.simplefilter("ignore")
import torch
from megatron.core import dist_checkpointing as d
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedObject
import megatron.core
torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
folder, expected = sys.argv[1], torch.load(sys.argv[2])
state = {n: ShardedTensor.from_rank_offsets(n, torch.zeros_like(t)) for n, t in expected.items()}
state["rng"] = ShardedObject("rng", None, (1,), (0,))
loaded = d.load(state, folder)
for name, tensor in expected.items():
    same = loaded[name].contiguous().reshape(-1).view(torch.uint8) if tensor.ndim else loaded[name].reshape(1).view(torch.uint8)
    assert torch.equal(same, tensor.contiguous().reshape(-1).view(torch.uint8)), name
assert loaded["rng"] == {"a": [1]}, loaded["rng"]
assert loaded["iteration"] == 7 and loaded["args"].tp == 2
print("megatron-core", megatron.core.__version__)
"""


@pytest.mark.oracle
@pytest.mark.parametrize("version", ["0.16", "0.19"])
def test_megatron_core_reads_our_index_records_and_common_state(tmp_path, version):
    pytest.importorskip("megatron.core")
    path = ROOT / ".venv" / "mcore019"
    if version == "0.19" and not path.is_dir():
        pytest.skip("megatron-core 0.19 is not installed beside the project")
    tensors = some_tensors()
    write_folder(tmp_path / "x", tensors, {"rng/shard_0_1": {"a": [1]}})
    torch.save({name: tensor for name, (tensor, _) in tensors.items()}, tmp_path / "expected.pt")
    env = {**os.environ, "PYTHONPATH": str(path) if version == "0.19" else "", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", MCORE, str(tmp_path / "x"), str(tmp_path / "expected.pt")]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False, cwd=tmp_path, timeout=300)
    assert done.returncode == 0 and f"megatron-core {version}" in done.stdout, done.stderr[-3000:]


# ------------------------------------------------------------------------------------------------------------- damage and malice


class Payload:
    def __init__(self, flag):
        self.flag = flag

    def __reduce__(self):
        return os.system, (f"touch {self.flag}",)


@pytest.mark.case("I1")
def test_a_payload_is_named_and_never_runs(tmp_path):
    torch.save({"iteration": 1, "x": Payload(tmp_path / "PWNED")}, tmp_path / "model_optim_rng.pt")
    error = failure(tmp_path / "model_optim_rng.pt")
    assert error.code == "E501" and error.found == "posix.system" and not (tmp_path / "PWNED").exists()
    torch.save(Payload(tmp_path / "PWNED"), tmp_path / "x.distcp")
    with pytest.raises(CkptError) as caught:
        entry_of(tmp_path / "x.distcp")
    assert caught.value.code == "E501" and not (tmp_path / "PWNED").exists()


@pytest.mark.case("H9")
def test_a_flipped_bit_is_found_by_its_checksum_only(tmp_path):
    torch.save({"a": torch.full((4,), 2.0), "b": torch.zeros(3)}, tmp_path / "x.pt")
    file = open_torch_file(tmp_path / "x.pt")
    start, _ = file.extent(file.value["a"])
    data = bytearray((tmp_path / "x.pt").read_bytes())
    data[start + 3] ^= 0x40
    (tmp_path / "x.pt").write_bytes(data)
    assert torch.load(tmp_path / "x.pt")["a"][0] != 2.0  # torch does not look
    bad = [result for result in open_torch_file(tmp_path / "x.pt").check_crc() if not result.ok]
    assert [result.record for result in bad] == ["data/0"] and bad[0].expected != bad[0].found


def test_holes_have_no_checksum_to_check(tmp_path):
    blob = tensor_blob("int8", (3,))
    (tmp_path / "x").write_bytes(blob.head + b"abc" + blob.tail)
    results = {r.record: r for r in open_torch_file(tmp_path / "x").check_crc()}
    assert results["data/0"].expected is None and all(r.ok for r in results.values())


def test_files_of_other_kinds_are_named(tmp_path):
    path = tmp_path / "x.pt"
    torch.save([1], path, _use_new_zipfile_serialization=False)
    error = failure(path)
    assert error.code == "E204" and "torch 1.6" in error.what and "torch.save" in error.hint
    path.write_bytes(pickle.dumps([1] * 30))
    assert failure(path).code == "E204" and "bare pickle" in failure(path).what
    path.write_bytes(b"\x1f\x8b" + bytes(100))
    assert failure(path).code == "E203"
    path.write_bytes(b"")
    assert failure(path).code == "E203"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme", "hello")
    assert failure(path).code == "E204"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/data.pkl", pickle.dumps(["a" * 100]))
    assert failure(path).code == "E204" and "compressed" in failure(path).what
    assert failure(tmp_path / "absent.pt").code == "E901"


def test_files_that_python_s_zipfile_wrote_are_read(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as archive:
        archive.writestr("any/data.pkl", pickle.dumps({"a": 1}))
        archive.writestr("any/version", "3\n")
        archive.comment = b"a comment behind the end record"
    assert open_torch_file(tmp_path / "x.pt").value == {"a": 1}


def test_a_storage_shorter_than_its_tensor(tmp_path):
    blob = tensor_blob("float32", (4,))
    small = tensor_blob("float32", (3,))
    path = tmp_path / "x"
    # the pickle says 4 elements, the record holds 3
    pickled = pickle_of(blob)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/data/0", bytes(12))
    with pytest.raises(CkptError) as caught:
        entry_of(path)
    assert caught.value.code == "E203" and "larger than its bytes" in caught.value.what
    file = open_torch_file(path)
    with pytest.raises(CkptError):
        file.read(file.value)
    assert small.nbytes == 12


def pickle_of(blob):
    with zipfile.ZipFile(io.BytesIO(blob.head + bytes(blob.nbytes) + blob.tail)) as archive:
        return archive.read("archive/data.pkl")


def test_a_record_that_is_no_tensor_or_lacks_its_data(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(dump_file([1]))
    with pytest.raises(CkptError, match="does not hold a tensor"):
        entry_of(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle_of(tensor_blob("int8", (1,))))
    with pytest.raises(CkptError, match="missing"):
        entry_of(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/version", "3")
    with pytest.raises(CkptError, match=r"data\.pkl"):
        entry_of(path)
    with zipfile.ZipFile(path, "w") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("a/data.pkl", b"N.")
        archive.writestr("a/data.pkl", b"N.")
    assert failure(path).code == "E203"


def test_lengths_from_the_index_are_not_trusted(tmp_path):
    blob = tensor_blob("int8", (3,))
    (tmp_path / "x").write_bytes(blob.head + b"abc" + blob.tail)
    for offset, length in ((0, blob.size + 1), (1, blob.size), (0, 2**62), (0, 10), (-1, blob.size), (0, 0), (2**40, blob.size), (64, blob.size - 64)):
        with pytest.raises(CkptError) as caught:
            entry_of(tmp_path / "x", offset, length)
        assert caught.value.code == "E203"


def test_a_directory_larger_than_the_file(tmp_path):
    data = bytearray(dump_file({"a": 1}))
    for at, value in ((len(data) - 10, 2**31), (len(data) - 6, 2**31), (len(data) - 12, 0xFF00)):
        changed = data.copy()
        struct.pack_into("<I" if value > 65535 else "<H", changed, at, value)
        (tmp_path / "x").write_bytes(changed)
        assert failure(tmp_path / "x").code == "E203"


def test_a_directory_of_its_own(tmp_path):
    (tmp_path / "x").write_bytes(dump_file({"a": TensorSpec("int8", (2,), b"ab")}))
    with open(tmp_path / "x", "rb") as file:
        records = read_directory(file.fileno(), 0, os.path.getsize(tmp_path / "x"), "x")
    assert {n: r.size for n, r in records.items() if n != "data.pkl"} == {"data/0": 2, "byteorder": 6, "version": 2}


def seeds():
    stream = io.BytesIO()
    torch.save(torch.arange(5), stream)
    nested = io.BytesIO()
    torch.save({"args": argparse.Namespace(a=1), "t": torch.ones(2, 2).t(), "r": np.random.RandomState(0).get_state()[:2]}, nested)
    blob = tensor_blob("float8_e4m3fn", (3,))
    return [stream.getvalue(), nested.getvalue(), blob.head + b"abc" + blob.tail]


SEEDS = seeds()
INDEX = dump(metadata_object([("a", "bfloat16", (4, 2), [((0, 0), (2, 2)), ((2, 0), (2, 2))])], ["o"],
                             [("o", None, "x", 0, 9), ("a", (0, 0), "x", 9, 9), ("a", (2, 0), "x", 300, 70000)]))  # fmt: skip


@given(st.lists(st.tuples(st.integers(0, 2**20), st.integers(0, 255)), min_size=1, max_size=4), st.integers(0, 5))
@settings(max_examples=800, deadline=None)
def test_a_corrupted_index_has_its_fields_or_fails_cleanly(changes, protocol):
    data = bytearray(INDEX if protocol < 3 else pickle.dumps(pickle.loads(INDEX), protocol))
    for at, byte in changes:
        data[at % len(data)] = byte
    try:
        metadata = load(bytes(data), where=".metadata", policy="metadata")
    except CkptError as error:
        assert error.where.startswith(".metadata") and error.code in ("E203", "E501", "E502")
        return
    for fqn, entry in metadata.state_dict_metadata.items():
        assert type(fqn) is str
        for chunk in getattr(entry, "chunks", ()):
            assert len(chunk.offsets) == len(chunk.sizes) == len(entry.size) and type(entry.properties.dtype) is str
    for index, info in metadata.storage_data.items():
        assert type(index.fqn) is str and type(info.relative_path) is str and info.offset >= 0 and info.length >= 0


@given(st.sampled_from(SEEDS), st.lists(st.tuples(st.integers(0, 2**20), st.integers(0, 255)), min_size=1, max_size=6), st.integers(0, 2**20), st.booleans())
@settings(max_examples=600, deadline=None)
def test_corrupted_files_read_or_fail_cleanly(tmp_path_factory, seed, changes, cut, truncate):
    path = tmp_path_factory.getbasetemp() / "corrupted.pt"
    data = bytearray(seed)
    for at, byte in changes:
        data[-1 - at % min(len(data), 700) if at % 2 else at % len(data)] = byte  # half of them in the directory
    if truncate:
        del data[cut % len(data) :]
    path.write_bytes(data)
    for attempt in (lambda: entry_of(path), lambda: read_all(path)):
        try:
            attempt()
        except CkptError as error:
            assert str(path) in error.where and error.code in ("E203", "E204", "E206", "E501", "E502")


def read_all(path):
    file = open_torch_file(path)
    for value in [file.value, *(file.value.values() if isinstance(file.value, dict) else ())]:
        if type(value) is TensorRef:
            file.read(value)
    for _ in file.check_crc():
        pass


def test_arrays_written_into_files_draw_the_same_numbers(tmp_path):
    source = np.random.RandomState(5)
    kind, words, *rest = source.get_state()
    state = (kind, NumpyArray("<u4", (624,), words.tobytes()), *rest)
    (tmp_path / "x.pt").write_bytes(dump_file({"np_rng_state": state}))
    other = np.random.RandomState()
    other.set_state(torch.load(tmp_path / "x.pt", weights_only=False)["np_rng_state"])
    assert np.array_equal(source.randint(0, 2**31, 5), other.randint(0, 2**31, 5))


def test_the_layout_of_one_tensor_is_made_once():
    assert tensor_blob("int8", (3,)) is tensor_blob("int8", (3,)) and torch_zip_writer.tensor_blob("torch.int8", (3,)) is tensor_blob("int8", (3,))
    for name in ("float6_e2m3fn", "nonsense"):
        with pytest.raises(CkptError) as caught:
            tensor_blob(name, (4,))
        assert caught.value.code == "E206"
