"""The command: exit status, formats, choosing checks, --fix; and independent readers that agree with every verdict."""

from __future__ import annotations

import json
import random
import stat
import xml.etree.ElementTree as xml

import numpy as np
import pytest
import torch
from builders import CONFIG, ckpt, megatron_args, megatron_tensors, read_torch_dist, stack, write_hf, write_index, write_torch_dist
from conftest import ROOT
from safetensors import safe_open

from ckpt_tools.validation.mend import apply_mends, plan_mends
from ckpt_tools.validation.run import Options, examine, look_at, validate
from validation import mutations as m

NAME = "model.norm.weight"


def examined(folder):
    subject = look_at(folder, Options())
    return subject, examine(subject, Options())


FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def index_of(folder):
    return json.loads((folder / "model.safetensors.index.json").read_text())


def spoil(folder, change):
    """Two shards whose index is changed."""
    write_hf(folder, shards=2)
    value = index_of(folder)
    change(value)
    (folder / "model.safetensors.index.json").write_text(json.dumps(value))
    return folder


# ---- answers ------------------------------------------------------------------------------------------------------------------------


def test_the_exit_status_is_the_answer(tmp_path):
    write_hf(tmp_path / "good", shards=2)
    assert ckpt("validate", tmp_path / "good").returncode == 0
    wrong = spoil(tmp_path / "wrong", lambda v: v["metadata"].update(total_size=1))
    assert ckpt("validate", wrong).returncode == 0, "a warning alone is no error"
    assert ckpt("validate", wrong, "--strict").returncode == 1
    assert ckpt("validate", wrong, "--strict", "--ignore", "V209").returncode == 0
    (wrong / "model.safetensors.index.json").unlink()
    assert ckpt("validate", wrong).returncode == 1
    assert ckpt("validate", wrong, "--select", "V3").returncode == 0
    for arguments in ((tmp_path / "absent",), (tmp_path / "good", "--select", "V9"), (tmp_path / "good", "--format", "yaml"), (tmp_path,)):
        assert ckpt("validate", *arguments).returncode == 2, arguments


def test_json_says_what_was_checked_and_what_was_not(tmp_path):
    folder = spoil(tmp_path / "hf", lambda v: v["weight_map"].pop(NAME))
    answer = json.loads(ckpt("validate", folder, "--json").stdout)
    assert answer["schema"] == "ckpt.validate/1" and answer["valid"] is False and answer["holds"]["weights"] == "safetensors"
    assert {f["code"]: f["tensor"] for f in answer["findings"]}["V205"] == NAME
    assert "V601" in answer["skipped"] and "V601" not in answer["checked"] and "V301" in answer["checked"]


def test_findings_are_github_annotations_and_junit_failures(tmp_path):
    folder = spoil(tmp_path / "hf", lambda v: v["weight_map"].update({"evil\n::error::x%0A,:": FIRST}))
    done = ckpt("validate", folder, "--format", "github")
    lines = done.stdout.splitlines()
    errors = [line for line in lines if line.startswith("::error ")]
    assert done.returncode == 1 and errors and all(",title=V203::" in line for line in errors)
    assert not any(line.startswith("::error::") for line in lines) and "%250A" in done.stdout
    tree = xml.fromstring(ckpt("validate", folder, "--format", "junit").stdout)
    failed = [c.get("name") for c in tree if c.find("failure") is not None]
    assert tree.get("failures") == "1" and len(failed) == 1 and failed[0].startswith("V203 ")
    assert int(tree.get("tests")) == len(tree) > 70


def test_tables_and_markdown_name_code_place_and_tensor(tmp_path):
    folder = spoil(tmp_path / "hf", lambda v: v["weight_map"].pop(NAME))
    table = ckpt("validate", folder, "--format", "table").stdout
    assert (
        "not valid (1 error, 1 warning)" in table and "error[V205]" in table and f"tensor: {NAME}" in table and "more with --deep" in table
    )
    markdown = ckpt("validate", folder, "--format", "md").stdout
    assert markdown.startswith("\n### Validation") and "| error | V205 |" in markdown
    tsv = ckpt("validate", folder).stdout.splitlines()
    assert tsv[0].split("\t")[:2] == ["severity", "code"] and tsv[1].startswith("error\tV205\t")
    assert "--fix" in ckpt("explain", "V205").stdout and ckpt("explain", "v205").returncode == 0


def test_the_example_of_the_documentation_runs(monkeypatch):
    import re

    monkeypatch.chdir(ROOT)
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "validate.md").read_text(), re.S)
    exec(compile(block, "docs/validate.md", "exec"), {})


# ---- mending ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda v: v["weight_map"].pop(NAME), "V205"),
        (lambda v: v["weight_map"].update({NAME: FIRST, "model.embed_tokens.weight": SECOND}), "V204"),
        (lambda v: v["weight_map"].update({"model.ghost.weight": FIRST}), "V203"),
        (lambda v: v["metadata"].update(total_size=5), "V209"),
        (lambda v: v.update(metadata=None), "V209"),
    ],
)
def test_an_index_is_made_anew_from_the_files(tmp_path, change, code):
    write_hf(tmp_path / "good", shards=2)
    folder = spoil(tmp_path / "hf", change)
    assert code in {f.code for f in validate(folder).findings}
    before = {p.name: p.read_bytes() for p in folder.glob("*.safetensors")}
    done = ckpt("validate", folder, "--fix", "--yes")
    assert done.returncode == 0 and "total_size" in done.stderr and not validate(folder).findings
    assert index_of(folder) == index_of(tmp_path / "good")
    assert before == {p.name: p.read_bytes() for p in folder.glob("*.safetensors")} and not list(folder.glob(".ckpt*"))


def test_without_yes_and_without_a_terminal_nothing_is_written(tmp_path):
    folder = spoil(tmp_path / "hf", lambda v: v["weight_map"].pop(NAME))
    before = (folder / "model.safetensors.index.json").read_bytes()
    done = ckpt("validate", folder, "--fix")
    assert done.returncode == 1 and "nothing was changed" in done.stderr and "write " in done.stderr
    assert (folder / "model.safetensors.index.json").read_bytes() == before


def test_an_index_that_would_hide_a_loss_is_not_made(tmp_path):
    lost = spoil(tmp_path / "lost", lambda v: None)
    (lost / SECOND).unlink()
    tensor_gone = spoil(tmp_path / "gone", lambda v: None)
    drop(tensor_gone)
    unknown = spoil(tmp_path / "unknown", lambda v: v["weight_map"].update({"model.ghost.weight": FIRST}))
    config = json.loads((unknown / "config.json").read_text())
    (unknown / "config.json").write_text(json.dumps({**config, "model_type": "unheard_of", "architectures": []}))
    twin = spoil(tmp_path / "twin", lambda v: None)
    (twin / "model.safetensors.index.json").unlink()
    m.copy_over(FIRST, "model-00003-of-00002.safetensors")(twin)
    for folder in (lost, tensor_gone, unknown, twin):
        subject, report = examined(folder)
        mends, refused = plan_mends(subject, report)
        assert not mends and not report.valid and (refused or folder is lost), folder


def drop(folder):
    from safetensors.numpy import load_file, save_file

    file = folder / index_of(folder)["weight_map"][NAME]
    held = load_file(file)
    held.pop(NAME)
    save_file(held, file, {"format": "pt"})


def test_a_missing_index_is_made_and_a_link_is_replaced_and_not_followed(tmp_path):
    write_hf(tmp_path / "good", shards=2)
    folder = spoil(tmp_path / "hf", lambda v: None)
    (folder / "model.safetensors.index.json").unlink()
    assert ckpt("validate", folder, "--fix", "--yes").returncode == 0
    assert index_of(folder) == index_of(tmp_path / "good")
    write_index(tmp_path, {}, 3)
    (tmp_path / "model.safetensors.index.json").rename(tmp_path / "blob")
    blob = json.dumps({**index_of(folder), "metadata": {"total_size": 3}})
    (tmp_path / "blob").write_text(blob)
    (folder / "model.safetensors.index.json").unlink()
    (folder / "model.safetensors.index.json").symlink_to(tmp_path / "blob")
    subject, report = examined(folder)
    apply_mends(plan_mends(subject, report)[0])
    assert index_of(folder) == index_of(tmp_path / "good") and (tmp_path / "blob").read_text() == blob


@pytest.mark.parametrize("tracker", [b"9", b"", b"abc", None])
def test_a_tracker_is_set_to_the_newest_complete_iteration(tmp_path, tracker):
    tensors = stack(megatron_tensors(write_hf(tmp_path / "hf"), CONFIG), 4)
    for iteration in (3, 12):
        write_torch_dist(tmp_path / "run", tensors, megatron_args(CONFIG), iteration=iteration)
    (tmp_path / "run" / "iter_0000020").mkdir()
    path = tmp_path / "run" / "latest_checkpointed_iteration.txt"
    path.unlink() if tracker is None else path.write_bytes(tracker)
    done = ckpt("validate", tmp_path / "run", "--fix", "--yes")
    assert done.returncode == 0 and path.read_bytes() == b"12" and "b'12'" in done.stderr
    assert stat.S_IMODE(path.stat().st_mode) & 0o444


def test_a_tracker_is_not_invented_when_no_iteration_is_complete(tmp_path):
    (tmp_path / "run" / "iter_0000003").mkdir(parents=True)
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("4")
    done = ckpt("validate", tmp_path / "run", "--fix", "--yes")
    assert done.returncode == 1 and "no complete iteration" in done.stderr


# ---- independent readers ------------------------------------------------------------------------------------------------------------


def opens(path) -> bool:
    """Whether the safetensors library reads every tensor of a file."""
    try:
        with safe_open(path, "np") as file:
            for name in list(file.keys()):
                file.get_tensor(name)
        return True
    except Exception:
        return False


@pytest.mark.oracle
def test_a_damaged_safetensors_file_is_valid_exactly_when_the_library_reads_it(tmp_path):
    write_hf(tmp_path / "hf")
    path = tmp_path / "hf" / "model.safetensors"
    good = path.read_bytes()
    header = 8 + int.from_bytes(good[:8], "little")
    chance = random.Random(1)
    verdicts = []
    for _ in range(300):
        data = bytearray(good)
        for _ in range(chance.choice((1, 1, 2))):
            what = chance.randrange(5)
            at = chance.randrange(header)
            if what == 0:
                del data[chance.randrange(len(data)) :]
                break
            if what == 1:
                data += bytes(chance.randrange(1, 20))
            elif what == 2:
                data[at] ^= 1 << chance.randrange(8)
            elif what == 3:
                data[at] = chance.choice(b'0123456789[]{},":')
            else:
                del data[at]
        path.write_bytes(data)
        found = {f.code for f in validate(path).findings if f.severity == "error"}
        broken = bool(found & {"V106", "V199", "V201", "V202", "V252", "V253"})
        assert broken is not opens(path), (found, bytes(data[:80]))
        verdicts.append(broken)
    assert 20 < sum(verdicts) < 300


@pytest.mark.oracle
def test_a_damaged_torch_dist_folder_is_never_valid_where_torch_cannot_read_it(tmp_path):
    tensors = stack(megatron_tensors(write_hf(tmp_path / "hf"), CONFIG), 4)
    folder = write_torch_dist(tmp_path / "run", tensors, megatron_args(CONFIG))
    files = [".metadata", "__0_0.distcp"]
    good = {n: (folder / n).read_bytes() for n in files}
    chance = random.Random(2)
    refused = silent = 0
    for _ in range(150):
        name = chance.choice(files)
        data = bytearray(good[name])
        if chance.random() < 0.3:
            del data[chance.randrange(len(data)) :]
        else:
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        (folder / name).write_bytes(data)
        report = validate(tmp_path / "run", Options(deep=True))
        try:
            read = {n: t.astype(np.float64) for n, t in read_torch_dist(folder).items()}
            equal = read.keys() == tensors.keys() and all(np.array_equal(read[n], tensors[n]) for n in tensors)
        except BaseException as error:  # torch wraps what goes wrong in a class of its own that is no Exception
            assert type(error).__name__ == "CheckpointException" or isinstance(error, Exception)
            equal = False
        refused += not report.valid
        # Bytes that no reader looks at (padding of records, fields of the zip that are not used) may change and nothing be wrong.
        assert equal or not report.valid, (name, [f.code for f in report.findings])
        silent += report.valid
        (folder / name).write_bytes(good[name])
    assert refused > 50 and silent < 100


@pytest.mark.oracle
def test_what_is_valid_is_read_whole_by_torch(tmp_path):
    tensors = stack(megatron_tensors(write_hf(tmp_path / "hf"), CONFIG), 4)
    write_torch_dist(tmp_path / "run", tensors, megatron_args(CONFIG))
    assert validate(tmp_path / "run", Options(deep=True)).valid
    read = read_torch_dist(tmp_path / "run" / "iter_0000005")
    assert all(np.array_equal(read[n], t) for n, t in tensors.items())
    assert torch.load(tmp_path / "run" / "iter_0000005" / "common.pt", weights_only=False)["iteration"] == 5
