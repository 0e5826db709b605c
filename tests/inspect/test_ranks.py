"""Who holds what, by rank: judged by what each rank's own file holds (keys.txt lists every key of it, unpickled by torch)."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from math import prod
from pathlib import Path

import pytest
from builders import ckpt

LEGACY = ("legacy_llama_tp2pp2_bf16", "legacy_llama_vpp2_bf16", "legacy_mixtral_ep2_seq_bf16")
TENSOR = re.compile(r"^  \['(?P<kind>model\d*|optimizer)'\](?P<name>.+?)  \((?P<shape>[\d, ]+)\) torch\.(?P<dtype>\w+)$")
LAYER = re.compile(r"decoder\.layers\.\d+\.input_layernorm\.weight")
SIZES = {"bfloat16": 2, "float32": 4}


def stored(folder: Path) -> dict[tuple[int, ...], dict[str, int]]:
    """Numbers in the name of a rank's folder -> elements and bytes of its weights, bytes of its optimizer state, number of its layers."""
    found: dict[tuple[int, ...], dict[str, int]] = {}
    for line in (folder / "keys.txt").read_text().splitlines():
        head = re.match(r"## mp_rank_(\d+)(?:_(\d+))?/", line)
        if head:
            rank = found.setdefault(tuple(int(n) for n in head.groups() if n), {"parameters": 0, "bytes": 0, "optimizer": 0, "layers": 0})
        match = TENSOR.match(line)
        if match is None:
            continue
        elements = prod(int(n) for n in re.findall(r"\d+", match["shape"]))
        size = elements * SIZES[match["dtype"]]
        if match["kind"] == "optimizer":
            rank["optimizer"] += size
        else:
            rank["parameters"] += elements
            rank["bytes"] += size
            rank["layers"] += LAYER.search(match["name"]) is not None
    return found


@pytest.mark.parametrize("name", LEGACY)
def test_each_rank_holds_what_its_file_holds(shared: Path, name: str) -> None:
    answer = json.loads(ckpt("inspect", shared / "real" / name / "mcore", "--by", "rank", "--json").stdout)["by"]
    files = stored(shared / "real" / name)
    assert answer["key"] == "rank" and len(answer["ranks"]) == len(files)
    second = "ep" if "ep2" in name else "pp"
    for share in answer["ranks"]:
        file = files[share["tp"], share[second]]
        assert (share["parameters"], share["bytes"], share["optimizer_bytes"]) == (file["parameters"], file["bytes"], file["optimizer"])
        assert len(share["layers"]) == file["layers"]


def test_layers_and_experts_are_named_by_their_global_numbers(shared: Path) -> None:
    def columns(name: str, *wanted: str) -> list[tuple[str, ...]]:
        lines = ckpt("inspect", shared / "real" / name / "mcore", "--by", "rank").stdout.splitlines()
        rows = [dict(zip(lines[0].split("\t"), line.split("\t"), strict=True)) for line in lines[1:]]
        return [tuple(row[w] for w in wanted) for row in rows]

    assert columns("legacy_llama_vpp2_bf16", "pp", "layers") == [("0", "0, 2"), ("1", "1, 3")]
    assert columns("legacy_mixtral_ep2_seq_bf16", "ep", "layers", "experts") == [("0", "0-3", "0-1"), ("1", "0-3", "2-3")]


def test_torch_dist_of_the_same_run_is_spread_as_the_legacy_format_is(shared: Path) -> None:
    def ranks(name: str) -> list[dict[str, object]]:
        found = json.loads(ckpt("inspect", shared / "real" / name / "mcore", "--by", "rank", "--json").stdout)["by"]["ranks"]
        return [{k: v for k, v in rank.items() if k != "optimizer_bytes"} for rank in found]

    assert ranks("llama_tp2pp2_bf16") == ranks("legacy_llama_tp2pp2_bf16")


def test_another_layout_is_what_reshard_then_writes(shared: Path, tmp_path: Path) -> None:
    source, sizes = shared / "real" / "legacy_llama_tp2pp2_bf16" / "mcore", ("--tp", 4, "--pp", 1)
    planned = json.loads(ckpt("inspect", source, "--by", "rank", *sizes, "--json").stdout)["by"]
    assert ckpt("reshard", source, tmp_path / "out", *sizes, "--no-fsync").returncode == 0
    assert json.loads(ckpt("inspect", tmp_path / "out", "--by", "rank", "--json").stdout)["by"] == planned


def test_an_hf_model_shows_what_a_layout_would_make_of_it(fixtures: Path) -> None:
    answer = json.loads(ckpt("inspect", fixtures / "tiny-llama", "--by", "rank", "--tp", 2, "--pp", 2, "--json").stdout)["by"]
    assert [r["layers"] for r in answer["ranks"]] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert all(r["optimizer_bytes"] == 0 for r in answer["ranks"])


def test_the_map_has_a_line_for_each_part_and_a_column_for_each_rank(shared: Path) -> None:
    done = ckpt("inspect", shared / "real" / "legacy_mixtral_ep2_seq_bf16" / "mcore", "--layout-map")
    assert [line.split("\t") for line in done.stdout.splitlines()] == [
        ["part", "rank 0", "rank 1"],
        ["embedding", "held", "held"],
        *([f"layer {n}", "e0-1", "e2-3"] for n in range(4)),
        ["final norm", "held", "held"],
        ["output layer", "held", "held"],
    ]


@pytest.mark.parametrize("columns", [30, 50, 80, 120])
def test_the_map_for_people_is_never_wider_than_the_terminal(shared: Path, columns: int) -> None:
    source = shared / "real" / "legacy_llama_tp2pp2_bf16" / "mcore"
    done = ckpt("inspect", source, "--layout-map", "--tp", 8, "--pp", 4, "--format", "table", env={"COLUMNS": str(columns)})
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= columns
    if columns == 30:  # two stages beside each other, the others below them
        assert [line.split()[1:] for line in lines if line.startswith("rank")] == [["0-7", "8-15"], ["16-23", "24-31"]]
        return
    assert lines[0].split() == ["rank", "0-7", "8-15", "16-23", "24-31"]
    held = {line[:14].strip(): [bool(line[14 + 7 * i :][:7].strip()) for i in range(4)] for line in lines[1:]}
    assert held["embedding"] == held["layer 0"] == [True, False, False, False]
    assert held["layer 3"] == held["output layer"] == [False, False, False, True]


def test_the_svg_has_a_box_for_each_part_that_a_rank_holds(shared: Path, tmp_path: Path) -> None:
    drawn = tmp_path / "map.svg"
    done = ckpt("inspect", shared / "real" / "legacy_llama_vpp2_bf16" / "mcore", "--svg", drawn)
    assert done.returncode == 0 and done.stdout == ""
    boxes = [e for e in ET.parse(drawn).getroot() if e.tag.endswith("rect")]
    assert len(boxes) == 7  # embedding, four layers, final norm, output layer, each on one of the two ranks
    assert len({b.get("fill") for b in boxes}) == 2  # two virtual stages


def test_a_layout_without_a_view_that_needs_it_is_refused(fixtures: Path) -> None:
    done = ckpt("inspect", fixtures / "tiny-llama", "--tp", 2)
    assert done.returncode == 2 and "E001" in done.stderr
    impossible = ckpt("inspect", fixtures / "tiny-llama", "--by", "rank", "--tp", 3)
    assert impossible.returncode == 2 and "E403" in impossible.stderr
