"""Runs the commands of the README in a terminal of 100 columns and puts what they print under them.

python tests/readme_transcript.py          rewrites README.md
"""

from __future__ import annotations

import os
import pty
import re
import select
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"(<!-- transcript -->\n```console\n)(.*?)(```)", re.S)
COLUMNS = 100


def in_a_terminal(command: str, folder: Path) -> str:
    """What a shell command prints to a terminal, stdout and stderr together, ckpt being the one of this project."""
    function = f'ckpt() {{ {shlex.quote(sys.executable)} -m ckpt_tools "$@"; }}'
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "NO_COLOR": "1", "TERM": "dumb", "PYTHONPATH": str(ROOT)}
    environment.pop("CKPT_DEBUG", None)
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        ["sh", "-c", f"{function}\n{command}"], cwd=folder, stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    parts = []
    while True:
        if select.select([ours], [], [], 0.1)[0]:
            try:
                data = os.read(ours, 65536)
            except OSError:  # Linux ends a terminal whose last user is gone this way
                break
            if not data:
                break
            parts.append(data)
        elif process.poll() is not None:
            break
    process.wait()
    os.close(ours)
    return b"".join(parts).decode().replace("\r\n", "\n")


def transcribe(text: str, folder: Path) -> str:
    """The text with every transcript block run again, in order, in `folder`."""

    def run(match: re.Match[str]) -> str:
        lines = []
        for line in match[2].splitlines():
            if line.startswith("$ "):
                lines.append(line)
                lines += in_a_terminal(line[2:], folder).splitlines()
        return match[1] + "".join(f"{line.rstrip()}\n" for line in lines) + match[3]

    return BLOCK.sub(run, text)


def prepared(folder: Path) -> Path:
    """The folder with the checkpoints that the README speaks of."""
    for name, source in (("tiny-llama", "tiny-llama"), ("mcore-run", "mcore/run")):
        subprocess.run(["cp", "-r", ROOT / "fixtures" / source, folder / name], check=True)
    return folder


def without_times(text: str) -> str:
    """The text without measured times, and without what a CPU's arithmetic decides: how far two trained models are apart, and the widths of
    the columns that say so."""
    text = re.sub(r"(?m)^(time +)\S.*$", r"\1...", text)
    text = re.sub(r"\bby [0-9][0-9.e+-]*", "by ...", text)
    return re.sub(r"─+", "─", re.sub(r" {2,}", "  ", text))


if __name__ == "__main__":
    readme = ROOT / "README.md"
    with tempfile.TemporaryDirectory() as scratch:
        readme.write_text(transcribe(readme.read_text(), prepared(Path(scratch))))
