"""What the command says, in every format, and what it refuses, without training anything."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

from ckpt_tools.commands.ci_formats import Style
from ckpt_tools.commands.verify_resume_report import show, verdict
from ckpt_tools.errors import CkptError
from ckpt_tools.resume.meanings import MEANINGS
from ckpt_tools.resume.result import DIFFERS, EQUAL, NOISE, Point, Reason, Row, Verified
from ckpt_tools.resume.settings import Settings, parse_stage

CURVE = tuple(Point(i, 5.0 - i / 10, 1.0 + i, 1e-3) for i in range(1, 5))
EVIL = "a|b<script>\x1b[31m::error::%0A"


def answer(**changes):
    base = {
        "model": "llama", "source": "runs/<a>", "start": 0, "saved": 2, "end": 4, "layout": "TP 1", "resumed_layout": "TP 1", "path": ("hf",),
        "exact": True, "rows": (Row("weights", "loaded", EQUAL, "every bit", total=27), Row("loss", "trained", EQUAL, "2 steps", total=2)),
        "reasons": (), "notes": (), "straight": CURVE, "resumed": CURVE[2:],
    }  # fmt: skip
    return Verified(**{**base, **changes})


BROKEN = answer(
    rows=(
        Row("master weights", "loaded", DIFFERS, "every bit", 2, "decoder.x", 3, 27, 0.5),
        Row("loss", "trained", DIFFERS, "2 steps", 3, "", 2, 2, 0.25),
    ),
    reasons=(Reason("R103", "master weights", f"stale {EVIL}", "decoder.x", "1", "2"),),
)
NOISY = answer(exact=False, rows=(Row("loss", "trained", NOISE, "2 steps", None, "", 0, 1, 1e-4, 2e-4),), other=CURVE)
LACKING = answer(rows=(), missing=("optimizer", "rng_state"), reasons=(Reason("R111", "checkpoint", "not resumable"),))


def test_the_verdict_is_one_line_that_says_it_all():
    assert answer().same and verdict(answer()).startswith("continues exactly: 2 steps")
    assert NOISY.same and "no more than the two layouts do" in verdict(NOISY)
    assert not BROKEN.same and verdict(BROKEN) == "DOES NOT CONTINUE: master weights decoder.x differs from iteration 2 on, as loaded"
    assert not LACKING.same and verdict(LACKING) == "NOT RESUMABLE: optimizer, rng_state missing"


def test_a_warning_alone_does_not_make_a_run_another_one():
    assert answer(reasons=(Reason("R112", "checkpoint", "twice", severity="warning"),)).same


@pytest.mark.parametrize("found", [answer(), BROKEN, NOISY, LACKING], ids=["exact", "broken", "noisy", "lacking"])
@pytest.mark.parametrize("format", ["table", "tsv", "json", "md", "github", "junit"])
def test_every_format_shows_the_verdict_and_lets_nothing_from_a_file_through(capsys, found, format):
    show(Style(format), found, None)
    out = capsys.readouterr().out
    assert "\x1b" not in out
    if format == "json":
        told = json.loads(out)
        assert told["schema"] == "ckpt.verify-resume/1" and told["same"] is found.same and told["missing"] == list(found.missing)
        assert len(told["curves"]["straight"]) == 4 and len(told["components"]) == len(found.rows)
    elif format == "junit":
        suite = ElementTree.fromstring(out.split("?>", 1)[1])
        failures = suite.findall("testcase/failure")
        assert int(suite.get("failures")) == len(failures) and bool(failures) is not found.same
    elif format == "github":
        annotations = [line for line in out.splitlines() if line.startswith("::error")]
        assert len(annotations) == len(found.reasons) and out.splitlines()[-1].endswith(verdict(found))
    else:
        assert verdict(found) in out


@pytest.mark.parametrize("found", [answer(), BROKEN, NOISY, LACKING], ids=["exact", "broken", "noisy", "lacking"])
def test_the_page_is_whole_and_draws_the_curves(tmp_path, capsys, found):
    show(Style("tsv"), found, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert "<script>" not in text and "\x1b" not in text
    start = text.index("<body>")
    body = ElementTree.fromstring(text[start : text.index("</body>") + len("</body>")])
    curves = body.findall(".//polyline")
    assert len(curves) == 3 * (3 if found.other else 2)
    for curve in curves:
        points = [tuple(map(float, p.split(","))) for p in curve.get("points").split()]
        assert all(0 <= x <= 920 and 0 <= y <= 240 for x, y in points) and points == sorted(points)


@pytest.mark.parametrize(
    ("text", "code"),
    [("hff", "E510"), ("reshard", "E510"), ("reshard:", "E510"), ("reshard:tp=0", "E510"), ("reshard:xp=2", "E510"), ("hf:tp=1", "E510")],
)
def test_stages_that_do_not_exist_are_refused_with_those_that_do(text, code):
    with pytest.raises(CkptError) as caught:
        parse_stage(text)
    assert (caught.value.code == code and "reshard:tp=2" in caught.value.expected) or "and a number" in caught.value.expected


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"steps": 1}, "E511"), ({"save_at": 8}, "E511"), ({"save_at": 0}, "E511"), ({"inject": "stale-masters"}, "E512"),
        ({"optimizer": "adam"}, "E511"), ({"form": "hf"}, "E511"), ({"dtype": "float16"}, "E511"), ({"spec": "megatron"}, "E511"),
        ({"via": (parse_stage("lora"), parse_stage("hf"))}, "E515"),
    ],
)  # fmt: skip
def test_settings_that_make_no_experiment_are_refused(settings, code):
    with pytest.raises(CkptError) as caught:
        Settings(**settings)
    assert (caught.value.code == code and caught.value.expected) or caught.value.found


def test_what_needs_libraries_or_another_machine_is_refused_before_anything_starts(run_ckpt, fixtures):
    done = run_ckpt("verify-resume", "--config", fixtures / "families" / "gemma.json", "--no-progress")
    assert done.rc == 2 and "E516" in done.err and "Transformer Engine" in done.err
    done = run_ckpt("verify-resume", "--tp", "3", "--no-progress")
    assert done.rc == 2 and "E516" in done.err
    done = run_ckpt("verify-resume", "--dp", "3", "--no-progress")
    assert done.rc == 2 and "E511" in done.err


def test_every_reason_has_a_text(run_ckpt):
    from conftest import ROOT

    used = set()
    for path in (ROOT / "ckpt_tools" / "resume").glob("*.py"):
        used |= {word.strip('"') for word in path.read_text().replace("(", " ").replace(",", " ").split() if word.startswith('"R1')}
    assert {code for code in used if len(code) == 4} == MEANINGS.keys()
    assert "float32" in run_ckpt("explain", "R103").out
