"""A job of transformers' Trainer, of the keys that every program on top of it passes on."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zsim.errors import InputError, NotSimulatedError
from zsim.specs.experiment.training.table import LAST_OF_MODULES, NEWEST
from zsim.specs.formats.config_file import TrainingFile, load_file
from zsim.specs.formats.file_values import FileValues

# The experiment's value for each, "" for one that it leaves open: torch's own choice.
_KERNELS = {
    "eager": "math", "sdpa": "", "flash_attention_2": "flash2", "flash_attention_3": "flash3",
    "kernels-community/flash-attn2": "flash2", "kernels-community/flash-attn": "flash2",
    "kernels-community/flash-attn3": "flash3", "kernels-community/vllm-flash-attn3": "flash3",
    "flash_attn": "flash2", "flash_attn_2": "flash2", "flash_attn_3": "flash3", "auto": "",  # ms-swift's
}  # fmt: skip
# Parts of names of a script's own keys that change what is trained, or how.
_OTHER_JOB = re.compile(
    r"(?<![a-z])(q|ada|long)?lora|adapter|freeze|frozen|(^|_)tune_|(^|_)vision|tower|teacher|distill|peft|bnb|[48]bit|rollout"
    r"|sequence_parallel|ulysses|ring_att|num_experts|pissa|galore|medusa|mtp|fp8|vllm|passage|negatives"
    r"|contrast|pooling|spectrum|^model_config$|custom(ized)?_optim|(^|_)target_modules$"
    r"|^optimizer$|^training_method$|^total_length$"
)
# Names that scripts of one's own have for the micro-batch.
_OTHER_BATCH = re.compile(r"((train|micro|mini|per_gpu|per_device)_)?(batch_size|bs)(_per_(gpu|device))?")
# Values of such keys that say so, as `train_mode: qlora` does.
_OTHER_MODES = re.compile(
    r"q?lora|dora|qdora|pissa|adapter|freeze|prefix|p-?tuning(_v2)?|prompt_tuning", re.I
)
_NO_ADAPTERS = re.compile(r"(use|enable|with)_(lora|peft)|(lora|peft)_enabled?")  # switches
_OFF = (None, False, 0, "", "none", "None", "no", "False")
_ROWS = ("train_micro_batch_size_per_gpu", "train_batch_size")  # of a DeepSpeed JSON
_LIGER_LOSSES = ("fused_linear_cross_entropy", "cross_entropy")


def refuse_other_jobs(values: FileValues) -> None:
    """Raises NotSimulatedError for the first declared key that makes another job of it, and for one of a
    script's own that does by its name.
    """
    values.refuse_declared()
    has_no_adapters = any(_NO_ADAPTERS.fullmatch(key) and values.values[key] in _OFF for key in values.values)
    for name, value in values.values.items():
        if has_no_adapters and name.startswith(("lora_", "target_modules")):
            continue
        is_extra = name not in values.keys and name not in values.silent and value not in _OFF
        is_batch = bool(_OTHER_BATCH.fullmatch(name)) and not values.has("per_device_train_batch_size")
        if is_extra and (is_batch or _OTHER_JOB.search(name) or _OTHER_MODES.fullmatch(str(value))):
            raise NotSimulatedError(
                f"{values.file.name}: {name} {value}: is a script's own and none of {values.title}'s; by its "
                "name it changes what is trained, and zsim does not read it: write an experiment file"
            )


def read_batch(values: FileValues) -> None:
    """Read the micro-batch and the accumulation, except where DeepSpeed's JSON says them, and the epochs."""
    for key in ("per_device_train_batch_size", "gradient_accumulation_steps"):
        if values.get(key) != "auto":
            values.read(key)
    if "per_device_train_batch_size" not in values.values:
        size = values.keys["per_device_train_batch_size"].default
        values.assumptions.append(f"per_device_train_batch_size {size}")
    read_epochs(values, "num_train_epochs", 3)
    if values.has("max_grad_norm") and values.number("max_grad_norm") == 0:
        values.file.settings["training.gradient_clipping"] = 0.0
    else:
        values.read("max_grad_norm")


def read_epochs(values: FileValues, key: str, default: float, steps: str = "max_steps") -> None:
    """Read how often a data set is trained on. Steps say how far a run goes where the file has them."""
    if (values.number(steps) or -1) <= 0:
        epochs = values.number(key)
        if epochs is not None and epochs <= 0:
            raise values.error(key, "a number above 0")
        values.file.epochs = default if epochs is None else epochs


def precision_of(values: FileValues, default: str = "fp32") -> str:
    """The type of products, by `bf16` and `fp16`. `default` holds where the file has neither."""
    for key in ("bf16", "fp16"):
        if values.get(key) == "auto":
            return "bf16"
        if values.flag(key):
            return key
    return "fp32" if values.has("bf16") else default


def read_checkpointing(values: FileValues, *, default: bool = False) -> None:
    """Read whether every block is checkpointed. `default` is the program's."""
    if not values.has("gradient_checkpointing") and default:
        values.assume("gradient_checkpointing", True)
        values.file.defaults["training.activation_checkpointing"] = "full"
    else:
        values.read("gradient_checkpointing")
    arguments = values.table("gradient_checkpointing_kwargs")
    if arguments.get("offload") and values.flag("gradient_checkpointing", default):
        # torch's `save_on_cpu` with pinned memory around every checkpoint (transformers 5.17, #48444)
        values.put("training.checkpoint_offload", "pinned", "gradient_checkpointing_kwargs")
    if "use_reentrant" in arguments and values.flag("gradient_checkpointing", default):
        is_reentrant = bool(arguments["use_reentrant"])
        values.put("training.checkpoint_is_reentrant", is_reentrant, "gradient_checkpointing_kwargs")


def is_of_release_4(values: FileValues, *keys: str) -> bool:
    """Whether a file has arguments that releases before 5 took away (training_args.py), or one of `keys`."""
    return values.has(*keys, "evaluation_strategy", "no_cuda")


def write_release(values: FileValues, *keys: str) -> None:
    """Write which release of transformers runs, so that loss, experts and checkpoints are of one: the last
    before 5 for files with one of `keys`.
    """
    release = LAST_OF_MODULES if is_of_release_4(values, *keys) else NEWEST
    values.file.defaults["training.software"] = f"transformers {release}"


def read_liger(values: FileValues, key: str = "use_liger_kernel") -> None:
    """Read Liger's kernels, all of them or only some losses."""
    if not values.flag(key):
        return
    config: Mapping[str, Any] = values.table("liger_kernel_config") if key == "use_liger_kernel" else {}
    chosen = {name for name, is_on in config.items() if is_on}
    if not config or len(chosen) > 1 or not chosen & set(_LIGER_LOSSES):
        values.file.settings["training.liger"] = True
        if config.get("fused_linear_cross_entropy") is False:
            loss = "liger" if config.get("cross_entropy") else "eager"
            values.file.settings["training.cross_entropy"] = loss
        return
    loss = "fused_linear" if "fused_linear_cross_entropy" in chosen else "liger"
    values.file.settings["training.cross_entropy"] = loss


def read_synchronisation(values: FileValues) -> None:
    """Read whether gradients are reduced in every micro-batch."""
    config = values.get("accelerator_config", {})
    arguments = config.get("gradient_accumulation_kwargs") if isinstance(config, Mapping) else None
    has_key = values.file.settings["strategy.kind"] in ("ddp", "fsdp1", "fsdp2")
    if isinstance(arguments, Mapping) and "sync_each_batch" in arguments and has_key:
        values.file.settings["strategy.no_sync"] = not arguments["sync_each_batch"]


def note_full_length(values: FileValues, key: str, *, is_packed: bool) -> None:
    """Say what stands for documents whose lengths no file has."""
    if is_packed:
        values.file.note(
            "sequences are full and their documents attend as one, since no file says how long documents "
            "are: training.lengths does"
        )
    else:
        values.file.note(
            f"every sequence is taken at {key}, its longest, since no file says how long documents are: "
            "training.lengths does"
        )


def read_attention(values: FileValues, *keys: str) -> None:
    """Write the attention that the first of `keys` in the file names.

    FlashAttention-2 stays open, since it is what torch's kernels are as well. A note names kernels that zsim
    does not know.
    """
    key = next((key for key in keys if values.has(key)), None)
    if key is None:
        return
    name = str(values.get(key)).removeprefix("paged|")
    if name not in _KERNELS:
        values.file.note(f"{key}: '{name}' is simulated as the GPU's usual fused attention")
    elif (kernels := _KERNELS[name]) in ("math", "flash3"):
        values.file.settings["training.attention"] = kernels


def read_preferences(values: FileValues, loss: str, *, reference: str | None) -> None:
    """Turn a job into one of a preference loss: each row is a chosen and a rejected sequence.

    `loss` is its name in sentences, `reference` the model that it asks for probabilities as well.
    """
    file = values.file
    _double_rows(file)
    _ask_reference(file, reference)
    file.note(
        f"{loss}: a row of the batch is two sequences, chosen and rejected, each taken at its longest; the "
        "loss is simulated as one that keeps all logits"
    )


def _double_rows(file: TrainingFile) -> None:
    """Make a micro-batch of rows one of two sequences each."""
    file.has_pairs = True
    file.settings["training.sequences_per_sample"] = 2
    key = "training.micro_batch_size"
    table = file.settings if key in file.settings else file.defaults
    table[key] = 2 * table[key]
    leave_row_counts(file)


def leave_row_counts(file: TrainingFile) -> None:
    """Leave the numbers of a DeepSpeed JSON, which counts rows of pairs too, to the arguments.

    Raises InputError for another number of rows than theirs.
    """
    config = file.settings.get("strategy.config")
    content = load_file(Path(config)) if isinstance(config, str) else config
    size = {**file.defaults, **file.settings}["training.micro_batch_size"] // 2
    rows = content.get(_ROWS[0], size) if isinstance(content, Mapping) else size
    if rows not in ("auto", size):
        name = config if isinstance(config, str) else file.settings.get("strategy.config_name", file.name)
        raise InputError(f"{name}: {_ROWS[0]}: found {rows}, expected the arguments' {size} pairs, or auto")
    counts = {name: "auto" for name in _ROWS if isinstance(content, Mapping) and content.get(name)}
    if isinstance(content, Mapping) and counts:
        if isinstance(config, str):
            file.settings["strategy.config_name"] = config
        file.settings["strategy.config"] = {**content, **counts}


def read_unpaired_preferences(values: FileValues, *, reference: str) -> None:
    """Turn a job into one of KTO: rows of one sequence, and three forwards without gradients, of mismatched
    pairs by the model and of both by the reference. `apo_zero_unpaired` asks the reference alone.
    """
    if values.flag("precompute_ref_log_probs"):
        raise values.lack("precompute_ref_log_probs", "KTO whose reference has run before")
    _ask_reference(values.file, reference)
    if values.get("loss_type") != "apo_zero_unpaired":
        values.file.settings["training.reference_forwards"] = 3
    values.file.note(
        "KTO: mismatched pairs are asked for as well, each taken at its longest; the loss is simulated as "
        "one that keeps all logits"
    )


def _ask_reference(file: TrainingFile, reference: str | None) -> None:
    """Write a reference, and a loss of log-probabilities of all logits."""
    if reference is not None:
        file.settings["training.reference"] = reference
    for losses in (file.settings, file.defaults):
        losses.pop("training.cross_entropy", None)
    file.settings["training.cross_entropy"] = "eager"


def read_labels(values: FileValues, labels: int, *, has_adapters: bool) -> None:
    """Turn a job into one of a head with `labels` outputs, which PEFT trains whole beside adapters (0.21.2
    peft_model.py `PeftModelForSequenceClassification`).
    """
    settings = values.file.settings
    for table in (settings, values.file.defaults):
        table.pop("training.cross_entropy", None)
    settings["training.labels"] = labels
    if has_adapters:
        saved = settings.get("training.lora.modules_to_save", [])
        settings["training.lora.modules_to_save"] = [*dict.fromkeys((*saved, "score"))]


def read_rewards(values: FileValues, *, has_adapters: bool) -> None:
    """Turn a job into one of a reward model: one output, and rows of a chosen and a rejected sequence."""
    _double_rows(values.file)
    read_labels(values, 1, has_adapters=has_adapters)
    values.file.note(
        "reward model: a row of the batch is two sequences, chosen and rejected, each taken at its longest"
    )
