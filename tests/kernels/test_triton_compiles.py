"""The Triton kernels compile for real GPUs, on machines without one: the compiler sees what the interpreter forgives."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = r"""
import json, re, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from ckpt_tools.kernels import triton_kernels as kernels
from ckpt_tools.kernels.descriptors import COLUMNS, OUTER
from ckpt_tools.kernels.floats import FORMATS

POINTER = {32: "*i32", 16: "*i16", 8: "*i8"}

def ptx(function, arguments, constants, capability):
    signature = {n: "constexpr" if n in constants else arguments[n] for n in function.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(function.arg_names) if signature[n].startswith("*") or n == "count"}
    source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 8, "enable_fp_fusion": False}).asm["ptx"]

def form(name, prefix=""):
    kind = FORMATS[name]
    return {prefix + "E": kind.exponent, prefix + "M": kind.mantissa, prefix + "F": kind.finite}

texts, table = {}, {"COLUMNS": COLUMNS, "OUTER": OUTER}
for capability in (80, 90):
    for kind, item, lanes, tile in ((0, 8, 2, (4, 1024)), (0, 8, 2, (1, 4096)), (0, 2, 1, (256, 16)), (1, 2, 8, (64, 64)),
                                    (1, 1, 16, (64, 64)), (1, 4, 1, (64, 64)), (2, 2, 1, (4, 1024)), (2, 8, 1, (256, 16))):
        sizes = {"KIND": kind, "ITEM": item, "LANES": lanes, "TILE_ROWS": tile[0], "TILE_COLUMNS": tile[1], **table}
        texts[f"move {capability} {kind} {item} {lanes} {tile}"] = ptx(
            kernels.move_boxes, {"table": "*i64", "tile_rows": "*i32"}, sizes, capability)
for a in FORMATS:
    for b in FORMATS:
        pointers = {"source": POINTER[FORMATS[a].bits], "target": POINTER[FORMATS[b].bits], "count": "i64", "addend": "fp32"}
        texts[f"cast {a} {b}"] = ptx(kernels.cast_elements, pointers, {"ADD": True, **form(a), **form(b, "TO_"), "TILE": 4096}, 90)
small = {n: "i32" for n in ("rows", "columns", "scale_rows", "scale_columns")}
block = {"BLOCK_ROWS": 128, "BLOCK_COLUMNS": 128, "TILE_COLUMNS": 128}
for uniform in (True, False):
    for ones in ({}, {n: 1 for n in small}):  # Triton makes an argument that is 1 a constant
        texts[f"dequantise {uniform} {len(ones)}"] = ptx(
            kernels.dequantise, {"values": "*i8", "scales": "*fp32", "target": "*i16", **small},
            {**ones, **block, "UNIFORM": uniform, **form("float8_e4m3fn"), **form("bfloat16", "TO_"), "TILE_ROWS": 32}, 90)
for ones in ({}, {"rows": 1, "columns": 1}):
    texts[f"quantise {len(ones)}"] = ptx(
        kernels.quantise, {"values": "*i16", "scales": "*fp32", "target": "*i8", "rows": "i32", "columns": "i32", "largest": "fp32"},
        {**ones, **block, **form("bfloat16"), **form("float8_e4m3fn", "TO_"), "TILE_ROWS": 128}, 90)
bytes_in = {"blocks": "*i8", "scales": "*i8", "target": "*i16", "count": "i64"}
texts["mxfp4"] = ptx(kernels.dequantise_fp4, bytes_in, {**form("bfloat16", "TO_"), "TILE": 4096}, 90)
words = re.compile(r"(?:(?:ld|st)\.global|div|fma|add|mul)[.\w]*(?:f32|b\d+)\b|\w*\.ftz\w*")
print(json.dumps({name: sorted(set(words.findall(text))) for name, text in texts.items()}))
"""


@pytest.fixture(scope="module")
def instructions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Kernel -> the memory and float instructions in its PTX."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT], capture_output=True, text=True, env=environment, cwd=ROOT / "tests", check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


def test_aligned_boxes_move_sixteen_bytes_per_instruction(instructions: dict[str, list[str]]) -> None:
    for name, found in instructions.items():
        if name.startswith("move") and name.split()[3:5] in (["8", "2"], ["2", "8"], ["1", "16"]):
            wide = {"ld.global.v2.b64", "ld.global.v4.b32"} & set(found), {"st.global.v2.b64", "st.global.v4.b32"} & set(found)
            assert all(wide), (name, found)


def test_no_kernel_flushes_subnormals_fuses_or_divides_approximately(instructions: dict[str, list[str]]) -> None:
    assert len(instructions) == 16 + 25 + 4 + 2 + 1
    for name, found in instructions.items():
        assert not [i for i in found if ".ftz" in i or i.startswith("fma") or (i.startswith("div") and i != "div.rn.f32")], (name, found)
    assert "div.rn.f32" in instructions["quantise 0"]


def test_casts_use_wide_loads_on_aligned_tensors(instructions: dict[str, list[str]]) -> None:
    assert "ld.global.v4.b32" in instructions["cast float32 bfloat16"], instructions["cast float32 bfloat16"]
    assert "st.global.v4.b32" in instructions["cast bfloat16 float32"]
