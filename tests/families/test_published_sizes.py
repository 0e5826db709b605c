"""The largest published models are planned from their headers: every parameter is counted, and memory does not grow with their bytes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from families import published

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow
# parameters as the model cards count them; prediction layers and their shared copies are extra
PARAMETERS = {
    "llama-3.1-405b": 405_853_388_800,
    "qwen3-235b-a22b": 235_093_634_560,
    "deepseek-v3": 671_026_419_200,
    "kimi-k2": 1_026_408_232_448,
}


@pytest.mark.parametrize("size", published.SIZES)
def test_it_is_planned_in_bounded_memory_and_no_parameter_is_missing(tmp_path, size):
    config = published.SIZES[size]
    published.write(size, tmp_path / size)
    experts = ["--ep", "8", "--etp", "1"] if size != "llama-3.1-405b" else []
    arguments = ["convert", str(tmp_path / size), str(tmp_path / "out"), "--to", "torch_dist", "--tp", "8", *experts, "--dry-run", "--json"]
    code = (
        f"import sys\nfrom ckpt_tools.commands.main import main\ncode = main({arguments!r})\n"
        "print('peak', next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')), file=sys.stderr)\n"
        "sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    moved = json.loads(done.stdout)["tensor_bytes"]  # bfloat16, but for the routers' biases; padding is written by nobody
    biases = 4 * config.get("n_routed_experts", 0) * (config["num_hidden_layers"] - config.get("first_k_dense_replace", 0))
    if config.get("num_nextn_predict_layers"):
        moved -= published.prediction_bytes(size)
    assert (moved - biases) // 2 + biases // 4 == PARAMETERS[size]
    assert int(done.stderr.split("peak ")[1]) < 600 * 1024
