"""Which folder and which iteration a path means (cases A1 A3 A4 A8 A9 B1 B2 G7 H2), for every layout that is known to occur."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckpt_tools.errors import CkptError
from ckpt_tools.location import Location, locate
from ckpt_tools.tracker import TRACKER_NAME

OLD_JSON = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}
NEW_JSON = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0000\nsize 1234\n"


def fill(folder: Path, *names: str, content: bytes = b"x") -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def torch_dist(folder: Path, metadata_json: dict[str, object] = OLD_JSON) -> Path:
    fill(folder, ".metadata", "__0_0.distcp")
    if "common_backend" in metadata_json:
        fill(folder, "common.pt")
    fill(folder, "metadata.json", content=json.dumps(metadata_json).encode())
    return folder


def legacy(folder: Path, *ranks: str) -> Path:
    return fill(folder, *(f"{rank}/model_optim_rng.pt" for rank in ranks or ("mp_rank_00",)))


def tracker(root: Path, content: bytes) -> Path:
    return fill(root, TRACKER_NAME, content=content)


def hf(folder: Path) -> Path:
    return fill(folder, "config.json", "model.safetensors")


def refused(code: str, path: Path | str, *arguments: object, **options: bool) -> CkptError:
    with pytest.raises(CkptError) as caught:
        locate(str(path), *arguments, **options)  # type: ignore[arg-type]
    assert caught.value.code == code, str(caught.value)
    return caught.value


# ---- A1: the tracker decides -------------------------------------------------------------------------------------------------------


@pytest.fixture
def two(tmp_path: Path) -> Path:
    legacy(tmp_path / "root" / "iter_0000005")
    legacy(tmp_path / "root" / "iter_0000020")
    return tracker(tmp_path / "root", b"20\n")


@pytest.mark.parametrize(("wanted", "number"), [("latest", 20), ("20", 20), (20, 20), ("5", 5), (5, 5), ("iter_0000005", 5)])
def test_a1_latest_is_the_tracker_and_a_number_is_that_number(two: Path, wanted: str | int, number: int) -> None:
    place = locate(str(two), wanted)
    assert (place.iteration, place.label) == (number, str(number))
    assert place.directory == str(two / f"iter_{number:07d}")
    assert place.root == str(two)
    assert str(number) in place.chosen
    assert [c.label for c in place.candidates] == ["5", "20"]


def test_a1_an_iteration_that_is_not_there_lists_the_ones_that_are(two: Path) -> None:
    error = refused("E101", two, "7")
    assert error.expected == "iter_0000007"
    assert error.found == "5, 20"


def test_a1_the_tracker_wins_over_a_larger_folder_which_is_mentioned(two: Path) -> None:
    tracker(two, b"5")
    place = locate(str(two))
    assert place.iteration == 5
    assert any("20" in w for w in place.warnings)
    assert TRACKER_NAME in place.chosen


def test_a1_a_tracker_that_names_a_missing_folder_is_an_error_listing_what_exists(two: Path) -> None:
    tracker(two, b"30")
    error = refused("E101", two)
    assert "30" in error.what
    assert error.found == "5, 20"
    assert "--iteration 20" in (error.hint or "")
    refused("E101", two, allow_untracked=True)


@pytest.mark.parametrize("text", ["seven", "-1", "", "1.5", "٣", "99999999999999999999"])
def test_what_is_no_iteration_is_refused(two: Path, text: str) -> None:
    refused("E107", two, text)


def test_numbers_sort_as_numbers_and_may_be_wider_than_seven_digits(tmp_path: Path) -> None:
    for number in (5, 100000000, 20, 9999999):
        torch_dist(tmp_path / f"iter_{number:07d}")
    tracker(tmp_path, b"100000000")
    place = locate(str(tmp_path))
    assert place.iteration == 100000000
    assert [c.label for c in place.candidates] == ["5", "20", "9999999", "100000000"]


def test_a_folder_spelled_unlike_megatron_is_used_with_a_warning_and_loses_to_the_usual_one(tmp_path: Path) -> None:
    torch_dist(tmp_path / "iter_20")
    tracker(tmp_path, b"20")
    assert any("iter_0000020" in w for w in locate(str(tmp_path)).warnings)
    torch_dist(tmp_path / "iter_0000020")
    place = locate(str(tmp_path))
    assert place.directory.endswith("iter_0000020")
    assert any("2 times" in w for w in place.warnings)


# ---- A3: interrupted saves ----------------------------------------------------------------------------------------------------------


def test_a3_an_incomplete_latest_is_refused_naming_the_newest_complete_one(tmp_path: Path) -> None:
    torch_dist(tmp_path / "iter_0000010")
    fill(tmp_path / "iter_0000020", "__0_0.distcp")
    tracker(tmp_path, b"20")
    error = refused("E103", tmp_path)
    assert error.what == "iter_0000020 is incomplete: .metadata, metadata.json, common.pt missing"
    assert "--iteration 10" in (error.hint or "")
    assert locate(str(tmp_path), 10).iteration == 10
    place = locate(str(tmp_path), need_complete=False)
    assert (place.iteration, place.format) == (20, "torch_dist")
    assert any("incomplete" in w for w in place.warnings)
    assert [(c.label, c.complete) for c in place.candidates] == [("10", True), ("20", False)]


@pytest.mark.parametrize("lost", [".metadata", "metadata.json", "common.pt", "__0_0.distcp"])
@pytest.mark.parametrize("how", ["removed", "emptied"])
def test_a3_each_missing_or_empty_part_of_a_torch_dist_folder_is_named(tmp_path: Path, lost: str, how: str) -> None:
    if how == "emptied" and lost.endswith(".distcp"):
        pytest.skip("a rank may have had nothing to write")
    folder = torch_dist(tmp_path / "iter_0000010")
    (folder / lost).unlink() if how == "removed" else (folder / lost).write_bytes(b"")
    tracker(tmp_path, b"10")
    (candidate,) = locate(str(tmp_path), need_complete=False).candidates
    assert candidate.format == "torch_dist"
    (missing,) = candidate.missing
    assert missing.startswith("*.distcp" if lost.endswith(".distcp") else lost)
    refused("E103", tmp_path)


def test_a3_metadata_tmp_is_an_interrupted_save_even_beside_an_older_metadata(tmp_path: Path) -> None:
    folder = torch_dist(tmp_path / "iter_0000010")
    fill(folder, ".metadata.tmp")
    assert ".metadata.tmp" in refused("E103", folder).what
    (folder / ".metadata").unlink()
    assert ".metadata missing" in refused("E103", folder).what


def test_a3_an_empty_iteration_folder_and_one_that_is_a_dead_link_are_incomplete(tmp_path: Path) -> None:
    torch_dist(tmp_path / "iter_0000010")
    (tmp_path / "iter_0000020").mkdir()
    (tmp_path / "iter_0000030").symlink_to("gone")
    for number in (b"20", b"30"):
        tracker(tmp_path, number)
        assert "--iteration 10" in (refused("E103", tmp_path, need_complete=False).hint or "")


def test_megatron_core_0_19_writes_no_common_pt_and_is_complete_without(tmp_path: Path) -> None:
    folder = torch_dist(tmp_path / "iter_0000010", NEW_JSON)
    assert locate(str(folder)).format == "torch_dist"
    (folder / "metadata.json").unlink()
    (folder / ".metadata").write_bytes(b"...common_state/shard_0_1...")
    assert refused("E103", folder).what == "iter_0000010 is incomplete: metadata.json missing"


def test_an_unknown_backend_is_named(tmp_path: Path) -> None:
    folder = fill(tmp_path / "iter_0000001", "metadata.json", content=b'{"sharded_backend": "tape"}')
    assert "tape" in (refused("E108", folder).found or "")


# ---- A4: tracker text ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [b"20", b"20\r\n", b"\xef\xbb\xbf20", b" \t20 \n\n", b"0000020", b"\xef\xbb\xbf20\r\n"])
def test_a4_blanks_crlf_bom_and_zeros_are_tolerated(tmp_path: Path, text: bytes) -> None:
    legacy(tmp_path / "iter_0000020")
    assert locate(str(tracker(tmp_path, text))).iteration == 20


@pytest.mark.parametrize(
    "text", [b"", b" \n", b"abc", b"20 30", b"-5", b"1e3", b"\xff\xfe2\x000\x00", b"Release", b"iter_0000020", b"9" * 5000]
)
def test_a4_any_other_text_is_an_error_that_quotes_the_bytes(tmp_path: Path, text: bytes) -> None:
    legacy(tmp_path / "iter_0000020")
    error = refused("E102", tracker(tmp_path, text), allow_untracked=True)
    assert repr(text[:40]) in (error.found or "") or not text
    assert len(error.found or "") < 250
    assert locate(str(tmp_path), 20).iteration == 20, "an explicit iteration does not need the tracker"


def test_a4_release_is_read_from_release_and_shown_as_release(tmp_path: Path) -> None:
    legacy(tmp_path / "release")
    legacy(tmp_path / "iter_0000020")
    place = locate(str(tracker(tmp_path, b"release")))
    assert (place.label, place.iteration, place.directory) == ("release", None, str(tmp_path / "release"))
    assert [c.label for c in place.candidates] == ["20", "release"]
    assert locate(str(tmp_path), "release").label == "release"
    refused("E101", two_release_less(tmp_path), "release")


def two_release_less(tmp_path: Path) -> Path:
    legacy(tmp_path / "other" / "iter_0000003")
    return tracker(tmp_path / "other", b"3")


def test_a4_without_a_tracker_only_looking_is_allowed_and_it_says_so(tmp_path: Path) -> None:
    legacy(tmp_path / "iter_0000003")
    error = refused("E104", tmp_path)
    assert "--iteration 3" in (error.hint or "")
    place = locate(str(tmp_path), allow_untracked=True)
    assert place.iteration == 3
    assert f"no {TRACKER_NAME}" in place.chosen
    assert locate(str(tmp_path), 3).iteration == 3


def test_a4_without_a_tracker_looking_shows_the_newest_complete_one(tmp_path: Path) -> None:
    torch_dist(tmp_path / "iter_0000003")
    torch_dist(tmp_path / "iter_0000010")
    fill(tmp_path / "iter_0000020", "__0_0.distcp")
    assert locate(str(tmp_path), allow_untracked=True).iteration == 10
    assert "20 (incomplete)" in (refused("E104", tmp_path).found or "")


# ---- A8: links, spaces, HF folders --------------------------------------------------------------------------------------------------


def test_a8_the_hub_cache_made_of_links_and_with_spaces_is_an_hf_folder(tmp_path: Path) -> None:
    cache = tmp_path / "models--a--b"
    snapshot = cache / "snapshots" / "0123 abc"
    snapshot.mkdir(parents=True)
    for name in ("config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"):
        fill(cache / "blobs", f"hash {name}")
        (snapshot / name).symlink_to(f"../../blobs/hash {name}")
    place = locate(str(snapshot))
    assert (place.format, place.iteration, place.directory, place.root) == ("hf", None, str(snapshot), None)
    assert str(snapshot) in (refused("E106", cache).hint or "")


def test_links_to_iteration_folders_are_followed_and_named_after_where_they_lead(tmp_path: Path) -> None:
    torch_dist(tmp_path / "disk" / "iter_0000005")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "iter_0000005").symlink_to(tmp_path / "disk" / "iter_0000005")
    tracker(tmp_path / "run", b"5")
    assert locate(str(tmp_path / "run")).directory == str(tmp_path / "run" / "iter_0000005")
    (tmp_path / "current").symlink_to(tmp_path / "disk" / "iter_0000005")
    assert locate(str(tmp_path / "current")).iteration == 5
    assert locate(str(tmp_path / "current") + "/").iteration == 5


def test_g7_single_files_are_taken_as_they_are(tmp_path: Path) -> None:
    fill(tmp_path, "model.safetensors", "model_optim_rng.pt", "common.pt", "adapter_model.safetensors")
    formats = {n: locate(str(tmp_path / n)).format for n in sorted(os.listdir(tmp_path))}
    assert formats == {"adapter_model.safetensors": "peft", "common.pt": "state", "model.safetensors": "hf", "model_optim_rng.pt": "torch"}
    refused("E101", tmp_path / "model.safetensors", 5)


@pytest.mark.parametrize("name", ["metadata.json", "__0_0.distcp", "model.safetensors.index.json", "notes.txt"])
def test_files_that_are_parts_of_a_checkpoint_point_at_their_folder(tmp_path: Path, name: str) -> None:
    error = refused("E106", fill(tmp_path, name) / name)
    assert (str(tmp_path) in (error.hint or "")) == (name != "notes.txt")


def test_the_tracker_file_itself_stands_for_its_folder(two: Path) -> None:
    assert locate(str(two / TRACKER_NAME)).iteration == 20


def test_hf_folders_have_no_iterations_to_choose(tmp_path: Path) -> None:
    assert locate(str(hf(tmp_path))).chosen.startswith("an HF folder")
    refused("E101", tmp_path, 5)


def test_an_unfinished_export_is_refused(tmp_path: Path) -> None:
    fill(tmp_path, "config.json", "model-00001-of-?????.safetensors")
    refused("E103", tmp_path)
    assert locate(str(tmp_path), need_complete=False).warnings


def test_a_peft_adapter_folder_is_told_from_a_model(tmp_path: Path) -> None:
    fill(tmp_path, "adapter_config.json", "adapter_model.safetensors")
    assert locate(str(tmp_path)).format == "peft"


# ---- A9 and legacy folders ----------------------------------------------------------------------------------------------------------


def test_a9_legacy_folders_are_one_format_whatever_their_numbers_mean(tmp_path: Path) -> None:
    legacy(tmp_path / "iter_0000005", "mp_rank_00_000", "mp_rank_00_001", "mp_rank_01_000", "mp_rank_01_001")
    assert locate(str(tracker(tmp_path, b"5"))).format == "torch"


def test_older_legacy_file_names_count_and_a_rank_without_files_is_missing(tmp_path: Path) -> None:
    folder = fill(tmp_path / "iter_0000005", "mp_rank_00/model_rng.pt", "mp_rank_00_000/optim.pt", "mp_rank_00_001/optim.pt")
    assert locate(str(folder)).format == "torch"
    (folder / "mp_rank_01").mkdir()
    assert "mp_rank_01/model_optim_rng.pt" in refused("E103", folder).what
    assert str(folder) in (refused("E106", folder / "mp_rank_00").hint or "")


# ---- B1, B2 and split checkpoints ---------------------------------------------------------------------------------------------------


def test_b1_common_pt_alone_is_legal_when_the_weights_lie_at_the_root(tmp_path: Path) -> None:
    fill(hf(tmp_path / "checkpoint-20"), "args.json", "iter_0000020/common.pt")
    root = tracker(tmp_path / "checkpoint-20", b"20")
    for place in (locate(str(root)), locate(str(root / "iter_0000020"))):
        assert (place.format, place.iteration, place.weights, place.root) == ("state", 20, str(root), str(root))
        assert place.producer == "ms-swift"
        assert not place.warnings


def test_b1_common_pt_alone_without_weights_names_the_place_looked_at(tmp_path: Path) -> None:
    root = tracker(fill(tmp_path / "run", "iter_0000020/common.pt"), b"20")
    error = refused("E103", root)
    assert str(root) in (error.hint or "")
    assert "safetensors" in (error.hint or "")
    assert locate(str(root), need_complete=False).format == "state"


@pytest.mark.parametrize("make", [torch_dist, legacy])
def test_b2_weights_beside_a_full_iteration_folder_are_reported(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    make(tmp_path / "iter_0000020")
    root = tracker(hf(tmp_path), b"20")
    assert locate(str(root)).weights == str(root)
    assert locate(str(root / "iter_0000020")).weights == str(root)


def test_weights_and_iterations_without_a_tracker_are_an_hf_folder_that_says_what_was_left(tmp_path: Path) -> None:
    torch_dist(hf(tmp_path) / "iter_0000005")
    place = locate(str(tmp_path))
    assert place.format == "hf"
    assert any("--iteration" in w for w in place.warnings)
    assert [c.label for c in place.candidates] == ["5"]
    assert locate(str(tmp_path), 5).format == "torch_dist"
    assert locate(str(tmp_path), allow_untracked=True).format == "torch_dist"


def test_merged_weights_with_a_tracker_and_no_iteration_folder_are_an_hf_folder(tmp_path: Path) -> None:
    root = tracker(fill(hf(tmp_path / "checkpoint-20-merged"), "args.json"), b"20")
    place = locate(str(root))
    assert (place.format, place.iteration, place.producer) == ("hf", 20, "ms-swift")
    assert place.warnings


def test_an_unfinished_export_at_the_root_makes_a_split_checkpoint_incomplete(tmp_path: Path) -> None:
    fill(tmp_path, "config.json", "model-00001-of-?????.safetensors", "iter_0000020/common.pt")
    assert "?????" in refused("E103", tracker(tmp_path, b"20")).what


# ---- one iteration folder by itself -------------------------------------------------------------------------------------------------


def test_an_iteration_folder_given_by_itself_says_when_the_tracker_names_another(two: Path) -> None:
    place = locate(str(two / "iter_0000005"))
    assert (place.iteration, place.root) == (5, str(two))
    assert any("20" in w for w in place.warnings)
    assert not locate(str(two / "iter_0000020") + "/").warnings
    refused("E101", two / "iter_0000005", 20)
    assert locate(str(two / "iter_0000005"), 5).iteration == 5


def test_the_current_folder_may_be_the_iteration_folder(two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(two / "iter_0000020")
    assert (locate(".").iteration, locate(".").directory) == (20, ".")
    monkeypatch.chdir(two)
    assert locate("iter_0000005").root == "."


def test_a_broken_tracker_beside_a_given_iteration_folder_is_only_a_warning(two: Path) -> None:
    tracker(two, b"abc")
    assert any("abc" in w for w in locate(str(two / "iter_0000005")).warnings)


def test_a_torch_dist_folder_with_another_name_states_no_iteration(tmp_path: Path) -> None:
    torch_dist(hf(tmp_path) / "copy")
    place = locate(str(tmp_path / "copy"))
    assert (place.format, place.iteration, place.label, place.root, place.weights) == ("torch_dist", None, None, None, None)


def test_old_zarr_folders_are_recognised(tmp_path: Path) -> None:
    folder = fill(tmp_path / "iter_0000005", "common.pt", "embedding.word_embeddings.weight/.zarray")
    assert "metadata.json" in refused("E103", folder).what
    fill(folder, "metadata.json", content=b'{"sharded_backend": "zarr", "sharded_backend_version": 1}')
    assert locate(str(folder)).format == "zarr"


# ---- other software -----------------------------------------------------------------------------------------------------------------


def test_ms_swift_run_folders_hold_one_root_per_iteration(tmp_path: Path) -> None:
    for number in (5, 20):
        root = tracker(fill(tmp_path / f"checkpoint-{number}", "args.json"), str(number).encode())
        torch_dist(root / f"iter_{number:07d}")
    assert "--iteration 20" in (refused("E104", tmp_path).hint or "")
    place = locate(str(tmp_path), 5)
    assert (place.iteration, place.producer) == (5, "ms-swift")
    assert place.directory == str(tmp_path / "checkpoint-5" / "iter_0000005")
    assert [c.label for c in place.candidates] == ["5", "20"]
    assert locate(str(tmp_path), allow_untracked=True).iteration == 20
    assert refused("E101", tmp_path, 7).found == "5, 20"


def test_a_trainer_folder_with_weights_of_its_own_is_that_model(tmp_path: Path) -> None:
    hf(hf(tmp_path) / "checkpoint-500")
    assert any("500" in w for w in locate(str(tmp_path)).warnings)
    assert locate(str(tmp_path)).directory == str(tmp_path)
    assert locate(str(tmp_path), 500).directory == str(tmp_path / "checkpoint-500")


def test_verl_folders_open_the_actor_at_every_level(tmp_path: Path) -> None:
    step = tmp_path / "global_step_30"
    for role in ("actor", "critic"):
        torch_dist(step / role / "dist_ckpt")
        fill(step / role, "transformer_config.json")
        hf(step / role / "huggingface")
    torch_dist(tmp_path / "global_step_5" / "actor" / "dist_ckpt")
    tracker(tmp_path, b"30")
    for start in (tmp_path, step, step / "actor", step / "actor" / "dist_ckpt"):
        place = locate(str(start))
        assert os.path.samefile(place.directory, step / "actor" / "dist_ckpt"), start
        assert (place.iteration, place.format, place.producer) == (30, "torch_dist", "verl")
        assert place.weights == str(step / "actor" / "huggingface")
        assert place.root is not None
        assert os.path.samefile(place.root, tmp_path)
    assert any("critic" in w for w in locate(str(tmp_path)).warnings)
    assert locate(str(step / "critic")).directory == str(step / "critic" / "dist_ckpt")
    assert locate(str(step / "critic" / "huggingface")).format == "hf"
    assert locate(str(tmp_path), 5).iteration == 5


def test_verl_checkpoints_saved_with_fsdp_are_refused_by_name(tmp_path: Path) -> None:
    fill(tmp_path / "global_step_30" / "actor", "model_world_size_2_rank_0.pt")
    assert "FSDP" in refused("E103", tracker(tmp_path, b"30")).what


def test_megatron_bridge_and_slime_are_recognised_by_their_side_files(tmp_path: Path) -> None:
    bridge, slime = tmp_path / "bridge", tmp_path / "slime"
    fill(torch_dist(bridge / "iter_0000005"), "run_config.yaml", "train_state.pt")
    fill(bridge, "latest_train_state.pt")
    torch_dist(slime / "release")
    fill(slime, "rollout/global_dataset_state_dict_5.pt")
    assert locate(str(tracker(bridge, b"5"))).producer == "megatron-bridge"
    assert locate(str(bridge / "iter_0000005")).producer == "megatron-bridge"
    assert locate(str(tracker(slime, b"release"))).producer == "slime"


@pytest.mark.parametrize(
    ("persistent", "temporary", "number"), [(b"20", b"25", 25), (b"20", b"20", 20), (b"20", b"15", 20), (None, b"15", 15)]
)
def test_a_non_persistent_checkpoint_wins_when_it_is_at_least_as_new(
    tmp_path: Path, persistent: bytes | None, temporary: bytes, number: int
) -> None:
    second = tmp_path / "non_persistent"
    torch_dist(second / f"iter_{int(temporary):07d}")
    tracker(second, temporary)
    torch_dist(tmp_path / "iter_0000020")
    if persistent:
        tracker(tmp_path, persistent)
    place = locate(str(tmp_path))
    assert place.iteration == number
    wins = not persistent or int(temporary) >= int(persistent)
    assert place.directory.startswith(str(second)) == wins
    assert "non_persistent" in place.chosen
    assert locate(str(tmp_path), 20).directory == str(tmp_path / "iter_0000020")


# ---- H2, wrong paths ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [LFS, b"<!DOCTYPE html><html>404</html>"])
def test_h2_placeholders_are_named_instead_of_parsed(tmp_path: Path, content: bytes) -> None:
    torch_dist(tmp_path / "iter_0000005")
    assert TRACKER_NAME in (refused("E205", tracker(tmp_path, content)).where or "")
    tracker(tmp_path, b"5")
    for name in (".metadata", "metadata.json", "common.pt"):
        kept = (tmp_path / "iter_0000005" / name).read_bytes()
        (tmp_path / "iter_0000005" / name).write_bytes(content)
        assert name in (refused("E205", tmp_path, need_complete=False).where or "")
        (tmp_path / "iter_0000005" / name).write_bytes(kept)


def test_a_path_that_does_not_exist_offers_near_names(tmp_path: Path) -> None:
    (tmp_path / "llama-7b-run").mkdir()
    assert "llama-7b-run" in (refused("E105", tmp_path / "llama-7b-rnu").hint or "")
    assert "llama-7b-run" in (refused("E105", tmp_path / "llama-7b-rnu" / "iter_0000005").hint or "")
    assert "hf download org/name" in (refused("E105", "org/name").hint or "")
    (tmp_path / "dead").symlink_to("nowhere")
    assert "nowhere" in (refused("E105", tmp_path / "dead").found or "")


def test_a_folder_that_holds_nothing_known_says_what_is_there(tmp_path: Path) -> None:
    fill(tmp_path, "notes.txt")
    assert refused("E106", tmp_path).found == "notes.txt"
    tracker(tmp_path / "run", b"5")
    assert str(tmp_path / "run") in (refused("E106", tmp_path).hint or "")


def test_an_empty_root_with_a_tracker_says_that_the_iteration_is_gone(tmp_path: Path) -> None:
    assert refused("E101", tracker(tmp_path, b"5")).found == "no iteration folder"


# ---- nothing depends on order, dates or sizes ---------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), numbers=st.sets(st.integers(0, 10**8), min_size=1, max_size=6), data=st.data())
def test_no_result_depends_on_listing_order_or_modification_times(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, seed: int, numbers: set[int], data: st.DataObject
) -> None:
    root = tmp_path_factory.mktemp("run")
    for number in numbers:
        folder = root / f"iter_{number:07d}"
        kind = data.draw(st.sampled_from(["torch_dist", "legacy", "cut off"]))
        torch_dist(folder) if kind == "torch_dist" else legacy(folder) if kind == "legacy" else fill(folder, "__0_0.distcp")
    named = data.draw(st.sampled_from(sorted(numbers)))
    tracker(root, str(named).encode())

    def results() -> list[Location | str]:
        answers: list[Location | str] = []
        for options in ({}, {"need_complete": False}, {"allow_untracked": True}):
            try:
                answers.append(locate(str(root), **options))
            except CkptError as error:
                answers.append(str(error))
        return answers

    before = results()
    assert isinstance(before[1], Location)
    assert before[1].iteration == named
    shuffler, real = random.Random(seed), os.listdir
    for folder in root.iterdir():
        os.utime(folder, (shuffler.random() * 1e9, shuffler.random() * 1e9))

    def shuffled(path: str) -> list[str]:
        names = real(path)
        shuffler.shuffle(names)
        return names

    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", shuffled)
        assert results() == before


# ---- judged by checkpoints that the real libraries wrote ------------------------------------------------------------------------------


def real_folders(shared: Path) -> list[Path]:
    folders = sorted(p for p in (shared / "real").iterdir() if (p / "mcore").is_dir())
    assert folders, "shared/real is empty"
    return folders


def test_every_real_checkpoint_is_found_by_its_tracker(shared: Path) -> None:
    for variant in real_folders(shared):
        root = variant / "mcore"
        place = locate(str(root))
        said = (root / TRACKER_NAME).read_text().strip()
        assert place.label == said, variant.name
        assert place.format == ("torch" if variant.name.startswith("legacy_") else "torch_dist"), variant.name
        assert place.directory == str(root / (said if said == "release" else f"iter_{int(said):07d}"))
        assert all(c.complete for c in place.candidates), place.candidates
        assert (place.weights, place.warnings, place.producer) == (None, (), "megatron-lm")
        direct = locate(place.directory)
        assert (direct.root, direct.label, direct.format) == (str(root), said, place.format)
        assert locate(str(variant)).format == "hf"


def test_megatron_core_agrees_on_which_folders_are_distributed_checkpoints(shared: Path) -> None:
    core = pytest.importorskip("megatron.core.dist_checkpointing.core")
    for variant in real_folders(shared):
        place = locate(str(variant / "mcore"))
        assert core.check_is_distributed_checkpoint(place.directory) == (place.format == "torch_dist"), variant.name


def test_a_real_save_cut_off_at_any_file_is_never_taken_for_complete(shared: Path, tmp_path: Path) -> None:
    for name in ("llama_tp2_bf16", "mc019_llama_tp1_bf16"):
        source = shared / "real" / name / "mcore" / "iter_0000005"
        if not source.is_dir():
            pytest.skip(f"{name} is not here")
        # The order of a save: blobs (and common.pt), .metadata, metadata.json, tracker.
        last = [".metadata", "metadata.json"]
        order = sorted(n for n in os.listdir(source) if n not in last) + last
        for kept in range(len(order)):
            root = tmp_path / f"{name} {kept}"
            (root / "iter_0000005").mkdir(parents=True)
            for file in order[:kept]:
                (root / "iter_0000005" / file).write_bytes((source / file).read_bytes()[:200_000])
            refused("E103", tracker(root, b"5"))


def test_a_folder_written_by_plain_torch_is_torch_dcp(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    dcp.save({"model": {"w": torch.ones(2, 3)}}, checkpoint_id=str(tmp_path / "iter_0000005"), no_dist=True)
    place = locate(str(tracker(tmp_path, b"5")))
    assert (place.format, place.iteration) == ("torch_dcp", 5)
    assert locate(str(tmp_path / "iter_0000005")).format == "torch_dcp"
