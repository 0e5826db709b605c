"""The frame of the command line: first screen, exit statuses, errors that help, texts from files that cannot do harm."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from builders import ckpt, write_hf
from conftest import ROOT


def test_the_first_screen_says_what_it_is_and_how_to_begin():
    done = ckpt("--help")
    assert done.returncode == 0 and "Megatron-Core" in done.stdout and done.stdout.count("\n  ckpt ") >= 3
    assert ckpt().stdout == done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 120


def test_every_command_has_help_with_three_examples():
    from ckpt_tools.commands.main import available

    for entry in available():
        done = ckpt(entry.name, "--help", env={"COLUMNS": "120"})
        assert done.returncode == 0, entry
        if entry.name != "explain":
            assert len(re.findall(rf"ckpt {entry.name} ", done.stdout)) >= 4, done.stdout  # usage and three examples


def test_every_error_code_is_explained_and_every_explanation_is_used():
    from ckpt_tools.explain import EXPLANATIONS

    code = "\n".join(
        p.read_text() for folder in ("ckpt_tools", "commands", "kernels") for p in (ROOT / folder).rglob("*.py") if p.name != "explain.py"
    )
    used = set(re.findall(r'CkptError\(\s*"(E\d{3})"', code)) | set(re.findall(r'"(E\d{3})"', code))
    used.discard("E201")  # the example in the docstring of CkptError
    assert used - EXPLANATIONS.keys() == set()
    assert EXPLANATIONS.keys() - used == set()
    done = ckpt("explain", "E104")
    assert done.returncode == 0 and "latest_checkpointed_iteration.txt" in done.stdout


def test_an_unknown_command_and_an_unknown_option_are_usage_errors_with_a_hint(tmp_path):
    done = ckpt("convrt", "a", "b")
    assert done.returncode == 2 and "convert" in done.stderr
    done = ckpt("convert", tmp_path, tmp_path / "out", "--too", "hf")
    assert done.returncode == 2 and "--to" in done.stderr


def test_a_missing_path_names_what_is_near(tmp_path):
    write_hf(tmp_path / "llama")
    done = ckpt("inspect", tmp_path / "lama")
    assert done.returncode == 2 and "llama" in done.stderr


def test_names_from_files_cannot_steer_the_terminal(tmp_path):
    import numpy as np

    write_hf(tmp_path / "hf", tensors={"a\x1b]0;pwned\x07\x1b[2J[red]b": np.zeros(1, np.float32)})
    done = ckpt("inspect", tmp_path / "hf", "--tensors")
    assert done.returncode == 0 and "\x1b" not in done.stdout and "\x07" not in done.stdout and "[red]" in done.stdout


def test_json_carries_its_schema_and_nothing_else_is_on_stdout(tmp_path):
    write_hf(tmp_path / "hf")
    for args in (("inspect", tmp_path / "hf", "--json"), ("convert", tmp_path / "hf", tmp_path / "out", "--to", "torch_dist", "--json")):
        done = ckpt(*args)
        assert done.returncode == 0 and json.loads(done.stdout)["schema"] == f"ckpt.{args[0]}/1"


def test_a_reader_that_goes_away_is_no_error(tmp_path):
    write_hf(tmp_path / "hf")
    command = f"{sys.executable} -m ckpt_tools inspect {tmp_path / 'hf'} --tensors | head -1"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr


def test_importing_the_package_imports_nothing_heavy():
    code = "import ckpt_tools, sys; print(sorted({'numpy', 'typer', 'rich', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip() == "[]"


@pytest.mark.slow
def test_a_wheel_in_an_empty_environment_gives_a_working_ckpt(tmp_path, fixtures):
    pytest.importorskip("build")
    subprocess.run([sys.executable, "-m", "build", "--wheel", "--outdir", tmp_path, ROOT], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    import zipfile

    names = zipfile.ZipFile(wheel).namelist()
    assert len(names) == len(set(names)) and not [n for n in names if n.startswith(("commands/", "kernels/", "tests/"))]
    assert {
        "ckpt_tools/commands/main.py",
        "ckpt_tools/kernels/casts.py",
        "ckpt_tools/formats/hf.py",
        "ckpt_tools/families/llama.py",
    } <= set(names)
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    subprocess.run([tmp_path / "venv" / "bin" / "pip", "install", "--quiet", wheel], check=True)
    program = tmp_path / "venv" / "bin" / "ckpt"
    subprocess.run(
        [program, "convert", fixtures / "tiny-llama", tmp_path / "run", "--to", "torch_dist", "--verify"], check=True, capture_output=True
    )
    subprocess.run([program, "convert", tmp_path / "run", tmp_path / "back", "--to", "hf"], check=True, capture_output=True)
    assert (tmp_path / "back" / "model-00001-of-00002.safetensors").read_bytes() == (
        fixtures / "tiny-llama" / "model-00001-of-00002.safetensors"
    ).read_bytes()
    code = "import importlib.util as u; print([n for n in ('torch', 'commands', 'kernels') if u.find_spec(n)])"
    assert (
        subprocess.run(
            [tmp_path / "venv" / "bin" / "python", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout.strip()
        == "[]"
    )


def test_the_memory_that_a_dry_run_announces_grows_with_threads_and_buffer(run_ckpt, fixtures, tmp_path):
    def announced(*options):
        done = run_ckpt("convert", fixtures / "tiny-llama", tmp_path / "out", "--to", "torch_dist", "--dry-run", "--format", "tsv", *options)
        assert done.rc == 0, done.err
        return int(next(line.split("\t")[1] for line in done.out.splitlines() if line.startswith("peak memory")))

    assert announced("--threads", "8", "--buffer", "4MiB") - announced("--threads", "2", "--buffer", "4MiB") == 6 * 2 * 4 * 2**20
