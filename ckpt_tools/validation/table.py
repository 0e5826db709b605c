"""The checks: one line each. `ckpt explain CODE` tells more; a test demands a text and a fixture for every line."""

from __future__ import annotations

from . import archives, files, index, resume, stored, values, weights
from .finding import Check

CHECKS: tuple[Check, ...] = (
    # ---- V1: folders and files
    Check("V101", "error", "the tracker names an iteration that is not there", files.errors("E101")),
    Check("V102", "error", "the tracker names no iteration", files.errors("E102")),
    Check("V103", "error", "the save did not end", files.incomplete),
    Check("V104", "warning", "a run folder without a tracker", files.no_tracker),
    Check("V105", "info", "another iteration is newer or broken", files.not_used),
    Check("V106", "error", "a placeholder in place of a file", files.placeholders),
    Check("V107", "warning", "a temporary file was left behind", files.leftovers),
    Check("V108", "error", "a file is not the one that was saved", files.integrity_sums, deep=True),
    Check("V109", "error", "integrity.json lists what is not there", files.integrity_names),
    Check("V110", "error", "a JSON file cannot be read", files.broken_json),
    Check("V111", "error", "a link leads nowhere", files.dangling_links),
    Check("V112", "warning", "a data file that no index names", files.unlisted_files),
    Check("V113", "warning", "an iteration folder that Megatron does not find", files.unusual_name),
    Check("V114", "warning", "a key is twice in a JSON file", files.doubled_keys),
    Check("V115", "error", "the export did not end", files.unfinished_export),
    Check("V116", "error", "the folder and its state are of different iterations", stored.folder_iteration),
    Check("V199", "error", "something could not be opened", files.unclaimed),
    # ---- V2: containers and indexes
    Check("V201", "error", "a safetensors header is broken", files.errors("E210")),
    Check("V202", "error", "safetensors ranges are not a partition of the file", files.errors("E211")),
    Check("V203", "error", "the index lists a tensor that is nowhere", index.ghosts),
    Check("V204", "error", "the index sends a tensor to the wrong file", index.misdirected),
    Check("V205", "error", "the index does not list a stored tensor", index.unlisted),
    Check("V206", "error", "a shard is missing", index.missing_shards),
    Check("V207", "error", "a path leads out of the folder", index.unsafe_paths),
    Check("V208", "error", "a tensor is in two files", index.twins),
    Check("V209", "warning", "total_size is wrong", index.total_size),
    Check("V210", "error", "several files and no index", index.no_index),
    Check("V211", "info", "no format in __metadata__", index.no_format),
    Check("V212", "info", "no checksums", stored.no_checksums, deep=True),
    Check("V221", "error", "a torch file or pickle is damaged", files.errors("E203", "E204")),
    Check("V222", "error", "a data file is missing or too short", files.errors("E217")),
    Check("V223", "error", "the index of pieces is broken", files.errors("E218", "E219")),
    Check("V224", "error", "pieces do not make up the tensor", files.errors("E207")),
    Check("V225", "error", "a record is not what the index says", files.errors("E220")),
    Check("V226", "error", "entries share bytes of a file", stored.overlaps),
    Check("V227", "error", "objects of some ranks are missing", stored.object_grids),
    Check("V228", "error", "there is no common state", stored.common_state),
    Check("V229", "error", "a record's checksum is wrong", stored.checksums, deep=True),
    Check("V230", "error", "torch cannot read a record", archives.unreadable_by_torch, deep=True),
    Check("V231", "error", "rank files are missing", files.errors("E223")),
    Check("V232", "error", "ranks do not fit together", files.errors("E224")),
    Check("V233", "error", "copies on ranks differ", stored.replicas),
    Check("V234", "error", "rank files disagree", weights.legacy_layout),
    Check("V235", "error", "rank files are copies", stored.equal_ranks),
    Check("V251", "error", "a pickle names foreign code", files.errors("E501")),
    Check("V252", "error", "a file asks for unreasonable memory", files.errors("E502")),
    Check("V253", "error", "an unknown dtype", files.errors("E206")),
    # ---- V3: names
    Check("V301", "error", "a tensor of the model is missing", weights.missing),
    Check("V302", "error", "an unknown tensor", weights.unexpected),
    Check("V303", "error", "no weights anywhere", weights.no_weights),
    Check("V304", "info", "names and shapes were not checked", weights.unknown_family),
    Check("V305", "error", "layers have holes", weights.layer_holes),
    Check("V306", "error", "keys contradict each other", files.errors("E305")),
    Check("V307", "warning", "a file without tensors", weights.no_tensors),
    # ---- V4: shapes and settings
    Check("V401", "error", "a shape is not the model's", weights.shapes),
    Check("V402", "error", "the sizes of the model contradict each other", files.errors("E301", "E302", "E311")),
    Check("V403", "warning", "no config.json", weights.no_config),
    Check("V404", "error", "vocabulary rows do not fit", weights.vocabulary),
    Check("V405", "warning", "config.json and arguments disagree", weights.config_against_args),
    # ---- V5: dtypes
    Check("V501", "warning", "one kind of tensor in several dtypes", weights.mixed_dtypes),
    Check("V502", "warning", "parts of one tensor in different dtypes", weights.joined_dtypes),
    Check("V503", "warning", "a router bias is not float32", weights.router_bias),
    Check("V504", "warning", "config.json states another dtype", weights.config_dtype),
    Check("V505", "info", "weights in several dtypes", weights.several_dtypes),
    Check("V506", "warning", "quantisation config and weights disagree", weights.quantised_left_over),
    # ---- V6: values
    Check("V601", "error", "NaN", values.nans, deep=True),
    Check("V602", "error", "infinities", values.infinities, deep=True),
    Check("V603", "warning", "a tensor of zeros", values.all_zero, deep=True),
    Check("V604", "warning", "a matrix of one number", values.constants, deep=True),
    Check("V605", "warning", "a shard of zeros", values.zero_shards, deep=True),
    Check("V606", "warning", "experts are copies", values.equal_experts, deep=True),
    Check("V607", "error", "tied weights differ", values.tied_weights, deep=True),
    Check("V608", "info", "padding rows hold numbers", values.padding_rows, deep=True),
    Check("V609", "error", "master weights are not the model's", values.masters),
    Check("V610", "error", "a negative second moment", values.negative_moments, deep=True),
    Check("V611", "warning", "a shard is there twice", values.repeated_shards, deep=True),
    # ---- V7: what training needs to go on
    Check("V701", "info", "no optimizer state", resume.no_optimizer, resume=True),
    Check("V702", "info", "no scheduler state", resume.no_scheduler, resume=True),
    Check("V703", "info", "no random states", resume.no_random_state, resume=True),
    Check("V704", "info", "no counters of progress", resume.no_progress, resume=True),
    Check("V705", "info", "weights only", resume.no_training_state, resume=True),
    Check("V706", "info", "optimizer state is bound to its layout", resume.bound_to_its_layout),
    Check("V707", "error", "optimizer state does not fit the model", resume.misfit),
    Check("V708", "warning", "step counts disagree", resume.steps_disagree),
    Check("V709", "warning", "parameters without optimizer state", resume.without_state),
    Check("V710", "warning", "a remark about the optimizer state", resume.other_remarks),
    # ---- V8: twice
    Check("V801", "warning", "weights are stored twice", values.stored_twice),
    Check("V802", "error", "the two copies differ", values.copies_differ),
)
BY_CODE = {check.code: check for check in CHECKS}
CLAIMED = frozenset(code for check in CHECKS for code in getattr(check.function, "codes", ())) | {
    "E205", "E213", "E214", "E215", "E216",  # told by checks that look for themselves
}  # fmt: skip
