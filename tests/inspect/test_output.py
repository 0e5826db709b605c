"""The answer as JSON, as TSV in a pipe and as text for people; and what inspect must not cost."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from builders import CONFIG, ckpt, dense_shapes, fill, megatron_args, megatron_tensors, stack, write_hf, write_torch_dist
from safetensors.numpy import save_file


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("inspected")
    tensors = stack(megatron_tensors(fill(dense_shapes(CONFIG)), CONFIG, 104), 4)
    write_hf(root / "hf", shards=2)
    write_torch_dist(root / "run", tensors, megatron_args(CONFIG), objects={"rng_state/shard_0.0_1.1": [1]})
    hf = write_hf(root / "split")
    folder = write_torch_dist(root / "split", {"optimizer.state.exp_avg.x": hf["model.norm.weight"]}, megatron_args(CONFIG), iteration=20)
    assert folder.is_dir()
    plain = write_torch_dist(
        root / "dcp", {"model.w": np.ones((2, 2), np.float32), "optimizer.state.w.exp_avg": np.ones((2, 2), np.float32)}, None
    )
    for name in ("metadata.json", "common.pt"):
        (plain / name).unlink()
    return {name: root / name for name in ("hf", "run", "split", "dcp")}


_NAMES_AND_KINDS = (
    ("schema format", str),
    ("iteration", (int, str, type(None))),
    ("parameters bytes wasted_bytes extra_state", int),
    ("source weights writer optimizer rng scheduler progress", dict),
    ("iterations copies tree warnings", list),
    ("model", (dict, type(None))),
)
TOP = {name: kind for names, kind in _NAMES_AND_KINDS for name in names.split()}
INNER = {
    "source": {"given", "root", "directory", "chosen", "weights_beside", "producer"},
    "weights": {"format", "directory", "tensors", "parameters", "bytes", "dtypes", "padding_parameters"},
    "writer": {"software", "clues", "layout", "layout_from", "files", "file_bytes", "ranks"},
    "optimizer": {"kind", "name", "states", "tensors", "bytes", "reshardable", "why", "step", "groups"},
    "rng": {"objects", "grid"},
}
TREE = {"part", "state", "name", "dtype", "shape", "count", "stored", "numbers", "inner", "parameters", "bytes"}


@pytest.mark.parametrize("name", ["hf", "run", "split", "dcp"])
def test_json_has_every_field_of_the_first_schema(checkpoints: dict[str, Path], name: str) -> None:
    answer = json.loads(ckpt("inspect", checkpoints[name], "--json").stdout)
    assert next(iter(answer)) == "schema" and answer["schema"] == "ckpt.inspect/1"
    for key, kind in TOP.items():
        assert isinstance(answer[key], kind), key
    for key, fields in INNER.items():
        assert fields <= answer[key].keys(), key
    assert answer["tree"] and all(k.keys() >= TREE for k in answer["tree"])
    assert sum(k["parameters"] for k in answer["tree"] if k["part"] == "weights") == answer["parameters"]


def test_json_of_every_view_comes_with_the_summary(checkpoints: dict[str, Path]) -> None:
    answer = json.loads(ckpt("inspect", checkpoints["run"], "--tensors", "--by", "file", "--args", "--fingerprint", "--json").stdout)
    assert answer["schema"] == "ckpt.inspect/1" and answer["parameters"]
    assert {"part", "name", "dtype", "shape", "bytes", "pieces", "files"} == answer["tensors"][0].keys()
    assert answer["by"]["key"] == "file" and {"name", "tensors", "parameters", "bytes", "file_size"} == answer["by"]["groups"][0].keys()
    assert answer["args"]["source"] == "args" and answer["args"]["values"]["num_layers"] == 4
    assert len(answer["fingerprint"]["sha256"]) == 64 and answer["fingerprint"]["naming"] == "hf"
    stats = json.loads(ckpt("inspect", checkpoints["run"], "--stats", "norm", "--json").stdout)["stats"]
    assert {"name", "dtype", "shape", "count", "minimum", "maximum", "mean", "nans", "infinities", "zeros"} == stats[0].keys()


def test_numbers_that_json_cannot_hold_do_not_break_it(tmp_path: Path) -> None:
    args = megatron_args(CONFIG, norm_epsilon=float("nan"), rotary_base=float("inf"))
    write_torch_dist(tmp_path, {"w": np.array([np.nan, np.inf, -np.inf], np.float32)}, args)
    answer = json.loads(ckpt("inspect", tmp_path, "--stats", "--json").stdout)
    assert (answer["stats"][0]["minimum"], answer["stats"][0]["nans"], answer["stats"][0]["infinities"]) == (None, 1, 2)
    json.loads(ckpt("inspect", tmp_path, "--args", "--json").stdout)


@pytest.mark.parametrize("name", ["hf", "run", "split", "dcp"])
def test_a_pipe_gets_key_and_value_a_line(checkpoints: dict[str, Path], name: str) -> None:
    done = ckpt("inspect", checkpoints[name])
    pairs = dict(line.split("\t") for line in done.stdout.splitlines())
    assert pairs["format"] and int(pairs["parameters"]) > 0 and pairs["source.directory"].startswith(str(checkpoints[name]))


@pytest.mark.parametrize(
    "view", [("--tensors",), ("--layers",), ("--by", "module"), ("--by", "dtype"), ("--by", "file"), ("--stats",), ("--args",)]
)
@pytest.mark.parametrize("name", ["hf", "run", "split"])
def test_a_pipe_gets_one_table_with_a_header(checkpoints: dict[str, Path], name: str, view: tuple[str, ...]) -> None:
    done = ckpt("inspect", checkpoints[name], *view)
    assert done.returncode == 0, done.stderr
    rows = [line.split("\t") for line in done.stdout.splitlines()]
    assert len(rows) > 1 and len({len(r) for r in rows}) == 1 and len(set(rows[0])) == len(rows[0])
    assert "  " not in done.stdout and "\x1b" not in done.stdout


def test_a_listing_for_people_never_breaks_a_name(checkpoints: dict[str, Path]) -> None:
    shown = ckpt("inspect", checkpoints["run"], "--stats", "--format", "table", env={"COLUMNS": "40"}).stdout.splitlines()
    assert [line.split()[0] for line in shown[1:]] == [
        line.split("\t")[0] for line in ckpt("inspect", checkpoints["run"], "--stats").stdout.splitlines()[1:]
    ]


def test_two_tables_in_a_pipe_are_refused_before_anything_is_opened(tmp_path: Path) -> None:
    done = ckpt("inspect", tmp_path / "nowhere", "--tensors", "--by", "dtype")
    assert done.returncode == 2 and "E001" in done.stderr and "--json" in done.stderr
    done = ckpt("inspect", tmp_path / "nowhere", "--by", "colour")
    assert done.returncode == 2 and "module, dtype, file" in done.stderr


def test_a_pattern_chooses_tensors_in_every_view(checkpoints: dict[str, Path]) -> None:
    run = checkpoints["run"]
    assert (
        ckpt("inspect", run, "linear_fc2").stdout
        == ckpt("inspect", run, "--tensors", "linear_fc2").stdout
        == ckpt("inspect", "--tensors", run, "linear_fc2").stdout
    )
    lines = ckpt("inspect", run, "*.1.mlp.linear_fc2.weight", "--layers").stdout.splitlines()
    assert [line.split("\t")[0] for line in lines[1:]] == ["decoder.layers.1.mlp.linear_fc2.weight"]
    lines = ckpt("inspect", run, "--stats", "--layers", "*.[02].mlp.linear_fc2.weight").stdout.splitlines()
    assert [line.split("\t")[0] for line in lines[1:]] == [f"decoder.layers.{i}.mlp.linear_fc2.weight" for i in (0, 2)]
    assert len(ckpt("inspect", run, "--by", "dtype", "no.such.tensor").stdout.splitlines()) == 1
    assert ckpt("inspect", run, "--args", "*hidden_size").stdout == "name\tvalue\nffn_hidden_size\t16\nhidden_size\t8\n"


def test_sums_by_dtype_module_and_file_all_add_up(checkpoints: dict[str, Path]) -> None:
    for name in ("hf", "run"):
        total = json.loads(ckpt("inspect", checkpoints[name], "--json").stdout)
        for how in ("dtype", "module", "file"):
            groups = json.loads(ckpt("inspect", checkpoints[name], "--by", how, "--json").stdout)["by"]["groups"]
            assert sum(g["bytes"] for g in groups) == total["bytes"] and sum(g["parameters"] for g in groups) == total["parameters"]
        files = {g["name"]: g["file_size"] for g in groups}
        assert files == {p.name: p.stat().st_size for p in checkpoints[name].rglob("*") if p.name in files}


def test_text_for_people_is_never_wider_than_a_hundred_columns(checkpoints: dict[str, Path]) -> None:
    for name, path in checkpoints.items():
        for line in ckpt("inspect", path, "--format", "table", env={"COLUMNS": "300"}).stdout.splitlines():
            assert len(line) <= 100 or str(path) in line, (name, line)
    assert "| parameters" not in ckpt("inspect", checkpoints["run"], "--format", "md").stdout.splitlines()[0]
    assert "| decoder.layers.*.mlp.linear_fc2.weight |" in ckpt("inspect", checkpoints["run"], "--format", "md").stdout


def test_no_text_from_a_file_can_steer_the_terminal(tmp_path: Path) -> None:
    evil = "w\x1b[2J\x07\u202e\n\tx [bold]"
    config = {
        "model_type": evil,
        "architectures": [evil],
        "dtype": evil,
        "hidden_act": evil,
        "transformers_version": evil,
        "tie_word_embeddings": False,
    }
    save_file({evil: np.zeros(2, np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    for view in ((), ("--tensors",), ("--by", "module"), ("--stats",), ("--args",), ("--fingerprint",)):
        for form in ("table", "tsv", "md", "json"):
            done = ckpt("inspect", tmp_path, *view, "--format", form)
            assert done.returncode == 0, done.stderr
            for text in (done.stdout, done.stderr):
                assert not {"\x1b", "\x07", "\u202e"} & set(text)
            if form == "tsv" and view and view[0] != "--fingerprint":
                assert len({line.count("\t") for line in done.stdout.splitlines()}) == 1


def test_plain_dcp_is_shown_without_common_state(checkpoints: dict[str, Path]) -> None:
    answer = json.loads(ckpt("inspect", checkpoints["dcp"], "--json").stdout)
    assert answer["format"] == "torch_dcp" and answer["writer"]["software"] == "torch.distributed.checkpoint"
    assert answer["parameters"] == 4 and answer["optimizer"]["kind"] == "by_name" and answer["optimizer"]["states"] == ["exp_avg"]


@pytest.mark.parametrize("view", [[], ["--tensors"], ["--by", "module"], ["--layers"], ["--by", "rank"], ["--layout-map"]])
def test_reading_headers_imports_neither_numpy_nor_torch_nor_rich(checkpoints: dict[str, Path], view: list[str]) -> None:
    heavy = {"torch", "numpy", "ml_dtypes", "safetensors", "transformers", "megatron", "rich.table"}
    script = (
        "import sys\nfrom ckpt_tools.commands.main import main\n"
        "assert main(sys.argv[1:]) == 0\n"
        f"print(sorted({heavy!r} & set(sys.modules)), file=sys.stderr)"
    )
    root = Path(__file__).parents[2]

    def imported(*arguments: object) -> str:
        command = [sys.executable, "-c", script, "inspect", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, check=True, cwd=root).stderr.splitlines()[-1]

    assert imported(checkpoints["hf"], *view) == imported(checkpoints["run"], *view) == "[]"
    assert "torch" not in imported(checkpoints["run"], "--stats")
