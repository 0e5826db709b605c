"""What every family owes: each file in fixtures/families is one tiny model that is converted, brought back and judged.

transformers makes the models and says which names and logits are right; megatron-core builds its own model from the arguments that ckpt
wrote and must find every tensor under the name and shape it asks for, in its Transformer Engine spec and in its local one.
A logit may differ by 1e-4 in float32: the two libraries add in different orders; measured differences are below 2e-5 on logits of size 5.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from builders import ckpt
from conftest import ROOT
from families import tiny
from oracle import launch

from ckpt_tools.families import FAMILIES, family_of_config
from ckpt_tools.families.config import args_from_config
from ckpt_tools.families.config_kinds import Lacks
from ckpt_tools.families.dimensions import dimensions
from ckpt_tools.families.family import expand
from ckpt_tools.hf_layouts import fuse
from ckpt_tools.tensors import TensorMetadata

pytestmark = [pytest.mark.oracle, pytest.mark.xdist_group("family contract")]
IDS = [[3, 17, 101, 250, 508, 1, 42, 77, 300, 12], [9, 8, 7, 6, 5, 4, 3, 2, 1, 0]]
LEVELS = ("round trip", "names", "logits")
JUDGES = [("0.16.1", "te"), ("0.16.1", "local"), ("0.19.2", "te"), ("0.19.2", "local")]


def convert(*arguments: Any) -> None:
    done = ckpt("convert", *arguments)
    assert done.returncode == 0, done.stderr


def allowed(variant: str) -> tuple[str, ...]:
    """Converting a family that Megatron-Core cannot hold or compute has to be asked for."""
    rules = family_of_config(tiny.config_of(variant), variant).rules
    return ("--allow-unrepresentable",) if any(isinstance(rule, Lacks) and rule.refuse for rule in rules) else ()


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


class Made:
    """A variant written by transformers and converted by ckpt, once for all tests."""

    def __init__(self, variant: str, base: Path) -> None:
        import torch

        self.hf, self.base = base / "hf", base
        model = tiny.write(variant, self.hf)
        with torch.no_grad():
            self.logits = model(torch.tensor(IDS)).logits

    def run(self, spec: str = "te") -> Path:
        """The run folder that ckpt writes for a layer spec."""
        folder = self.base / spec
        if not folder.exists():
            convert(self.hf, folder, "--to", "torch_dist", "--spec", spec, "--verify", *allowed(self.hf.parent.name))
        return folder

    def iteration(self, spec: str) -> Path:
        """The one iteration folder of it."""
        return next(path for path in self.run(spec).iterdir() if path.is_dir())


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    kept: dict[str, Made] = {}

    def get(variant: str) -> Made:
        if variant not in kept:
            kept[variant] = Made(variant, tmp_path_factory.mktemp("contract") / variant)
        return kept[variant]

    return get


@pytest.fixture(scope="session")
def judged(made: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """judged(version, spec, variant) -> the report of that megatron-core, which loads all variants in one process."""
    reports: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}

    def get(version: str, spec: str, variant: str) -> tuple[dict[str, Any], Path]:
        base = tmp_path_factory.getbasetemp() / f"judged-{version}-{spec}"
        if (version, spec) not in reports:
            base.mkdir(exist_ok=True)
            wanted = [v for v in tiny.VARIANTS if claim(v) != "round trip" and converts(made(v), spec)]
            jobs = [{"checkpoint": str(made(v).iteration(spec)), "output": str(base / v), "ids": IDS} for v in wanted]
            before = os.environ.get("CKPT_TEST_SPEC")
            os.environ["CKPT_TEST_SPEC"] = spec
            try:
                assert launch.run("family_model", jobs, base, version) == [None] * len(jobs)
            finally:
                os.environ.pop("CKPT_TEST_SPEC") if before is None else os.environ.update(CKPT_TEST_SPEC=before)
            reports[version, spec] = {v: json.loads((base / v / "report.json").read_text()) for v in wanted}
        assert variant in reports[version, spec], "it was not converted"
        return reports[version, spec][variant], base / variant

    return get


def converts(made: Made, spec: str) -> bool:
    """Whether a variant converts; where it does not, its own tests say why, and the others are judged all the same."""
    try:
        made.run(spec)
    except AssertionError:
        return False
    return True


def claim(variant: str) -> str:
    """What the family of a variant says of itself."""
    return family_of_config(tiny.config_of(variant), variant).verified


def unbuildable(variant: str, judge: str) -> str | None:
    """Why a judge ("0.19.2 local") cannot build the model, where the family says so."""
    family = family_of_config(tiny.config_of(variant), variant)
    dims = dimensions(args_from_config(tiny.config_of(variant), family.rules, allow_unrepresentable=True)[0])
    return next((why for who, when, why in family.unbuildable if who == judge and dims.holds(when, None)), None)


@pytest.mark.parametrize("variant", tiny.VARIANTS)
def test_every_name_of_transformers_is_claimed_once_with_its_shape(variant, made):
    from safetensors import safe_open

    config = tiny.config_of(variant)
    family = family_of_config(config, variant)
    args, _ = args_from_config(config, family.rules, allow_unrepresentable=True)
    dims = dimensions(args)
    real: dict[str, tuple[int, ...]] = {}
    for file in sorted(made(variant).hf.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            real |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    claimed: dict[str, tuple[int, ...]] = {}
    counted: Counter[str] = Counter()
    for binding in expand(family, dims):
        names = dict(zip(binding.hf, binding.mapping.hf_shapes(dims), strict=True))
        may_lack = binding.mapping.optional or binding.mcore.startswith("mtp.")  # transformers does not save prediction layers
        if may_lack and not names.keys() & real.keys():
            continue
        claimed |= names
        counted.update(binding.hf)
    assert [name for name, count in counted.items() if count > 1] == []
    in_files = fuse({name: TensorMetadata(name, "float32", shape, ()) for name, shape in claimed.items()}, family, only=True)
    assert {name: tensor.shape for name, tensor in in_files.items()} == real


@pytest.mark.parametrize("variant", tiny.VARIANTS)
def test_every_byte_comes_back_from_torch_dist(variant, made, tmp_path):
    convert(made(variant).run(), tmp_path / "back", "--to", "hf", "--verify")
    assert content(tmp_path / "back") == content(made(variant).hf)


@pytest.mark.parametrize("variant", tiny.VARIANTS)
def test_every_byte_comes_back_from_two_legacy_ranks_in_bfloat16(variant, tmp_path):
    tiny.write(variant, tmp_path / "hf", "bfloat16")
    convert(tmp_path / "hf", tmp_path / "run", "--to", "torch", "--tp", "2", "--verify", *allowed(variant))
    convert(tmp_path / "run", tmp_path / "back", "--to", "hf", "--verify")
    assert content(tmp_path / "back") == content(tmp_path / "hf")


@pytest.mark.parametrize("variant", tiny.VARIANTS)
def test_without_its_hf_config_the_same_model_comes_back(variant, made, tmp_path):
    import torch

    alone = tmp_path / "run"
    shutil.copytree(made(variant).run(), alone)
    for path in [p for p in alone.rglob("*") if p.is_file() and p.suffix in (".json", ".jinja") and p.name != "metadata.json"]:
        path.unlink()
    family = family_of_config(tiny.config_of(variant), variant)
    convert(alone, tmp_path / "back", "--to", "hf", "--family", family.name)
    model = tiny.load(tmp_path / "back", variant)
    with torch.no_grad():
        assert torch.equal(model(torch.tensor(IDS)).logits, made(variant).logits)


@pytest.mark.parametrize("variant", [v for v in tiny.VARIANTS if claim(v) != "round trip"])
@pytest.mark.parametrize(("version", "spec"), JUDGES, ids=["-".join(j) for j in JUDGES])
def test_megatron_core_finds_every_tensor_it_asks_for(version, spec, variant, judged):
    if not launch.available(version):
        pytest.skip(f"megatron-core {version} is not installed here")
    if reason := unbuildable(variant, f"{version} {spec}"):
        pytest.skip(reason)
    report, _ = judged(version, spec, variant)
    assert report == {"missing": [], "unexpected": [], "error": None}, report["error"] or report


@pytest.mark.parametrize("variant", [v for v in tiny.VARIANTS if claim(v) == "logits"])
@pytest.mark.parametrize("version", ["0.16.1", "0.19.2"])
def test_megatron_core_computes_the_logits_of_transformers(version, variant, judged, made):
    from safetensors.torch import load_file

    if not launch.available(version):
        pytest.skip(f"megatron-core {version} is not installed here")
    if reason := unbuildable(variant, f"{version} local"):
        pytest.skip(reason)
    report, folder = judged(version, "local", variant)
    assert report["error"] is None, report["error"]
    expected = made(variant).logits
    found = load_file(folder / "logits.safetensors")["logits"][..., : expected.shape[-1]]
    assert (found - expected).abs().max().item() < 1e-4


def test_every_family_has_a_tiny_model_and_says_how_it_was_verified():
    covered = {family_of_config(tiny.config_of(v), v).name for v in tiny.VARIANTS}
    seeing = {f.name for f in FAMILIES.values() if f.carried}
    assert covered | seeing == set(FAMILIES)
    assert {path.stem for path in (ROOT / "fixtures" / "vision").glob("*.json")} == seeing  # test_vision.py is their contract
    for family in FAMILIES.values():
        assert family.verified in LEVELS and family.sources, family.name
        assert family.note or family.verified == "logits", f"{family.name}: say what could not be verified"


@pytest.mark.parametrize("variant", tiny.VARIANTS)
def test_both_sides_are_valid_and_equal(variant, made, tmp_path):
    from ckpt_tools.diff.compare import diff
    from ckpt_tools.validation.run import Options, validate

    hf = made(variant).hf
    convert(hf, tmp_path / "legacy", "--to", "torch", *allowed(variant))
    runs = (made(variant).run(), tmp_path / "legacy")
    for folder in (hf, *runs):
        report = validate(folder, Options(deep=True, strict=True))
        assert report.valid, [(f.code, f.tensor, f.text, f.found) for f in report.findings if f.severity != "info"]
    for a, b in ((hf, runs[0]), (runs[1], hf), runs):
        found = diff(a, b)
        assert found.equal, (found.only_a[:3], found.only_b[:3], found.shapes[:3], found.dtypes[:3], found.config, found.values[:2])
