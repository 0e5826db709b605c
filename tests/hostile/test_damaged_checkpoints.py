"""Damaged checkpoints of every format through the program itself: it answers or refuses (exit 2, an error code), and does nothing else.

No crash, no hang, no gigabytes of memory, no code executed, no file opened outside SRC and DST, nothing left where DST should be.
`make soak` runs many more examples than a normal test run; both say how many.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import shutil
import signal
import sys
import sysconfig
import tempfile
from collections import Counter
from pathlib import Path
from random import Random

import pytest
from builders import ckpt, write_hf
from hostile.mutations import damage
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckpt_tools.commands.main import main

pytest.importorskip("torch")
EXAMPLES = 4000 if os.environ.get("CKPT_SOAK") else 120
SECONDS = 60
MEGABYTES = 400
ROOT = Path(__file__).parents[2]
ALLOWED = tuple(
    os.path.realpath(p)
    for p in (ROOT, sys.prefix, sys.base_prefix, *(p for p in sys.path if p), sysconfig.get_paths()["stdlib"], "/proc/sys/kernel", "/dev/null", "/dev/shm", "/usr/lib", "/usr/share")
)  # fmt: skip
watched: list[str] | None = None
allowed_here: tuple[str, ...] = ()


def watch(event: str, arguments: tuple[object, ...]) -> None:
    """Audit hook: what a damaged file must never bring about."""
    if watched is None:
        return
    if event in (
        "os.system",
        "os.exec",
        "os.posix_spawn",
        "subprocess.Popen",
        "socket.connect",
        "pickle.find_class",
        "marshal.loads.unused",
    ):
        watched.append(f"{event} {arguments!r}"[:200])
    elif event == "open" and isinstance(arguments[0], (str, bytes)):
        path = os.path.realpath(os.fsdecode(arguments[0]))
        if not path.startswith((*ALLOWED, *allowed_here)):
            watched.append(f"open {path}")


sys.addaudithook(watch)


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """One small checkpoint per format."""
    base = tmp_path_factory.mktemp("originals")
    write_hf(base / "hf", shards=2)
    for to in ("torch_dist", "torch"):
        done = ckpt("convert", base / "hf", base / to, "--to", to, "--tp", "2", "--as-iteration", "3")
        assert done.returncode == 0, done.stderr
    return base


def run(*arguments: object) -> tuple[int, str]:
    """The program in this process, watched."""
    global watched
    out, err = io.StringIO(), io.StringIO()
    watched, seen = [], []
    signal.alarm(SECONDS)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main([str(a) for a in arguments])
    finally:
        signal.alarm(0)
        seen, watched = watched, None
    assert not seen, seen
    assert "\x1b" not in out.getvalue() + err.getvalue()
    return code, err.getvalue()


def hang(*_: object) -> None:
    raise TimeoutError(f"no end after {SECONDS} s")


@pytest.mark.parametrize(
    ("kind", "to"), [("hf", "torch_dist"), ("torch_dist", "hf"), ("torch", "hf"), ("torch_dist", "torch"), ("torch", "torch_dist")]
)
def test_damage_is_refused_or_harmless(originals, kind, to, capsys):
    global allowed_here
    counts: Counter[str] = Counter()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    old = signal.signal(signal.SIGALRM, hang)
    term = signal.getsignal(signal.SIGTERM)

    @settings(max_examples=EXAMPLES // 2, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.integers(0, 2**32))
    def check(seed: int) -> None:
        global allowed_here
        random = Random(seed)
        with tempfile.TemporaryDirectory() as scratch:
            allowed_here = (os.path.realpath(scratch),)
            source, target = Path(scratch, "source"), Path(scratch, "target")
            shutil.copytree(originals / kind, source)
            what = damage(source, random)
            code, said = run("inspect", source, "--json", *random.choice(((), ("--tensors",), ("--by", "dtype"), ("--stats",))))
            assert code == 0 or (code == 2 and "error[E" in said), (what, code, said)
            counts["inspected" if code == 0 else "refused"] += 1
            options = random.choice(((), ("--dry-run",), ("--verify",), ("--family", "llama"), ("--dtype", "float32"), ("--check-crc",)))
            code, said = run("convert", source, target, "--to", to, "--no-progress", *options)
            assert code == 0 or (code == 2 and "error[E" in said), (what, code, said)
            counts["converted" if code == 0 else "not converted"] += 1
            assert target.exists() == (code == 0 and "--dry-run" not in options), what
            assert sorted(os.listdir(scratch)) == (["source", "target"] if target.exists() else ["source"]), what

    try:
        check()
    finally:
        signal.signal(signal.SIGALRM, old)
        signal.signal(signal.SIGTERM, term)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024
    assert grown < MEGABYTES, f"{grown} MB more"
    with capsys.disabled():
        print(f"\n{kind} -> {to}: {dict(counts)}, {grown} MB more")
    assert counts["not converted"] and counts["refused"]


def test_a_pipe_or_a_device_in_place_of_a_file_is_refused_at_once(tmp_path):
    for number, make in enumerate((os.mkfifo, lambda path: os.symlink("/dev/zero", path))):
        for name in ("config.json", "model.safetensors"):
            folder = tmp_path / f"{name}{number}"
            write_hf(folder)
            (folder / name).unlink(missing_ok=True)
            make(folder / name)
            done = ckpt("convert", folder, tmp_path / "out", "--to", "torch_dist")
            assert done.returncode == 2 and "E901" in done.stderr and name in done.stderr, done.stderr
            assert not (tmp_path / "out").exists()
    write_hf(tmp_path / "hf")
    os.mkfifo(tmp_path / "hf" / "tokenizer.json")
    done = ckpt("convert", tmp_path / "hf", tmp_path / "out", "--to", "torch_dist")
    assert done.returncode == 0 and "tokenizer.json: not a regular file; not copied" in done.stderr, done.stderr


@pytest.mark.parametrize("field", ["num_hidden_layers", "vocab_size", "hidden_size", "num_attention_heads"])
def test_a_config_of_astronomical_numbers_is_refused_at_once(tmp_path, field):
    write_hf(tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps({**config, field: 2**40}))
    done = ckpt("convert", tmp_path / "hf", tmp_path / "out", "--to", "torch_dist")
    assert done.returncode == 2 and "error[E3" in done.stderr, done.stderr
