"""What each error code means: the table behind `ckpt explain`."""

from __future__ import annotations

from typing import NamedTuple


class Explanation(NamedTuple):
    """title: the meaning in a few words; text: why it is an error and what to do; its line breaks mean nothing."""

    title: str
    text: str


EXPLANATIONS: dict[str, Explanation] = {
    "E001": Explanation(
        "the command line cannot be understood",
        """\
An option, a value or a command is not one that ckpt knows, or one is missing.
`ckpt --help` lists the commands, `ckpt COMMAND --help` what one of them takes.""",
    ),
    # ---- which checkpoint, which iteration
    "E101": Explanation(
        "the iteration asked for is not there",
        """\
--iteration, or the tracker file, names an iteration that the folder does not hold. ckpt never reads another one instead:
that would be a different model under the same name. The message lists what is there; choose one with --iteration N.""",
    ),
    "E102": Explanation(
        "the tracker file does not name an iteration",
        """\
latest_checkpointed_iteration.txt must hold a number or the word `release`, as Megatron writes it. An empty or damaged one is
usually left by a crash or a full disk. Choose with --iteration N, or write the right number into the file.""",
    ),
    "E103": Explanation(
        "the checkpoint is incomplete",
        """\
The save, copy or export that made this folder did not end: files that its index promises are missing. This happens when a
job is killed while it writes, also when the tracker file already names the iteration. Use the newest complete iteration,
which the hint names, or copy the folder again.""",
    ),
    "E104": Explanation(
        "nothing says which iteration is the latest",
        """\
There are iteration folders, but no latest_checkpointed_iteration.txt. The largest number is not always the latest good one
(a run may have been rewound, the last save cut short), so ckpt does not guess. Choose with --iteration N.""",
    ),
    "E105": Explanation(
        "no such file or folder",
        """\
The path does not exist, or is a link that leads nowhere. Names of models on the Hugging Face Hub are not paths: ckpt reads
local files; download the model first.""",
    ),
    "E106": Explanation(
        "this is not a checkpoint that ckpt knows",
        """\
ckpt recognises a Megatron run folder (tracker file, iter_XXXXXXX, release), one iteration folder, a Hugging Face folder
(safetensors and config.json) and a single .safetensors file. If the checkpoint lies deeper, point at that folder.""",
    ),
    "E107": Explanation(
        "this is not an iteration",
        """\
--iteration takes `latest` (what the tracker file says), `release`, or a number.""",
    ),
    "E108": Explanation(
        "a distributed checkpoint of an unknown kind",
        """\
metadata.json names a storage back end that ckpt does not read, such as the retired zarr one. Load the checkpoint with the
Megatron-Core that wrote it and save it as torch_dist.""",
    ),
    # ---- files and formats
    "E203": Explanation(
        "a torch file or its pickle is damaged",
        """\
A .metadata, common.pt or other torch.save file is truncated, or holds something that its format does not allow.
Copy it again from where it came; if it is so at the source, use another iteration.""",
    ),
    "E204": Explanation(
        "a torch.save file of a kind that ckpt does not read",
        """\
torch.save has written plain, uncompressed zip files since torch 1.6. This file is older, compressed, split, big-endian, or
a TorchScript archive. Load it with torch (weights_only=True) and save it once more.""",
    ),
    "E205": Explanation(
        "a placeholder lies where the file should be",
        """\
The file is a git-lfs pointer or the HTML error page of a failed download. Run `git lfs pull` in that folder, or download
the file again.""",
    ),
    "E206": Explanation(
        "this dtype cannot be used here",
        """\
The name is no dtype that ckpt knows, or the dtype has no meaning in this place: casts go to floating dtypes only, and
elements smaller than a byte cannot be addressed one by one.""",
    ),
    "E207": Explanation(
        "the stored pieces do not make up the tensor",
        """\
Each element of a tensor must be stored exactly once. Here pieces overlap or leave a hole, which happens when a rank's file
is missing or files of two saves lie in one folder. The message names the region. Use another iteration.""",
    ),
    "E210": Explanation(
        "the safetensors header is broken",
        """\
The header is not the JSON that the format prescribes, is too large, or names a tensor twice. The file is damaged or was
not written by a safetensors library. Download or write it again.""",
    ),
    "E211": Explanation(
        "safetensors data and header do not fit",
        """\
The byte ranges of the header must cover the data without hole, overlap or remainder, and fit shape and dtype. A truncated
download is the usual cause: fetch the file again.""",
    ),
    "E212": Explanation(
        "safetensors cannot hold this",
        """\
The format has no such dtype, or the header of one file would pass its limit of 100 MB. For the latter give a smaller
--max-shard-size, so that the tensors are spread over more files.""",
    ),
    "E213": Explanation(
        "index and safetensors files disagree",
        """\
model.safetensors.index.json and the files beside it name different tensors or files. Stale shards of an earlier export in
the same folder are the usual cause; loading them would mix two models. Remove what does not belong, or download again.""",
    ),
    "E214": Explanation(
        "a path leads out of the folder",
        """\
An index names a file with .. or an absolute path. No writer does that; someone may have prepared the checkpoint to make a
reader open other files. ckpt opens nothing outside the checkpoint.""",
    ),
    "E215": Explanation(
        "there are no safetensors weights",
        """\
The folder has a config but no .safetensors file. pytorch_model.bin is a pickle, which can run code when it is read and
which ckpt does not read. Load it once with transformers and save_pretrained it as safetensors.""",
    ),
    "E216": Explanation(
        "a JSON file cannot be used",
        """\
A config or index is not valid JSON, not an object, or larger than any checkpoint needs. Download it again.""",
    ),
    "E217": Explanation(
        "files that the index names are missing or too short",
        """\
.metadata says in which .distcp file and at which offset each piece lies; some of that is not there. A rank did not finish
its save, or the copy is incomplete. Copy again, or use another iteration.""",
    ),
    "E218": Explanation(
        "the torch_dist index is broken",
        """\
.metadata or the common state does not have the structure that torch.distributed.checkpoint writes. The file is damaged,
was edited, or comes from a version that ckpt does not know yet; in the last case please report it.""",
    ),
    "E219": Explanation(
        "the checkpoint is compressed",
        """\
It was saved with a stream extension (such as zstd), so its bytes cannot be addressed in place. Load it with torch and save
it without the extension.""",
    ),
    "E220": Explanation(
        "a stored piece is not what the index says",
        """\
The record in a .distcp file has another dtype or shape than .metadata promises. Files of two saves may have been mixed.
Use another iteration.""",
    ),
    "E221": Explanation(
        "this format cannot be read yet",
        """\
ckpt recognised the format but has no reader for it. `ckpt inspect` may still tell what it is.""",
    ),
    "E222": Explanation(
        "there are no model weights in this checkpoint",
        """\
It holds optimizer or other state only. In a split checkpoint the weights lie beside it as safetensors: convert those.""",
    ),
    # ---- names, shapes, configs
    "E223": Explanation(
        "files of some ranks are missing",
        """\
A legacy checkpoint has one mp_rank folder per tensor-, pipeline- and expert-parallel rank. The stored args say how many there
must be, and some are not there: the save was cut short, or only the folders of one node were copied.""",
    ),
    "E224": Explanation(
        "the ranks of a legacy checkpoint do not fit together",
        """\
Rank files disagree about layers, shapes or sizes, or hold names that ckpt does not know (checkpoints from before
Megatron-Core among them). The message names the file and what was found.""",
    ),
    "E225": Explanation(
        "copies that should be equal are not",
        """\
Norms, routers and tied embeddings are stored by several ranks and must be the same everywhere. Here they drifted apart, which
a missing gradient reduction in training does. ckpt neither averages nor chooses: --replicas first takes the first rank's copy.""",
    ),
    "E226": Explanation(
        "the optimizer state does not fit the model",
        """\
Optimizer state is matched with the parameters of the model before it is trusted: by name and shape, or, for the flat buffers of
the distributed optimizer, by recomputing where Megatron put each parameter and comparing with the sizes it recorded. Here
something does not match; the message says what. --optimizer none moves the weights alone.""",
    ),
    "E227": Explanation(
        "the parameter groups of the optimizer cannot be understood",
        """\
Groups are matched by wd_mult, lr_mult, is_expert_parallel and is_decoupled_lr, not by position. Two groups claim to be the same
one and differ, or a group lacks what it needs.""",
    ),
    "E301": Explanation(
        "the model's sizes do not fit together",
        """\
Heads, groups, layers, vocabulary and hidden size come from the stored arguments or from config.json, and here they
contradict each other or are missing. Give the right config with --hf-config DIR.""",
    ),
    "E302": Explanation(
        "a tensor has not the shape that the config gives it",
        """\
Config and weights are of different models, or head_dim, vocab_size or the like is wrong in the config. ckpt shows both
numbers and converts nothing: a reshape that happens to fit would be a silently broken model.""",
    ),
    "E303": Explanation(
        "tensors are missing",
        """\
The model family needs tensors that the checkpoint lacks. It is incomplete, or its config is that of another model.""",
    ),
    "E304": Explanation(
        "tensors are unknown to the model family",
        """\
The checkpoint holds tensors that the family has no mapping for. ckpt skips nothing silently: they may be an adapter, a
quantisation, a vision tower, or the family may be the wrong one. Name the right one with --family.""",
    ),
    "E305": Explanation(
        "a stored name or setting has no equal on the other side",
        """\
Two stored keys claim the same tensor and differ, a key lacks an axis that its name promises, or the config has a setting
that Megatron cannot express. For the last, --allow-unrepresentable converts the weights and lists what is lost.""",
    ),
    "E306": Explanation(
        "the model's config is not there",
        """\
Heads and sizes cannot be read off the tensors. They come from config.json (Hugging Face) or from the arguments that
Megatron-LM stores in common.pt, and neither is there. Give a config with --hf-config DIR.""",
    ),
    "E307": Explanation(
        "tensors that belong together have different dtypes or shapes",
        """\
Megatron stores them as one tensor (query, key and value; gate and up; the same weight of all layers), which has one dtype.
Ask for one with --dtype, or store layers apart with --layer-keys per-layer.""",
    ),
    "E310": Explanation(
        "the model family is unknown",
        """\
config.json or the arguments name an architecture that ckpt has no mappings for, or do not settle which it is. If the tensors
are those of a known family, name it with --family.""",
    ),
    "E311": Explanation(
        "config.json has an unusable value",
        """\
A field that the conversion needs is missing or has an impossible value. Take config.json from the model's own folder, or
correct the field that the message names.""",
    ),
    "E312": Explanation(
        "the weights are quantised in a way that ckpt does not read",
        """\
config.json has a quantization_config. ckpt reads float8 weights with one scale per block (quant_method fp8 with weight_block_size, as
DeepSeek-V3 and the -FP8 models of Qwen3 have them) and the four-bit experts of gpt-oss (mxfp4), and writes what they stand for. AWQ, GPTQ,
bitsandbytes (NF4) and compressed-tensors are recognised and refused: their numbers are not those of the model that was trained. Take the
original checkpoint, or dequantise with the tool that quantised.""",
    ),
    "E390": Explanation(
        "a model family of ckpt is wrongly declared",
        """\
This is a fault in ckpt, not in your checkpoint. Please report the whole message.""",
    ),
    # ---- plan and writing
    "E401": Explanation(
        "a parallel size is not usable",
        """\
The sizes --tp, --pp, --vpp, --ep and --etp are numbers of at least 1.""",
    ),
    "E402": Explanation(
        "the layers cannot be split over the pipeline stages",
        """\
Without a pipeline layout each stage takes the same number of layers, so pp x vpp must divide the number of layers.""",
    ),
    "E403": Explanation(
        "a tensor cannot be cut for this tensor-parallel size",
        """\
The axis that tensor parallelism cuts is not a multiple of --tp. Choose a size that divides heads, ffn size and vocabulary;
the vocabulary can be padded with --make-vocab-size-divisible-by.""",
    ),
    "E404": Explanation(
        "the source does not hold every element of the target",
        """\
Planning found elements of a target tensor that no stored piece provides. The source is incomplete.""",
    ),
    "E405": Explanation(
        "this is not a plan of ckpt",
        """\
The file is not the JSON that --save-plan writes, or was written by a version with another plan format. Plan again.""",
    ),
    "E406": Explanation(
        "a source file changed while it was read",
        """\
Its size or time of change is not what it was when the plan was made, or it is gone. Someone still writes to the source.
Nothing was left behind; wait until the save has ended and run again.""",
    ),
    "E407": Explanation(
        "the target is occupied",
        """\
DST is a file, holds files already, or overlaps SRC. ckpt writes into a new folder and puts it in place whole, so it never
mixes with what was there. Give another DST; --overwrite replaces a folder as a whole once the new one is complete.""",
    ),
    "E408": Explanation(
        "another ckpt writes this target right now",
        """\
Two processes were given the same DST. Wait for the other, or give another DST. The lock goes with the process that holds
it, so a killed ckpt leaves none.""",
    ),
    "E409": Explanation(
        "writing failed, or there is no space",
        """\
The file system has fewer free bytes than the result needs, or refused a write. Nothing was left behind. Free space or give
a DST elsewhere.""",
    ),
    "E410": Explanation(
        "this conversion is not possible",
        """\
The target format cannot be written, or the conversion would lose something that was not to be lost: optimizer state, or
layers that are not alike in a stacked key. The hint names the way that works.""",
    ),
    "E411": Explanation(
        "what was written is not what was read",
        """\
--verify read the result back and found another byte. That is a fault of disk or memory, or a bug in ckpt. The result was
not put in place. Run again; if it stays, please report it.""",
    ),
    "E413": Explanation(
        "weights are stored twice and the copies differ",
        """\
The folder holds the model's weights as safetensors and again inside the Megatron iteration, and they are not the same. One of
them is older, or was edited. ckpt does not choose: say --weights-from safetensors or --weights-from megatron.""",
    ),
    "E415": Explanation(
        "a stored checksum does not match",
        """\
torch.save stores a CRC-32 with every tensor, and neither torch nor Megatron looks at it when loading. --check-crc does: the bytes of
this record are not the ones that were written.""",
    ),
    "E416": Explanation(
        "optimizer state that was saved shifted",
        """\
megatron-core 0.15 to 0.19 save a wrong slice of the optimizer state (fully_reshardable) when a gradient bucket before it ends in
padding: the float32 weights then do not round to the model's weights. --repair puts back what the file still holds and says how many
elements it does not; --optimizer none leaves the state behind.""",
    ),
    "E412": Explanation(
        "a tensor is missing from the result, or has another shape",
        """\
--verify opened the result as a reader would and did not find the tensor as planned. That is a bug in ckpt; please report
it. The result was not put in place.""",
    ),
    "E490": Explanation(
        "a plan of ckpt contradicts itself",
        """\
This is a fault in ckpt, not in your checkpoint. Please report the whole message and, if you can, the plan (--save-plan).""",
    ),
    # ---- safety
    "E501": Explanation(
        "a pickle refers to code",
        """\
A pickle can name any function and have it called. ckpt rebuilds only the few data types that Megatron and torch store, and
calls nothing. This pickle needs something else to be understood. If you trust it, load it with torch and save it again.""",
    ),
    "E502": Explanation(
        "a file asks for unreasonable memory",
        """\
Its sizes, as stated inside, go beyond what any checkpoint needs. It is damaged, or made to exhaust the reader's memory.""",
    ),
    # ---- validate and diff
    # ---- verify-resume
    "E510": Explanation(
        "an unknown stage of a path",
        """\
--via takes hf, torch, torch_dist, split, lora, or reshard with sizes, as in reshard:tp=2,pp=1. Give it once per stage; stages are passed in
the order given.""",
    ),
    "E511": Explanation(
        "an experiment that cannot be done",
        """\
The numbers of steps, the place of the save, the batch or another setting contradict each other; the message shows which values fit.""",
    ),
    "E512": Explanation(
        "an unknown mistake to inject",
        """\
--inject makes one of a fixed list of mistakes on purpose, to show that the comparison sees it.""",
    ),
    "E513": Explanation(
        "libraries for training are not installed",
        """\
`ckpt verify-resume` trains with PyTorch and megatron-core, which nothing else in ckpt needs: pip install 'ckpt-tools[train]'.""",
    ),
    "E514": Explanation(
        "training failed",
        """\
A process of the trainer ended with an error; its last words are shown. --keep DIR keeps all that was written, with the whole output in
files that end in .log.""",
    ),
    "E515": Explanation(
        "a path that makes no sense",
        """\
A stage of --via cannot be passed from where it stands: converting to the form that the checkpoint already has, for example.""",
    ),
    "E516": Explanation(
        "a model that this trainer cannot run here",
        """\
The trainer builds the model with megatron-core on the hardware that is there. What needs Transformer Engine, or does not divide among the
ranks, is refused before anything is started.""",
    ),
    # ---- split checkpoints and adapters
    "E540": Explanation(
        "no second copy of the weights",
        """\
`ckpt slim` takes Megatron's copy of the weights out of an iteration folder when the same weights lie beside it as safetensors.
Here they are stored once, or in a format that has no iteration folder of its own.""",
    ),
    "E541": Explanation(
        "the safetensors are not a full copy of Megatron's weights",
        """\
Some tensors are missing in the safetensors, or were stored in another dtype. Taking Megatron's copy out would lose information, so
nothing is changed.""",
    ),
    "E542": Explanation(
        "optimizer state whose index ckpt cannot write",
        """\
State of the form fully_sharded_model_space (megatron-core 0.8 to 0.15) keeps the shapes of its tensors in a part of .metadata that ckpt
reads but does not write. `ckpt convert RUN DST --to split` writes the same state by parameter.""",
    ),
    "E543": Explanation(
        "not a plain LoRA adapter",
        """\
ckpt adds adapters of the form weight + alpha / r * B A. DoRA, QALoRA, adapters of fused expert parameters, single trained tokens and
methods other than LoRA change weights in another way or not at all; PiSSA, OLoRA, CorDA and LoftQ belong to a base that was changed
before training. PEFT itself can merge those.""",
    ),
    "E544": Explanation(
        "the adapter contradicts itself or its base",
        """\
A factor is missing, holds NaN, or has another rank than adapter_config.json says, or the product has another shape than the weight.
A wrong rank means a wrong scale, so nothing is guessed.""",
    ),
    "E545": Explanation(
        "the adapter changes a module that the base does not have",
        """\
Every tensor of an adapter must find its place. The adapter belongs to another model, or was trained on a version of the model whose
modules are called otherwise.""",
    ),
    "E546": Explanation(
        "tied embeddings would come apart",
        """\
The model uses one table as embedding and as output layer, and the adapter changes only one of the two uses. Adding it to the shared
table would change the other use too, which is not what was trained. --untie stores two tables and sets tie_word_embeddings to false.""",
    ),
    "E547": Explanation(
        "the adapter is merged already",
        """\
merged_adapters.json beside the base's config lists this adapter (by the hash of its tensors). Adding it again would double its effect.
Merge into the original base, or give --again if doubling is meant.""",
    ),
    "E570": Explanation(
        "this is not a tolerance",
        """\
--tol takes a number for the difference itself (1e-6), a share of the larger value (1e-3rel, 0.1%), or representable values apart
(2ulp). Without it values must be equal bit for bit.""",
    ),
    "E571": Explanation(
        "there is no optimizer state to compare",
        """\
--optimizer compares the state of two Megatron checkpoints, and one of the sides holds none: it is an HF folder, a release, or was
saved with --no-save-optim. Leave out --optimizer to compare the weights.""",
    ),
    "E572": Explanation(
        "no tensor has such a name",
        """\
--tensors takes a glob over the names under which the sides are compared: Hugging Face's when one side is an HF folder, otherwise
Megatron's, with one name per layer and expert. `ckpt inspect --layers` lists them.""",
    ),
    "E573": Explanation(
        "a report could not be written",
        """\
The file exists already, its folder does not, or may not be written to. Nothing is overwritten: give another name.""",
    ),
    "E580": Explanation(
        "there is no such check",
        """\
--select and --ignore take codes of findings or their beginnings: V301, or V3 for all about names. `ckpt explain` lists them.""",
    ),
    "E581": Explanation(
        "a file could not be mended",
        """\
--fix writes a new file beside the old one and then takes its place; the folder does not allow it, or the disk is full. The old file
is as it was.""",
    ),
    # ---- environment
    "E901": Explanation(
        "the environment does not allow it",
        """\
A file or folder cannot be read (permissions, a file system error), or an optional package is not installed. For the latter
the hint names the `pip install` that brings it.""",
    ),
}
