"""Nothing is found in what real Megatron-Core wrote, and every change of it is found under the right code."""

from __future__ import annotations

import json

import numpy as np
import pytest

from ckpt_tools.validation.run import Options, examine, look_at, validate
from validation import mutations as m
from validation.mutations import DENSE, FC2, LEGACY, MIXTRAL, NORM, TRACKER, WEIGHTS, Mutation

pytestmark = pytest.mark.oracle
IT = "iter_0000005/"


def examined(folder):
    subject = look_at(folder, Options())
    return subject, examine(subject, Options())


DEEP, RESUME = ("deep",), ("resume",)
Q0 = "model.layers.0.self_attn.q_proj.weight"

MUTATIONS: dict[str, Mutation] = {
    # ---- a torch_dist run
    "tracker ahead": Mutation(DENSE, m.text(TRACKER, "7"), "V101"),
    "tracker empty": Mutation(DENSE, m.text(TRACKER, ""), "V102"),
    "tracker garbled": Mutation(DENSE, m.text(TRACKER, "abc"), "V102"),
    "tracker gone": Mutation(DENSE, m.delete(TRACKER), "V104"),
    "index gone": Mutation(DENSE, m.delete(IT + ".metadata"), "V103"),
    "metadata.json gone": Mutation(DENSE, m.delete(IT + "metadata.json"), "V103"),
    "metadata.json empty": Mutation(DENSE, m.text(IT + "metadata.json", ""), "V103"),
    "common.pt gone": Mutation(DENSE, m.delete(IT + "common.pt"), "V103"),
    "newer iteration broken": Mutation(DENSE, lambda run: (run / "iter_0000009").mkdir(), "V105"),
    "common.pt is a pointer": Mutation(DENSE, m.text(IT + "common.pt", "version https://git-lfs.github.com/spec/v1\n"), "V106"),
    "index is a web page": Mutation(DENSE, m.text(IT + ".metadata", "<!DOCTYPE html><html>"), "V106"),
    "second save cut off": Mutation(DENSE, m.text(IT + ".metadata.tmp", "x"), "V107"),
    "sum of a file wrong": Mutation(DENSE, m.integrity(True), "V108", DEEP),
    "file of the list gone": Mutation(DENSE, m.integrity(False), "V109"),
    "data file of another save": Mutation(DENSE, m.text(IT + "__9_0.distcp", "x"), "V112"),
    "folder with five digits": Mutation(DENSE, m.rename("iter_0000005", "iter_00005"), "V113"),
    "folder renamed": Mutation(DENSE, m.both(m.rename("iter_0000005", "iter_0000006"), m.text(TRACKER, "6")), "V116"),
    "unknown back end": Mutation(DENSE, m.text(IT + "metadata.json", '{"sharded_backend": "zebra", "sharded_backend_version": 1}'), "V199"),
    "path out of the folder": Mutation(DENSE, m.replaced(IT + ".metadata", b"__1_1.distcp", b"../_1.distcp"), "V207"),
    "data file gone": Mutation(DENSE, m.delete(IT + "*.distcp"), "V222"),
    "data file cut": Mutation(DENSE, m.cut(IT + "*.distcp", 0.5), "V222"),
    "data file short by a byte": Mutation(DENSE, m.cut(IT + "*.distcp", 1), "V222"),
    "index cut": Mutation(DENSE, m.cut(IT + ".metadata", 0.7), "V221"),
    "common.pt cut": Mutation(DENSE, m.cut(IT + "common.pt", 0.5), "V221"),
    "record garbled": Mutation(DENSE, m.replaced(IT + "__0_0.distcp", b"PK\x01\x02", b"PK\x09\x09"), "V221"),
    "common state gone": Mutation(
        DENSE,
        m.both(m.delete(IT + "common.pt"), m.text(IT + "metadata.json", '{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')),
        "V228",
    ),
    "a rank's random state gone": Mutation(DENSE, m.replaced(IT + ".metadata", b"rng_state/shard_0.1_", b"rng_state/shard_0.7_"), "V227"),
    "a flipped bit": Mutation(DENSE, m.poke(FC2, m.flip), "V229", DEEP),
    "a flipped bit in a moment": Mutation(DENSE, m.poke(f"exp_avg/{FC2}", lambda v: m.flip(v.view(np.uint32))), "V229", DEEP),
    "key misspelled: missing": Mutation(
        DENSE, m.replaced(IT + ".metadata", b"decoder.layers.mlp.linear_fc2.", b"decoder.layers.mlp.linear_fc3."), "V301"
    ),
    "key misspelled: unknown": Mutation(
        DENSE, m.replaced(IT + ".metadata", b"decoder.layers.mlp.linear_fc2.", b"decoder.layers.mlp.linear_fc3."), "V302"
    ),
    "NaN": Mutation(DENSE, m.poke(FC2, m.put((2, 5), np.nan)), "V601", DEEP),
    "NaN in a moment": Mutation(DENSE, m.poke(f"exp_avg/{FC2}", m.put((2, 5), np.nan)), "V601", DEEP),
    "infinity": Mutation(DENSE, m.poke(FC2, m.put((2, 5), -np.inf)), "V602", DEEP),
    "tensor zero": Mutation(DENSE, m.poke(FC2, m.put(..., 0)), "V603", DEEP),
    "norm zero": Mutation(DENSE, m.poke(NORM, m.put(..., 0)), "V603", DEEP),
    "tensor of one number": Mutation(DENSE, m.poke(FC2, m.put(..., 0.5)), "V604", DEEP),
    "half a vocabulary zero": Mutation(DENSE, m.poke("embedding.word_embeddings.weight", m.put(slice(256), 0)), "V605", DEEP),
    "columns of a rank zero": Mutation(DENSE, m.poke(FC2, m.put((slice(None), slice(40, 80)), 0)), "V605", DEEP),
    "shard twice": Mutation(DENSE, m.poke("output_layer.weight", m.twice), "V611", DEEP),
    "padding not zero": Mutation(DENSE, m.poke("output_layer.weight", m.put(511, 3)), "V608", DEEP),
    "weights exchanged, masters not": Mutation(DENSE, m.poke(FC2, m.put((0, slice(9)), 9)), "V609"),
    "masters exchanged": Mutation(DENSE, m.poke(f"param/{FC2}", m.put((0, slice(9)), 9)), "V609"),
    "one master exchanged": Mutation(DENSE, m.poke(f"param/{FC2}", m.put((63, 79), 9)), "V609", DEEP),
    "second moment negative": Mutation(DENSE, m.poke(f"exp_avg_sq/{FC2}", m.put((1, 1), -1)), "V610", DEEP),
    "expert copied": Mutation(MIXTRAL, m.expert_copied, "V606", DEEP),
    "no optimizer to resume from": Mutation(WEIGHTS, lambda run: None, "V701", RESUME),
    "no schedule to resume from": Mutation(WEIGHTS, lambda run: None, "V702", RESUME),
    "no random states to resume from": Mutation(WEIGHTS, lambda run: None, "V703", RESUME),
    "a release to resume from": Mutation("release_llama_tp1_bf16", lambda run: None, "V705", RESUME),
    # ---- a legacy run
    "rank folder gone": Mutation(LEGACY, m.delete(IT + "mp_rank_01_001"), "V231"),
    "first rank folder gone": Mutation(LEGACY, m.delete(IT + "mp_rank_00_000"), "V231"),
    "rank file gone": Mutation(LEGACY, m.delete(IT + "mp_rank_01_001/*.pt"), "V103"),
    "rank file cut": Mutation(LEGACY, m.cut(IT + "mp_rank_00_001/*.pt", 0.9), "V221"),
    "rank file copied over another": Mutation(
        LEGACY, m.copy_over(IT + "mp_rank_00_000/model_optim_rng.pt", IT + "mp_rank_01_000/model_optim_rng.pt"), "V235"
    ),
    "norm of one rank drifted": Mutation(LEGACY, m.one_rank_drifts, "V233"),
    "a flipped bit in a rank file": Mutation(LEGACY, m.poke(FC2, m.flip), "V229", DEEP),
    "distributed optimizer gone": Mutation("legacy_llama_dp2_distopt_bf16", m.delete(IT + "*/distrib_optim.pt"), "V707"),
    # ---- its HF weights in one file
    "file cut by a byte": Mutation("hf", m.cut("model.safetensors", 1), "V202"),
    "file cut in its header": Mutation("hf", m.cut("model.safetensors", 0.001), "V201"),
    "bytes appended": Mutation("hf", m.append("model.safetensors", bytes(16)), "V202"),
    "header no JSON": Mutation("hf", m.header(b'{"__metadata__"', b"[{__metadata___"), "V201"),
    "shape and range disagree": Mutation("hf", m.header(b'"shape":[509,64]', b'"shape":[508,64]'), "V202"),
    "file is a pointer": Mutation("hf", m.text("model.safetensors", "version https://git-lfs.github.com/spec/v1\n"), "V106"),
    "tokenizer is a pointer": Mutation("hf", m.text("tokenizer.json", "version https://git-lfs.github.com/spec/v1\n"), "V106"),
    "config gone": Mutation("hf", m.delete("config.json"), "V403"),
    "config no JSON": Mutation("hf", m.text("config.json", "{"), "V110"),
    "config says a thing twice": Mutation(
        "hf", lambda f: (f / "config.json").write_text((f / "config.json").read_text().replace("{", '{"vocab_size": 7,', 1)), "V114"
    ),
    "link to nowhere": Mutation("hf", lambda f: (f / "tokenizer.json").symlink_to("../blobs/0"), "V111"),
    "no format": Mutation("hf", m.tensors(lambda t: None, metadata=None), "V211"),
    "no checksums": Mutation("hf", lambda f: None, "V212", DEEP),
    "tensor missing": Mutation("hf", m.tensors(lambda t: t.pop(Q0)), "V301"),
    "config of a deeper model": Mutation("hf", m.config(num_hidden_layers=5), "V301"),
    "config of a flatter model": Mutation("hf", m.config(num_hidden_layers=3), "V302"),
    "tensor too many": Mutation("hf", m.tensors(lambda t: t.update({"model.extra.weight": t[Q0]})), "V302"),
    "config of a wider model": Mutation("hf", m.config(intermediate_size=96), "V401"),
    "tensor transposed": Mutation("hf", m.tensors(lambda t: t.update({n: a.T for n, a in t.items() if "down_proj" in n})), "V401"),
    "heads that do not divide": Mutation("hf", m.config(num_key_value_heads=3), "V402"),
    "family unknown": Mutation("hf", m.config(model_type="unheard_of", architectures=None), "V304"),
    "layer lost, family unknown": Mutation(
        "hf",
        m.both(m.config(model_type="unheard_of", architectures=None), m.tensors(lambda t: [t.pop(n) for n in list(t) if ".2." in n])),
        "V305",
    ),
    "one layer float32": Mutation(
        "hf", m.tensors(lambda t: t.update({n: a.astype(np.float32) for n, a in t.items() if ".2." in n})), "V501"
    ),
    "q alone float32": Mutation("hf", m.tensors(lambda t: t.update({Q0: t[Q0].astype(np.float32)})), "V502"),
    "config of another dtype": Mutation("hf", m.config(dtype="float32"), "V504"),
    "norms float32": Mutation("hf", m.tensors(lambda t: t.update({n: a.astype(np.float32) for n, a in t.items() if "norm" in n})), "V505"),
    "config says fp8": Mutation("hf", m.config(quantization_config={"quant_method": "fp8"}), "V506"),
    "head tied and different": Mutation("hf", m.config(tie_word_embeddings=True), "V607", DEEP),
    "HF weights to resume from": Mutation("hf", lambda f: None, "V705", RESUME),
    # ---- in two files
    "ghost in the index": Mutation(
        "shards", m.index(lambda w: w.update({"model.ghost.weight": "model-00001-of-00002.safetensors"})), "V203"
    ),
    "tensor sent to the wrong file": Mutation(
        "shards", m.index(lambda w: w.update({"lm_head.weight": "model-00002-of-00002.safetensors"})), "V204"
    ),
    "tensor not listed": Mutation("shards", m.index(lambda w: w.pop("lm_head.weight")), "V205"),
    "shard gone": Mutation("shards", m.delete("model-00002*"), "V206"),
    "shard renamed": Mutation("shards", m.rename("model-00002-of-00002.safetensors", "Model-00002-of-00002.safetensors"), "V206"),
    "index leads out": Mutation("shards", m.index(lambda w: w.update({"lm_head.weight": "../model.safetensors"})), "V207"),
    "stale twin": Mutation("shards", m.stale_twin, "V208"),
    "total_size wrong": Mutation("shards", m.index(lambda w: None, total=7), "V209"),
    "index gone, two files": Mutation("shards", m.delete("*.index.json"), "V210"),
    "stray file": Mutation("shards", m.copy_over("model-00001-of-00002.safetensors", "model-old.safetensors"), "V112"),
    "export not ended": Mutation("shards", m.rename("model-00002-of-00002.safetensors", "model-00002-of-?????.safetensors"), "V115"),
}


def made(shared, tmp_path, mutation):
    source = shared / "real" / (DENSE if mutation.source in ("hf", "shards") else mutation.source)
    if mutation.source in ("hf", "shards"):
        folder = m.hf_copy(source, tmp_path / "hf", shards=1 if mutation.source == "hf" else 2)
    else:
        folder = m.copied(source / "mcore", tmp_path / "run")
    mutation.change(folder)
    return folder


def options(mutation):
    return Options(deep="deep" in mutation.options, resume="resume" in mutation.options)


def test_nothing_is_found_in_what_megatron_and_transformers_wrote(shared, tmp_path):
    for name in sorted(p.name for p in (shared / "real").iterdir()):
        report = validate(shared / "real" / name / "mcore", Options(deep=True, strict=True))
        assert report.valid and not report.count("warning"), (name, report.findings)
        if name != "optimonly_llama_tp2_bf16":
            assert validate(m.hf_copy(shared / "real" / name, tmp_path / name, shards=2), Options(deep=True, strict=True)).valid


CASES = {  # public reports that a change repeats
    "tracker ahead": "A3",
    "index gone": "A3",
    "tracker empty": "A4",
    "tracker garbled": "A4",
    "rank folder gone": "E5",
    "ghost in the index": "G1",
    "tensor sent to the wrong file": "G1",
    "total_size wrong": "G3",
    "stale twin": "G4",
    "index leads out": "G6",
    "shard gone": "G8",
    "shard renamed": "G8",
    "file cut by a byte": "H1",
    "data file cut": "H1",
    "file is a pointer": "H2",
    "tokenizer is a pointer": "H2",
    "bytes appended": "H3",
    "a flipped bit": "H9",
    "a flipped bit in a rank file": "H9",
    "config says fp8": "J3",
    "no optimizer to resume from": "B3",
    "norm of one rank drifted": "N1",
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.case(CASES[n])) if n in CASES else n for n in MUTATIONS])
def test_a_change_is_found_under_its_code(shared, tmp_path, name):
    mutation = MUTATIONS[name]
    report = validate(made(shared, tmp_path, mutation), options(mutation))
    found = {f.code: f for f in report.findings}
    assert mutation.code in found, report.findings
    assert report.valid is (report.count("error") == 0)
    assert found[mutation.code].where, "a finding says where"


def test_split_checkpoints_are_told_by_what_lies_beside(shared, tmp_path):
    source = shared / "real" / DENSE
    run_folder = m.copied(source / "mcore", tmp_path / "run")
    m.beside(run_folder, source)
    for deep in (False, True):
        report = validate(run_folder, Options(deep=deep))
        assert {f.code for f in report.findings if f.severity != "info"} == {"V801"} and report.valid
        assert report.holds.weights == "both"
    m.poke(FC2, m.put((63, 79), 3))(run_folder)
    (finding,) = [f for f in validate(run_folder, Options(deep=True)).findings if f.code == "V802"]
    assert finding.tensor == "model.layers.1.mlp.down_proj.weight" and "[63, 79]" in finding.expected and finding.found == "3"
    m.config(rope_theta=5e5, rope_parameters=None)(run_folder)
    assert "V405" in {f.code for f in validate(run_folder).findings}


def test_at_least_forty_changes_of_real_files_and_every_verdict_has_a_place(shared):
    real = [x for x in MUTATIONS.values() if x.source not in ("hf", "shards")]
    assert len(real) >= 40 and len(MUTATIONS) >= 90


def test_findings_do_not_depend_on_what_else_is_looked_for(shared, tmp_path):
    folder = made(shared, tmp_path, MUTATIONS["tensor missing"])
    assert {f.code for f in validate(folder, Options(select=("V3",))).findings} == {"V301"}
    report = validate(folder, Options(ignore=("V301",)))
    assert "V301" not in report.checked and report.valid
    subject, report = examined(folder)
    assert json.dumps([f.code for f in report.findings]) and subject.models[0].missing == (Q0,)


@pytest.mark.slow
def test_an_independent_reader_reads_whatever_is_called_valid(shared, tmp_path):
    """torch with megatron-core's classes reads every checkpoint of the corpus, and every changed one that is not called invalid."""
    from oracle import launch

    jobs: dict[str, list[dict[str, str]]] = {"0.16.1": [], "0.19.2": []}
    verdicts = {}
    folders = [(p.name, p / "mcore") for p in sorted((shared / "real").iterdir())]
    if not launch.available("0.19.2"):
        folders = [(name, folder) for name, folder in folders if not name.startswith("mc019")]
    for name, mutation in MUTATIONS.items():
        if mutation.source not in ("hf", "shards"):
            (tmp_path / name.replace(" ", "_")).mkdir()
            folders.append((name, made(shared, tmp_path / name.replace(" ", "_"), mutation)))
    for name, folder in folders:
        report = validate(folder, options(MUTATIONS[name]) if name in MUTATIONS else Options())
        verdicts[name] = (report.count("error") == 0, report)
        iteration = report.directory if report.iteration else m.iteration(folder)
        version = "0.19.2" if name.startswith("mc019") else "0.16.1"  # its common state names enums that 0.16 does not have
        jobs[version].append({"checkpoint": str(iteration), "output": str(tmp_path / f"{name}.json")})
    for version, listed in jobs.items():
        assert launch.run("read_whole", listed, tmp_path, version) == [None] * len(listed)
    read = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name, _ in folders}
    for name, (valid, report) in verdicts.items():
        if valid:
            assert read[name]["error"] is None, (name, read[name], report.findings)
            assert read[name]["tensors"] or name not in MUTATIONS
    unreadable = [n for n, r in read.items() if r["error"]]
    assert len(unreadable) >= 12 and not [n for n in unreadable if verdicts[n][0]]
    assert all(verdicts[name][0] for name, _ in folders if name not in MUTATIONS)
