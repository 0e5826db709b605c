"""What each reason means: the texts behind `ckpt explain R...`, with their titles."""

from __future__ import annotations

MEANINGS: dict[str, tuple[str, str]] = {
    "R101": (
        "another iteration was loaded",
        """The run that goes on began at another iteration than the one that was saved. Usual causes: a number left in the loader, a
        tracker that names another iteration than the folder that is read, two loaders that each set the counter.""",
    ),
    "R102": (
        "weights were changed between saving and loading",
        """Some weight that was loaded is not, bit for bit, the one that was saved. Where the change has a known form (gate and up
        exchanged, transposed, shifted by a layer, cast), it is named. A run that goes on from here has another loss at once.""",
    ),
    "R103": (
        "float32 master weights are stale",
        """The optimizer keeps its own float32 copy of every weight, and the first step writes it over the model. When it is older than
        the weights, the model falls back to what it was: the loss jumps one step after loading. Whoever changes weights must refresh
        the copy or drop the optimizer's state.""",
    ),
    "R104": (
        "the optimizer's state was not restored",
        """The moments are zero, as in a run that begins: Adam takes steps of full size in every direction until it has seen enough
        gradients, which shows as a bump in the loss. Look for --no-load-optim, a saver that skips the optimizer, or a form the
        loader cannot read.""",
    ),
    "R105": (
        "moments are not those that were saved",
        """Adam's moments came back changed, or in the place of other parameters. Parameters are often identified by their position in a
        list; a list in another order gives each its neighbour's moments, and nothing fails.""",
    ),
    "R106": (
        "the optimizer's step count is wrong",
        """Adam divides its moments by 1 - beta^step. A count that starts again makes the first steps after loading too large. The count
        is stored in several places (per parameter, per group, once for all); a loader that reads another one than the saver kept
        gets 0 or 1.""",
    ),
    "R107": (
        "the learning-rate schedule was not restored",
        """The schedule counts samples on its own. Without its state the warm-up runs again, or the decay starts from its beginning.""",
    ),
    "R108": (
        "random states were not restored",
        """Dropout draws other masks than the run that never stopped. Harmless for training, but no comparison of losses to the last
        digit can succeed. Random states belong to the ranks of a layout: they are lost when tensor or pipeline size changes.""",
    ),
    "R109": (
        "the data goes on at another sample",
        """The count of consumed samples decides which sample comes next. When it is wrong, some samples are trained on twice or never.""",
    ),
    "R110": (
        "the run differs though everything loaded was equal",
        """All that a checkpoint holds came back to the bit, and yet the steps after it are others. Something that matters is not in the
        checkpoint, or the machine does not compute repeatably.""",
    ),
    "R111": (
        "the checkpoint lacks part of the training state",
        """A loader would begin with the missing part anew (moments at zero, schedule at its start, other dropout masks) and say
        nothing. `ckpt validate --resume` tells the same without training. Nothing is trained here from a state that is not whole.""",
    ),
    "R112": (
        "the weights are stored twice",
        """The run's root holds safetensors and the iteration folder holds the same weights again. Which copy is loaded depends on the
        loader; when one of them is edited later, the other one may be what trains. `ckpt slim` takes Megatron's copy out when both
        are equal.""",
    ),
    "R113": (
        "the checkpoint is not valid",
        """`ckpt validate` finds an error in it: the text names the finding, and `ckpt explain` tells about that code.""",
    ),
    "R114": (
        "the machine does not compute repeatably",
        """The same steps from the same state gave different numbers. On a GPU, set deterministic algorithms; until two runs agree, no
        bit of a resumed run can be judged.""",
    ),
}
