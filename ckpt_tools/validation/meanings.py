"""What each finding means: the texts behind `ckpt explain V...`."""

from __future__ import annotations

MEANINGS: dict[str, str] = {
    "V101": """latest_checkpointed_iteration.txt names an iteration whose folder does not exist; Megatron would refuse to start, or an
        older loader start from random weights. Usually old iterations were deleted, or only a part was copied. `--fix` writes
        the newest complete iteration that is there.""",
    "V102": """latest_checkpointed_iteration.txt is empty or holds something other than a number or `release`: a crash or a full disk
        while it was written. `--fix` writes the newest complete iteration that is there.""",
    "V103": """The files of a finished save are not all there. Megatron writes .metadata and metadata.json last, so without them the
        data files may be of any age. Use another iteration, or copy the folder again.""",
    "V104": """Without latest_checkpointed_iteration.txt Megatron warns and starts from random weights; it never looks for the largest
        number. `--fix` writes the newest complete iteration.""",
    "V105": """Beside the validated iteration there is a newer one that the tracker does not name, or one whose save did not end.
        Nothing reads it unless it is asked for; it may be what a crash left, and takes disk space.""",
    "V106": """A file was cloned or downloaded as a placeholder: a git-lfs pointer, or the error page of a server. Run `git lfs pull`,
        or download it again.""",
    "V107": """A writer that did not end left a temporary file. It is not part of the checkpoint and may be deleted when nothing is
        being written.""",
    "V108": """integrity.json lists the SHA-256 of every file as Megatron saved it (--verify-integrity), and this file has another: it
        was damaged or replaced afterwards. Copy it again.""",
    "V109": "integrity.json lists a file that is not in the folder: the copy is incomplete, or a file was deleted.",
    "V110": "A JSON file cannot be parsed, is not an object, or is larger than any real one. Loaders stop here; fetch it again.",
    "V111": """A link leads nowhere. Caches of the Hugging Face Hub are made of links into a folder of blobs: copying the links alone,
        or cleaning the cache, breaks them. Copy with `cp -L`.""",
    "V112": """A data file lies in the folder and no index names it. It is of an earlier save or another version of the model; no
        loader reads it, but it takes space, and an index made anew might pick it up.""",
    "V113": "Megatron looks for iter_ and seven digits. A folder spelled otherwise is found by ckpt, not by Megatron.",
    "V114": """An object of a JSON file has a key twice with different values. Parsers take the last, the first, or refuse: the file
        says different things to different programs.""",
    "V115": "Shards are still called model-00001-of-?????.safetensors: mcore-bridge renames them at the very end. Export again.",
    "V116": """The folder is called after one iteration and the state inside says another: it was renamed or copied over. Training
        would go on with the wrong schedule and counters.""",
    "V199": """Something that had to be read could not be; the message has the error. Nothing is called valid that was not looked at.""",
    "V201": "The header of a safetensors file is not what the format demands; the safetensors library refuses the file too.",
    "V202": """The byte ranges in a safetensors header must follow each other without holes, overlaps or rest. A file that ends early
        is a broken download; bytes at the end were appended. The safetensors library refuses such files too.""",
    "V203": """The index lists a tensor that no file holds. Either the index is stale, which `--fix` mends when the model is complete
        without the tensor, or the tensor is lost.""",
    "V204": """The index says a tensor is in one file and it is in another. Loaders fail. `--fix` makes the index anew from the files.""",
    "V205": """A file holds a tensor that the index does not list. Loaders that follow the index leave it at its random initial value.
        `--fix` makes the index anew from the files.""",
    "V206": "The index names a file that is not there: the download or copy is incomplete.",
    "V207": """A file name in an index is absolute or leads out of its folder. Joined to a path by a careless loader it would read
        foreign files. Nothing of it was opened.""",
    "V208": """The same name is in two files. With an index one of them is dead weight; without one, the order of loading decides which
        counts, and when the two differ nobody can know which is right.""",
    "V209": """metadata.total_size of the index must be the bytes of all tensors. Loaders plan memory by it, some refuse the index.
        `--fix` writes the right number.""",
    "V210": "There are several files and no index: transformers looks for one and fails. `--fix` makes it from the files.",
    "V211": """transformers before version 5 refuses files without {"format": "pt"} in __metadata__.""",
    "V212": "Unlike torch's files, safetensors files hold no checksums. Keep sha256 sums beside them if bit rot matters.",
    "V221": "A .metadata, common.pt, rank file or record is truncated or garbled. Copy it again or take another iteration.",
    "V222": """A data file that .metadata names is missing or ends before its last entry: a rank did not finish, or the copy did not.""",
    "V223": ".metadata contradicts itself, says impossible sizes, or uses an extension that ckpt does not read.",
    "V224": """The pieces of a tensor leave a part uncovered or cover one twice. Nothing in the format prevents it; a loader would
        return whatever was in memory there.""",
    "V225": """The record in a data file has another dtype or shape than .metadata says: data files and index are of different saves.""",
    "V226": "Two entries of .metadata share bytes of a file: it was edited or damaged, and at least one tensor is wrong.",
    "V227": """Random states and other objects are stored once per rank in a grid. Some are missing, so megatron-core refuses to load
        the grid, and with it the checkpoint.""",
    "V228": "Megatron reads args and iteration from the common state before anything else, and it is not there.",
    "V229": """torch stores a CRC-32 with every record and never checks it. This one is not that of the bytes: they changed on disk.""",
    "V230": """ckpt finds the numbers, but torch's own reader insists on more (a version record, one folder for all entries, headers
        that agree with the directory) and refuses the record. Converting with ckpt writes it anew.""",
    "V231": "The arguments say how many ranks there are, and the folders of some are missing: their shards are lost.",
    "V232": "Shapes or contents of rank files do not fit each other or their arguments.",
    "V233": """Norms, routers and biases are stored by every tensor-parallel rank and must be equal. They drifted apart in training (a
        gradient that was not summed). `ckpt convert --replicas first` takes the first rank's.""",
    "V234": "Rank files are of different iterations or runs: some were overwritten by a later save.",
    "V235": """The files of two ranks are the same bytes. Ranks hold different shards: one file was copied over the other, and its
        shard is lost.""",
    "V251": """A pickle names code that has no place in a checkpoint. Nothing was run here; torch.load(weights_only=False) and older
        Megatrons would have run it.""",
    "V252": "Sizes stated in a file go beyond what any checkpoint needs: it is damaged, or made to exhaust the reader.",
    "V253": "A tensor has a dtype that ckpt does not know.",
    "V301": """The family of the model has a tensor that is not stored. A loader would refuse, or leave it at its random initial value.""",
    "V302": """A stored tensor is unknown to the family of the model: the config is of another model, or the tensor has a wrong name. A
        warning only, when the family itself was told from the tensors.""",
    "V303": """Neither the iteration nor the folder beside it holds model weights. An ms-swift checkpoint may keep them as safetensors
        at its root: then they were not copied along. State saved with --no-save-model and the like is told as a remark.""",
    "V304": """ckpt does not know this family, or nothing says the sizes of the model. Files and values were checked, names and shapes
        not.""",
    "V305": "Judged by its other layers, a layer or a tensor of a layer is missing.",
    "V306": "Two stored keys make the same tensor and differ, or a key promises another shape than is stored.",
    "V307": "A safetensors file without any tensor is legal, and rarely what was meant.",
    "V308": """The config counts layers for predicting further tokens and none is stored, as when transformers saved the model: it has
        none then.""",
    "V309": """A PEFT adapter needs adapter_config.json, and lora_A and lora_B of every module: one without the other does nothing.""",
    "V401": "Shape and config disagree: weights and config are of different models, or a tensor is transposed or cut.",
    "V402": "The sizes in config.json or in the stored arguments contradict each other or lack something.",
    "V403": "Without config.json no program knows how to build the model of these weights.",
    "V404": "The vocabulary tables have fewer rows than the vocabulary, or embedding and head differ in their rows.",
    "V405": "config.json beside Megatron's state describes another model than the arguments stored in it.",
    "V501": "One kind of tensor has one dtype in some layers and another in others: a conversion that was done by halves.",
    "V502": "q, k and v, or gate and up, make one tensor in Megatron and have different dtypes here: converting needs --dtype.",
    "V503": """The bias that chooses experts differs between them in the third decimal. In bfloat16 many become equal and tokens go to
        other experts. It must stay float32.""",
    "V504": "config.json states a dtype that the weights do not have; loaders with dtype='auto' cast to it.",
    "V505": "Weights of several dtypes are often meant: norms and routers in float32, quantised weights.",
    "V506": "config.json announces quantised weights that are not there, or scales are there that it does not announce.",
    "V601": "NaN: training diverged, or a conversion read uninitialised memory. Every output of the model is NaN.",
    "V602": "Infinities: an overflow, often of a cast to float16.",
    "V603": "A weight of nothing but zeros: it was never written, or never trained. Biases are not counted.",
    "V604": "A matrix whose elements are all one number comes from an initialisation or a placeholder, not from training.",
    "V605": "An aligned half, quarter, ... of a matrix is zero: a rank's shard was not written.",
    "V606": "Experts are bitwise copies: an upcycled model before training, or one expert that was written in place of all.",
    "V607": "The config ties the head to the embedding, both are stored, and they differ: programs will disagree which counts.",
    "V608": "Rows after the vocabulary take no part in the model. Some writers leave initial values in them; others zeros.",
    "V609": """The optimizer keeps float32 weights; rounded, they must be the model's. Here they are not: the first training step would
        go on from other weights. Weights were exchanged without the optimizer, or megatron-core 0.15 to 0.19 saved the state
        shifted, which `ckpt reshard --repair` puts right.""",
    "V610": "exp_avg_sq is a mean of squares; a negative one means the bytes are not what they claim to be.",
    "V611": "Two aligned parts of a matrix are bitwise equal: the shard of one rank was written in place of another's.",
    "V701": "Training that goes on from here starts with zero moments: expect a jump of the loss.",
    "V702": "The learning-rate schedule would start from its beginning.",
    "V703": "Dropout and the like would use fresh random numbers: training goes on, not bit for bit.",
    "V704": "Nothing says how far the run was, so the data would start from its beginning.",
    "V705": "A release or an HF folder holds weights only; it is meant to be fine-tuned or served, not gone on from.",
    "V706": """The state lies in flat buffers in the order of the writer's layout. Megatron loads them at other data-parallel sizes
        only; `ckpt reshard` names them and writes them for any layout.""",
    "V707": "Optimizer state and model do not fit: parameters, shapes or sizes of buffers differ.",
    "V708": """The step count is stored in several places and they disagree: one is stale. Adam's bias correction depends on it; the
        largest is taken when converting.""",
    "V709": "Parameters have no optimizer state: they were frozen, or state is missing.",
    "V710": "The reader of the optimizer state has a remark: groups that are missing, or that ranks disagree about.",
    "V801": """The weights are there as safetensors and in Megatron's format: twice the disk, and an edit of one leaves the other
        stale.""",
    "V802": "The two copies of the weights are not equal: one was changed after they were written. Decide which counts.",
}
